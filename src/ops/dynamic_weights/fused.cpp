#include "ops/dynamic_weights/fused.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "ops/dispatch.h"
#include "ops/dynamic_weights/kernel.h"
#include "ops/kernel/capability.h"
#include "ops/streamed_linear/op.h"

namespace headloom::ops {
namespace {

using at::Tensor;

Tensor forward_meta(const Tensor& hidden, const Tensor& w2, int64_t rank) {
  return at::empty_symint({hidden.sym_size(0), hidden.sym_size(1), w2.sym_size(0), 2 * rank,
                           w2.sym_size(1) * (w2.sym_size(3) / (2 * rank))},
                          hidden.options());
}

Tensor forward_cpu(const Tensor& hidden, const Tensor& w2, int64_t rank) {
  static dynamic::Run* const kernel = HL_CHOOSE(dynamic::run);
  const Tensor values = hidden.contiguous(), matrix = w2.to(at::kFloat).contiguous();
  Tensor y = forward_meta(hidden, w2, rank);
  kernel({.sides = w2.size(0),
          .groups = w2.size(1),
          .inner = w2.size(2),
          .rank = rank,
          .heads = w2.size(3) / (2 * rank),
          .type = hidden.scalar_type() == at::kBFloat16 ? dynamic::Type::kBFloat16
                                                        : dynamic::Type::kFloat,
          .hidden = values.const_data_ptr(),
          .w2 = matrix.const_data_ptr<float>(),
          .y = y.mutable_data_ptr()},
         0, hidden.size(0) * hidden.size(1));
  return y;
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def("dynamic_weights_fused(Tensor hidden, Tensor w2, int rank) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CPU, m) { m.impl("dynamic_weights_fused", forward_cpu); }
TORCH_LIBRARY_IMPL(headloom, Meta, m) { m.impl("dynamic_weights_fused", forward_meta); }
TORCH_LIBRARY_IMPL(headloom, Autograd, m) {
  m.impl("dynamic_weights_fused", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

const char* dynamic_weights_unsupported(const Tensor& hidden, const Tensor& w2) {
  if (const char* reason = kernels_unsupported(hidden)) return reason;
  if (torch::autograd::compute_requires_grad(hidden, w2)) return "a gradient is wanted";
  if (hidden.sym_size(0) * hidden.sym_size(1) > kStreamedRows) return "there are more than 16 rows";
  if (w2.sym_size(3) > dynamic::kMostWeights) return "a group has more than 1024 weights";
  return nullptr;
}

std::string dynamic_weights_limits() {
  return c10::str("fused CPU kernels for float32 and bfloat16, up to ", kStreamedRows,
                  " rows, where no gradient is wanted; ATen's operators for the rest");
}

Tensor dynamic_weights_fused(const Tensor& hidden, const Tensor& w2, int64_t rank) {
  static const auto op = dispatched<decltype(forward_cpu)>("headloom::dynamic_weights_fused");
  return op.call(hidden, w2, rank);
}

}  // namespace headloom::ops
