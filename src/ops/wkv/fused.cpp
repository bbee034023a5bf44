#include "ops/wkv/fused.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/dispatch.h"
#include "ops/kernel/capability.h"
#include "ops/wkv/kernel.h"

namespace headloom::ops {
namespace {

using at::Tensor;
using wkv_kernel::Args;
using wkv_kernel::kChannels;
using wkv_kernel::kChunk;
using Optional = std::optional<Tensor>;
using Forward = std::tuple<Tensor, Tensor, Tensor>;  // output, state, checkpoints
// Of k, v, decay, bonus, receptance and state; the last two are empty where these are absent.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Arguments of the kernels and the tensors they point to.
struct Call {
  Args args;
  std::vector<Tensor> keep;

  wkv_kernel::Sequence sequence(const Tensor& t) {
    const Tensor& kept = keep.emplace_back(t.stride(-1) == 1 ? t : t.contiguous());
    return {kept.const_data_ptr(), kept.stride(0), kept.stride(1)};
  }
  template <typename T>
  const T* whole(const Tensor& t) {
    return keep.emplace_back(t.contiguous()).template const_data_ptr<T>();
  }

  Call(const Tensor& k, const Tensor& v, const Tensor& decay, const Tensor& bonus,
       const Optional& receptance, const Optional& documents) {
    args.B = k.size(0);
    args.T = k.size(1);
    args.C = k.size(2);
    if (k.scalar_type() == at::kBFloat16) args.type = wkv_kernel::Type::kBFloat16;
    args.k = sequence(k);
    args.v = sequence(v);
    if (receptance) args.r = sequence(*receptance);
    args.decay = whole<float>(decay);
    args.bonus = whole<float>(bonus);
    if (documents) args.documents = whole<int64_t>(*documents);
  }

  // All channels of all batch elements, in as many tasks as there are threads or more.
  void run(wkv_kernel::Run kernel, int64_t scratch) const {
    const int64_t threads = std::max(at::get_num_threads(), 1);
    const int64_t groups = (args.C + kChannels - 1) / kChannels;
    const int64_t parts = std::min(groups, (threads + args.B - 1) / std::max<int64_t>(args.B, 1));
    at::parallel_for(0, args.B * parts, 1, [&](int64_t begin, int64_t end) {
      const Tensor own = at::detail::empty_cpu({scratch}, at::kFloat);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t part = i % parts;
        const auto channel = [&](int64_t p) {
          return std::min(groups * p / parts * kChannels, args.C);
        };
        kernel(args, {i / parts, channel(part), channel(part + 1), own.data_ptr<float>()});
      }
    });
  }
};

// Empty where the backward is not wanted.
Tensor empty_checkpoints(const Tensor& k, bool wanted) {
  const c10::SymInt count = wanted ? (k.sym_size(1) + kChunk - 1) / kChunk : c10::SymInt(0);
  return at::empty_symint({k.sym_size(0), count, 3, k.sym_size(2)}, k.options().dtype(at::kFloat));
}

Tensor empty_state(const Tensor& k) {
  return at::empty_symint({k.sym_size(0), 3, k.sym_size(2)}, k.options().dtype(at::kFloat));
}

// Here and not in wkv's own checks, which also see tensors that have no values. NaN passes, to be
// seen in the output.
void check_rate(const Args& a) {
  const float* const end = a.decay + a.C;
  const float* const found = std::find_if(a.decay, end, [](float w) { return w < 0; });
  TORCH_CHECK_VALUE(found == end, "wkv: rate is ", *found, " for channel ", found - a.decay,
                    ", expected at least 0: exp(time_decay), not RWKV's time_decay itself.");
}

Forward forward_cpu(const Tensor& k, const Tensor& v, const Tensor& decay, const Tensor& bonus,
                    const Optional& receptance, const Optional& state, const Optional& documents,
                    bool checkpoints) {
  Call call(k, v, decay, bonus, receptance, documents);
  check_rate(call.args);
  Tensor out = contiguous_like(k), end = empty_state(k), kept = empty_checkpoints(k, checkpoints);
  Args& a = call.args;
  if (state) a.state = call.whole<float>(*state);
  a.out = out.data_ptr();
  a.end = end.data_ptr<float>();
  if (checkpoints) a.checkpoints_out = kept.data_ptr<float>();
  call.run(HL_CHOOSE(wkv_kernel::wkv_forward), 0);
  return {out, end, kept};
}

Forward forward_meta(const Tensor& k, const Tensor&, const Tensor&, const Tensor&, const Optional&,
                     const Optional&, const Optional&, bool checkpoints) {
  return {contiguous_like(k), empty_state(k), empty_checkpoints(k, checkpoints)};
}

Gradients empty_gradients(const Tensor& k, const Tensor& decay, const Optional& receptance,
                          const Optional& state) {
  const Tensor none = at::empty({0}, k.options());
  return {contiguous_like(k),
          contiguous_like(k),
          contiguous_like(decay),
          contiguous_like(decay),
          receptance ? contiguous_like(k) : none,
          state ? empty_state(k) : none};
}

Gradients backward_cpu(const Optional& grad_out, const Optional& grad_end, const Tensor& k,
                       const Tensor& v, const Tensor& decay, const Tensor& bonus,
                       const Optional& receptance, const Optional& state, const Optional& documents,
                       const Tensor& checkpoints) {
  Call call(k, v, decay, bonus, receptance, documents);
  Gradients grads = empty_gradients(k, decay, receptance, state);
  auto& [grad_k, grad_v, grad_decay, grad_bonus, grad_r, grad_state] = grads;
  Tensor rates = at::empty({k.size(0), 2, k.size(2)}, decay.options());
  Tensor carried = state ? grad_state : empty_state(k);
  Args& a = call.args;
  a.checkpoints = call.whole<float>(checkpoints);
  if (grad_out) a.grad_out = call.sequence(*grad_out);
  if (grad_end) a.grad_end = call.whole<float>(*grad_end);
  a.grad_k = grad_k.data_ptr();
  a.grad_v = grad_v.data_ptr();
  if (receptance) a.grad_r = grad_r.data_ptr();
  a.grad_rates = rates.data_ptr<float>();
  a.grad_state = carried.data_ptr<float>();
  call.run(HL_CHOOSE(wkv_kernel::wkv_backward), wkv_kernel::kScratch);
  const Tensor sums = rates.sum(0);
  grad_decay.copy_(sums[0]);
  grad_bonus.copy_(sums[1]);
  return grads;
}

Gradients backward_meta(const Optional&, const Optional&, const Tensor& k, const Tensor&,
                        const Tensor& decay, const Tensor&, const Optional& receptance,
                        const Optional& state, const Optional&, const Tensor&) {
  return empty_gradients(k, decay, receptance, state);
}

Forward call_fused(const Tensor& k, const Tensor& v, const Tensor& decay, const Tensor& bonus,
                   const Optional& receptance, const Optional& state, const Optional& documents,
                   bool checkpoints) {
  static const auto op = dispatched<decltype(forward_cpu)>("headloom::wkv_fused");
  return op.call(k, v, decay, bonus, receptance, state, documents, checkpoints);
}

struct Function : torch::autograd::Function<Function> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const Tensor& k, const Tensor& v,
                                                const Tensor& decay, const Tensor& bonus,
                                                const Optional& receptance, const Optional& state,
                                                const Optional& documents) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [out, end, checkpoints] =
        call_fused(k, v, decay, bonus, receptance, state, documents, true);
    const auto saved = [](const Optional& t) { return t.value_or(Tensor()); };
    ctx->save_for_backward(
        {k, v, decay, bonus, saved(receptance), saved(state), saved(documents), checkpoints});
    ctx->set_materialize_grads(false);
    return {out, end};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    static const auto op = dispatched<decltype(backward_cpu)>("headloom::wkv_backward");
    auto [k, v, decay, bonus, r, state] =
        op.call(optional_tensor(grads[0]), optional_tensor(grads[1]), saved[0], saved[1], saved[2],
                saved[3], optional_tensor(saved[4]), optional_tensor(saved[5]),
                optional_tensor(saved[6]), saved[7]);
    if (!saved[4].defined()) r = Tensor();
    if (!saved[5].defined()) state = Tensor();
    return {k, v, decay, bonus, r, state, Tensor()};
  }
};

