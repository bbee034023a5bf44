#include "ops/streamed_linear/fused.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>

#include "ops/dispatch.h"
#include "ops/kernel/capability.h"
#include "ops/streamed_linear/kernel.h"
#include "ops/streamed_linear/op.h"

namespace headloom::ops {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

c10::SymDimVector sizes_of(const Tensor& x, const Tensor& weight) {
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = weight.sym_size(0);
  return sizes;
}

Tensor forward_meta(const Tensor& x, const Tensor& weight, const Optional&, const Optional&) {
  return at::empty_symint(sizes_of(x, weight), x.options());
}

streamed::Type type_of(const Tensor& t) {
  return t.scalar_type() == at::kChar       ? streamed::Type::kInt8
         : t.scalar_type() == at::kBFloat16 ? streamed::Type::kBFloat16
                                            : streamed::Type::kFloat;
}

Tensor forward_cpu(const Tensor& x, const Tensor& weight, const Optional& scale,
                   const Optional& bias) {
  static streamed::Run* const kernel = HL_CHOOSE(streamed::run);
  const auto whole = [](const Optional& t) { return t ? t->contiguous() : Tensor(); };
  const Tensor values = x.contiguous(), matrix = weight.contiguous();
  const Tensor scales = whole(scale), offsets = whole(bias);
  Tensor y = at::empty_symint(sizes_of(x, weight), x.options());
  const int64_t in = weight.size(1), out = weight.size(0);
  streamed::Args args{.rows = out > 0 ? y.numel() / out : 0,
                      .in = in,
                      .type = type_of(x),
                      .weight_type = type_of(weight),
                      .x = values.const_data_ptr(),
                      .weight = matrix.const_data_ptr(),
                      .scale = scale ? scales.const_data_ptr<float>() : nullptr,
                      .bias = bias ? offsets.const_data_ptr() : nullptr,
                      .out = out,
                      .y = y.mutable_data_ptr()};
  // Groups of four outputs; below 32 KB of weights a second thread costs more than it brings.
  constexpr int64_t kGroup = 4;
  const int64_t bytes = kGroup * in * weight.element_size(), groups = (out + kGroup - 1) / kGroup;
  const int64_t least = std::max<int64_t>(1, (int64_t{32} << 10) / std::max<int64_t>(bytes, 1));
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), (groups + least - 1) / least);
  // Threads do not share the memory evenly: who is ahead takes more, in ever smaller runs.
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t begin = next.load(); begin < groups;) {
      const int64_t run = std::max(least, (groups - begin) / (2 * threads));
      const int64_t end = threads == 1 ? groups : std::min(begin + run, groups);
      if (!next.compare_exchange_weak(begin, end)) continue;
      kernel(args, kGroup * begin, std::min(kGroup * end, out));
      begin = next.load();
    }
  });
  return y;
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def("streamed_linear_fused(Tensor x, Tensor weight, Tensor? scale, Tensor? bias) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CPU, m) { m.impl("streamed_linear_fused", forward_cpu); }
TORCH_LIBRARY_IMPL(headloom, Meta, m) { m.impl("streamed_linear_fused", forward_meta); }
TORCH_LIBRARY_IMPL(headloom, Autograd, m) {
  m.impl("streamed_linear_fused", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

const char* streamed_linear_unsupported(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (const char* reason = kernels_unsupported(x)) return reason;
  if (torch::autograd::compute_requires_grad(x, weight, bias)) return "a gradient is wanted";
  if (x.sym_numel() > weight.sym_size(1) * kStreamedRows) return "there are more than 16 rows";
  return nullptr;
}

std::string streamed_linear_limits() {
  return c10::str("fused CPU kernels for float32, bfloat16 and int8 weights, up to ", kStreamedRows,
                  " rows, where no gradient is wanted; ATen's products for the rest");
}

Tensor streamed_linear_fused(const Tensor& x, const Tensor& weight, const Tensor& scale,
                             const Tensor& bias) {
  static const auto op = dispatched<decltype(forward_cpu)>("headloom::streamed_linear_fused");
  return op.call(x, weight, optional_tensor(scale), optional_tensor(bias));
}

}  // namespace headloom::ops
