#include "ops/aft/fused.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/aft/kernel.h"
#include "ops/dispatch.h"
#include "ops/kernel/capability.h"

namespace headloom::ops {
namespace {

using aft_kernel::Args;
using aft_kernel::kChannels;
using aft_kernel::kChunk;
using at::Tensor;
using Optional = std::optional<Tensor>;
using Forward = std::tuple<Tensor, Tensor, Tensor>;  // output, state, checkpoints
// Of q, k, v, bias and state, the last empty where that is absent.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Weights beyond e^20 or below e^-20 would use up float32's range together with the keys.
constexpr double kMildest = 20;

// Arguments of the kernels and the tensors they point to.
struct Call {
  Args args;
  std::vector<Tensor> keep;

  aft_kernel::Sequence sequence(const Tensor& t) {
    const Tensor& kept = keep.emplace_back(t.stride(-1) == 1 ? t : t.contiguous());
    return {kept.const_data_ptr(), kept.stride(0), kept.stride(1)};
  }
  template <typename T>
  const T* whole(const Tensor& t) {
    return keep.emplace_back(t.contiguous()).template const_data_ptr<T>();
  }

  Call(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Optional& state,
       const Optional& documents, int64_t offset) {
    args.B = q.size(0);
    args.T = q.size(1);
    args.C = q.size(2);
    args.W = bias.size(1);
    if (q.scalar_type() == at::kBFloat16) args.type = aft_kernel::Type::kBFloat16;
    args.q = sequence(q);
    args.k = sequence(k);
    args.v = sequence(v);
    args.bias = whole<float>(bias);
    args.weight = whole<float>(bias.exp());
    args.mild = bias.abs().max().item<float>() <= kMildest;
    args.bias_size = bias.numel();
    args.offset = offset;
    if (state) args.state = whole<float>(*state);
    if (documents) args.documents = whole<int64_t>(*documents);
  }

  int64_t tasks() const { return args.B * ((args.C + kChannels - 1) / kChannels); }
  int64_t workers() const {
    return std::clamp<int64_t>(at::get_num_threads(), 1, std::max<int64_t>(tasks(), 1));
  }

