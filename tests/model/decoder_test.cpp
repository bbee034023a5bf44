// The decoder and its blocks against the formulas written out with plain tensor operations, in
// double precision.
#include <gtest/gtest.h>

#include <cmath>

#include "support.h"

namespace headloom::test::decoder_test {
namespace {

using Parameters = std::map<std::string, Tensor>;

Tensor linear(const Tensor& x, const Parameters& p, const std::string& name) {
  const Tensor y = at::matmul(x, p.at(name + ".weight").t());
  const auto bias = p.find(name + ".bias");
  return bias == p.end() ? y : y + bias->second;
}

Tensor norm(const Tensor& x, const std::string& type, const Parameters& p,
            const std::string& name) {
  if (type == "none") return x;
  const Tensor scale = p.at(name + ".weight");
  if (type == "rms_norm") {
    return x / at::sqrt(x.square().mean(-1, true) + 1e-6) * scale;
  }
  const Tensor centred = x - x.mean(-1, true);
  return centred / at::sqrt(centred.square().mean(-1, true) + 1e-5) * scale + p.at(name + ".bias");
}

// x [B, T, H, D], number by number.
Tensor rope(const Tensor& x, const PositionOptions& o) {
  const auto rotary =
      static_cast<int64_t>(std::llround(o.fraction * static_cast<double>(x.size(3))));
  Tensor out = x.clone();
  for (int64_t t = 0; t < x.size(1); ++t) {
    for (int64_t i = 0; i < rotary / 2; ++i) {
      const double angle =
          static_cast<double>(t) *
          std::pow(o.base, -2.0 * static_cast<double>(i) / static_cast<double>(rotary));
      const int64_t a = o.layout == "half" ? i : 2 * i;
      const int64_t b = o.layout == "half" ? i + rotary / 2 : 2 * i + 1;
      const Tensor xa = x.select(1, t).select(2, a), xb = x.select(1, t).select(2, b);
      out.select(1, t).select(2, a).copy_(xa * std::cos(angle) - xb * std::sin(angle));
      out.select(1, t).select(2, b).copy_(xb * std::cos(angle) + xa * std::sin(angle));
    }
  }
  return out;
}

struct Attention {
  int64_t heads = 4, kv_heads = 4;
  bool qk_norm = false;
  int64_t window = 1 << 20;
};

Tensor attention(const Tensor& x, const Attention& a, const PositionOptions& position,
                 const Parameters& p, const std::string& name) {
  const int64_t length = x.size(1), dim = x.size(2) / a.heads;
  const auto parts = linear(x, p, name + ".qkv")
                         .split_with_sizes({a.heads * dim, a.kv_heads * dim, a.kv_heads * dim}, -1);
  Tensor q = parts[0].unflatten(-1, {a.heads, dim}), k = parts[1].unflatten(-1, {a.kv_heads, dim});
  Tensor v = parts[2].unflatten(-1, {a.kv_heads, dim});
  if (a.qk_norm) {
    q = q / at::sqrt(q.square().mean(-1, true) + 1e-6) * p.at(name + ".q_norm");
    k = k / at::sqrt(k.square().mean(-1, true) + 1e-6) * p.at(name + ".k_norm");
  }
  if (position.type == "rope") {
    q = rope(q, position);
    k = rope(k, position);
  }
  Tensor out = at::zeros({x.size(0), length, a.heads, dim}, x.options());
  for (int64_t h = 0; h < a.heads; ++h) {
    const int64_t group = h / (a.heads / a.kv_heads);
    for (int64_t t = 0; t < length; ++t) {
      const int64_t first = std::max<int64_t>(0, t + 1 - a.window), count = t + 1 - first;
      const Tensor keys = k.select(2, group).narrow(1, first, count);
      Tensor scores = at::matmul(keys, q.select(1, t).select(1, h).unsqueeze(-1)).squeeze(-1) /
                      std::sqrt(static_cast<double>(dim));
      if (position.type == "alibi") {
        const double slope =
            std::pow(2.0, -8.0 * static_cast<double>(h + 1) / static_cast<double>(a.heads));
        scores = scores - slope * (t - at::arange(first, t + 1, kDouble));
      }
      const Tensor weights = at::softmax(scores, -1).unsqueeze(1);
      out.select(1, t).select(1, h).copy_(
          at::matmul(weights, v.select(2, group).narrow(1, first, count)).squeeze(1));
    }
  }
  return linear(out.flatten(-2), p, name + ".output");
}

Tensor channel(const Tensor& x, const std::string& type, const Parameters& p,
               const std::string& name) {
  const Tensor h = linear(x, p, name + ".up");
  if (type == "mlp") {
    return linear(h * 0.5 * (1 + at::erf(h / std::sqrt(2.0))), p, name + ".down");
  }
  const int64_t hidden = h.size(-1) / 2;
  const Tensor gate = h.narrow(-1, 0, hidden);
  return linear(gate * at::sigmoid(gate) * h.narrow(-1, hidden, hidden), p, name + ".down");
}

// The logits of a decoder of mha layers, from the formulas.
Tensor literal(const ModelConfig& c, const Attention& a, const std::string& channel_type,
               const std::string& block, const Parameters& p, const Tensor& tokens) {
  Tensor x = p.at("embedding")
                 .index_select(0, tokens.flatten())
                 .view({tokens.size(0), tokens.size(1), c.width});
  const int64_t length = tokens.size(1);
  if (c.position.type == "learned") x = x + p.at("positions").narrow(0, 0, length);
  if (c.position.type == "sinusoidal") {
    Tensor table = at::zeros({length, c.width}, kDouble);
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t i = 0; i < c.width; ++i) {
        const double angle =
            static_cast<double>(t) *
            std::pow(10000.0, -static_cast<double>(i / 2 * 2) / static_cast<double>(c.width));
        table[t][i] = i % 2 == 0 ? std::sin(angle) : std::cos(angle);
      }
    }
    x = x + table;
  }
  for (int64_t i = 0; i < c.depth; ++i) {
    const std::string layer = "layer" + std::to_string(i);
    const auto mix = [&](const Tensor& y) {
      return attention(y, a, c.position, p, layer + ".mixer");
    };
    const auto feed = [&](const Tensor& y) {
      return channel(y, channel_type, p, layer + ".channel");
    };
    const auto normed = [&](const Tensor& y, const std::string& name) {
      return norm(y, c.norm, p, layer + "." + name);
    };
    if (block == "pre") {
      x = x + mix(normed(x, "mixer_norm"));
      x = x + feed(normed(x, "channel_norm"));
    } else if (block == "post") {
      x = normed(x + mix(x), "mixer_norm");
      x = normed(x + feed(x), "channel_norm");
    } else {
      x = x + mix(normed(x, "norm")) +
          feed(normed(x, block == "parallel2" ? "channel_norm" : "norm"));
    }
  }
  x = norm(x, c.norm, p, "norm");
  return at::matmul(x, p.at(c.tied ? "embedding" : "head.weight").t());
}

