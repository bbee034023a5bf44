#include "lending.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

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

}  // namespace

Node parse_spec(const std::string& spec) {
  Node node = parse_toml(spec, "headloom");
  forget_origins(node);
  return node;
}

void throw_value_error(const UsageError& error) { C10_THROW_ERROR(ValueError, error.what()); }

std::shared_ptr<Module> build_plainly(Builder build, const std::string& spec) {
  c10::impl::ForceDispatchKeyGuard plain{
      c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})};
  c10::InferenceMode normal(false);
  try {
    return build(spec);
  } catch (const UsageError& error) {
    throw_value_error(error);
  }
}

ModuleTensors tensors_of(const Module& module) {
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

ModuleTensors new_tensors(Builder build, std::string_view spec) {
  return tensors_of(*build_plainly(build, std::string(spec)));
}

void Shell::lend(const char* op, at::TensorList params) {
  TORCH_CHECK_VALUE(params.size() == slots.size(), op, ": params has ", params.size(),
                    " tensors, expected ", slots.size(), ".");
  for (size_t i = 0; i < params.size(); ++i) {
    for (Tensor* slot : slots[i]) *slot = params[i];
  }
}

void Shell::take_back() {
  for (const auto& places : slots) {
    for (Tensor* slot : places) *slot = Tensor();
  }
}

Shell make_shell(Builder build, const std::string& spec) {
  const at::Generator generator = at::detail::getDefaultCPUGenerator();
  const Tensor state = generator.get_state();
  Shell shell;
  {
    const WithoutValues fast;
    shell.module = build_plainly(build, spec);
  }
  at::Generator(generator).set_state(state);
  shell.slots = shell.module->release_tensors();
  const bool complete = std::none_of(shell.slots.begin(), shell.slots.end(),
                                     [](const auto& places) { return places.empty(); });
  TORCH_INTERNAL_ASSERT(complete && shell.module->parameters().empty(),
                        "a module registers all its parameters through Module::parameter and its "
                        "buffers through Module::buffer, but not this one: ",
                        spec);
  shell.take_back();
  return shell;
}

Shell Pool::take(const std::string& spec) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& idle = idle_[spec];
    if (!idle.empty()) {
      Shell shell = std::move(idle.back());
      idle.pop_back();
      return shell;
    }
  }
  return make_shell(build_, spec);
}

void Pool::put(const std::string& spec, Shell shell) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_[spec].push_back(std::move(shell));
}

Tensor auxiliary_loss(const Observed& observed, const Tensor& x) {
  return observed.loss.defined() ? observed.loss : at::zeros({}, x.options().dtype(at::kFloat));
}

bool counts_load(bool training) {
  return training && torch::autograd::get_current_graph_task_id() == -1;
}

bool is_traced(at::TensorList inputs, at::TensorList params) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet modes(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PreDispatch,
       DispatchKey::Functionalize, DispatchKey::FuncTorchDynamicLayerFrontMode,
       DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchBatched,
       DispatchKey::FuncTorchVmapMode, DispatchKey::FuncTorchGradWrapper});
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(modes)) return true;
  const auto transformed = [](const Tensor& t) {
    return t.defined() && t.key_set().has_any(modes);
  };
  return std::any_of(inputs.begin(), inputs.end(), transformed) ||
         std::any_of(params.begin(), params.end(), transformed);
}

}  // namespace headloom::python
