// torch.ops.headloom.model: one operator that runs a whole model with the parameters that Python
// gives, and what decoding, loading and saving need beside it.
#include <torch/custom_class.h>
#include <torch/library.h>

#include <filesystem>
#include <mutex>

#include "core/json.h"
#include "core/platform.h"
#include "functional_call.h"
#include "interop/convert.h"
#include "mixers/check.h"
#include "model/check.h"
#include "model/generation.h"
#include "model_pool.h"
#include "ops/linear_cross_entropy/op.h"
#include "saved_state.h"
#include "train/load.h"

namespace headloom::python {
namespace {

ModelConfig parse_config(const std::string& spec) {
  const Node node = parse_spec(spec);
  ModelConfig config;
  read_fields(node, config, "model");
  return config;
}

// UsageError naming the size that no default fills in: Python has no task that gives it.
void check_sizes(const ModelConfig& config) {
  const auto expect = [](const char* key, bool present, const char* what) {
    if (!present) usage_error("'model.", key, "' is not set, expected ", what, ".");
  };
  if (config.kind == "vit") {
    expect("image.channels", config.image.channels.has_value(), "the images' colours");
    expect("image.height", config.image.height.has_value(), "the images' rows");
    expect("image.width", config.image.width.has_value(), "the images' columns");
  } else {
    expect("vocabulary", config.vocabulary.has_value(), "the number of tokens");
  }
  if (config.position.type == "learned" && config.kind != "vit") {
    expect("max_length", config.max_length.has_value(), "the longest sequence");
    expect("max_source_length", config.max_source_length || config.kind != "encoder_decoder",
           "the longest source");
  }
  expect("classes", config.classes || !config.has_classes(), "the number of labels");
}

std::shared_ptr<Module> build(const std::string& spec) {
  const ModelConfig config = parse_config(spec);
  check_sizes(config);
  return build_model(config);
}

// --- Forward --------------------------------------------------------------------------------

// The mean cross-entropy of `targets`; in training, and what the layers want added.
Tensor mean_loss(Model& built, const ModelInput& input, const Tensor& targets, bool training) {
  if (built.config().head.value_or("") == "span") {
    usage_error("the loss of spans is over the positions of a context, which logits are made for.");
  }
  check_input(built, input);
  const Tensor mean = built.loss_of_input(input, [&](const Tensor& hidden) {
    const auto expected = hidden.sym_sizes().slice(0, hidden.dim() - 1);
    TORCH_CHECK_VALUE(targets.scalar_type() == at::kLong && targets.sym_sizes() == expected,
                      "model: targets has shape ", targets.sym_sizes(), " and type ",
                      targets.scalar_type(), ", expected ", expected, " and int64.");
    const Tensor flat = targets.flatten();
    return built.loss(hidden.flatten(0, -2), flat).sum / flat.ne(ops::kIgnoredTarget).sum();
  });
  return training ? mean + auxiliary_loss(*input.auxiliary, mean) : mean;
}

// Logits, or with `targets` their loss; where it is asked for, what the layers want added to the
// loss (0 for nothing); and in training, of each layer that balances the load of its experts, how
// many choices each got.
std::vector<Tensor> model(std::string_view spec, at::TensorList params, bool training,
                          const OptionalTensor& tokens, const OptionalTensor& lengths,
                          const OptionalTensor& documents, const OptionalTensor& segments,
                          const OptionalTensor& source, const OptionalTensor& source_lengths,
                          const OptionalTensor& images, bool auxiliary,
                          const OptionalTensor& targets) {
  const ModelInput input =
      input_of(tokens, lengths, documents, segments, source, source_lengths, images);
  return with_model(spec, params, input, training, [&](Model& built) {
    AuxiliaryOutputs side_outputs;
    ModelInput own = input;
    // Computed again, the same tensors must be kept for the gradient, the balance loss's too.
    const auto balanced = training ? built.balanced() : std::vector<int64_t>();
    if (!balanced.empty()) expect_countable(built);
    if (auxiliary || !balanced.empty() || (targets && training)) own.auxiliary = &side_outputs;
    std::vector<Tensor> out = {targets ? mean_loss(built, own, *targets, training)
                                       : built.forward(own)};
    if (auxiliary) out.push_back(auxiliary_loss(side_outputs, out[0]));
    if (computes_again()) return out;
    for (const int64_t layer : balanced) out.push_back(side_outputs.load.at(layer));
    return out;
  });
}

// `load`: of each layer that balances its experts, as model() returns it.
void balance_model(std::string_view spec, at::TensorList params, at::TensorList load) {
  with_parameters<Model>(model_pool(), spec, params, {}, /*training=*/true, [&](Model& built) {
    const std::vector<int64_t> layers = built.balanced();
    TORCH_CHECK_VALUE(load.size() == layers.size(), "balance_model: load has ", load.size(),
                      " tensors, expected ", layers.size(), ".");
    std::map<int64_t, Tensor> by_layer;
    for (size_t i = 0; i < layers.size(); ++i) by_layer[layers[i]] = load[i];
    built.balance(by_layer);
    return true;
  });
}

void redraw_model(std::string_view spec, at::TensorList params, int64_t step, int64_t seed) {
  with_parameters<Model>(model_pool(), spec, params, {}, /*training=*/true, [&](Model& built) {
    built.redraw(step, static_cast<uint64_t>(seed));
    return true;
  });
}

// --- Decoding -------------------------------------------------------------------------------

AutoregressiveModel& as_autoregressive(Module& module) {
  auto* decoder = dynamic_cast<AutoregressiveModel*>(&module);
  TORCH_CHECK_VALUE(decoder != nullptr, "a model of kind \"",
                    dynamic_cast<Model&>(module).config().kind,
                    "\" does not write token by token, expected a decoder or an encoder_decoder.");
  return *decoder;
}

CachePolicy parse_policy(const std::string& text, const std::string& dtype) {
  try {
    return CachePolicy::parse(text, dtype);
  } catch (const UsageError& error) {
    throw_value_error(error);
  }
}

// What decoding keeps of the positions that a batch of sequences has seen. With a spec but without
// layers it is of no use any more, because a call failed after layers had begun to read its tokens.
struct State : torch::CustomClassHolder, HeldState {
  State(const std::string& cache, const std::string& dtype)
      : HeldState{.policy = parse_policy(cache, dtype)} {}
  explicit State(HeldState held) : HeldState(std::move(held)) {}
  // Calls of several threads take turns.
  std::lock_guard<std::mutex> locked() const { return std::lock_guard(mutex_); }
  // Of the sequence that has seen most.
  int64_t position() const {
    const auto lock = locked();
    return state.position.longest;
  }
  int64_t bytes() const {
    const auto lock = locked();
    return state.bytes();
  }
  c10::intrusive_ptr<State> select(const Tensor& given) const {
    const Tensor rows = given.cpu();
    const auto lock = locked();
    TORCH_CHECK_VALUE(rows.dim() == 1 && rows.scalar_type() == at::kLong && rows.numel() > 0,
                      "state: rows has shape ", rows.sizes(), " and type ", rows.scalar_type(),
                      ", expected the numbers [n] of at least one sequence.");
    const int64_t batch = state.batch();
    const auto [low, high] = at::aminmax(rows);
    const int64_t first = low.item<int64_t>(), last = high.item<int64_t>();
    TORCH_CHECK_VALUE(first >= 0 && last < batch, "state: rows has ", first < 0 ? first : last,
                      ", expected numbers of the ", batch, " sequences that it has seen.");
    return c10::make_intrusive<State>(HeldState{policy, state.select(rows), spec, types});
  }

