// torch.ops.headloom.mixer and channel_mixer: one operator each that runs any mixer of the registry
// with the parameters that Python gives.
#include <torch/library.h>

#include "core/sizes.h"
#include "functional_call.h"
#include "mixers/mixer.h"
#include "mixers/without_memory.h"

namespace headloom::python {
namespace {

// What a mixer is built from: its shape, and in a table of its own its type and options.
template <typename SpecType>
struct Request {
  const std::vector<Entry<SpecType>>& (*registry)();
  const char* key;
  const char* what;  // for messages
  LayerShape shape = {};
  std::optional<int64_t> layer = {};
  std::shared_ptr<SpecType> mixer = {};

  void fields(Fields& f) {
    f.field("width", shape.width, "size of x's last dimension", size_from(1));
    f.field("layer", layer, "index of the layer in its model; absent: it is in none",
            between(int64_t{0}, kMostLayers));
    f.field("depth", shape.depth, "layers of the model", between(int64_t{1}, kMostLayers));
    f.field("max_length", shape.max_length, "longest sequence", size_from(1));
    f.field("causal", shape.causal, "no token sees a later one");
    f.field("bias", shape.bias, "biases in linear maps");
    f.field("init_std", shape.init_std, "standard deviation of new weights", positive());
    f.table("position", shape.position, "positions");
    f.variant<SpecType>(key, mixer, what, entry_names(registry()),
                        [this](const std::string& n) { return make_spec(registry(), what, n); });
  }
};

template <typename SpecType>
std::shared_ptr<Module> built(Request<SpecType> request, const std::string& spec) {
  const Node node = parse_spec(spec);
  read_fields(node, request);
  if (request.layer && *request.layer >= request.shape.depth) {
    usage_error("'layer' is ", *request.layer,
                ", expected less than the model's depth = ", request.shape.depth, ".");
  }
  request.shape.alone = !request.layer;
  request.shape.layer = request.layer.value_or(0);
  const auto build = [&] { return request.mixer->build(request.shape); };
  const std::shared_ptr<Module> counted = built_without_memory(build);
  if (!counted) usage_error("'", request.mixer->type(), "' is no module: leave it out.");
  check_weights_fit(*counted, request.what);
  return build();
}
std::shared_ptr<Module> build_token_mixer(const std::string& spec) {
  return built(
      Request<TokenMixerSpec>{.registry = token_mixers, .key = "mixer", .what = "token mixer"},
      spec);
}
std::shared_ptr<Module> build_channel_mixer(const std::string& spec) {
  return built(
      Request<ChannelMixerSpec>{
          .registry = channel_mixers, .key = "channel", .what = "channel mixer"},
      spec);
}

Pool& channel_pool() {
  static auto* pool = new Pool(build_channel_mixer);  // threads may outlive static storage
  return *pool;
}

Pool& mixer_pool() {
  static auto* pool = new Pool(build_token_mixer);  // threads may outlive static storage
  return *pool;
}

Tensor mixer(std::string_view spec, const Tensor& x, at::TensorList params, bool training,
             const std::optional<Tensor>& lengths, const std::optional<Tensor>& documents,
             const std::optional<Tensor>& memory) {
  MixerContext context;
  context.documents = documents.value_or(Tensor());
  context.memory = memory.value_or(Tensor());
  (memory ? context.memory_lengths : context.lengths) = lengths.value_or(Tensor());
  return with_parameters<TokenMixer>(
      mixer_pool(), spec, params, {{"x", x}, {"memory", context.memory}}, training,
      [&](TokenMixer& module) { return module.forward(x, context); });
}

// y; where it is asked for, what the mixer wants added to the loss (0 for nothing); and in
// training, of a mixer that balances the load of its experts, how many choices each got.
std::vector<Tensor> channel_mixer(std::string_view spec, const Tensor& x, at::TensorList params,
                                  bool training, const std::optional<Tensor>& documents,
                                  bool auxiliary) {
  const auto run = [&](ChannelMixer& module) {
    AuxiliaryOutputs side_outputs;
    MixerContext context;
    context.documents = documents.value_or(Tensor());
    // Computed again, the same tensors must be kept.
    const bool load = training && module.balances();
    if (load) expect_countable(module);
    if (auxiliary || load) context.auxiliary = &side_outputs;
    std::vector<Tensor> out = {module.forward(x, context)};
    if (auxiliary) out.push_back(auxiliary_loss(side_outputs, x));
    if (load && !computes_again()) out.push_back(side_outputs.load.at(context.layer));
    return out;
  };
  return with_parameters<ChannelMixer>(channel_pool(), spec, params, {{"x", x}}, training, run);
}

void balance_channel_mixer(std::string_view spec, at::TensorList params, at::TensorList load) {
  with_parameters<ChannelMixer>(
      channel_pool(), spec, params, {}, /*training=*/true, [&](ChannelMixer& module) {
        TORCH_CHECK_VALUE(load.size() == 1 && module.balances(), "balance_channel_mixer: load has ",
                          load.size(), " tensors, expected ", module.balances(), ".");
        module.balance(load[0]);
        return true;
      });
}

void redraw_mixer(std::string_view spec, at::TensorList params, int64_t step, int64_t seed) {
  with_parameters<TokenMixer>(mixer_pool(), spec, params, {}, /*training=*/true,
                              [&](TokenMixer& module) {
                                module.redraw(step, static_cast<uint64_t>(seed), /*layer=*/0);
                                return true;
                              });
}

// A registry as rows of tab-separated text: "mixer name doc source", each followed by its options
// as "option key type default doc".
template <typename SpecType>
std::vector<std::string> rows(const std::vector<Entry<SpecType>>& entries) {
  std::vector<std::string> out;
  for (const auto& entry : entries) {
    if (entry.name == "none") continue;  // what a layer without a channel mixer says
    const auto spec = entry.make();
    out.push_back(str("mixer\t", entry.name, "\t", entry.doc, "\t", entry.source));
    Lister lister;
    spec->fields(lister);
    for (const OptionInfo& o : lister.options()) {
      out.push_back(str("option\t", o.key, "\t", o.type, "\t", o.default_value, "\t", o.doc));
    }
  }
  return out;
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.def(
      "mixer(str spec, Tensor x, Tensor[] params, bool training=False, Tensor? lengths=None, "
      "Tensor? documents=None, Tensor? memory=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "channel_mixer(str spec, Tensor x, Tensor[] params, bool training=False, "
      "Tensor? documents=None, bool auxiliary=False) -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
  m.def("balance_channel_mixer(str spec, Tensor(a!)[] params, Tensor[] load) -> ()");
  m.def("redraw_mixer(str spec, Tensor(a!)[] params, int step, int seed) -> ()");
  m.def("mixer_tensors(str spec, bool values=True) -> (str[] names, Tensor[] values, str[] kinds)");
  m.def(
      "channel_mixer_tensors(str spec, bool values=True) -> "
      "(str[] names, Tensor[] values, str[] kinds)");
  m.def("mixer_rows() -> str[]");
  m.def("channel_mixer_rows() -> str[]");
}
TORCH_LIBRARY_IMPL(headloom, CompositeImplicitAutograd, m) {
  m.impl("mixer", mixer);
  m.impl("channel_mixer", channel_mixer);
  m.impl("balance_channel_mixer", balance_channel_mixer);
  m.impl("redraw_mixer", redraw_mixer);
  m.impl("mixer_tensors", [](std::string_view spec, bool values) {
    return new_tensors(build_token_mixer, spec, values);
  });
  m.impl("channel_mixer_tensors", [](std::string_view spec, bool values) {
    return new_tensors(build_channel_mixer, spec, values);
  });
  m.impl("mixer_rows", [] { return rows(token_mixers()); });
  m.impl("channel_mixer_rows", [] { return rows(channel_mixers()); });
}
// vmap's own fallback, a loop over slices, knows no lists of tensors.
TORCH_LIBRARY_IMPL(headloom, FuncTorchBatched, m) {
  m.impl("mixer", mixer);
  m.impl("channel_mixer", channel_mixer);
}

}  // namespace
}  // namespace headloom::python
