#include "model/activation_checkpoint.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "mixers/random_state.h"
#include "ops/operator.h"

namespace headloom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Autocast as it was where this was made. The cast copies of weights are not shared with other
// layers: one that was made without a gradient must not be used where there is one, and the graph
// of another ends with its layer's backward.
class AutocastState {
 public:
  explicit AutocastState(c10::DeviceType device)
      : device_(device),
        on_(at::autocast::is_autocast_enabled(device)),
        type_(at::autocast::get_autocast_dtype(device)) {}

  template <typename F>
  auto run(const F& f) const {
    struct Restore {
      c10::DeviceType device;
      bool on = at::autocast::is_autocast_enabled(device);
      at::ScalarType type = at::autocast::get_autocast_dtype(device);
      bool cache = at::autocast::is_autocast_cache_enabled();
      ~Restore() {
        at::autocast::set_autocast_enabled(device, on);
        at::autocast::set_autocast_dtype(device, type);
        at::autocast::set_autocast_cache_enabled(cache);
      }
    };
    const Restore restore{device_};
    at::autocast::set_autocast_enabled(device_, on_);
    at::autocast::set_autocast_dtype(device_, type_);
    at::autocast::set_autocast_cache_enabled(false);
    return f();
  }

 private:
  c10::DeviceType device_;
  bool on_;
  at::ScalarType type_;
};

// A call of a block, to be made twice.
struct Checkpoint : torch::CustomClassHolder {
  std::shared_ptr<Block> block;
  MixerContext context;  // without what each call brings: memory and auxiliary outputs
  RandomState random;
  AutocastState autocast;
  // What AuxiliaryOutputs::sum_counts gave the first time, in order: the second call does not talk
  // to other processes.
  std::vector<Tensor> sums;

  Checkpoint(std::shared_ptr<Block> of, const Tensor& x, const MixerContext& given)
      : block(std::move(of)), context(given), random(x.device()), autocast(x.device().type()) {
    context.memory = Tensor();
    context.auxiliary = nullptr;
  }

  // The block's output and, where there is one, its auxiliary loss.
  variable_list run(at::TensorList inputs, AuxiliaryOutputs& auxiliary) const {
    MixerContext own = context;
    if (inputs.size() > 1) own.memory = inputs[1];
    own.auxiliary = &auxiliary;
    variable_list out = {autocast.run([&] { return block->forward(inputs[0], own); })};
    if (auxiliary.loss.defined()) out.push_back(auxiliary.loss);
    return out;
  }
};

struct CheckpointFunction : torch::autograd::Function<CheckpointFunction> {
  // `inputs` are x and, where there is one, the memory. Autograd switches gradients off here.
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs,
                               const c10::intrusive_ptr<Checkpoint>& call,
                               AuxiliaryOutputs* auxiliary) {
    ctx->save_for_backward(inputs.vec());
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    AuxiliaryOutputs& own = *auxiliary;
    if (const auto sum = own.sum_counts) {
      own.sum_counts = [call, sum](const Tensor& counts) {
        call->sums.push_back(sum(counts));
        return call->sums.back();
      };
    }
    const ops::GradientComes announced;
    variable_list out = call->run(inputs, own);
    own.sum_counts = nullptr;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(),
                                "activation checkpointing has no gradient of the gradient.");
    const c10::intrusive_ptr<torch::CustomClassHolder> held = ctx->saved_data["call"].toCapsule();
    auto& call = static_cast<Checkpoint&>(*held);
    variable_list inputs;
    for (const Tensor& t : ctx->get_saved_variables()) {
      inputs.push_back(t.detach().requires_grad_(t.requires_grad()));
    }
    AuxiliaryOutputs again;  // its statistics were counted before
    size_t next = 0;
    if (!call.sums.empty()) {
      again.sum_counts = [&](const Tensor&) { return call.sums.at(next++); };
    }
    const at::AutoGradMode with_gradients(true);
    RandomState now(inputs[0].device());
    call.random.restore();
    const variable_list out = call.run(inputs, again);
    now.restore();
    torch::autograd::backward(out, grads);
    variable_list found;
    for (const Tensor& t : inputs) found.push_back(t.grad());
    found.resize(found.size() + 2);  // the call and the auxiliary outputs
    return found;
  }
};

}  // namespace

Tensor checkpointed(const std::shared_ptr<Block>& block, const Tensor& x,
                    const MixerContext& context) {
  AuxiliaryOutputs own;
  if (context.auxiliary != nullptr) own.sum_counts = context.auxiliary->sum_counts;
  variable_list inputs = {x};
  if (context.memory.defined()) inputs.push_back(context.memory);
  const variable_list out = CheckpointFunction::apply(
      at::TensorList(inputs), c10::make_intrusive<Checkpoint>(block, x, context), &own);
  if (context.auxiliary != nullptr) {
    AuxiliaryOutputs& all = *context.auxiliary;
    if (out.size() > 1) all.loss = all.loss.defined() ? all.loss + out[1] : out[1];
    for (auto& [layer, load] : own.load) {
      Tensor& sum = all.load[layer];
      sum = sum.defined() ? sum + load : load;
    }
  }
  return out[0];
}

}  // namespace headloom
