// Encoders, encoder-decoders and vision transformers: the formulas written out, what sees what,
// padding, refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "model/describe.h"
#include "model/encoder_decoder.h"
#include "model/vit.h"
#include "support.h"

namespace headloom::test::kinds_test {
namespace {

using Parameters = std::map<std::string, Tensor>;

Tensor linear(const Tensor& x, const Parameters& p, const std::string& name) {
  const Tensor y = at::matmul(x, p.at(name + ".weight").t());
  const auto bias = p.find(name + ".bias");
  return bias == p.end() ? y : y + bias->second;
}

Tensor layer_norm(const Tensor& x, double eps, const Parameters& p, const std::string& name) {
  const Tensor centred = x - x.mean(-1, true);
  return centred / at::sqrt(centred.square().mean(-1, true) + eps) * p.at(name + ".weight") +
         p.at(name + ".bias");
}

Tensor erf_gelu(const Tensor& x) { return x * 0.5 * (1 + at::erf(x / std::sqrt(2.0))); }

// Plain attention of x to memory, head by head; `name` has qkv and output.
Tensor attention(const Tensor& x, const Tensor& memory, int64_t heads, bool causal,
                 const Parameters& p, const std::string& name) {
  const int64_t width = x.size(-1), dim = width / heads;
  const Tensor of_x = linear(x, p, name + ".qkv"), of_memory = linear(memory, p, name + ".qkv");
  std::vector<Tensor> out;
  for (int64_t h = 0; h < heads; ++h) {
    const Tensor q = of_x.narrow(-1, h * dim, dim);
    const Tensor k = of_memory.narrow(-1, width + h * dim, dim);
    const Tensor v = of_memory.narrow(-1, 2 * width + h * dim, dim);
    Tensor scores = at::matmul(q, k.transpose(1, 2)) / std::sqrt(static_cast<double>(dim));
    if (causal) {
      scores = scores + at::full_like(scores, -1e300).triu(1);
    }
    out.push_back(at::matmul(at::softmax(scores, -1), v));
  }
  return linear(at::cat(out, -1), p, name + ".output");
}

Tensor looked_up(const Tensor& table, const Tensor& ids) {
  return table.index_select(0, ids.flatten()).view({ids.size(0), ids.size(1), table.size(1)});
}

std::shared_ptr<Model> double_model(const ModelConfig& config) {
  at::manual_seed(1);
  auto model = build_model(config);
  model->to(at::kDouble);
  randomize(*model);
  model->eval();
  return model;
}

// --- Encoders.
// ------------------------------------------------------------------------------------

const char* const kBert =
    "preset = 'bert-tiny'\nwidth = 16\nvocabulary = 19\nmax_length = 9\ndropout = 0.1\n"
    "layer = [{ mixer = { heads = 4 }, channel = { type = 'mlp' },"
    " block = { type = 'sequential', norm_place = 'post' } }]\n";

// BERT's encoder from its description (Devlin et al. 2019; eps 1e-12 as published).
Tensor bert(const Parameters& p, const Tensor& tokens, const Tensor& segments) {
  Tensor x = looked_up(p.at("embedding"), tokens) + p.at("positions").narrow(0, 0, tokens.size(1)) +
             looked_up(p.at("segments"), segments);
  x = layer_norm(x, 1e-12, p, "embedding_norm");
  for (const std::string layer : {"layer0", "layer1"}) {
    x = layer_norm(x + attention(x, x, 4, false, p, layer + ".mixer"), 1e-12, p,
                   layer + ".mixer_norm");
    const Tensor up = erf_gelu(linear(x, p, layer + ".channel.up"));
    x = layer_norm(x + linear(up, p, layer + ".channel.down"), 1e-12, p, layer + ".channel_norm");
  }
  return x;
}

TEST(Encoder, ComputesBert) {
  const auto model = double_model(model_of(kBert));
  const Parameters p = parameters_of(*model);
  EXPECT_EQ(p.count("norm.weight"), 0u) << "post-norm layers end normed";
  const Tensor input = tokens(2, 7, 19), segments = tokens(2, 7, 2);
  at::NoGradGuard no_grad;
  const Tensor x = bert(p, input, segments);
  EXPECT_TRUE(close(model->hidden({.tokens = input, .segments = segments}), x, 1e-10));
  const Tensor transformed =
      layer_norm(erf_gelu(linear(x, p, "transform")), 1e-12, p, "transform_norm");
  EXPECT_TRUE(close(model->forward({.tokens = input, .segments = segments}),
                    at::matmul(transformed, p.at("embedding").t()) + p.at("output_bias"), 1e-10));
  // Without segments all are the first.
  EXPECT_TRUE(
      close(model->hidden({.tokens = input}), bert(p, input, at::zeros_like(input)), 1e-10));
}

TEST(Encoder, ReadsALabelFromBertsPooler) {
  ModelConfig config = model_of(kBert);
  config.head = "label";
  config.classes = 3;
  const auto model = double_model(config);
  const Parameters p = parameters_of(*model);
  EXPECT_EQ(p.count("transform.weight"), 0u);
  const Tensor input = tokens(2, 7, 19);
  at::NoGradGuard no_grad;
  const Tensor first = bert(p, input, at::zeros_like(input)).select(1, 0);
  EXPECT_TRUE(close(model->forward({.tokens = input}),
                    linear(at::tanh(linear(first, p, "pooler")), p, "classifier"), 1e-10));
}

TEST(Encoder, ScoresPositionsForTagsAndSpans) {
  for (const std::string head : {"tags", "span"}) {
    ModelConfig config = model_of(kBert);
    config.head = head;
    if (head == "tags") config.classes = 3;
    const auto model = double_model(config);
    const Parameters p = parameters_of(*model);
    EXPECT_EQ(p.count("transform.weight") + p.count("pooler.weight"), 0u);
    const Tensor input = tokens(2, 7, 19), segments = tokens(2, 7, 2);
    at::NoGradGuard no_grad;
    const Tensor x = bert(p, input, segments);
    const Tensor scores = model->forward({.tokens = input, .segments = segments});
    EXPECT_EQ(scores.size(2), head == "tags" ? 3 : 2);
    EXPECT_TRUE(close(scores, linear(x, p, head == "tags" ? "classifier" : "span"), 1e-10)) << head;
  }
}

TEST(Encoder, RefusesSegmentsItHasNoEmbeddingsFor) {
  const auto model = build_model(model_of("kind = 'encoder'\nvocabulary = 9\nmax_length = 8"));
  const Tensor input = tokens(2, 7, 9);
  EXPECT_TRUE(contains(
      message_of<Error>([&] { model->forward({.tokens = input, .segments = input}); }),
      "the input has segments, but the model has no embeddings for them (model.segments = 0)"));
}

std::string tiny_encoder(const std::string& mixer, const std::string& more = "") {
  return str("kind = 'encoder'\nvocabulary = 23\nmax_length = 12\nwidth = 32\ndepth = 3\n", more,
             "\n[[layer]]\nmixer = { type = '", mixer,
             "' }\nchannel = { type = 'swiglu', hidden = 8 }\n");
}

// The mixers that can look both ways; the others must say so.
std::vector<std::string> two_way_mixers() {
  std::vector<std::string> out;
  for (const auto& mixer : token_mixers()) {
    try {
      build_model(model_of(tiny_encoder(mixer.name)));
      out.push_back(mixer.name);
    } catch (const UsageError& error) {
      const std::string message = error.what();
      EXPECT_FALSE(mixer.traits.bidirectional) << message;
      EXPECT_TRUE(contains(message, "model.layer[0].mixer (" + mixer.name + "): " + mixer.name))
          << message;
    }
  }
  return out;
}

TEST(Encoder, EveryPositionSeesEveryOther) {
  const auto mixers = two_way_mixers();
  EXPECT_GE(mixers.size(), 5u);
  EXPECT_EQ(std::count(mixers.begin(), mixers.end(), "retention"), 0);
  for (const std::string& mixer : mixers) {
    at::manual_seed(2);
    const auto model = build_model(model_of(tiny_encoder(mixer)));
    randomize(*model);
    model->eval();
    at::NoGradGuard no_grad;
    const Tensor before = tokens(2, 12, 23);
    const Tensor a = model->forward({.tokens = before});
    for (const int64_t place : {0, 6, 11}) {
      Tensor after = before.clone();
      after.select(1, place).add_(1).remainder_(23);
      const Tensor difference = (model->forward({.tokens = after}) - a).abs().amax({0, 2});
      EXPECT_GT(difference.min().item<double>(), 1e-6) << mixer << " misses token " << place;
    }
  }
}

TEST(Encoder, PaddingChangesNothing) {
  for (const std::string& mixer : two_way_mixers()) {
    // The Fourier transform has no mask, as published.
    if (mixer == "fnet") continue;
    for (const std::string more : {"", "head = 'tags'\nclasses = 4", "head = 'span'\nsegments = 2",
                                   "head = 'label'\nclasses = 4\npool = 'mean'",
                                   "head = 'label'\nclasses = 4\npool = 'first'\npooler = true"}) {
      at::manual_seed(3);
      const auto model = build_model(model_of(tiny_encoder(mixer, more)));
      randomize(*model, 0.3);
      model->eval();
      at::NoGradGuard no_grad;
      const Tensor input = tokens(2, 12, 23);
      Tensor other = input.clone();
      other[0].narrow(0, 8, 4).add_(5).remainder_(23);
      const Tensor lengths = at::tensor({8, 12}, kLong);
      const Tensor a = model->forward({.tokens = input, .lengths = lengths});
      const Tensor b = model->forward({.tokens = other, .lengths = lengths});
      const Tensor alone = model->forward({.tokens = input.narrow(0, 0, 1).narrow(1, 0, 8)})[0];
      const auto real = [&](const Tensor& x) { return x.dim() == 3 ? x[0].narrow(0, 0, 8) : x[0]; };
      EXPECT_TRUE(close(real(a), real(b), 1e-5)) << mixer << " " << more;
      EXPECT_TRUE(close(real(a), alone, 1e-3)) << mixer << " " << more;
      EXPECT_TRUE(close(a[1], b[1], 1e-5)) << mixer << " " << more;
    }
  }
}

TEST(Encoder, ThePoolIgnoresWhatPaddingHolds) {
  Module owner;
  ModelConfig config = model_of("kind = 'encoder'\npool = 'mean'\nclasses = 2\nwidth = 3");
  const LabelHead head(owner, config);
  Tensor x = at::ones({2, 4, 3});
  x[0].narrow(0, 2, 2).fill_(std::nan(""));
  x[1].mul_(2);
  const Tensor pooled = head.pool(x, at::tensor({2, 4}, kLong), false);
  EXPECT_TRUE(pooled.equal(at::tensor({1.0f, 2.0f}).unsqueeze(1).expand({2, 3})));
}

// --- Encoder-decoders.
// ----------------------------------------------------------------------------

TEST(EncoderDecoder, ComputesTheTransformer) {
  const ModelConfig config = model_of(
      "preset = 'transformer-base'\nwidth = 16\ndepth = 2\nencoder_depth = 1\n"
      "vocabulary = 19\nmax_length = 8\nmax_source_length = 8\nlayer = [{ mixer = { heads "
      "= 4 }, channel = { type = 'mlp', hidden = 24, activation = 'relu', bias = true }, "
      "block = { norm_place = 'post' } }]");
  const auto model = double_model(config);
  const Parameters p = parameters_of(*model);
  const Tensor source = tokens(2, 5, 19), target = tokens(2, 7, 19);
  const auto embedded = [&](const Tensor& ids) {
    return looked_up(p.at("embedding"), ids) * 4.0 +
           sinusoidal(at::arange(ids.size(1)), 16, at::TensorOptions(at::kDouble));
  };
  const auto feed = [&](const Tensor& x, const std::string& layer) {
    const Tensor up = at::relu(linear(x, p, layer + ".channel.up"));
    return layer_norm(x + linear(up, p, layer + ".channel.down"), 1e-5, p, layer + ".channel_norm");
  };
  const auto attend = [&](const Tensor& x, const Tensor& memory, bool causal,
                          const std::string& layer, const std::string& part) {
    return layer_norm(x + attention(x, memory, 4, causal, p, layer + "." + part), 1e-5, p,
                      layer + "." + part + "_norm");
  };
  at::NoGradGuard no_grad;
  Tensor memory = embedded(source);
  memory = feed(attend(memory, memory, false, "encoder.layer0", "mixer"), "encoder.layer0");
  Tensor x = embedded(target);
  for (const std::string layer : {"decoder.layer0", "decoder.layer1"}) {
    x = attend(x, x, true, layer, "mixer");
    x = feed(attend(x, memory, false, layer, "cross"), layer);
  }
  EXPECT_TRUE(close(model->forward({.tokens = target, .source = source}),
                    at::matmul(x, p.at("embedding").t()), 1e-10));
}

std::string tiny_seq(const std::string& layer, const char* more = "") {
  // Depth 3: multi_token convolves in layer 2.
  return str("kind = 'encoder_decoder'\nvocabulary = 23\nmax_length = 12\nmax_source_length = 12\n",
             "width = 32\ndepth = 3\n", more, "\nlayer = [{ ", layer,
             ", channel = { type = 'swiglu', hidden = 8 } }]");
}

TEST(EncoderDecoder, EveryComposedMixerReadsTheSource) {
  int readers = 0;
  for (const auto& mixer : token_mixers()) {
    const std::string config = tiny_seq(str("cross = { type = '", mixer.name, "' }"));
    std::shared_ptr<Model> model;
    at::manual_seed(4);
    try {
      model = build_model(model_of(config));
    } catch (const UsageError& error) {
      EXPECT_FALSE(mixer.traits.cross_attention) << error.what();
      EXPECT_TRUE(contains(error.what(), "model.layer[0].cross (" + mixer.name + "): "));
      continue;
    }
    ++readers;
    randomize(*model, 0.3);
    model->eval();
    at::NoGradGuard no_grad;
    const Tensor source = tokens(2, 9, 23), target = tokens(2, 7, 23);
    const Tensor lengths = at::tensor({6, 9}, kLong);
    const auto run = [&](const Tensor& from, const Tensor& to) {
      return model->forward({.tokens = to, .source = from, .source_lengths = lengths});
    };
    const Tensor a = run(source, target);
    // Every target position sees every real source position, and no padding.
    for (const int64_t place : {0, 5}) {
      Tensor other = source.clone();
      other.select(1, place).add_(1).remainder_(23);
      EXPECT_GT((run(other, target) - a).abs().amax(2).min().item<double>(), 1e-6) << mixer.name;
    }
    Tensor padded = source.clone();
    padded[0].narrow(0, 6, 3).add_(1).remainder_(23);
    EXPECT_TRUE(close(run(padded, target), a, 1e-6)) << mixer.name;
    EXPECT_TRUE(close(model->forward({.tokens = target.narrow(0, 0, 1),
                                      .source = source.narrow(0, 0, 1).narrow(1, 0, 6)})[0],
                      a[0], 1e-3))
        << mixer.name;
    // The target is causal.
    Tensor later = target.clone();
    later.select(1, 4).add_(1).remainder_(23);
    const Tensor change = (run(source, later) - a).abs().amax({0, 2});
    EXPECT_LT(change.narrow(0, 0, 4).max().item<double>(), 1e-6) << mixer.name;
    EXPECT_GT(change.narrow(0, 4, 3).min().item<double>(), 1e-6) << mixer.name;
  }
  EXPECT_GE(readers, 5);
}

TEST(EncoderDecoder, CrossIsAsTheMixerAndTheEncoderAsTheLayers) {
  const auto names = [](const std::string& toml) {
    const auto model = build_model(model_of(toml));
    std::set<std::string> out;
    for (const auto& item : model->named_parameters()) out.insert(item.key());
    return out;
  };
  const auto same = names(tiny_seq("mixer = { type = 'dcmha', heads = 4 }", "encoder_depth = 1"));
  EXPECT_EQ(same.count("decoder.layer2.cross.w1.weight"), 1u);
  EXPECT_EQ(same.count("encoder.layer0.mixer.w1.weight"), 1u);
  EXPECT_EQ(same.count("encoder.layer1.mixer.w1.weight"), 0u);
  const auto own = names(tiny_seq(
      "mixer = { type = 'dcmha', heads = 4 }, cross = { type = 'mha', heads = 2 }",
      "encoder_layer = [{ mixer = { type = 'mha', heads = 4 }, channel = { type = 'none' } }]"));
  EXPECT_EQ(own.count("decoder.layer0.cross.w1.weight"), 0u);
  EXPECT_EQ(own.count("decoder.layer0.cross.qkv.weight"), 1u);
  EXPECT_EQ(own.count("encoder.layer0.mixer.w1.weight"), 0u);
  EXPECT_EQ(own.count("encoder.layer0.channel.up.weight"), 0u);
}

TEST(EncoderDecoder, WorksInEveryBlockThatTakesIt) {
  for (const auto& block : blocks()) {
    if (!block.traits.cross_attention) continue;
    const auto model = double_model(
        model_of(tiny_seq(str("mixer = { heads = 4 }, block = { type = '", block.name, "' }"))));
    at::NoGradGuard no_grad;
    const Tensor target = tokens(1, 4, 23), source = tokens(1, 4, 23);
    const Tensor a = model->forward({.tokens = target, .source = source});
    const Tensor b = model->forward({.tokens = target, .source = (source + 1).remainder(23)});
    EXPECT_GT((a - b).abs().min().item<double>(), 0) << block.name;
  }
}

// --- Vision transformers.
// -------------------------------------------------------------------------

const char* const kVit =
    "kind = 'vit'\nwidth = 16\ndepth = 1\nclasses = 5\nnorm = 'layer_norm'\nbias = true\n"
    "image = { channels = 3, height = 8, width = 12, patch = 4 }\n"
    "layer = [{ mixer = { heads = 4 }, channel = { type = 'mlp' } }]\n";

TEST(Vit, ComputesTheFormulas) {
  for (const bool class_token : {true, false}) {
    for (const bool learned : {true, false}) {
      ModelConfig config = model_of(kVit);
      config.pool = class_token ? "first" : "mean";
      config.position.type = learned ? "learned" : "sinusoidal";
      const auto model = double_model(config);
      const Parameters p = parameters_of(*model);
      const Tensor images = at::randn({2, 3, 8, 12}, at::kDouble);
      at::NoGradGuard no_grad;
      // The patches are a convolution of stride 4.
      Tensor x = at::conv2d(images, p.at("patch.weight").view({16, 3, 4, 4}), p.at("patch.bias"), 4)
                     .flatten(2)
                     .transpose(1, 2);
      if (!learned) {
        Tensor grid = at::zeros({6, 16}, at::kDouble);
        for (int64_t i = 0; i < 6; ++i) {
          for (int64_t j = 0; j < 4; ++j) {
            const double frequency = std::pow(10000.0, -static_cast<double>(j) / 3);
            const double along = static_cast<double>(i % 3) * frequency;
            const double down = static_cast<double>(i / 3) * frequency;
            grid[i][j] = std::sin(along);
            grid[i][4 + j] = std::cos(along);
            grid[i][8 + j] = std::sin(down);
            grid[i][12 + j] = std::cos(down);
          }
        }
        x = x + grid;
      }
      if (class_token) {
        x = at::cat({p.at("class_token").view({1, 1, 16}).expand({2, 1, 16}), x}, 1);
      }
      if (learned) x = x + p.at("positions");
      const Tensor normed = layer_norm(x, 1e-5, p, "layer0.mixer_norm");
      x = x + attention(normed, normed, 4, false, p, "layer0.mixer");
      const Tensor up =
          erf_gelu(linear(layer_norm(x, 1e-5, p, "layer0.channel_norm"), p, "layer0.channel.up"));
      x = layer_norm(x + linear(up, p, "layer0.channel.down"), 1e-5, p, "norm");
      const Tensor pooled = class_token ? x.select(1, 0) : x.mean(1);
      EXPECT_TRUE(
          close(model->forward({.images = images}), linear(pooled, p, "classifier"), 1e-10));
    }
  }
}

// --- Auto-encoders.
// ---------------------------------------------------------------------------------

const char* const kAutoEncoder =
    "kind = 'auto_encoder'\nwidth = 16\ndepth = 2\nvocabulary = 11\nmax_length = 9\n"
    "norm = 'layer_norm'\nposition = { type = 'none' }\n"
    "layer = [{ mixer = { heads = 4 }, channel = { type = 'swiglu', hidden = 24 } }]\n";

TEST(AutoEncoder, HasNoStateOfDecoding) {
  EXPECT_TRUE(std::isnan(model_costs(*build_model(model_of(kAutoEncoder)), 9).state_bytes));
}

TEST(AutoEncoder, ReadsAllPositionsFromTheLastVector) {
  const auto model = double_model(model_of(kAutoEncoder));
  at::NoGradGuard no_grad;
  const Parameters p = parameters_of(*model);
  const Tensor tokens = at::randint(11, {3, 7}, at::kLong);
  const Tensor scores = model->forward({.tokens = tokens});
  EXPECT_EQ(scores.sizes(), (at::IntArrayRef{3, 7, 11}));

  // The layers are those of a decoder without a norm after them.
  ModelConfig decoder =
      model_of(std::string("final_norm = false\ntied = false\n") +
               std::string(kAutoEncoder).substr(std::string("kind = 'auto_encoder'\n").size()));
  const auto layers = double_model(decoder);
  for (auto& [name, value] : parameters_of(*layers)) {
    if (p.contains(name)) value.copy_(p.at(name));
  }
  const Tensor last = layers->hidden({.tokens = tokens}).select(1, 6);
  Tensor positions = at::zeros({7, 16}, at::kDouble);
  for (int64_t t = 0; t < 7; ++t) {
    for (int64_t i = 0; i < 8; ++i) {
      const double angle =
          static_cast<double>(t) * std::pow(10000.0, -2.0 * static_cast<double>(i) / 16.0);
      positions[t][2 * i] = std::sin(angle);
      positions[t][2 * i + 1] = std::cos(angle);
    }
  }
  Tensor x = last.unsqueeze(1) + positions;
  x = erf_gelu(linear(layer_norm(x, 1e-5, p, "step_norm0"), p, "step0"));
  x = erf_gelu(linear(layer_norm(x, 1e-5, p, "step_norm1"), p, "step1"));
  x = linear(layer_norm(x, 1e-5, p, "output_norm"), p, "output");
  EXPECT_LT((x - scores).abs().max().item<double>(), 1e-10);
}

TEST(AutoEncoder, RefusesWhatItDoesNotRead) {
  const auto model = double_model(model_of(kAutoEncoder));
  const Tensor tokens = at::zeros({1, 3}, at::kLong);
  EXPECT_TRUE(contains(message_of<UsageError>([&] {
                         model->forward({.tokens = tokens, .lengths = at::tensor({2}, at::kLong)});
                       }),
                       "a model of kind \"auto_encoder\" reads no lengths"));
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { model_of("kind = 'auto_encoder'\nfinal_norm = true"); }),
      "final_norm"));
}