Forward fused_autograd(const Tensor& k, const Tensor& v, const Tensor& decay, const Tensor& bonus,
                       const Optional& receptance, const Optional& state, const Optional& documents,
                       bool checkpoints) {
  const auto wants = [](const Optional& t) { return t && t->requires_grad(); };
  if (at::GradMode::is_enabled() &&
      (k.requires_grad() || v.requires_grad() || decay.requires_grad() || bonus.requires_grad() ||
       wants(receptance) || wants(state))) {
    const auto out = Function::apply(k, v, decay, bonus, receptance, state, documents);
    return {out[0], out[1], empty_checkpoints(k, false)};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return call_fused(k, v, decay, bonus, receptance, state, documents, checkpoints);
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def(
      "wkv_fused(Tensor k, Tensor v, Tensor decay, Tensor bonus, Tensor? receptance, Tensor? "
      "state, Tensor? documents, bool checkpoints=False) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "wkv_backward(Tensor? grad_out, Tensor? grad_end, Tensor k, Tensor v, Tensor decay, Tensor "
      "bonus, Tensor? receptance, Tensor? state, Tensor? documents, Tensor checkpoints) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(headloom, CPU, m) {
  m.impl("wkv_fused", forward_cpu);
  m.impl("wkv_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(headloom, Meta, m) {
  m.impl("wkv_fused", forward_meta);
  m.impl("wkv_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(headloom, Autograd, m) {
  m.impl("wkv_fused", fused_autograd);
  m.impl("wkv_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace

std::string wkv_fused_limits() {
  return c10::str(
      "fused CPU kernels for float32 and bfloat16; the reference for other types and devices");
}

std::tuple<Tensor, Tensor> wkv_fused(const Tensor& k, const Tensor& v, const Tensor& decay,
                                     const Tensor& bonus, const WkvOptions& o) {
  auto [out, end, checkpoints] =
      call_fused(k, v, decay, bonus, optional_tensor(o.receptance), optional_tensor(o.state),
                 optional_tensor(o.documents), false);
  return {out, end};
}

}  // namespace headloom::ops
