#include "ops/gated_norm/fused.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/dispatch.h"
#include "ops/gated_norm/kernel.h"
#include "ops/kernel/capability.h"

namespace headloom::ops {
namespace {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor>;

void run(gated::Args args, const Tensor& x, const Tensor& gate, const Tensor& eps) {
  static gated::Run* const kernel = HL_CHOOSE(gated::run);
  const Tensor values = x.contiguous(), gates = gate.contiguous(), floor = eps.contiguous();
  args.width = x.size(-1);
  if (x.scalar_type() == at::kBFloat16) args.type = gated::Type::kBFloat16;
  args.x = values.const_data_ptr();
  args.gate = gates.const_data_ptr();
  args.eps = floor.const_data_ptr<float>();
  at::parallel_for(0, floor.numel(), std::max<int64_t>(1, 4096 / args.width),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

Tensor forward_meta(const Tensor& x, const Tensor&, const Tensor&) { return contiguous_like(x); }

Tensor forward_cpu(const Tensor& x, const Tensor& gate, const Tensor& eps) {
  Tensor y = contiguous_like(x);
  gated::Args args{};
  args.y = y.data_ptr();
  run(args, x, gate, eps);
  return y;
}

Gradients backward_meta(const Tensor&, const Tensor& x, const Tensor& gate, const Tensor&) {
  return {contiguous_like(x), contiguous_like(gate)};
}

Gradients backward_cpu(const Tensor& grad, const Tensor& x, const Tensor& gate, const Tensor& eps) {
  const Tensor whole = grad.contiguous();
  Tensor grad_x = contiguous_like(x), grad_gate = contiguous_like(gate);
  gated::Args args{};
  args.grad = whole.const_data_ptr();
  args.grad_x = grad_x.data_ptr();
  args.grad_gate = grad_gate.data_ptr();
  run(args, x, gate, eps);
  return {grad_x, grad_gate};
}

Tensor call_fused(const Tensor& x, const Tensor& gate, const Tensor& eps) {
  static const auto op = dispatched<decltype(forward_cpu)>("headloom::gated_norm_fused");
  return op.call(x, gate, eps);
}

struct Function : torch::autograd::Function<Function> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& gate,
                        const Tensor& eps) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x, gate, eps});
    return call_fused(x, gate, eps);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = dispatched<decltype(backward_cpu)>("headloom::gated_norm_backward");
    const auto saved = ctx->get_saved_variables();
    auto [x, gate] = op.call(grads[0], saved[0], saved[1], saved[2]);
    return {x, gate, Tensor()};
  }
};

Tensor fused_autograd(const Tensor& x, const Tensor& gate, const Tensor& eps) {
  return Function::apply(x, gate, eps);
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def("gated_norm_fused(Tensor x, Tensor gate, Tensor eps) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("gated_norm_backward(Tensor grad, Tensor x, Tensor gate, Tensor eps) -> (Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CPU, m) {
  m.impl("gated_norm_fused", forward_cpu);
  m.impl("gated_norm_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(headloom, Meta, m) {
  m.impl("gated_norm_fused", forward_meta);
  m.impl("gated_norm_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(headloom, Autograd, m) {
  m.impl("gated_norm_fused", fused_autograd);
  m.impl("gated_norm_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

const char* gated_norm_unsupported_reason(const Tensor& x, const Tensor& eps) {
  if (const char* reason = kernels_unsupported(x)) return reason;
  if (eps.requires_grad()) return "eps wants a gradient";
  return nullptr;
}

std::string gated_norm_limits() {
  return c10::str(
      "fused CPU kernels for float32 and bfloat16; the reference for other types and devices and "
      "an eps that wants a gradient");
}

Tensor gated_norm_fused(const Tensor& x, const Tensor& gate, const Tensor& eps) {
  return call_fused(x, gate, eps);
}

}  // namespace headloom::ops