struct Case {
  std::string name, position = "type = 'rope'", norm = "rms_norm", block = "pre",
                    channel = "swiglu", mixer = "heads = 4";
  bool tied = true, bias = false;
  Attention attention = {};
};

class DecoderLiteral : public ::testing::TestWithParam<Case> {};

TEST_P(DecoderLiteral, ComputesTheFormulas) {
  at::manual_seed(1);
  const Case& c = GetParam();
  const std::string block = c.block == "pre"         ? "type = 'sequential'"
                            : c.block == "post"      ? "type = 'sequential', norm_place = 'post'"
                            : c.block == "parallel2" ? "type = 'parallel', norms = 2"
                                                     : "type = 'parallel'";
  const ModelConfig config = model_of(
      str("vocabulary = 19\nmax_length = 7\nwidth = 16\ndepth = 2\nnorm = '", c.norm,
          "'\ntied = ", c.tied ? "true" : "false", "\nbias = ", c.bias ? "true" : "false",
          "\nposition = { ", c.position, " }\n[[layer]]\nmixer = { type = 'mha', ", c.mixer,
          " }\nchannel = { type = '", c.channel, "', hidden = 10 }\nblock = { ", block, " }\n"));
  Decoder model(config);
  model.to(at::kDouble);
  randomize(model);
  const Parameters p = parameters_of(model);
  EXPECT_EQ(p.count("head.weight"), c.tied ? 0u : 1u);
  EXPECT_EQ(p.count("layer0.mixer.qkv.bias"), c.bias ? 1u : 0u);
  const Tensor input = tokens(2, 6, 19);
  at::NoGradGuard no_grad;
  EXPECT_TRUE(close(model.forward(input),
                    literal(config, c.attention, c.channel, c.block, p, input), 1e-10));
}

INSTANTIATE_TEST_SUITE_P(
    Models, DecoderLiteral,
    ::testing::Values(Case{.name = "pre"}, Case{.name = "post", .block = "post"},
                      Case{.name = "parallel", .block = "parallel"},
                      Case{.name = "parallel_two_norms", .block = "parallel2"},
                      Case{.name = "layer_norm", .norm = "layer_norm", .bias = true},
                      Case{.name = "no_norm", .norm = "none"},
                      Case{.name = "untied", .tied = false},
                      Case{.name = "mlp", .channel = "mlp", .bias = true},
                      Case{.name = "rope_interleaved",
                           .position = "layout = 'interleaved', base = 500"},
                      Case{.name = "rope_partial", .position = "fraction = 0.5"},
                      Case{.name = "rope_partial_interleaved",
                           .position = "fraction = 0.5, layout = 'interleaved'"},
                      Case{.name = "learned", .position = "type = 'learned'"},
                      Case{.name = "sinusoidal", .position = "type = 'sinusoidal'"},
                      Case{.name = "alibi", .position = "type = 'alibi'"},
                      Case{.name = "no_positions", .position = "type = 'none'"},
                      Case{.name = "grouped_queries",
                           .mixer = "heads = 4, kv_heads = 2",
                           .attention = {.heads = 4, .kv_heads = 2}},
                      Case{.name = "window_and_qk_norm",
                           .mixer = "heads = 4, window = 3, qk_norm = true",
                           .attention = {.heads = 4, .kv_heads = 4, .qk_norm = true, .window = 3}}),
    [](const auto& info) { return info.param.name; });

