#include "functional_call.h"

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "mixers/check.h"
#include "mixers/random_state.h"
#include "ops/operator.h"

namespace headloom::python {
namespace {

void forget_origins(Node& node) {
  node.origin.clear();
  if (node.is_table()) {
    for (auto& [key, child] : node.table()) forget_origins(child);
  } else if (node.is_array()) {
    for (Node& child : node.array()) forget_origins(child);
  }
}

// Its weights mean nothing, and leave no trace in the caller's random numbers.
std::shared_ptr<Module> build_without_values(Builder build, const std::string& spec) {
  RandomState before(at::kCPU);
  const WithoutValues fast;
  std::shared_ptr<Module> module = build_plainly(build, spec);
  before.restore();
  return module;
}

// As if no mode (fake tensors, tracing, autocast, inference) were on.
class NoModes {
  c10::impl::ForceDispatchKeyGuard plain_{
      c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})};
  // detach() asks a mode of Python's also where its key is not included.
  c10::impl::ExcludeDispatchKeyGuard no_python_{c10::DispatchKey::Python};
  c10::InferenceMode normal_{false};
};

bool has_sizes(const Tensor& t, at::IntArrayRef sizes) {
  if (!t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return t.sizes() == sizes;
  bool same = t.dim() == static_cast<int64_t>(sizes.size());
  for (int64_t i = 0; same && i < t.dim(); ++i) same = t.sym_size(i) == sizes[i];
  return same;
}

}  // namespace

Node parse_spec(const std::string& spec) {
  Node node = parse_toml(spec, "headloom");
  forget_origins(node);
  return node;
}

void throw_value_error(const UsageError& error) { C10_THROW_ERROR(ValueError, error.what()); }

std::shared_ptr<Module> build_plainly(Builder build, const std::string& spec) {
  const NoModes plain;
  try {
    return build(spec);
  } catch (const UsageError& error) {
    throw_value_error(error);
  }
}

ModuleTensors tensors_of(const Module& module) {
  const NoModes plain;
  const std::set<std::string> decayed = decayed_parameters(module);
  const size_t parameters = module.parameters().size();
  std::vector<std::string> names, kinds;
  std::vector<Tensor> values;
  for (const auto& [name, value] : named_tensors(module)) {
    const char* kind = names.size() >= parameters ? "buffer"
                       : decayed.contains(name)   ? "decayed"
                                                  : "undecayed";
    names.push_back(name);
    values.push_back(value.detach());
    kinds.push_back(kind);
  }
  return {names, values, kinds};
}

ModuleTensors new_tensors(Builder build, std::string_view spec, bool values) {
  const std::string text(spec);
  return tensors_of(values ? *build_plainly(build, text) : *build_without_values(build, text));
}

void FunctionalModule::set_tensors(at::TensorList params, Inputs inputs) {
  TORCH_CHECK_VALUE(params.size() == parameters.size(), module->what(), ": params has ",
                    params.size(), " tensors, expected ", parameters.size(), ".");
  for (size_t i = 0; i < params.size(); ++i) {
    const Parameter& own = parameters[i];
    TORCH_CHECK_VALUE(has_sizes(params[i], own.sizes), module->what(), ": parameter '", own.name,
                      "' must be ", at::IntArrayRef(own.sizes), "; it is ", params[i].sym_sizes(),
                      ".");
    // PyTorch's products of a tensor and one on meta have values that nobody has computed.
    TORCH_CHECK_VALUE(params[i].device() == params[0].device(), module->what(), ": parameter '",
                      own.name, "' is on ", params[i].device(), ", but '", parameters[0].name,
                      "' is on ", params[0].device(), "; expected one device.");
  }
  for (const Input& input : inputs) {
    if (params.empty() || !input.tensor.defined()) continue;
    TORCH_CHECK_VALUE(input.tensor.device() == params[0].device(), module->what(), ": ", input.name,
                      " is on ", input.tensor.device(), ", but the parameters are on ",
                      params[0].device(), "; expected one device.");
  }
  // Some linear maps could multiply an input of a type that none of the parameters has, and others
  // could not. So all refuse it.
  for (const Input& input : inputs) {
    if (params.empty() || !input.tensor.defined() || !input.tensor.is_floating_point()) continue;
    const bool known = std::any_of(params.begin(), params.end(), [&](const Tensor& t) {
      return t.scalar_type() == input.tensor.scalar_type();
    });
    if (!known) explain_types(*this, params, inputs);
  }
  for (size_t i = 0; i < params.size(); ++i) {
    for (Tensor* slot : parameters[i].slots) *slot = params[i];
  }
}