// --- All kinds.
// -----------------------------------------------------------------------------------

TEST(Kinds, WriteAndReadBack) {
  for (const std::string& kind : model_kinds()) {
    ModelConfig config = model_of("kind = '" + kind + "'");
    config.complete({.vocabulary = 10,
                     .length = 8,
                     .source_length = 9,
                     .classes = 3,
                     .image = {3, 8, 8},
                     .head = "label"});
    EXPECT_TRUE(config.is_complete()) << kind;
    const std::string text = to_toml(write_fields(config));
    ModelConfig back = model_of(text);
    EXPECT_EQ(to_toml(write_fields(back)), text);
    EXPECT_EQ(back.kind, kind);
    EXPECT_GT(count_parameters(back), 0);
  }
}

TEST(Kinds, AnEncoderHasTheSegmentsOfItsData) {
  const auto segments = [](const std::string& more, int64_t of_data) {
    ModelConfig config = model_of("kind = 'encoder'\nhead = 'span'" + more);
    EXPECT_FALSE(config.is_complete());
    config.complete({.vocabulary = 10, .length = 8, .segments = of_data});
    EXPECT_TRUE(config.is_complete());
    return *config.segments;
  };
  EXPECT_EQ(segments("", 2), 2);
  EXPECT_EQ(segments("", 0), 0);
  EXPECT_EQ(segments("\nsegments = 3", 2), 3);
  EXPECT_EQ(segments("\nsegments = 0", 2), 0);
}

