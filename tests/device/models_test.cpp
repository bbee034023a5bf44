// Every kind of model, token mixer, channel mixer, block and tiny preset on a device that is not
// the CPU: the same values and gradients, and no wait for the device.
#include "mixers/recording.h"
#include "ops/aft/op.h"
#include "support.h"

namespace headloom::test::models_test {
namespace {

TEST(Device, RefusesTensorsOfTwoDevices) {
  const Tensor x = at::randn({3, 4}), y = at::randn({4, 5}), z = at::matmul(there(x), there(y));
  EXPECT_EQ(z.device(), kDevice);
  EXPECT_TRUE(close(z.cpu(), at::matmul(x, y), kGuarded ? 0 : 1e-6));
  EXPECT_THROW(at::matmul(there(x), y), c10::Error);
  EXPECT_THROW(there(x).normal_(0, 1, at::globalContext().defaultGenerator(at::kCPU)), c10::Error);
  if (!kGuarded) return;  // there may be one
  EXPECT_THROW(at::matmul(there(x), y.to(at::Device(at::kPrivateUse1, 0))), c10::Error);
}

TEST(Device, CountsHowOftenTheHostWaits) {
  if (!kGuarded) GTEST_SKIP() << kOnlyGuarded;
  const Tensor x = at::randn({3, 4});
  EXPECT_EQ(waits([&] { there(x).sum().item<float>(); }), 1);
  EXPECT_EQ(waits([&] { there(x).gt(0).nonzero(); }), 1);
  EXPECT_EQ(waits([&] { there(x).mul(2).sum(); }), 0);
}

TEST(Device, CodeOfTheHostThatReadsItsMemoryEnds) {
  if (!kGuarded) GTEST_SKIP() << kOnlyGuarded;
  const Tensor x = there(at::ones({3}));
  EXPECT_DEATH(
      {
        volatile float value = *x.const_data_ptr<float>();
        static_cast<void>(value);
      },
      "guarded: code of the host");
}

ModelInput input_for(const ModelConfig& config) {
  at::manual_seed(7);
  const int64_t vocabulary = config.vocabulary.value_or(0);
  if (config.kind == "vit") {
    const auto [channels, height, width] = config.image.shape();
    return {.images = at::randn({3, channels, height, width})};
  }
  ModelInput in{.tokens = at::randint(vocabulary, {3, 12}, kLong)};
  if (config.kind == "encoder_decoder") {
    in.source = at::randint(vocabulary, {3, 10}, kLong);
    in.source_lengths = at::tensor({10, 7, 3}, kLong);
  }
  if (config.kind == "encoder") in.lengths = at::tensor({12, 5, 9}, kLong);
  return in;
}

ModelInput there(const ModelInput& input) {
  ModelInput out = input;
  for (Tensor* t : {&out.tokens, &out.lengths, &out.documents, &out.segments, &out.source,
                    &out.source_lengths, &out.images}) {
    *t = test::there(*t);
  }
  return out;
}

// Hidden states, and a loss of all that the model can give.
struct Values {
  Tensor hidden, loss;
};
Values run(Model& model, const ModelInput& given) {
  AuxiliaryOutputs auxiliary;
  ModelInput input = given;
  input.auxiliary = &auxiliary;
  Values out{.hidden = model.hidden(input), .loss = {}};
  const Tensor logits = model.logits(out.hidden).to(at::kFloat);
  out.loss = logits.log_softmax(-1).square().mean() + out.hidden.to(at::kFloat).square().mean();
  if (auxiliary.loss.defined()) out.loss = out.loss + auxiliary.loss;
  return out;
}

using Gradients = std::map<std::string, Tensor>;

// Without autocast, on the CPU.
Gradients exact_gradients(const ModelConfig& config, const ModelInput& input) {
  const auto model = pair_of(config).here;
  model->train();
  run(*model, input).loss.backward();
  Gradients out;
  for (const auto& item : model->named_parameters()) out[item.key()] = item.value().grad();
  return out;
}

// Of both models. `exact`: what those of the CPU, which round otherwise, are held against, too.
void expect_same_gradients(const Pair<Model>& both, const Gradients& exact) {
  const auto of_away = both.away->named_parameters();
  double largest = 0, error = 0, allowed = 0;
  std::string worst;
  const auto apart = [](const Tensor& a, const Tensor& b) {
    return (a - b).abs().max().item<double>();
  };
  for (const auto& item : both.here->named_parameters()) {
    const Tensor own = item.value().grad(), other = of_away[item.key()].grad();
    ASSERT_EQ(own.defined(), other.defined()) << item.key();
    if (!own.defined()) continue;
    ASSERT_EQ(other.device(), kDevice) << item.key();
    const Tensor expected = exact.empty() ? own : exact.at(item.key());
    largest = std::max(largest, expected.abs().max().item<double>());
    allowed = std::max(allowed, 2 * apart(own, expected));
    if (const double here = apart(other.cpu(), expected); !(here <= error)) {
      error = here;
      worst = item.key();
    }
  }
  EXPECT_LE(error, allowed + (exact.empty() ? 1e-3 : 1e-2) * largest) << worst;
}

// `narrow`: under autocast.
void expect_same(const ModelConfig& config, const ModelInput& input, bool checkpoint = false,
                 bool narrow = false) {
  const Pair<Model> both = pair_of(config);
  ASSERT_EQ(both.away->device(), kDevice);
  both.here->train();
  both.away->train();
  ModelInput here = input, away = there(input);
  here.activation_checkpointing = away.activation_checkpointing = checkpoint;
  const char* const type = narrow ? "bfloat16" : "float32";
  Values expected, found;
  {
    const Autocast autocast(type);
    expected = run(*both.here, here);
  }
  expected.loss.backward();
  const int64_t waited = waits([&] {
    {
      const Autocast autocast(type, kDevice.type());
      found = run(*both.away, away);
    }
    found.loss.backward();
  });
  EXPECT_EQ(waited, 0);
  ASSERT_EQ(found.hidden.device(), kDevice);
  EXPECT_TRUE(close(found.hidden.cpu(), expected.hidden, narrow ? 0.1 : 1e-4));
  EXPECT_TRUE(close(found.loss.cpu(), expected.loss, narrow ? 0.05 : 1e-4));
  EXPECT_EQ(found.hidden.scalar_type(), expected.hidden.scalar_type());
  expect_same_gradients(both, narrow ? exact_gradients(config, input) : Gradients());
}

void expect_same(const std::string& toml, bool checkpoint = false, bool narrow = false) {
  SCOPED_TRACE(toml);
  ModelConfig config;
  try {
    config = model_of(toml);
    build_model(config);
  } catch (const UsageError& error) {
    ADD_FAILURE() << error.what();
    return;
  }
  expect_same(config, input_for(config), checkpoint, narrow);
}

constexpr const char* kSizes = "width = 32\ndepth = 2\nvocabulary = 30\nmax_length = 16\n";

std::string layer_of(const std::string& mixer, const std::string& more = "") {
  return "[[layer]]\nmixer = { type = '" + mixer + "'" + heads_of(mixer, 4) + more + " }\n";
}

// The kind that a token mixer can be in.
std::string kind_for(const MixerTraits& traits) {
  return traits.causal ? "" : "kind = 'encoder'\n";
}

TEST(Device, EveryTokenMixerIsTheSame) {
  for (const auto& entry : token_mixers()) {
    expect_same(kSizes + kind_for(entry.traits) + layer_of(entry.name));
  }
}

TEST(Device, EveryTokenMixerIsTheSameUnderAutocast) {
  for (const auto& entry : token_mixers()) {
    expect_same(kSizes + kind_for(entry.traits) + layer_of(entry.name), false, true);
  }
}

// A channel mixer alone, on the CPU and on the device.
auto channels_of(const std::string& name, const std::string& options) {
  LayerShape shape;
  shape.width = 32;
  const auto build = [&] {
    at::manual_seed(3);
    const auto spec = make_spec(channel_mixers(), "channel mixer", name);
    read_fields(parse_toml(options, "test"), *spec, name);
    return spec->build(shape);
  };
  std::pair both(build(), build());
  both.second->to(kDevice);
  return both;
}

// The choice of experts is in float32 under autocast, on every device.
TEST(Device, AutocastLeavesTheScoresOfExpertsAlone) {
  at::NoGradGuard no_grad;
  at::manual_seed(7);
  const Tensor x = at::randn({2, 40, 32}) * 4;
  const auto [experts, experts_away] = channels_of("moe", "routed = 4\nactive = 2\nhidden = 16");
  const auto scores = [](ChannelMixer& mixer, const Tensor& t) {
    const Autocast autocast("bfloat16", t.device().type());
    Recording recording({"expert_scores"});
    mixer.forward(t, {.recording = &recording});
    return recording.find("expert_scores").cpu();
  };
  EXPECT_TRUE(close(scores(*experts_away, test::there(x)), scores(*experts, x), 1e-5));
}

// On a CPU the causal form runs its definition, so its bands are tested here.
TEST(Device, CausalConvolutionsOfAftAreTheDefinition) {
  at::manual_seed(8);
  const auto results = [](const std::vector<Tensor>& given, const Tensor& pull) {
    std::vector<Tensor> leaves;
    for (const Tensor& t : given) leaves.push_back(leaf(t));
    ops::AftOptions options;
    options.form = "conv";
    options.bias = leaves[3];
    const Tensor y = std::get<0>(ops::aft(leaves[0], leaves[1], leaves[2], options));
    (y * pull).sum().backward();
    std::vector<Tensor> out{y.detach().cpu()};
    for (const Tensor& t : leaves) out.push_back(t.grad().cpu());
    return out;
  };
  for (const int64_t length : {3, 65, 200}) {
    for (const int64_t window : {1, 7, 70}) {
      std::vector<Tensor> here;
      for (int i = 0; i < 3; ++i) here.push_back(at::randn({2, length, 6}, kDouble));
      here.push_back(at::randn({2, window}, kDouble));
      std::vector<Tensor> away;
      for (const Tensor& t : here) away.push_back(test::there(t));
      const Tensor pull = at::randn({2, length, 6}, kDouble);
      const auto expected = results(here, pull), got = results(away, test::there(pull));
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(close(got[i], expected[i], 1e-10))
            << "T " << length << " W " << window << " result " << i;
      }
    }
  }
}

TEST(Device, OptionsOfTokenMixersAreTheSame) {
  for (const auto& [mixer, options] : std::vector<std::pair<std::string, std::string>>{
           {"mha", ", kv_heads = 2, head_dim = 10, qk_norm = true, window = 5"},
           {"dcmha", ", kv_heads = 2, groups = 2, static = 'add', window = 5"},
           {"dcmha", ", query_wise = false, static = 'replace', pre = false"},
           {"talking_heads", ", key_heads = 2, value_heads = 8"},
           {"multi_token", ", conv_layers = 'all', conv_heads = 2, post_conv = true"},
           {"linformer", ", rank = 4, sharing = 'layerwise'"},
           {"retention", ", chunk = 5"},
           {"aft", ", form = 'simple'"},
           {"aft", ", form = 'full', factor = 3"},
           {"aft", ", form = 'conv', local_window = 5"},
           {"performer", ", kernel = 'relu', features = 20"},
           {"synthesizer", ", scores = 'random'"},
           {"synthesizer", ", scores = ['random', 'dense', 'dot_product']"},
           {"synthesizer", ", scores = 'factorized_dense'"}}) {
    const bool both_ways = mixer == "linformer";
    const std::string heads = mixer == "aft" && options.find("conv") == std::string::npos
                                  ? "[[layer]]\nmixer = { type = 'aft'" + options + " }\n"
                                  : layer_of(mixer, options);
    expect_same(std::string(kSizes) + (both_ways ? "kind = 'encoder'\n" : "") + heads);
  }
  for (const char* position : {"learned", "sinusoidal", "alibi", "none"}) {
    expect_same(str(kSizes, "position = { type = '", position, "' }\n", layer_of("mha")));
  }
  expect_same(kSizes + layer_of("mha") + "block = { type = 'sequential', short_conv = 3 }\n");
}

TEST(Device, EveryChannelMixerAndBlockIsTheSame) {
  for (const auto& entry : channel_mixers()) {
    const std::string mixer = entry.name == "rwkv_channel" ? "rwkv" : "mha";
    std::string layer = layer_of(mixer) + "channel = { type = '" + entry.name + "'";
    if (entry.name == "moe") layer += ", routed = 4, active = 2, hidden = 16, bias_speed = 0.01";
    expect_same(kSizes + layer + " }\n");
    expect_same(kSizes + layer + " }\n", false, true);
  }
  for (const auto& entry : blocks()) {
    const std::string mixer = entry.name == "simplified" ? "shaped" : "mha";
    expect_same(str(kSizes, layer_of(mixer), "block = { type = '", entry.name, "' }\n"));
  }
}

TEST(Device, EveryKindIsTheSame) {
  for (const std::string& kind : model_kinds()) {
    const std::string image =
        kind == "vit" ? "image = { channels = 3, height = 8, width = 8, patch = 4 }\nclasses = 5\n"
                      : "";
    const std::string sizes = kind == "vit" ? "width = 32\ndepth = 2\n" : kSizes;
    const std::string source = kind == "encoder_decoder" ? "max_source_length = 16\n" : "";
    const std::string whole = sizes + image + source + "kind = '" + kind + "'\n";
    expect_same(whole + layer_of("dcmha"));
    expect_same(whole + layer_of("mha"), /*checkpoint=*/true);
  }
}

TEST(Device, DocumentsAreKeptApartTheSame) {
  for (const auto& entry : token_mixers()) {
    if (!entry.traits.documents) continue;
    const ModelConfig config = model_of(kSizes + kind_for(entry.traits) + layer_of(entry.name));
    ModelInput input{.tokens = at::randint(30, {2, 12}, kLong),
                     .documents = at::arange(24).view({2, 12}).div(5, "floor")};
    SCOPED_TRACE(entry.name);
    expect_same(config, input);
  }
}

TEST(Device, EveryTinyPresetIsTheSame) {
  int64_t compared = 0;
  for (const ModelPreset& preset : model_presets()) {
    if (!preset.name.ends_with("-tiny")) continue;
    // Fewer layers, where the pattern of layers allows it.
    for (const char* depth : {"depth = 1\n", "depth = 2\n", ""}) {
      ModelConfig config;
      try {
        config = model_of("preset = '" + preset.name + "'\n" + depth);
        config.complete({.vocabulary = 40,
                         .length = 12,
                         .source_length = 12,
                         .classes = 5,
                         .segments = 0,
                         .image = {3, 32, 32},
                         .head = config.head.value_or("tokens")});
        if (config.vocabulary) config.vocabulary = 40;
        config.dropout = 0;  // each device has random numbers of its own
        build_model(config);
      } catch (const Error&) {
        continue;
      }
      SCOPED_TRACE(preset.name);
      expect_same(config, input_for(config));
      ++compared;
      break;
    }
  }
  EXPECT_GE(compared, 25);
}

TEST(Device, QuantizedWeightsMoveWithTheModel) {
  at::NoGradGuard no_grad;
  for (const at::ScalarType type : {at::kBFloat16, at::kChar, at::ScalarType::Int4}) {
    for (const char* tied : {"true", "false"}) {
      const std::string toml = str(kSizes, "tied = ", tied, "\n", layer_of("dcmha"));
      const auto before = writers_of(toml), after = writers_of(toml);
      before.away->to(at::kCPU);
      for (const auto& model : {before.here, before.away, after.away}) {
        model->convert_weights(type);
      }
      before.away->to(kDevice);
      const Tensor tokens = at::randint(30, {2, 9}, kLong);
      // A bfloat16 model computes in it.
      const char* const computes = type == at::kBFloat16 ? "bfloat16" : "float32";
      Tensor expected;
      {
        const Autocast autocast(computes);
        expected = before.here->forward({.tokens = tokens});
      }
      for (const auto& model : {before.away, after.away}) {
        const Autocast autocast(computes, kDevice.type());
        EXPECT_EQ(waits([&] {
                    const Tensor y = model->forward({.tokens = tokens.to(kDevice)});
                    EXPECT_EQ(y.device(), kDevice);
                  }),
                  0);
        const Tensor y = model->forward({.tokens = tokens.to(kDevice)}).cpu();
        EXPECT_TRUE(close(y, expected, type == at::kBFloat16 ? 0.05 : 1e-3)) << type << tied;
      }
    }
  }
}

}  // namespace
}  // namespace headloom::test::models_test