void FunctionalModule::clear_tensors() {
  for (const Parameter& own : parameters) {
    for (Tensor* slot : own.slots) *slot = Tensor();
  }
}

bool under_autocast(at::DeviceType device) {
  return device != at::kMeta && at::autocast::is_autocast_enabled(device);
}

bool is_of_python(const Tensor& t) { return t.key_set().has(c10::DispatchKey::Python); }

void explain_types(const FunctionalModule& functional, at::TensorList params, Inputs inputs) {
  for (const Input& input : inputs) {
    if (!input.tensor.defined() || is_of_python(input.tensor)) continue;
    for (size_t i = 0; i < params.size(); ++i) {
      TORCH_CHECK_VALUE(!is_of_python(params[i]), functional.module->what(), ": parameter '",
                        functional.parameters[i].name, "' is a DTensor or of another class, but ",
                        input.name, " is a plain tensor; expected one class. Parameters that FSDP ",
                        "shards are whole in forward and in methods that ",
                        "register_fsdp_forward_method names.");
    }
  }
  // Autocast brings types together, but leaves Double alone.
  const bool autocast = under_autocast(params.empty() ? at::kCPU : params[0].device().type());
  const char* kind = "";
  std::string first;
  std::optional<at::ScalarType> type;
  const auto expect = [&](const char* what, const std::string& name, const Tensor& t) {
    if (!t.defined() || !t.is_floating_point()) return;
    if (!type) {
      kind = what;
      first = name;
      type = t.scalar_type();
    }
    const bool together = autocast && t.scalar_type() != at::kDouble && *type != at::kDouble;
    TORCH_CHECK_VALUE(together || t.scalar_type() == *type, functional.module->what(), ": ", kind,
                      first, " is ", *type, ", but ", what, name, " is ", t.scalar_type(),
                      "; expected one type (.to(dtype) converts)",
                      autocast ? ", as autocast leaves Double alone." : ", or torch.autocast.");
  };
  for (const Input& input : inputs) expect("", input.name, input.tensor);
  for (size_t i = 0; i < params.size(); ++i) {
    const std::string& name = functional.parameters[i].name;
    if (name.ends_with("choice_bias")) continue;  // stays in float32 (Part._apply in Python)
    expect("parameter ", "'" + name + "'", params[i]);
  }
}

FunctionalModule make_functional_module(Builder build, const std::string& spec) {
  FunctionalModule functional;
  functional.module = build_without_values(build, spec);
  for (const auto& [name, value] : named_tensors(*functional.module)) {
    functional.parameters.push_back({.name = name, .sizes = value.sizes().vec(), .slots = {}});
  }
  bool complete = true;
  size_t next = 0;
  for (auto& places : functional.module->release_tensors()) {
    complete = complete && !places.empty();
    functional.parameters[next++].slots = std::move(places);
  }
  TORCH_INTERNAL_ASSERT(complete && functional.module->parameters().empty(),
                        "a module registers all its parameters through Module::parameter and its "
                        "buffers through Module::buffer, but not this one: ",
                        spec);
  functional.clear_tensors();
  return functional;
}

FunctionalModule Pool::take(const std::string& spec) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = idle_.find(spec);
    if (found != idle_.end() && !found->second.empty()) {
      FunctionalModule functional = std::move(found->second.back());
      found->second.pop_back();
      return functional;
    }
  }
  return make_functional_module(build_, spec);
}

void Pool::put(const std::string& spec, FunctionalModule functional) {
  constexpr size_t kMostSpecs = 256;  // more than a model that is made of layers has
  const std::lock_guard<std::mutex> lock(mutex_);
  if (idle_.size() >= kMostSpecs && !idle_.contains(spec)) idle_.clear();
  idle_[spec].push_back(std::move(functional));
}

Tensor auxiliary_loss(const AuxiliaryOutputs& auxiliary, const Tensor& x) {
  return auxiliary.loss.defined() ? auxiliary.loss : at::zeros({}, x.options().dtype(at::kFloat));
}

bool computes_again() { return torch::autograd::get_current_graph_task_id() != -1; }

void expect_countable(const Module& module) {
  if (!ops::in_transform()) return;
  usage_error(module.what(), ": training calls count the load of experts (bias_speed), which a ",
              "transform of torch.func cannot keep; call model.eval() first.");
}

bool is_traced(Inputs inputs, at::TensorList params) {
  return is_transforming() ||
         std::any_of(inputs.begin(), inputs.end(),
                     [](const Input& input) { return is_transformed(input.tensor); }) ||
         std::any_of(params.begin(), params.end(), is_transformed);
}

}  // namespace headloom::python
