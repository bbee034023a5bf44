// torch.ops.headloom.mixer: one operator that runs any C++ token mixer with parameters lent by
// Python.
//
// A spec is TOML text: the layer's shape and, in [mixer], the mixer's type and options. The C++
// modules built from it wait in a pool; a call takes one, puts the caller's tensors into its
// parameter slots, runs forward and empties the slots again. The operator is composite: autograd,
// fake tensors, functional transforms and export see only the ATen and Headloom operators inside.
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "core/config.h"
#include "mixers/mixer.h"

namespace headloom {
namespace {

struct Request {
  LayerShape shape;
  std::string type;

  void fields(Fields& f) {
    f.field("width", shape.width, "size of x's last dimension", at_least(1));
    f.field("layer", shape.layer, "index of the layer in its model", at_least(0));
    f.field("depth", shape.depth, "layers of the model", at_least(1));
    f.field("max_length", shape.max_length, "longest sequence", at_least(1));
    f.field("causal", shape.causal, "no token sees a later one");
    f.field("bias", shape.bias, "biases in linear maps");
    f.field("init_std", shape.init_std, "standard deviation of new weights", positive());
    f.table("position", shape.position, "positions");
    f.variant<TokenMixerSpec>("mixer", mixer, "the mixer", entry_names(token_mixers()), make);
  }

  std::shared_ptr<TokenMixerSpec> mixer;
  static std::shared_ptr<TokenMixerSpec> make(const std::string& name) {
    return make_spec(token_mixers(), "mixer", name);
  }
};

void forget_origins(Node& node) {
  node.origin.clear();
  if (node.is_table()) {
    for (auto& [key, child] : node.table()) forget_origins(child);
  } else if (node.is_array()) {
    for (Node& child : node.array()) forget_origins(child);
  }
}

// Builds on the calling thread as if no mode (fake tensors, tracing, autocast, inference) were on.
std::shared_ptr<TokenMixer> build(const std::string& spec) {
  c10::impl::ForceDispatchKeyGuard plain{
      c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})};
  c10::InferenceMode normal(false);
  try {
    Node node = parse_toml(spec, "headloom.mixer");
    forget_origins(node);  // lines of a text that Python wrote mean nothing to its caller
    Request request;
    read_fields(node, request);
    return request.mixer->build(request.shape);
  } catch (const UsageError& e) {
    TORCH_CHECK_VALUE(false, e.what());
  }
}

// A module without parameters of its own.
struct Shell {
  std::shared_ptr<TokenMixer> module;
  std::vector<Tensor*> slots;
};

Shell make_shell(const std::string& spec) {
  // Its initial weights are thrown away and must leave no trace in the caller's random numbers.
  const at::Generator generator = at::detail::getDefaultCPUGenerator();
  const Tensor state = generator.get_state();
  Shell shell;
  shell.module = build(spec);
  at::Generator(generator).set_state(state);
  const auto registered = shell.module->parameters();
  const bool buffers = !shell.module->buffers().empty();
  shell.slots = shell.module->release_parameters();
  bool complete = shell.slots.size() == registered.size() && !buffers;
  for (size_t i = 0; complete && i < registered.size(); ++i) {
    complete = shell.slots[i]->is_same(registered[i]);
  }
  TORCH_INTERNAL_ASSERT(complete,
                        "a mixer registers all its parameters through "
                        "Module::parameter and has no buffers, but not this one: ",
                        spec);
  return shell;
}

// Idle shells by spec. Calls from several threads each take their own.
class Pool {
 public:
  Shell take(const std::string& spec) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto& idle = idle_[spec];
      if (!idle.empty()) {
        Shell shell = std::move(idle.back());
        idle.pop_back();
        return shell;
      }
    }
    return make_shell(spec);
  }
  void put(const std::string& spec, Shell shell) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_[spec].push_back(std::move(shell));
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::vector<Shell>> idle_;
};

// Whether a call is traced or transformed: what a mixer then keeps between calls (tables of
// positions) would be tensors of that mode.
bool is_traced(const Tensor& x, at::TensorList params) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet modes(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PreDispatch,
       DispatchKey::Functionalize, DispatchKey::FuncTorchDynamicLayerFrontMode,
       DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchBatched,
       DispatchKey::FuncTorchVmapMode, DispatchKey::FuncTorchGradWrapper});
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(modes)) return true;
  if (x.key_set().has_any(modes)) return true;
  return std::any_of(params.begin(), params.end(),
                     [](const Tensor& p) { return p.key_set().has_any(modes); });
}

Tensor mixer(std::string_view spec_text, const Tensor& x, at::TensorList params, bool training,
             const std::optional<Tensor>& lengths, const std::optional<Tensor>& documents,
             const std::optional<Tensor>& memory) {
  static auto* pool = new Pool;  // never destroyed: threads may outlive static storage
  const std::string spec(spec_text);
  TORCH_CHECK_VALUE(x.dim() == 3, "mixer: x has shape ", x.sym_sizes(), ", expected [B, T, C].");
  const bool traced = is_traced(x, params);
  Shell shell = traced ? make_shell(spec) : pool->take(spec);
  TORCH_CHECK_VALUE(params.size() == shell.slots.size(), "mixer: params has ", params.size(),
                    " tensors, expected ", shell.slots.size(), ".");
  // On an error the shell is dropped with whatever it was lent.
  for (size_t i = 0; i < params.size(); ++i) *shell.slots[i] = params[i];
  shell.module->train(training);
  Tensor y;
  try {
    MixerContext context;
    context.documents = documents.value_or(Tensor());
    context.memory = memory.value_or(Tensor());
    (memory ? context.memory_lengths : context.lengths) = lengths.value_or(Tensor());
    y = shell.module->forward(x, context);
  } catch (const UsageError& e) {
    TORCH_CHECK_VALUE(false, e.what());
  }
  for (Tensor* slot : shell.slots) *slot = Tensor();
  if (!traced) pool->put(spec, std::move(shell));
  return y;
}

// New parameters, drawn from torch's default generator, and their names.
std::tuple<std::vector<std::string>, std::vector<Tensor>> mixer_parameters(std::string_view spec) {
  std::vector<std::string> names;
  std::vector<Tensor> values;
  for (const auto& item : build(std::string(spec))->named_parameters()) {
    names.push_back(item.key());
    values.push_back(item.value().detach());
  }
  return {names, values};
}

// The registry as rows of tab-separated text: "mixer name doc source", each followed by its
// options as "option key type default doc".
std::vector<std::string> mixer_rows() {
  std::vector<std::string> rows;
  for (const auto& entry : token_mixers()) {
    rows.push_back(str("mixer\t", entry.name, "\t", entry.doc, "\t", entry.source));
    Lister lister;
    entry.make()->fields(lister);
    for (const OptionInfo& o : lister.options()) {
      rows.push_back(str("option\t", o.key, "\t", o.type, "\t", o.default_value, "\t", o.doc));
    }
  }
  return rows;
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def(
      "mixer(str spec, Tensor x, Tensor[] params, bool training=False, Tensor? lengths=None, "
      "Tensor? documents=None, Tensor? memory=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def("mixer_parameters(str spec) -> (str[] names, Tensor[] values)");
  m.def("mixer_rows() -> str[]");
}
TORCH_LIBRARY_IMPL(headloom, CompositeImplicitAutograd, m) {
  m.impl("mixer", mixer);
  m.impl("mixer_parameters", mixer_parameters);
  m.impl("mixer_rows", mixer_rows);
}

}  // namespace
}  // namespace headloom
