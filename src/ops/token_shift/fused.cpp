#include "ops/token_shift/fused.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/dispatch.h"
#include "ops/kernel/capability.h"
#include "ops/token_shift/kernel.h"

namespace headloom::ops {
namespace {

using at::Tensor;
using token_shift_kernel::Args;
using token_shift_kernel::kMixes;
using Optional = std::optional<Tensor>;

// Arguments of the kernels and the tensors they point to.
struct Call {
  Args args;
  std::vector<Tensor> keep;

  token_shift_kernel::Sequence sequence(const Tensor& t) {
    const Tensor& kept = keep.emplace_back(t.stride(-1) == 1 ? t : t.contiguous());
    return {kept.const_data_ptr(), kept.stride(0), kept.stride(1)};
  }
  const void* whole(const Tensor& t) { return keep.emplace_back(t.contiguous()).const_data_ptr(); }

  Call(const Tensor& x, const Tensor& mix, const Optional& last, const Optional& documents) {
    args.B = x.size(0);
    args.T = x.size(1);
    args.C = x.size(2);
    args.N = mix.size(0);
    if (x.scalar_type() == at::kBFloat16) args.type = token_shift_kernel::Type::kBFloat16;
    args.x = sequence(x);
    args.mix = static_cast<const float*>(whole(mix));
    if (last) args.last = whole(*last);
    if (documents) args.documents = static_cast<const int64_t*>(whole(*documents));
  }

  void run(token_shift_kernel::Run kernel, int64_t workers) const {
    const int64_t positions = args.B * args.T;
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) {
        kernel(args, {positions * w / workers, positions * (w + 1) / workers, w});
      }
    });
  }
};

// Workers for what is a pass over memory: none for less than a page or two.
int64_t workers_for(const Tensor& x) {
  return std::clamp<int64_t>(x.numel() / 4096, 1, std::max(at::get_num_threads(), 1));
}

std::vector<Tensor> forward_meta(const Tensor& x, const Tensor& mix, const Optional&,
                                 const Optional&) {
  std::vector<Tensor> out;
  for (int64_t i = 0; i < mix.size(0); ++i) out.push_back(contiguous_like(x));
  return out;
}

std::vector<Tensor> forward_cpu(const Tensor& x, const Tensor& mix, const Optional& last,
                                const Optional& documents) {
  Call call(x, mix, last, documents);
  std::vector<Tensor> out = forward_meta(x, mix, last, documents);
  for (size_t i = 0; i < out.size(); ++i) call.args.out[i] = out[i].data_ptr();
  call.run(HL_CHOOSE(token_shift_kernel::token_shift_forward), workers_for(x));
  return out;
}

// Gradients of x, mix and `last`, empty where that is absent.
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

Gradients backward_meta(at::TensorList, const Tensor& x, const Tensor& mix, const Optional& last,
                        const Optional&) {
  return {contiguous_like(x), contiguous_like(mix),
          last ? contiguous_like(*last) : at::empty({0}, x.options())};
}

Gradients backward_cpu(at::TensorList grads, const Tensor& x, const Tensor& mix,
                       const Optional& last, const Optional& documents) {
  Call call(x, mix, last, documents);
  auto [grad_x, grad_mix, grad_last] = backward_meta(grads, x, mix, last, documents);
  const int64_t workers = workers_for(x);
  const Tensor sums = at::zeros({workers, mix.size(0), mix.size(1)}, mix.options());
  Args& a = call.args;
  for (size_t i = 0; i < grads.size(); ++i) a.grad_out[i] = call.sequence(grads[i]);
  a.grad_x = grad_x.data_ptr();
  a.grad_mix = sums.data_ptr<float>();
  if (last) a.grad_last = grad_last.data_ptr();
  call.run(HL_CHOOSE(token_shift_kernel::token_shift_backward), workers);
  at::sum_out(grad_mix, sums, 0);
  return {grad_x, grad_mix, grad_last};
}

std::vector<Tensor> call_fused(const Tensor& x, const Tensor& mix, const Optional& last,
                               const Optional& documents) {
  static const auto op = dispatched<decltype(forward_cpu)>("headloom::token_shift_fused");
  return op.call(x, mix, last, documents);
}

struct Function : torch::autograd::Function<Function> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const Tensor& x, const Tensor& mix,
                                                const Optional& last, const Optional& documents) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x, mix, last.value_or(Tensor()), documents.value_or(Tensor())});
    return call_fused(x, mix, last, documents);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    static const auto op = dispatched<decltype(backward_cpu)>("headloom::token_shift_backward");
    auto [x, mix, last] =
        op.call(grads, saved[0], saved[1], optional_tensor(saved[2]), optional_tensor(saved[3]));
    if (!saved[2].defined()) last = Tensor();
    return {x, mix, last, Tensor()};
  }
};

std::vector<Tensor> fused_autograd(const Tensor& x, const Tensor& mix, const Optional& last,
                                   const Optional& documents) {
  return Function::apply(x, mix, last, documents);
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def("token_shift_fused(Tensor x, Tensor mix, Tensor? last, Tensor? documents) -> Tensor[]",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "token_shift_backward(Tensor[] grads, Tensor x, Tensor mix, Tensor? last, Tensor? documents) "
      "-> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CPU, m) {
  m.impl("token_shift_fused", forward_cpu);
  m.impl("token_shift_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(headloom, Meta, m) {
  m.impl("token_shift_fused", forward_meta);
  m.impl("token_shift_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(headloom, Autograd, m) {
  m.impl("token_shift_fused", fused_autograd);
  m.impl("token_shift_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

const char* token_shift_unsupported(const Tensor& x, const Tensor& mix) {
  if (const char* reason = kernels_unsupported(x)) return reason;
  if (mix.size(0) > kMixes) return "there are more than 4 mixes";
  return nullptr;
}

std::string token_shift_limits() {
  return c10::str("fused CPU kernels for float32 and bfloat16, up to ", kMixes,
                  " mixes; the reference for the rest");
}

std::vector<Tensor> token_shift_fused(const Tensor& x, const Tensor& mix,
                                      const TokenShiftOptions& o) {
  return call_fused(x, mix, optional_tensor(o.last), optional_tensor(o.documents));
}

}  // namespace headloom::ops
