// Configurations, presets, costs, matching of parameters.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <utility>

#include "model/describe.h"
#include "support.h"

namespace headloom::test::model_test {
namespace {

TEST(Presets, AllBuild) {
  EXPECT_FALSE(model_presets().empty());
  for (const ModelPreset& preset : model_presets()) {
    ModelConfig config = model_of(str("preset = '", preset.name, "'"));
    EXPECT_GE(config.depth, static_cast<int64_t>(config.layers.size())) << preset.name;
    // One round of the layers shows whether the options fit each other.
    config.depth = static_cast<int64_t>(config.layers.size());
    config.encoder_depth.reset();
    config.complete(
        {.vocabulary = 32, .length = 16, .source_length = 16, .classes = 5, .image = {3, 32, 32}});
    const auto model = build_without_memory(config);  // a layer of billions is big
    EXPECT_EQ(model->stacks().back()->all().size(), config.layers.size()) << preset.name;
    EXPECT_FALSE(preset.doc.empty());
    EXPECT_FALSE(preset.source.empty());
  }
}

// The model of a preset with the sizes that `headloom describe` fills in.
ModelConfig described(const std::string& preset) {
  ModelConfig config = model_of(str("preset = '", preset, "'"));
  config.complete({.vocabulary = 256,
                   .length = 1024,
                   .classes = 1000,
                   .segments = 2,
                   .image = {3, 224, 224},
                   .head = config.kind == "encoder" ? "tokens" : ""});
  return config;
}

TEST(Presets, HaveThePublishedParameters) {
  int64_t published = 0;
  for (const ModelPreset& preset : model_presets()) {
    if (preset.published == 0) continue;
    ++published;
    const int64_t count = count_parameters(described(preset.name));
    int64_t last_digit = 1;  // what a 1 counts at the last place that the source states
    while (preset.published % (10 * last_digit) == 0) last_digit *= 10;
    if (last_digit < 100'000) {
      EXPECT_EQ(count, preset.published) << preset.name;
    } else {
      const auto stated = static_cast<double>(preset.published);
      const double tolerance = std::max(0.01 * stated, 0.5 * static_cast<double>(last_digit));
      EXPECT_NEAR(static_cast<double>(count), stated, tolerance) << preset.name;
    }
  }
  EXPECT_GE(published, 20);
}

TEST(Presets, CompositionAddsWhatItsNetworksHave) {
  // Two sides, before and after softmax: w1 [C, 4H], w2 [4H, 4H] and a gate [C, H] for rank 2.
  const auto added = [](const ModelConfig& c, int64_t heads) {
    return c.depth * 4 * (5 * c.width * heads + 16 * heads * heads);
  };
  for (const auto& [size, heads] : {std::pair{"", 16}, {"-834m", 24}, {"-1.4b", 32}}) {
    const ModelConfig plain = described(str("transformer++", size));
    EXPECT_EQ(count_parameters(described(str("dcformer++", size))) - count_parameters(plain),
              added(plain, heads))
        << size;
  }
  for (const std::string size : {"-2.8b", "-6.9b"}) {
    const int64_t heads = 32;
    ModelConfig plain = described("pythia" + size);
    plain.vocabulary = 50257;  // DCPythia's is not padded
    EXPECT_EQ(count_parameters(described("dcpythia" + size)) - count_parameters(plain),
              added(plain, heads) + plain.depth * 2 * plain.width / heads)  // and QK-norm's scales
        << size;
  }
}

TEST(ModelConfig, KeysOverrideThePresetAndItIsNotWrittenBack) {
  ModelConfig config = model_of("width = 64\npreset = 'transformer++-tiny'\ndepth = 3");
  EXPECT_EQ(config.width, 64);
  EXPECT_EQ(config.depth, 3);
  const std::string text = to_toml(write_fields(config));
  EXPECT_EQ(text.find("preset"), std::string::npos);
  ModelConfig back = model_of(text);
  EXPECT_EQ(to_toml(write_fields(back)), text);
}

TEST(ModelConfig, RefusesWhatDoesNotFit) {
  const auto refused = [](const std::string& toml) {
    return message_of<UsageError>([&] {
      ModelConfig config = model_of("vocabulary = 10\nmax_length = 8\nwidth = 16\n" + toml);
      Decoder model(config);
    });
  };
  EXPECT_TRUE(contains(refused("preset = 'transformer+'"), "did you mean 'transformer++'"));
  EXPECT_TRUE(contains(refused("layer = []"), "'model.layer' is empty"));
  EXPECT_TRUE(contains(refused("depht = 3"), "did you mean 'model.depth'"));
  EXPECT_TRUE(contains(refused("layer = [{ mixer = { type = 'mah' } }]"), "did you mean \"mha\""));
  EXPECT_TRUE(contains(refused("layer = [{ mixer = { window = 0 } }]"),
                       "model.toml:4: 'model.layer[0].mixer.window' is 0, expected at least 1"));
  const std::string heads = refused("layer = [{}, { mixer = { heads = 3 } }]\ndepth = 2");
  EXPECT_TRUE(contains(heads, "model.layer[1].mixer (mha): heads is 3"));
  EXPECT_TRUE(contains(heads, "divisor of the model's width = 16"));
  EXPECT_TRUE(contains(refused("layer = [{ mixer = { heads = 4, kv_heads = 3 } }]"), "kv_heads"));
  EXPECT_TRUE(
      contains(refused("layer = [{ mixer = { type = 'multi_token', heads = 4, key_kernel = 4 } }]"),
               "key_kernel is 4, expected an odd number"));
  EXPECT_TRUE(contains(refused("layer = [{ mixer = { heads = 16 } }]"), "even number"))
      << "rope on heads of size 1";
  EXPECT_EQ(refused("layer = [{ mixer = { type = 'fnet' } }]"),
            "model.layer[0].mixer (fnet): fnet mixes the whole sequence, but the model is causal.");
  EXPECT_TRUE(contains(refused("layer = [{ block = { type = 'simplified' }, mixer.heads = 2 }]"),
                       "model.layer[0].block (simplified): simplified has no skip around its token "
                       "mixer, so mha cannot be in it"));
  EXPECT_TRUE(contains(refused("layer = [{ channel = { hidden = 10, gate_groups = 3 } }]"),
                       "model.layer[0].channel (swiglu)"));
}

TEST(Decoder, SequencesBeyondLearnedPositionsAreRefused) {
  Decoder model(model_of(
      "vocabulary = 10\nmax_length = 8\nwidth = 16\ndepth = 1\nposition.type = 'learned'"));
  EXPECT_EQ(model.forward(tokens(1, 8, 10)).size(1), 8);
  EXPECT_TRUE(contains(message_of([&] { model.forward(tokens(1, 9, 10)); }), "model.max_length"));
  EXPECT_TRUE(contains(message_of([] { Decoder none(model_of("width = 16")); }), "vocabulary"));
}

TEST(Costs, PartsAddUpToTheParameters) {
  const std::regex own_of_model(R"((layer\d+\.(mixer_norm|channel_norm|norm)|norm)\..*|positions)");
  for (const auto& mixer : token_mixers()) {
    Lister options;
    mixer.make()->fields(options);
    bool attention = false;  // of the composed-attention family
    for (const OptionInfo& o : options.options()) attention = attention || o.key == "qk_norm";
    for (const auto& channel : channel_mixers()) {
      const auto built = decoder_if_it_fits(model_of(
          str("vocabulary = 23\nmax_length = 16\nwidth = 16\ndepth = 4\nbias = true\n"
              "position.type = 'learned'\ntied = false\n[[layer]]\nmixer = { type = '",
              mixer.name, "'", attention ? ", qk_norm = true" : "", heads_of(mixer.name, 4),
              " }\nchannel = { type = '", channel.name, "' }\n")));
      if (!built) continue;
      const Decoder& model = *built;
      const ModelCosts costs = model_costs(model, 16);
      int64_t total = 0, norms = 0, parts = 0;
      for (const auto& item : model.named_parameters()) {
        total += item.value().numel();
        if (std::regex_match(item.key(), own_of_model)) norms += item.value().numel();
      }
      double flops = 0, mechanism = 0;
      for (const Cost& part : costs.parts) {
        parts += part.parameters;
        flops += part.flops_per_token;
        if (part.mechanism) mechanism += part.flops_per_token;
        EXPECT_GE(part.parameters, 0) << part.part;
        if (part.part == "norms and positions") {
          EXPECT_EQ(part.parameters, norms) << mixer.name << " with " << channel.name;
        }
      }
      EXPECT_EQ(costs.parameters, total);
      EXPECT_EQ(parts, total) << mixer.name << " with " << channel.name;
      EXPECT_DOUBLE_EQ(costs.flops_per_token, flops);
      EXPECT_DOUBLE_EQ(costs.mechanism_share, mechanism / (flops - mechanism));
      if (attention) {
        EXPECT_EQ(mixer.name == "mha", mechanism == 0) << mixer.name;
        EXPECT_GT(costs.state_bytes_per_token, 0) << mixer.name;
      }
    }
  }
}

TEST(Linformer, LayerwiseSharingCountsAndSavesOneProjection) {
  const auto count = [](const char* sharing) {
    ModelConfig config =
        model_of(str("kind = 'encoder'\nvocabulary = 10\nmax_length = 8\nwidth = 16\ndepth = 3\n"
                     "head = 'tokens'\n[[layer]]\nmixer = { type = 'linformer', heads = 4, rank = "
                     "5, sharing = '",
                     sharing, "' }\n"));
    const auto model = build_model(config);
    const auto names = parameters_of(*model);
    EXPECT_EQ(names.count("layer0.mixer.e"), 1u);
    EXPECT_EQ(names.count("layer2.mixer.e"), sharing == std::string("kv") ? 1u : 0u);
    const ModelCosts costs = model_costs(*model, 8);
    int64_t parts = 0;
    for (const Cost& part : costs.parts) parts += part.parameters;
    EXPECT_EQ(parts, costs.parameters);
    return costs.parameters;
  };
  EXPECT_EQ(count("kv") - count("layerwise"), 2 * 8 * 5);
}

TEST(Costs, PlainAttentionByHand) {
  const Decoder model(
      model_of("vocabulary = 10\nmax_length = 8\nwidth = 16\ndepth = 2\n[[layer]]\n"
               "mixer = { heads = 4, window = 3 }\n"
               "channel = { type = 'mlp', hidden = 32 }\n"));
  const ModelCosts costs = model_costs(model, 8);
  // Visible keys of 8 tokens with a window of 3: 1 + 2 + 6 * 3.
  const double keys = 21.0 / 8;
  const double layer = 2.0 * 16 * 64 + 2 * keys * 32 + 4.0 * 16 * 32;
  EXPECT_DOUBLE_EQ(costs.flops_per_token, 2 * layer + 2.0 * 16 * 10);
  EXPECT_DOUBLE_EQ(costs.state_bytes, 2 * 2 * 4.0 * 32);  // two positions of the window's three
  EXPECT_DOUBLE_EQ(costs.state_bytes_per_token, 0);
  EXPECT_DOUBLE_EQ(model_costs(model, 2).state_bytes_per_token, 2 * 4.0 * 32);
  EXPECT_EQ(costs.parameters, 2 * (64 * 16 + 2 * 16 * 32 + 2 * 16) + 160 + 16);
}

TEST(MatchParameters, EveryMixerComesWithinAPercent) {
  const auto text = [](const std::string& mixer, const std::string& channel) {
    return str(
        "vocabulary = 64\nmax_length = 16\nwidth = 32\ndepth = 4\n[[layer]]\nmixer = { type = '",
        mixer, "'", heads_of(mixer, 4), " }\nchannel = { type = '", channel, "' }\n");
  };
  const int64_t target = count_parameters(model_of(text("mha", "swiglu")));
  for (const auto& mixer : token_mixers()) {
    for (const char* channel : {"swiglu", "mlp", "rwkv_channel"}) {
      ModelConfig config = model_of(text(mixer.name, channel));
      if (!decoder_if_it_fits(config)) continue;
      const int64_t reached = match_parameters(config, target);
      EXPECT_EQ(reached, count_parameters(config)) << mixer.name;
      EXPECT_NEAR(static_cast<double>(reached), static_cast<double>(target),
                  0.01 * static_cast<double>(target))
          << mixer.name << " with " << channel;
    }
  }
}

TEST(MatchParameters, TakesWidthsThatMixersCanHave) {
  const auto text = [](int64_t depth, const std::string& layers) {
    return str("vocabulary = 64\nmax_length = 16\nwidth = 64\ndepth = ", depth, "\nlayer = [",
               layers, "]\n");
  };
  const int64_t target =
      count_parameters(model_of(text(4, "{ mixer = { type = 'mha', heads = 4 } }")));
  for (const int64_t groups : {3, 4, 5}) {
    ModelConfig config = model_of(text(4, str("{ mixer = { type = 'talking_heads', heads = 4 }, "
                                              "channel = { type = 'swiglu', gate_groups = ",
                                              groups, " } }")));
    const int64_t reached = match_parameters(config, target);
    EXPECT_NEAR(static_cast<double>(reached), static_cast<double>(target),
                0.01 * static_cast<double>(target));
    EXPECT_EQ(**config.layers[0].channel->hidden(64)->option % groups, 0);
  }
  // Between two multiples of 8 the larger one is taken.
  const std::string large =
      "vocabulary = 4096\nmax_length = 16\nwidth = 64\ndepth = 4\n[[layer]]\nchannel = { type = "
      "'swiglu'";
  ModelConfig tie = model_of(large + " }\n");
  match_parameters(tie, count_parameters(model_of(large + ", hidden = 76 }\n")));
  EXPECT_EQ(**tie.layers[0].channel->hidden(64)->option, 80);
  // Layers of different widths keep their proportion.
  ModelConfig two = model_of(text(4,
                                  "{ channel = { type = 'mlp', hidden = 300 } }, { channel = { "
                                  "type = 'mlp', hidden = 100 } }"));
  match_parameters(two, target);
  const auto width = [&](size_t i) { return **two.layers[i].channel->hidden(64)->option; };
  EXPECT_NEAR(static_cast<double>(width(0)) / static_cast<double>(width(1)), 3, 0.2);
  EXPECT_NE(width(0), 300);
  // A width that no layer has.
  ModelConfig one =
      model_of(text(1, "{ channel = { type = 'none' } }, { channel = { type = 'mlp' } }"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { match_parameters(one, target); }),
                       "no channel mixer whose width could match"));
}

TEST(MatchParameters, SaysWhereItCannot) {
  ModelConfig config = model_of("vocabulary = 64\nwidth = 32\ndepth = 2");
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { match_parameters(config, 1000); }),
               "no hidden width of the channel mixers brings the model to 1000 parameters "
               "within 1%: it has more without them; make its other parts smaller, or leave "
               "the parameters unequal with match_parameters = false."));
  ModelConfig none = model_of(
      "vocabulary = 64\nwidth = 32\ndepth = 2\n[[layer]]\n"
      "channel = { type = 'none' }");
  EXPECT_TRUE(contains(message_of<UsageError>([&] { match_parameters(none, 1000000); }),
                       "no channel mixer whose width could match"));
  EXPECT_EQ(match_parameters(none, count_parameters(none)), count_parameters(none));
}

}  // namespace
}  // namespace headloom::test::model_test
