#include "bench/overhead.h"

#include <algorithm>

#include "bench/decode_step.h"
#include "bench/harness.h"

namespace headloom::bench {
namespace {

std::optional<int64_t> whole_option(const Node& options, const char* key) {
  const Node* found = options.find(key);
  if (found == nullptr || !std::holds_alternative<int64_t>(found->value)) return {};
  return std::get<int64_t>(found->value);
}

// mha in place of `mixer`, with score maps of the same number and size.
std::shared_ptr<TokenMixerSpec> plain_of(TokenMixerSpec& mixer, int64_t width, bool windows) {
  const Node options = write_fields(mixer);
  std::string text;
  const auto add = [&](const char* key, std::optional<int64_t> value) {
    if (value) text += str(key, " = ", *value, "\n");
  };
  std::optional<int64_t> heads = whole_option(options, "heads");
  std::optional<int64_t> dim = whole_option(options, "head_dim");
  std::optional<int64_t> groups = whole_option(options, "kv_heads");
  if (mixer.type() == "differential" && heads) {
    // Two maps a head, values of twice their size.
    heads = 2 * *heads;
    if (groups) groups = 2 * *groups;
  }
  if (mixer.type() == "talking_heads") {
    // Its maps before the first mix.
    if (const auto maps = whole_option(options, "key_heads")) heads = maps;
  }
  if (!heads || (!dim && width % *heads != 0)) heads = std::max<int64_t>(1, width / 64);
  add("heads", heads);
  add("head_dim", dim);
  add("kv_heads", groups);
  if (windows) add("window", whole_option(options, "window"));
  const auto plain = make_spec(token_mixers(), "token mixer", "mha");
  read_fields(parse_toml(text, "overhead"), *plain, "mha");
  return plain;
}

// A block that takes any mixer, in place of the one without skips, which takes only its own.
std::shared_ptr<BlockSpec> plain_block(BlockSpec& block) {
  const Node options = write_fields(block);
  const Node* const form = options.find("form");
  const bool parallel = form != nullptr && std::get<std::string>(form->value) == "parallel";
  auto plain = make_spec(blocks(), "block", parallel ? "parallel" : "sequential");
  plain->short_conv = block.short_conv;
  return plain;
}

ModelConfig plain_model(ModelConfig config, bool windows) {
  for (LayerConfig& layer : config.layers) {
    layer.mixer = plain_of(*layer.mixer, config.width, windows);
    if (layer.block->type() == "simplified") layer.block = plain_block(*layer.block);
  }
  return config;
}

bool has_windows(const ModelConfig& config) {
  return std::any_of(config.layers.begin(), config.layers.end(), [](const LayerConfig& layer) {
    return whole_option(write_fields(*layer.mixer), "window").has_value();
  });
}

std::shared_ptr<Decoder> decoder_of_config(const ModelConfig& config) {
  seed_all();
  return std::dynamic_pointer_cast<Decoder>(build_model(config));
}

}  // namespace

std::vector<Overhead> measure_overhead(const ModelConfig& config, const OverheadOptions& options) {
  if (config.kind != "decoder") {
    usage_error("overhead times a decoder's training and decoding, but the model is a \"",
                config.kind, "\".");
  }
  const int64_t longest = config.length();
  const int64_t length = options.length > 0 ? options.length : longest;
  if (length > longest) {
    usage_error("--length is ", length, ", but the model reads at most ", longest,
                " positions (model.max_length).");
  }
  const int64_t batch = options.batch > 0 ? options.batch : std::max<int64_t>(1, 2048 / length);
  std::vector<Overhead> out;
  std::vector<std::pair<std::string, bool>> baselines = {{"mha, all global", false}};
  if (has_windows(config)) baselines.emplace_back("mha, the same windows", true);
  for (const auto& [name, windows] : baselines) {
    const ModelConfig plain = plain_model(config, windows);
    TrainOptions train;
    train.dtype = options.dtype;
    StepBench step(config, batch, length, train), baseline(plain, batch, length, train);
    for (int i = 0; i < 2; ++i) step(), baseline();  // memory that later steps use again
    out.push_back({.work = "training step",
                   .baseline = name,
                   .length = length,
                   .tokens = static_cast<double>(batch * length),
                   .timed = time_pairs([&] { step(); }, [&] { baseline(); }, options.seconds)});
  }
  for (const auto& [name, windows] : baselines) {
    const auto model = decoder_of_config(config);
    const bool stateful = model->decoder_layers().stateful();
    if (!stateful) break;
    DecodeStep step(model, length, options.dtype);
    DecodeStep baseline(decoder_of_config(plain_model(config, windows)), length, options.dtype);
    for (int i = 0; i < 4; ++i) tokens_in_a_row(step), tokens_in_a_row(baseline);
    out.push_back({.work = "decoding a token",
                   .baseline = name,
                   .length = length,
                   .tokens = kTokensInARow,
                   .timed = time_tokens(step, baseline, options.seconds)});
  }
  return out;
}

}  // namespace headloom::bench