TEST(Kinds, RefuseWhatDoesNotFit) {
  const auto refused = [](const std::string& toml) {
    return message_of<UsageError>([&] { build_model(model_of(toml)); });
  };
  const std::string sizes = "vocabulary = 10\nmax_length = 8\nwidth = 32\n";
  EXPECT_TRUE(contains(refused("kind = 'encodr'"), "did you mean \"encoder\""));
  EXPECT_TRUE(
      contains(refused("kind = 'encoder'\nhead = 'label2'"), "expected one of tokens, label"));
  EXPECT_TRUE(contains(refused("pool = 'mean'"), "unknown key 'model.pool'"));
  EXPECT_TRUE(contains(refused("norm = 'none'\nembedding_norm = true"),
                       "'model.embedding_norm' is true, expected false where model.norm is"));
  EXPECT_TRUE(contains(refused(sizes + "layer = [{ cross = { type = 'mha' } }]"),
                       "model.layer[0].cross is mha, but cross-attention belongs to kind"));
  const std::string seq = sizes + "max_source_length = 8\nkind = 'encoder_decoder'\n";
  EXPECT_TRUE(contains(refused(seq + "encoder_layer = [{ cross = { type = 'mha' } }]"),
                       "model.encoder_layer[0].cross is mha, but cross-attention belongs to the "
                       "decoder, model.layer."));
  EXPECT_TRUE(contains(refused(seq + "layer = [{ cross = { type = 'retention', heads = 4 } }]"),
                       "retention"));
  EXPECT_TRUE(contains(refused(seq + "layer = [{ mixer = { window = 3 } }]"),
                       "cross-attention reads the whole source"));
  EXPECT_TRUE(contains(refused(seq + "layer = [{ cross = { heads = 4 } }]"), "has no 'type'"));
  EXPECT_TRUE(contains(refused("kind = 'vit'\nclasses = 2\nimage = { channels = 3, height = 30, "
                               "width = 32, patch = 16 }"),
                       "'model.image.height' is 30, expected a multiple of the patch = 16"));
  EXPECT_TRUE(contains(refused("kind = 'vit'\nclasses = 2\nwidth = 6\nposition.type = "
                               "'sinusoidal'\nimage = { channels = 3, height = 8, width = 8 }"),
                       "multiple of 4"));
  const auto vit = build_model(model_of(kVit));
  const std::string size =
      message_of<UsageError>([&] { vit->forward({.images = at::zeros({1, 1, 28, 28})}); });
  EXPECT_TRUE(contains(size,
                       "images of 3 x 8 x 12 (channels, height, width), in a tensor with a batch "
                       "dimension before these, but got 1 x 1 x 28 x 28"));
  const auto both = build_model(model_of(seq));
  EXPECT_TRUE(contains(message_of([&] { both->forward({.tokens = tokens(1, 2, 10)}); }), "source"));
}

