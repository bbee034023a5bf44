#include "ops/positionwise/fused.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/dispatch.h"
#include "ops/kernel/capability.h"
#include "ops/positionwise/kernel.h"
#include "ops/positionwise/op.h"
#include "ops/second_order.h"

namespace headloom::ops {
namespace {

using at::Tensor;
using positionwise::Type;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Optional = std::optional<Tensor>;
using NormGradients = std::tuple<Tensor, Tensor>;

Type type_of(const Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? Type::kBFloat16 : Type::kFloat;
}

// Rows of `width` values that are worth a thread: below, starting it takes longer than they do.
int64_t grain(int64_t width) { return std::max<int64_t>(1, (int64_t{1} << 14) / width); }

// --- rms_norm ---

Tensor norm_cpu(const Tensor& x, const Optional& scale, double eps) {
  static positionwise::Norm* const kernel = HL_CHOOSE(positionwise::norm);
  const Tensor values = x.contiguous();
  const Tensor scales = scale ? scale->to(at::kFloat).contiguous() : Tensor();
  Tensor y = contiguous_like(x);
  positionwise::NormArgs args;
  args.width = x.size(-1);
  args.type = type_of(x);
  args.eps = static_cast<float>(eps);
  args.x = values.const_data_ptr();
  if (scale) args.scale = scales.const_data_ptr<float>();
  args.y = y.data_ptr();
  at::parallel_for(0, x.numel() / args.width, grain(args.width),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return y;
}

// grad_scale [E] float32, of no elements where there is no scale.
NormGradients norm_backward_cpu(const Tensor& grad, const Tensor& x, const Optional& scale,
                                double eps) {
  static positionwise::Norm* const kernel = HL_CHOOSE(positionwise::norm);
  const Tensor values = x.contiguous(), cotangent = grad.contiguous();
  const Tensor scales = scale ? scale->to(at::kFloat).contiguous() : Tensor();
  const int64_t width = x.size(-1), rows = x.numel() / width;
  // Every share of the rows has sums of its own, so that a number of threads gives one result.
  const int64_t step = grain(width);
  const int64_t shares =
      std::clamp<int64_t>((rows + step - 1) / step, 1, std::max(1, at::get_num_threads()));
  Tensor grad_x = contiguous_like(x);
  const Tensor sums = at::zeros({shares, scale ? width : 0}, x.options().dtype(at::kFloat));
  at::parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
    for (int64_t share = first; share < last; ++share) {
      positionwise::NormArgs args;
      args.width = width;
      args.type = type_of(x);
      args.eps = static_cast<float>(eps);
      args.x = values.const_data_ptr();
      args.grad = cotangent.const_data_ptr();
      args.grad_x = grad_x.data_ptr();
      if (scale) {
        args.scale = scales.const_data_ptr<float>();
        args.grad_scale = sums.data_ptr<float>() + share * width;
      }
      kernel(args, rows * share / shares, rows * (share + 1) / shares);
    }
  });
  return {grad_x, sums.sum(0)};
}

Tensor norm_meta(const Tensor& x, const Optional&, double) { return contiguous_like(x); }
NormGradients norm_backward_meta(const Tensor&, const Tensor& x, const Optional& scale, double) {
  const auto options = x.options().dtype(at::kFloat);
  return {contiguous_like(x),
          scale ? at::empty_symint(scale->sym_sizes(), options) : at::empty({0}, options)};
}

struct NormFunction : torch::autograd::Function<NormFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Optional& scale, double eps) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x, scale.value_or(Tensor())});
    ctx->saved_data["eps"] = eps;
    return rms_norm_fused(x, scale.value_or(Tensor()), eps);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    static const auto op = dispatched<decltype(norm_backward_cpu)>("headloom::rms_norm_backward");
    const auto saved = ctx->get_saved_variables();
    const double eps = ctx->saved_data["eps"].toDouble();
    const Tensor &x = saved[0], &scale = saved[1];
    variable_list out;
    if (at::GradMode::is_enabled()) {
      out = definition_gradients(
          [&](const variable_list& in) { return rms_norm_reference(in[0], in[1], eps); }, saved,
          grads[0]);
    } else {
      auto [grad_x, grad_scale] = op.call(grads[0], x, optional_tensor(scale), eps);
      out = {grad_x, scale.defined() ? grad_scale.to(scale.scalar_type()) : Tensor()};
    }
    out.emplace_back();
    return out;
  }
};

Tensor norm_autograd(const Tensor& x, const Optional& scale, double eps) {
  return NormFunction::apply(x, scale, eps);
}

// --- rotary ---

// `back` turns the other way.
Tensor rotary_cpu(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
                  bool back) {
  static positionwise::Rotary* const kernel = HL_CHOOSE(positionwise::rotary);
  const Tensor values = x.stride(-1) == 1 ? x : x.contiguous();
  const Tensor c = cos.contiguous(), s = sin.contiguous();
  Tensor y = contiguous_like(x);
  positionwise::RotaryArgs args;
  args.length = x.size(1);
  args.heads = x.size(2);
  args.width = x.size(3);
  args.pairs = cos.size(-1);
  args.interleaved = interleaved;
  args.back = back;
  args.type = type_of(x);
  args.x = values.const_data_ptr();
  for (int i = 0; i < 3; ++i) args.x_stride[i] = values.stride(i);
  args.cos = c.const_data_ptr<float>();
  args.sin = s.const_data_ptr<float>();
  args.table_stride[0] = cos.dim() == 3 ? args.length * args.pairs : 0;
  args.table_stride[1] = args.pairs;
  args.y = y.data_ptr();
  at::parallel_for(0, y.numel() > 0 ? x.size(0) * args.length : 0, grain(args.heads * args.width),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return y;
}

Tensor rotary_meta(const Tensor& x, const Tensor&, const Tensor&, bool, bool) {
  return contiguous_like(x);
}

Tensor call_rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
                   bool back) {
  static const auto op = dispatched<decltype(rotary_cpu)>("headloom::rotary_fused");
  return op.call(x, cos, sin, interleaved, back);
}