 private:
  mutable std::mutex mutex_;
};

// The type of the parameters, and the one to which autocast brings what they compute.
std::string types_of(at::TensorList params) {
  if (params.empty()) return "";
  const auto device = params[0].device().type();
  const std::string type = c10::toString(params[0].scalar_type());
  if (!under_autocast(device)) return type;
  return type + " under autocast to " + c10::toString(at::autocast::get_autocast_dtype(device));
}

// The next tokens [B, n] -> logits [B, n, V], or of the last position alone. A source [B, S] comes
// with the first.
Tensor extend(std::string_view spec, at::TensorList params, const c10::intrusive_ptr<State>& state,
              const Tensor& tokens, bool last, const OptionalTensor& source,
              const OptionalTensor& source_lengths) {
  const Tensor read = source.value_or(Tensor());
  const Inputs given = {{"tokens", tokens}, {"source", read}};
  const auto read_on = [&](Module& model) {
    AutoregressiveModel& decoder = as_autoregressive(model);
    at::NoGradGuard no_grad;
    const auto lock = state->locked();
    const bool begins = state->state.layers.empty();
    TORCH_CHECK_VALUE(
        !begins || state->spec.empty(),
        "model: an earlier call of this state failed after layers had begun to read its "
        "tokens, so it cannot go on, expected a new state.");
    // A request that is refused leaves the state as it was.
    const std::string types = types_of(params);
    DecoderState fresh;
    if (begins) {
      if (source) check_source(decoder, read, source_lengths.value_or(Tensor()), tokens.size(0));
      fresh = decoder.initial_state(state->policy, {read, source_lengths.value_or(Tensor())});
    } else {
      TORCH_CHECK_VALUE(!source,
                        "model: the state has begun: its source came with the first "
                        "tokens, expected none now.");
      TORCH_CHECK_VALUE(state->spec == spec,
                        "model: the state was begun by a model of another configuration.");
      // Many mixers would go on and mix what was computed in two types.
      TORCH_CHECK_TYPE(state->types == types,
                       "model: the state was begun in another type, or under another autocast, ",
                       "than this call's ", types, ", expected those in which it began, ",
                       state->types, ".");
    }
    const int64_t seen = state->state.position.longest;
    Tensor logits;
    try {
      const std::optional<int64_t> newest = last ? std::optional<int64_t>(1) : std::nullopt;
      logits = decoder.logits(decoder.extend(tokens, begins ? fresh : state->state, newest));
    } catch (...) {
      if (state->state.position.longest != seen) state->state = {};
      throw;
    }
    if (begins) {
      state->state = std::move(fresh);
      state->spec = spec;
      state->types = types;
    }
    return logits;
  };
  return with_parameters<Module>(model_pool(), spec, params, given, /*training=*/false, read_on);
}

// Generation from prompts (model/generation.h), by a module that keeps the parameters it was given.
class GenerationFromPython : public torch::CustomClassHolder {
 public:
  GenerationFromPython(const std::string& spec, const std::vector<Tensor>& params,
                       const std::vector<Tensor>& prompts, const std::vector<Tensor>& sources,
                       double temperature, int64_t top_k, double top_p, double min_p,
                       double repetition_penalty, int64_t seed, int64_t samples,
                       const std::string& cache, const std::string& cache_dtype, int64_t most)
      : functional_(make_functional_module(build, spec)), params_(params) {
    functional_.set_tensors(params, {});
    for (size_t i = 0; i < params.size(); ++i) {
      TORCH_CHECK_VALUE(
          !params[i].is_meta(), "model: parameter '", functional_.parameters[i].name,
          "' is on meta, expected cpu or another device that has numbers to generate.");
      TORCH_CHECK_VALUE(!is_of_python(params[i]), "model: parameter '",
                        functional_.parameters[i].name,
                        "' is a DTensor or of another class, expected a plain tensor to generate. ",
                        "For FSDP, register_fsdp_forward_method(model, \"generate\") gathers it.");
    }
    functional_.module->eval();
    AutoregressiveModel& decoder = as_autoregressive(*functional_.module);
    const auto texts_of = [&](const char* name, const std::vector<Tensor>& given) {
      std::vector<std::vector<int64_t>> texts;
      for (const Tensor& one : given) {
        TORCH_CHECK_VALUE(!one.is_meta(), decoder.what(), ": ", name,
                          " is on meta, expected tokens with values.");
        check_dense(decoder, name, one);  // before unsqueeze, which refuses others at length
        check_tokens(decoder, name, one.cpu().unsqueeze(0));
        const Tensor tokens = one.to(at::kCPU, at::kLong).contiguous();
        const int64_t* first = tokens.const_data_ptr<int64_t>();
        texts.emplace_back(first, first + tokens.numel());
      }
      return texts;
    };
    explained([&] {
      generation_ = std::make_unique<Generation>(
          decoder, texts_of("the prompt", prompts),
          GenerationOptions{.sampling = {.temperature = temperature,
                                         .top_k = top_k,
                                         .top_p = top_p,
                                         .min_p = min_p,
                                         .repetition_penalty = repetition_penalty},
                            .seed = static_cast<uint64_t>(seed),
                            .samples = samples,
                            .cache = CachePolicy::parse(cache, cache_dtype),
                            .tokens = most,
                            .sources = texts_of("the source", sources)});
    });
  }
  // The next token of each text, those of the first prompt first.
  Tensor next() {
    Tensor tokens;
    explained([&] { tokens = generation_->next(); });
    return tokens;
  }
  // Positions after which a text is read anew from so many of its newest.
  int64_t most() const { return generation_->most(); }
  int64_t newest() const { return generation_->newest(); }