TEST(Kinds, CostsAddUp) {
  for (const std::string& kind : model_kinds()) {
    for (const std::string head : {"tokens", "label", "tags", "span"}) {
      ModelConfig config = model_of("kind = '" + kind + "'\nwidth = 32\ndepth = 2\nbias = true\n" +
                                    "embedding_norm = true\nposition.type = 'learned'");
      config.transform = config.pooler = config.output_bias = true;
      config.complete({.vocabulary = 10,
                       .length = 16,
                       .source_length = 16,
                       .classes = 3,
                       .segments = 2,
                       .image = {3, 16, 16},
                       .head = head});
      const auto model = build_model(config);
      const ModelCosts costs = model_costs(*model, 16);
      int64_t total = 0, counted = 0;
      for (const Tensor& p : model->parameters()) total += p.numel();
      for (const Cost& cost : costs.parts) counted += cost.parameters;
      EXPECT_EQ(costs.parameters, total) << kind;
      EXPECT_EQ(counted, total) << kind;
      EXPECT_EQ(count_parameters(config), total) << kind;
      EXPECT_EQ(costs.state_bytes_per_token > 0, kind == "decoder" || kind == "encoder_decoder")
          << kind;
      if (kind == "decoder" || kind == "encoder_decoder") break;
    }
  }
  // An image of 16 patches and a class token, by hand: per token 24 C^2 + 4 T C a layer, and once
  // an image patches and classifier.
  ModelConfig config = model_of(
      "kind = 'vit'\nwidth = 32\ndepth = 2\nclasses = 3\npool = 'first'\n"
      "image = { channels = 3, height = 16, width = 16 }\n"
      "layer = [{ channel = { type = 'mlp' } }]");
  const ModelCosts costs = model_costs(*build_model(config), 0);
  const double once = 2.0 * 32 * 48 * 16 + 2.0 * 32 * 3;
  EXPECT_NEAR(costs.flops_per_token, 2 * (24.0 * 32 * 32 + 4.0 * 17 * 32) + once / 17, 1e-6);
}

TEST(Kinds, ABigModelIsCountedWithoutItsMemory) {
  ModelConfig config = model_of("preset = 'gptj-6b'\nvocabulary = 50400\nmax_length = 2048");
  // 28 (12 C^2 + 7 C) + 2 V C + V + 2 C with C = 4096: 24 GB, were it built.
  EXPECT_EQ(count_parameters(config), 6050882784);
}

}  // namespace
}  // namespace headloom::test::kinds_test
