#include "ops/operator.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cmath>

namespace headloom::ops {

std::string type_names(const std::vector<at::ScalarType>& types) {
  std::string out;
  for (size_t i = 0; i < types.size(); ++i) {
    if (i > 0) out += i + 1 == types.size() ? " and " : ", ";
    out += types[i] == at::kFloat      ? "float32"
           : types[i] == at::kBFloat16 ? "bfloat16"
           : types[i] == at::kHalf     ? "float16"
                                       : c10::toString(types[i]);
  }
  return out;
}

bool in_transform() {
  using c10::DispatchKey;
  static const c10::DispatchKeySet keys({DispatchKey::FuncTorchDynamicLayerFrontMode,
                                         DispatchKey::FuncTorchDynamicLayerBackMode,
                                         DispatchKey::FuncTorchVmapMode, DispatchKey::VmapMode});
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(keys);
}

namespace {
thread_local bool gradient_comes = false;
}  // namespace

GradientComes::GradientComes() : before_(gradient_comes) { gradient_comes = true; }
GradientComes::~GradientComes() { gradient_comes = before_; }
bool GradientComes::is_announced() { return gradient_comes; }

namespace detail {
namespace {

using torch::autograd::AutogradContext;

// The gradients of the definition for the tensors that want one; one place for each differentiable
// tensor that is there. Under GradMode they can be differentiated again.
variable_list definition_gradients(Call& call, const variable_list& grads) {
  const bool again = at::GradMode::is_enabled();
  const at::AutoGradMode recorded(true);
  std::vector<Tensor*> wanted;
  variable_list inputs, outputs, cotangents, out;
  for (const Slot& slot : call.tensors()) {
    Tensor& t = *slot.tensor;
    if (!slot.differentiable || !t.defined()) continue;
    // Apart from the others: one may have been computed from another.
    if (t.requires_grad()) inputs.push_back(t = at::alias(t));
    wanted.push_back(t.requires_grad() ? &t : nullptr);
  }
  const std::vector<Tensor> results = call.definition();
  for (size_t i = 0; i < grads.size() && i < results.size(); ++i) {
    if (!grads[i].defined() || !results[i].requires_grad()) continue;
    outputs.push_back(results[i]);
    cotangents.push_back(grads[i]);
  }
  variable_list found(inputs.size());
  if (!outputs.empty()) {
    found = torch::autograd::grad(outputs, inputs, cotangents, std::nullopt, again, true);
  }
  size_t next = 0;
  for (const Tensor* t : wanted) out.push_back(t ? std::move(found[next++]) : Tensor());
  return out;
}

// Whether the backward may scale in place what the forward kept: there is no second backward
// through this graph, and only the autograd node, the list of saved tensors and `kept` hold it. For
// a large vocabulary, memory for another gradient takes longer to get than the gradient to compute.
bool may_scale_kept(const variable_list& kept, const Tensor& grad) {
  const auto plain = [](const Tensor& t) { return t.is_cpu() && !at::isTensorSubclassLike(t); };
  if (torch::autograd::get_current_graph_task_keep_graph() || !plain(grad)) return false;
  for (const Tensor& t : kept) {
    if (!plain(t) || t.use_count() > 3 || t.storage().use_count() > 1) return false;
  }
  return std::isfinite(grad.item<double>());
}

struct RecordedFunction : torch::autograd::Function<RecordedFunction> {
  // `inputs` are the differentiable tensors of the call that are there: autograd sees only these.
  static variable_list forward(AutogradContext* ctx, at::TensorList /*inputs*/,
                               const c10::intrusive_ptr<Call>& call) {
    const at::AutoDispatchBelowADInplaceOrView below;
    variable_list out = call->fused(), saved;
    for (const Slot& slot : call->tensors()) saved.push_back(*slot.tensor);
    const variable_list kept(out.begin() + static_cast<std::ptrdiff_t>(call->results(out.size())),
                             out.end());
    saved.insert(saved.end(), kept.begin(), kept.end());
    ctx->save_for_backward(std::move(saved));
    ctx->mark_non_differentiable(kept);
    // Of a state that nobody reads there is no gradient; kernels need not read its zeros.
    ctx->set_materialize_grads(call->returns_list());
    ctx->saved_data["call"] = c10::IValue::make_capsule(call->without_tensors());
    // A hook for saved tensors may give the backward a tensor that the user has too.
    if (call->scales_kept() && !at::SavedTensorDefaultHooks::get_hooks()) {
      ctx->saved_data["scales_kept"] = true;
    }
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const c10::intrusive_ptr<torch::CustomClassHolder> held = ctx->saved_data["call"].toCapsule();
    // A copy: the graph may be walked again, by another thread too.
    const c10::intrusive_ptr<Call> call = static_cast<const Call&>(*held).without_tensors();
    const Slots tensors = call->tensors();
    for (size_t i = 0; i < tensors.size(); ++i) *tensors[i].tensor = saved[i];
    const variable_list kept(saved.begin() + static_cast<std::ptrdiff_t>(tensors.size()),
                             saved.end());
    grads.resize(grads.size() - kept.size());
    if (!grads[0].defined()) grads[0] = at::zeros_like(call->outputs()[0]);
    variable_list out;
    // A batch of gradients (is_grads_batched) comes under vmap, which no kernel knows.
    if (at::GradMode::is_enabled() || in_transform()) {
      out = definition_gradients(*call, grads);
    } else if (ctx->saved_data.count("scales_kept") > 0 && may_scale_kept(kept, grads[0])) {
      for (size_t i = 0; i < kept.size(); ++i) {
        out.push_back(ctx->needs_input_grad(i) ? kept[i].mul_(grads[0]).detach() : Tensor());
      }
    } else {
      Call::Grads given;
      for (const Tensor& grad : grads) given.push_back(OptionalTensor::pack(resolved(grad)));
      int64_t wanted = 0, bit = 0;
      size_t input = 0;
      for (const Slot& slot : tensors) {
        if (!slot.differentiable) continue;
        if (slot.tensor->defined() && ctx->needs_input_grad(input++)) wanted |= int64_t{1} << bit;
        ++bit;
      }
      out = call->backward(given, kept, wanted);
      for (size_t i = 0; i < out.size(); ++i) {
        if (!ctx->needs_input_grad(i)) out[i] = Tensor();
      }
    }
    out.emplace_back();  // the call
    return out;
  }
};

}  // namespace

variable_list record(const c10::intrusive_ptr<Call>& call) {
  variable_list inputs;
  for (const Slot& slot : call->tensors()) {
    if (slot.differentiable && slot.tensor->defined()) inputs.push_back(*slot.tensor);
  }
  return RecordedFunction::apply(at::TensorList(inputs), call);
}

}  // namespace detail

}  // namespace headloom::ops