// --- Properties of every mixer in every block.
// -----------------------------------------------------

std::string tiny(const std::string& mixer, const std::string& block, const char* more = "") {
  // Depth 4: multi_token convolves in layer 2.
  return str("vocabulary = 23\nmax_length = 16\nwidth = 16\ndepth = 4\n", more,
             "\n[[layer]]\nmixer = { type = '", mixer, "'", heads_of(mixer, 4),
             " }\nchannel = { type = 'swiglu', hidden = 8 }\nblock = { type = '", block, "' }\n");
}

TEST(EveryMixerAndBlock, SeesNoLaterToken) {
  for (const auto& mixer : token_mixers()) {
    for (const auto& block : blocks()) {
      at::manual_seed(2);
      const auto built = decoder_if_it_fits(model_of(tiny(mixer.name, block.name)));
      if (!built) continue;
      Decoder& model = *built;
      randomize(model);
      model.eval();
      at::NoGradGuard no_grad;
      const Tensor before = tokens(2, 12, 23);
      const Tensor a = model.forward(before);
      for (const int64_t place : {1, 6, 11}) {
        Tensor after = before.clone();
        after.select(1, place).add_(1).remainder_(23);
        const Tensor difference = (model.forward(after) - a).abs().amax({0, 2});
        EXPECT_LT(difference.narrow(0, 0, place).max().item<double>(), 1e-5)
            << mixer.name << " in " << block.name << " sees token " << place << " too early";
        EXPECT_GT(difference.narrow(0, place, 12 - place).min().item<double>(), 1e-5)
            << mixer.name << " in " << block.name << " misses token " << place;
      }
    }
  }
}

TEST(EveryMixerAndBlock, KeepsDocumentsApart) {
  for (const auto& mixer : token_mixers()) {
    at::manual_seed(3);
    const auto built = decoder_if_it_fits(
        model_of(tiny(mixer.name, "sequential", "position = { type = 'none' }")));
    if (!built) continue;
    Decoder& model = *built;
    randomize(model);
    at::NoGradGuard no_grad;
    const Tensor input = tokens(2, 12, 23);
    MixerContext context;
    context.documents = at::arange(12, kLong).ge(5).to(at::kLong).expand({2, 12}).contiguous();
    Tensor other = input.clone();
    other.narrow(1, 0, 5).add_(3).remainder_(23);
    const Tensor a = model.forward(input, context), b = model.forward(other, context);
    EXPECT_LT((a - b).narrow(1, 5, 7).abs().max().item<double>(), 1e-5) << mixer.name;
    EXPECT_GT((a - b).narrow(1, 0, 5).abs().min().item<double>(), 0) << mixer.name;
  }
}

TEST(EveryMixerAndBlock, DropsOutOnlyInTraining) {
  for (const auto& block : blocks()) {
    const char* mixer = block.name == "simplified" ? "shaped" : "mha";
    Decoder model(model_of(tiny(mixer, block.name, "dropout = 0.3")));
    at::NoGradGuard no_grad;
    const Tensor input = tokens(2, 8, 23);
    model.train();
    const Tensor a = model.forward(input), b = model.forward(input);
    EXPECT_GT((a - b).abs().max().item<double>(), 1e-4) << block.name;
    model.eval();
    const Tensor c = model.forward(input);
    EXPECT_TRUE(c.equal(model.forward(input))) << block.name;
    EXPECT_GT((a - c).abs().max().item<double>(), 1e-4) << block.name;
  }
}

// An element of the stream stays as it is where all branches are dropped there.
TEST(EveryMixerAndBlock, DropsEachBranchByItself) {
  const LayerShape shape{.width = 32, .depth = 1};
  for (const char* name : {"sequential", "parallel"}) {
    const auto block =
        make_spec(blocks(), "block", name)
            ->build(
                {.shape = shape,
                 .mixer = make_spec(token_mixers(), "token mixer", "mha")->build(shape),
                 .channel = make_spec(channel_mixers(), "channel mixer", "swiglu")->build(shape),
                 .dropout = 0.5});
    block->train();
    at::NoGradGuard no_grad;
    const Tensor x = at::randn({8, 64, 32});
    const double kept = block->forward(x, {}).eq(x).to(at::kDouble).mean().item<double>();
    EXPECT_NEAR(kept, 0.25, 0.02) << name;
  }
}

}  // namespace
}  // namespace headloom::test::decoder_test