// Linear in x: the backward is the same operator, and so on.
struct RotaryFunction : torch::autograd::Function<RotaryFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cos, const Tensor& sin,
                        bool interleaved, bool back) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["back"] = back;
    return call_rotary(x, cos, sin, interleaved, back);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor grad_x =
        call_rotary(grads[0], saved[0], saved[1], ctx->saved_data["interleaved"].toBool(),
                    !ctx->saved_data["back"].toBool());
    return {grad_x, {}, {}, {}, {}};
  }
};

Tensor rotary_autograd(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
                       bool back) {
  return RotaryFunction::apply(x, cos, sin, interleaved, back);
}

// --- swiglu ---

void run_gate(positionwise::GateArgs args, const Tensor& x) {
  static positionwise::Gate* const kernel = HL_CHOOSE(positionwise::gate);
  const Tensor values = x.contiguous();
  args.width = x.size(-1) / 2;
  args.type = type_of(x);
  args.x = values.const_data_ptr();
  at::parallel_for(0, x.numel() / x.size(-1), grain(x.size(-1)),
                   [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

c10::SymDimVector halved(const Tensor& x) {
  c10::SymDimVector sizes(x.sym_sizes());
  sizes.back() = sizes.back() / 2;
  return sizes;
}

Tensor gate_cpu(const Tensor& x) {
  Tensor y = at::empty_symint(halved(x), x.options());
  positionwise::GateArgs args;
  args.y = y.data_ptr();
  run_gate(args, x);
  return y;
}

Tensor gate_backward_cpu(const Tensor& grad, const Tensor& x) {
  const Tensor cotangent = grad.contiguous();
  Tensor grad_x = contiguous_like(x);
  positionwise::GateArgs args;
  args.grad = cotangent.const_data_ptr();
  args.grad_x = grad_x.data_ptr();
  run_gate(args, x);
  return grad_x;
}

Tensor gate_meta(const Tensor& x) { return at::empty_symint(halved(x), x.options()); }
Tensor gate_backward_meta(const Tensor&, const Tensor& x) { return contiguous_like(x); }

struct GateFunction : torch::autograd::Function<GateFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x});
    return swiglu_fused(x);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    static const auto op = dispatched<decltype(gate_backward_cpu)>("headloom::swiglu_backward");
    const auto saved = ctx->get_saved_variables();
    if (!at::GradMode::is_enabled()) return {op.call(grads[0], saved[0])};
    return definition_gradients([](const variable_list& in) { return swiglu_reference(in[0]); },
                                saved, grads[0]);
  }
};

Tensor gate_autograd(const Tensor& x) { return GateFunction::apply(x); }

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  const auto tags = std::vector<at::Tag>{at::Tag::pt2_compliant_tag};
  m.def("rms_norm_fused(Tensor x, Tensor? scale, float eps) -> Tensor", tags);
  m.def("rms_norm_backward(Tensor grad, Tensor x, Tensor? scale, float eps) -> (Tensor, Tensor)",
        tags);
  m.def("rotary_fused(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor",
        tags);
  m.def("swiglu_fused(Tensor x) -> Tensor", tags);
  m.def("swiglu_backward(Tensor grad, Tensor x) -> Tensor", tags);
}
TORCH_LIBRARY_IMPL(headloom, CPU, m) {
  m.impl("rms_norm_fused", norm_cpu);
  m.impl("rms_norm_backward", norm_backward_cpu);
  m.impl("rotary_fused", rotary_cpu);
  m.impl("swiglu_fused", gate_cpu);
  m.impl("swiglu_backward", gate_backward_cpu);
}
TORCH_LIBRARY_IMPL(headloom, Meta, m) {
  m.impl("rms_norm_fused", norm_meta);
  m.impl("rms_norm_backward", norm_backward_meta);
  m.impl("rotary_fused", rotary_meta);
  m.impl("swiglu_fused", gate_meta);
  m.impl("swiglu_backward", gate_backward_meta);
}
TORCH_LIBRARY_IMPL(headloom, Autograd, m) {
  m.impl("rms_norm_fused", norm_autograd);
  m.impl("rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("rotary_fused", rotary_autograd);
  m.impl("swiglu_fused", gate_autograd);
  m.impl("swiglu_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

std::string positionwise_limits() {
  return c10::str(
      "fused CPU kernels for float32 and bfloat16; the reference for other types and devices");
}

Tensor rms_norm_fused(const Tensor& x, const Tensor& scale, double eps) {
  static const auto op = dispatched<decltype(norm_cpu)>("headloom::rms_norm_fused");
  return op.call(x, optional_tensor(scale), eps);
}

Tensor rotary_fused(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  return call_rotary(x, cos, sin, interleaved, false);
}

Tensor swiglu_fused(const Tensor& x) {
  static const auto op = dispatched<decltype(gate_cpu)>("headloom::swiglu_fused");
  return op.call(x);
}

}  // namespace headloom::ops