 private:
  // Runs `work`, whose errors become those of a call of the model.
  template <typename Work>
  void explained(const Work& work) {
    const at::NoGradGuard no_grad;
    try {
      work();
    } catch (const UsageError& error) {
      throw_value_error(error);
    } catch (const std::exception&) {
      explain_types(functional_, params_, {});
      throw;
    }
  }

  FunctionalModule functional_;
  std::vector<Tensor> params_;
  std::unique_ptr<Generation> generation_;
};

// --- Configurations, loading and saving -----------------------------------------------------

// The complete configuration as a spec and as JSON.
std::tuple<std::string, std::string> written(ModelConfig config) {
  const Node node = write_fields(config);
  return {to_toml(node), to_json(node)};
}

std::tuple<std::string, std::string> model_spec(std::string_view text) {
  try {
    return written(parse_config(std::string(text)));
  } catch (const UsageError& error) {
    throw_value_error(error);
  }
}

// Each preset as "name doc source", separated by tabs.
std::vector<std::string> preset_rows() {
  std::vector<std::string> rows;
  for (const ModelPreset& p : model_presets()) {
    rows.push_back(str(p.name, "\t", p.doc, "\t", p.source));
  }
  return rows;
}

using Loaded = std::tuple<std::string, std::string, std::vector<std::string>, std::vector<Tensor>,
                          std::vector<std::string>, std::string, int64_t, std::string>;

// The tokenizer of a run, "" for none. An encoder-decoder that `save` wrote is of no task with
// texts: its tokenizer lies beside it, or its vocabulary is not the task's and may be bytes.
std::string tokenizer_of(const std::string& folder, const LoadedRun& run) {
  if (const std::string* file = run.config.task->tokenizer_file()) return *file;
  if (run.config.task->tokenizer()) return "bytes";
  if (run.config.model.kind != "encoder_decoder") return "";
  for (const char* name : {"/tokenizer.json", "/tokenizer.model"}) {
    if (std::filesystem::exists(folder + name)) return folder + name;
  }
  const auto sizes = run.config.task->known_sizes();
  return sizes && sizes->vocabulary != run.config.model.vocabulary ? "bytes" : "";
}

// A run, or a Hugging Face folder: spec, configuration as JSON, the names, values and kinds of its
// tensors, tokenizer ("" for none), step, a sentence for the user or "".
Loaded load(std::string_view path, std::string_view checkpoint) {
  const std::string folder(path);
  try {
    ModelConfig config;
    std::shared_ptr<Model> model;
    std::string tokenizer, note;
    int64_t step = 0;
    if (std::filesystem::exists(folder + "/config.toml")) {
      LoadedRun run = load_run(folder, std::string(checkpoint));
      config = run.config.model;
      model = run.model;
      step = run.step;
      tokenizer = tokenizer_of(folder, run);
    } else {
      ImportedModel read = read_folder(folder);
      config = read.config.model;
      model = read.model;
      tokenizer = read.tokenizer;
      note = read.note;
      if (tokenizer.empty() && !note.empty()) tokenizer = "bytes";
    }
    // What was saved without a tokenizer says nothing else; bytes are no tokens of a smaller one.
    if (tokenizer == "bytes" &&
        config.vocabulary.value_or(0) < data::make_tokenizer(tokenizer)->vocabulary()) {
      tokenizer = "";
    }
    auto [spec, json] = written(config);
    auto [names, values, kinds] = tensors_of(*model);
    return {spec, json, names, values, kinds, tokenizer, step, note};
  } catch (const UsageError& error) {
    throw_value_error(error);
  }
}

void save(std::string_view path, std::string_view spec, at::TensorList params,
          std::string_view tokenizer) {
  try {
    const ModelConfig config = parse_config(std::string(spec));
    std::shared_ptr<Model> model;
    {
      const WithoutValues fast;
      model = build_model(config);
    }
    auto present = named_tensors(*model);
    TORCH_CHECK_VALUE(present.size() == params.size(), "save: params has ", params.size(),
                      " tensors, expected ", present.size(), ".");
    for (size_t i = 0; i < params.size(); ++i) {
      TORCH_CHECK_VALUE(!params[i].is_meta() && !is_of_python(params[i]), "save: parameter '",
                        present[i].first, "' is ",
                        params[i].is_meta() ? "on meta" : "a DTensor or of another class",
                        ", expected a plain tensor with values. Of a model that FSDP shards, save ",
                        "one that has loaded get_model_state_dict's full state.");
      present[i].second.set_data(params[i].detach().to(at::kCPU, at::kFloat).contiguous());
    }
    write_run(std::string(path), config, *model, std::string(tokenizer));
  } catch (const UsageError& error) {
    throw_value_error(error);
  }
}

TORCH_LIBRARY_FRAGMENT(headloom, m) {
  m.class_<State>("State")
      .def(torch::init<const std::string&, const std::string&>())
      .def("position", &State::position)
      .def("bytes", &State::bytes)
      .def("select", &State::select)
      .def_pickle(
          [](const c10::intrusive_ptr<State>& state) {
            const auto lock = state->locked();
            return saved(*state);
          },
          [](const SavedState& from) { return c10::make_intrusive<State>(restored(from)); });
  m.class_<GenerationFromPython>("Generation")
      .def(torch::init<const std::string&, const std::vector<Tensor>&, const std::vector<Tensor>&,
                       const std::vector<Tensor>&, double, int64_t, double, double, double, int64_t,
                       int64_t, const std::string&, const std::string&, int64_t>())
      .def("next", &GenerationFromPython::next)
      .def("most", &GenerationFromPython::most)
      .def("newest", &GenerationFromPython::newest);
  m.def(
      "model(str spec, Tensor[] params, bool training=False, Tensor? tokens=None, "
      "Tensor? lengths=None, Tensor? documents=None, Tensor? segments=None, Tensor? source=None, "
      "Tensor? source_lengths=None, Tensor? images=None, bool auxiliary=False, "
      "Tensor? targets=None) -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "extend(str spec, Tensor[] params, __torch__.torch.classes.headloom.State state, "
      "Tensor tokens, bool last=False, Tensor? source=None, Tensor? source_lengths=None) -> "
      "Tensor");
  m.def("model_spec(str toml) -> (str spec, str json)");
  m.def("balance_model(str spec, Tensor(a!)[] params, Tensor[] load) -> ()");
  m.def("redraw_model(str spec, Tensor(a!)[] params, int step, int seed) -> ()");
  m.def("model_tensors(str spec, bool values=True) -> (str[] names, Tensor[] values, str[] kinds)");
  m.def("preset_rows() -> str[]");
  m.def("keep_freed_memory() -> bool");
  m.def(
      "load(str path, str checkpoint) -> (str spec, str json, str[] names, Tensor[] values, "
      "str[] kinds, str tokenizer, int step, str note)");
  m.def("save(str path, str spec, Tensor[] params, str tokenizer) -> ()");
}
TORCH_LIBRARY_IMPL(headloom, CompositeImplicitAutograd, m) {
  m.impl("model", model);
  m.impl("extend", extend);
  m.impl("model_spec", model_spec);
  m.impl("balance_model", balance_model);
  m.impl("redraw_model", redraw_model);
  m.impl("model_tensors",
         [](std::string_view spec, bool values) { return new_tensors(build, spec, values); });
  m.impl("preset_rows", preset_rows);
  m.impl("keep_freed_memory", keep_freed_memory);
  m.impl("load", load);
  m.impl("save", save);
}
// vmap's own fallback, a loop over slices, knows no lists of tensors.
TORCH_LIBRARY_IMPL(headloom, FuncTorchBatched, m) { m.impl("model", model); }

}  // namespace

Pool& model_pool() {
  static auto* pool = new Pool(build);  // never destroyed: threads may outlive static storage
  return *pool;
}

}  // namespace headloom::python
