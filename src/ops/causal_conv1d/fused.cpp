#include "ops/causal_conv1d/fused.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "ops/causal_conv1d/kernel.h"
#include "ops/dispatch.h"
#include "ops/kernel/capability.h"

namespace headloom::ops {
namespace {

using at::Tensor;
using conv::Args;
using Optional = std::optional<Tensor>;

// Holds what the pointers of Args point to.
struct Call {
  Args args;
  std::vector<Tensor> keep;

  const Tensor& hold(Tensor t) { return keep.emplace_back(std::move(t)); }
  const float* floats(const Tensor& t) {
    return hold(t.to(at::kFloat).contiguous()).const_data_ptr<float>();
  }
  // Read in place where the channels are adjacent.
  conv::Rows rows(const Tensor& given) {
    const Tensor& t = hold(given.stride(2) == 1 ? given : given.contiguous());
    return {t.const_data_ptr(), t.stride(0), t.stride(1)};
  }

  Call(const Tensor& x, const Tensor& weight, const Optional& bias, bool silu,
       const Optional& state, const Optional& documents) {
    args.B = x.size(0);
    args.L = x.size(1);
    args.C = x.size(2);
    args.taps = weight.size(1);
    args.bfloat16 = x.scalar_type() == at::kBFloat16;
    args.silu = silu;
    args.x = rows(x);
    args.weight = floats(weight.flip(1).t());
    if (bias) args.bias = floats(*bias);
    if (state) args.state = hold(state->contiguous()).const_data_ptr();
    if (documents) args.documents = hold(documents->contiguous()).const_data_ptr<int64_t>();
  }

  int64_t workers() const {
    return std::clamp<int64_t>(at::get_num_threads(), 1, std::max<int64_t>(args.B * args.L, 1));
  }
  // Each worker takes its share of the positions, so that sums depend on the number of threads
  // alone.
  void run(bool backward) {
    static conv::Run* const kernel = HL_CHOOSE(conv::run);
    const int64_t count = workers(), positions = args.B * args.L;
    const Tensor scratch = at::empty({count, backward ? args.taps * args.C : 0}, at::kFloat);
    float* const data = scratch.data_ptr<float>();
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) {
        kernel(args, {.backward = backward,
                      .worker = w,
                      .begin = w * positions / count,
                      .end = (w + 1) * positions / count,
                      .scratch = data + w * scratch.stride(0)});
      }
    });
  }
};

Tensor forward_cpu(const Tensor& x, const Tensor& weight, const Optional& bias, bool silu,
                   const Optional& state, const Optional& documents) {
  Call call(x, weight, bias, silu, state, documents);
  Tensor out = contiguous_like(x);
  call.args.out = out.data_ptr();
  call.run(false);
  return out;
}

Tensor forward_meta(const Tensor& x, const Tensor&, const Optional&, bool, const Optional&,
                    const Optional&) {
  return contiguous_like(x);
}

// Gradients of x and weight, then of those of bias and state that are there.
std::vector<Tensor> backward_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                 const Optional& bias, bool silu, const Optional& state,
                                 const Optional& documents) {
  Call call(x, weight, bias, silu, state, documents);
  Args& a = call.args;
  const auto real = x.options().dtype(at::kFloat);
  Tensor grad_x = contiguous_like(x), grad_state = state ? contiguous_like(*state) : Tensor();
  Tensor grad_weight = at::zeros({call.workers(), a.taps, a.C}, real);
  Tensor grad_bias = at::zeros({call.workers(), a.C}, real);
  a.grad_out = call.rows(grad_out);
  a.grad_x = grad_x.data_ptr();
  if (state) a.grad_state = grad_state.data_ptr();
  a.grad_weight = grad_weight.data_ptr<float>();
  a.grad_bias = grad_bias.data_ptr<float>();
  call.run(true);
  std::vector<Tensor> out = {grad_x,
                             grad_weight.sum(0).t().flip(1).to(weight.scalar_type()).contiguous()};
  if (bias) out.push_back(grad_bias.sum(0).to(bias->scalar_type()));
  if (state) out.push_back(grad_state);
  return out;
}

std::vector<Tensor> backward_meta(const Tensor&, const Tensor& x, const Tensor& weight,
                                  const Optional& bias, bool, const Optional& state,
                                  const Optional&) {
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  std::vector<Tensor> out = {like(x), like(weight)};
  if (bias) out.push_back(like(*bias));
  if (state) out.push_back(like(*state));
  return out;
}

Tensor call_forward(const Tensor& x, const Tensor& weight, const Optional& bias, bool silu,
                    const Optional& state, const Optional& documents) {
  static const auto op = dispatched<decltype(forward_cpu)>("headloom::causal_conv1d_fused");
  return op.call(x, weight, bias, silu, state, documents);
}
std::vector<Tensor> call_backward(const Tensor& grad_out, const Tensor& x, const Tensor& weight,
                                  const Optional& bias, bool silu, const Optional& state,
                                  const Optional& documents) {
  static const auto op = dispatched<decltype(backward_cpu)>("headloom::causal_conv1d_backward");
  return op.call(grad_out, x, weight, bias, silu, state, documents);
}

struct FusedFunction : torch::autograd::Function<FusedFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x,
                        const Tensor& weight, const Optional& bias, bool silu,
                        const Optional& state, const Optional& documents) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x, weight, bias.value_or(Tensor()), state.value_or(Tensor()),
                            documents.value_or(Tensor())});
    ctx->saved_data["silu"] = silu;
    return call_forward(x, weight, bias, silu, state, documents);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Optional bias = optional_tensor(saved[2]), state = optional_tensor(saved[3]);
    const auto out =
        call_backward(grads[0], saved[0], saved[1], bias, ctx->saved_data["silu"].toBool(), state,
                      optional_tensor(saved[4]));
    return {out[0],  out[1], bias ? out[2] : Tensor(), Tensor(), state ? out.back() : Tensor(),
            Tensor()};
  }
};

Tensor forward_autograd(const Tensor& x, const Tensor& weight, const Optional& bias, bool silu,
                        const Optional& state, const Optional& documents) {
  return FusedFunction::apply(x, weight, bias, silu, state, documents);
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def(
      "causal_conv1d_fused(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor? state, "
      "Tensor? documents) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "causal_conv1d_backward(Tensor grad_out, Tensor x, Tensor weight, Tensor? bias, bool silu, "
      "Tensor? state, Tensor? documents) -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CPU, m) {
  m.impl("causal_conv1d_fused", forward_cpu);
  m.impl("causal_conv1d_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(headloom, Meta, m) {
  m.impl("causal_conv1d_fused", forward_meta);
  m.impl("causal_conv1d_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(headloom, Autograd, m) {
  m.impl("causal_conv1d_fused", forward_autograd);
  m.impl("causal_conv1d_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

const char* causal_conv1d_unsupported(const Tensor& x, const Tensor& weight) {
  if (const char* reason = kernels_unsupported(x)) return reason;
  if (weight.size(1) > conv::kMaxTaps) return "a filter has more than 8 taps";
  return nullptr;
}

Tensor causal_conv1d_fused(const Tensor& x, const Tensor& weight, const CausalConv1dOptions& o) {
  return call_forward(x, weight, optional_tensor(o.bias), o.silu, optional_tensor(o.state),
                      optional_tensor(o.documents));
}

}  // namespace headloom::ops