  // Every worker does a run of tasks, the same for a given number of threads.
  void run(aft_kernel::Run kernel, bool backward) const {
    const int64_t count = tasks(), all = workers();
    const int64_t groups = count / std::max<int64_t>(args.B, 1);
    at::parallel_for(0, all, 1, [&](int64_t begin, int64_t end) {
      const Tensor scratch =
          at::detail::empty_cpu({aft_kernel::scratch_size(args.W, backward)}, at::kFloat);
      for (int64_t w = begin; w < end; ++w) {
        for (int64_t i = count * w / all; i < count * (w + 1) / all; ++i) {
          kernel(args, {i / groups, i % groups * kChannels, w, scratch.data_ptr<float>()});
        }
      }
    });
  }
};

// Empty where the backward is not wanted.
Tensor empty_checkpoints(const Tensor& q, bool wanted) {
  const c10::SymInt count = wanted ? (q.sym_size(1) + kChunk - 1) / kChunk : c10::SymInt(0);
  return at::empty_symint({q.sym_size(0), count, 3, q.sym_size(2)}, q.options().dtype(at::kFloat));
}

Tensor empty_state(const Tensor& q, const Tensor& bias) {
  return at::empty_symint({q.sym_size(0), 2 * bias.sym_size(1) + 1, q.sym_size(2)},
                          q.options().dtype(at::kFloat));
}

Forward forward_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
                    const Optional& state, const Optional& documents, int64_t offset,
                    bool checkpoints) {
  Call call(q, k, v, bias, state, documents, offset);
  Tensor out = contiguous_like(q), end = empty_state(q, bias);
  Tensor kept = empty_checkpoints(q, checkpoints);
  call.args.out = out.data_ptr();
  call.args.end = end.data_ptr<float>();
  if (checkpoints) call.args.checkpoints_out = kept.data_ptr<float>();
  call.run(HL_CHOOSE(aft_kernel::aft_forward), false);
  return {out, end, kept};
}

Forward forward_meta(const Tensor& q, const Tensor&, const Tensor&, const Tensor& bias,
                     const Optional&, const Optional&, int64_t, bool checkpoints) {
  return {contiguous_like(q), empty_state(q, bias), empty_checkpoints(q, checkpoints)};
}

Gradients empty_gradients(const Tensor& q, const Tensor& bias, const Optional& state) {
  return {contiguous_like(q), contiguous_like(q), contiguous_like(q), contiguous_like(bias),
          state ? empty_state(q, bias) : at::empty({0}, q.options())};
}

Gradients backward_cpu(const Optional& grad_out, const Optional& grad_end, const Tensor& q,
                       const Tensor& k, const Tensor& v, const Tensor& bias, const Optional& state,
                       const Optional& documents, int64_t offset, const Tensor& checkpoints) {
  Call call(q, k, v, bias, state, documents, offset);
  Gradients grads = empty_gradients(q, bias, state);
  auto& [grad_q, grad_k, grad_v, grad_bias, grad_state] = grads;
  const Tensor sums = at::zeros({call.workers(), bias.size(0), bias.size(1)}, bias.options());
  Args& a = call.args;
  a.checkpoints = call.whole<float>(checkpoints);
  if (grad_out) a.grad_out = call.sequence(*grad_out);
  if (grad_end) a.grad_end = call.whole<float>(*grad_end);
  a.grad_q = grad_q.data_ptr();
  a.grad_k = grad_k.data_ptr();
  a.grad_v = grad_v.data_ptr();
  a.grad_bias = sums.data_ptr<float>();
  if (state) a.grad_state = grad_state.data_ptr<float>();
  call.run(HL_CHOOSE(aft_kernel::aft_backward), true);
  at::sum_out(grad_bias, sums, 0);
  return grads;
}

Gradients backward_meta(const Optional&, const Optional&, const Tensor& q, const Tensor&,
                        const Tensor&, const Tensor& bias, const Optional& state, const Optional&,
                        int64_t, const Tensor&) {
  return empty_gradients(q, bias, state);
}

Forward call_fused(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
                   const Optional& state, const Optional& documents, int64_t offset,
                   bool checkpoints) {
  static const auto op = dispatched<decltype(forward_cpu)>("headloom::aft_local_fused");
  return op.call(q, k, v, bias, state, documents, offset, checkpoints);
}

struct Function : torch::autograd::Function<Function> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const Tensor& q, const Tensor& k, const Tensor& v,
                                                const Tensor& bias, const Optional& state,
                                                const Optional& documents, int64_t offset) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [out, end, checkpoints] = call_fused(q, k, v, bias, state, documents, offset, true);
    ctx->save_for_backward(
        {q, k, v, bias, state.value_or(Tensor()), documents.value_or(Tensor()), checkpoints});
    ctx->saved_data["offset"] = offset;
    ctx->set_materialize_grads(false);
    return {out, end};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    static const auto op = dispatched<decltype(backward_cpu)>("headloom::aft_local_backward");
    auto [q, k, v, bias, state] =
        op.call(optional_tensor(grads[0]), optional_tensor(grads[1]), saved[0], saved[1], saved[2],
                saved[3], optional_tensor(saved[4]), optional_tensor(saved[5]),
                ctx->saved_data["offset"].toInt(), saved[6]);
    if (!saved[4].defined()) state = Tensor();
    return {q, k, v, bias, state, Tensor(), Tensor()};
  }
};

Forward fused_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
                       const Optional& state, const Optional& documents, int64_t offset,
                       bool checkpoints) {
  if (at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad() ||
                                     bias.requires_grad() || (state && state->requires_grad()))) {
    const auto out = Function::apply(q, k, v, bias, state, documents, offset);
    return {out[0], out[1], empty_checkpoints(q, false)};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return call_fused(q, k, v, bias, state, documents, offset, checkpoints);
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def(
      "aft_local_fused(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? state, Tensor? "
      "documents, int offset=0, bool checkpoints=False) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "aft_local_backward(Tensor? grad_out, Tensor? grad_end, Tensor q, Tensor k, Tensor v, "
      "Tensor bias, Tensor? state, Tensor? documents, int offset, Tensor checkpoints) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CPU, m) {
  m.impl("aft_local_fused", forward_cpu);
  m.impl("aft_local_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(headloom, Meta, m) {
  m.impl("aft_local_fused", forward_meta);
  m.impl("aft_local_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(headloom, Autograd, m) {
  m.impl("aft_local_fused", fused_autograd);
  m.impl("aft_local_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

std::string aft_limits() {
  return c10::str(
      "fused CPU kernels for causal simple and local in float32 and bfloat16; matrix products for "
      "the other forms");
}

std::tuple<Tensor, Tensor> aft_local_fused(const Tensor& q, const Tensor& k, const Tensor& v,
                                           const AftOptions& o) {
  auto [out, end, checkpoints] =
      call_fused(q, k, v, o.bias.to(at::kFloat), optional_tensor(o.state),
                 optional_tensor(o.documents), o.offset, false);
  return {out, end};
}

}  // namespace headloom::ops
