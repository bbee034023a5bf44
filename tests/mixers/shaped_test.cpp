// Shaped attention: the formula with its maps written out, the start, documents and padding.
#include "support.h"

namespace headloom::shaped_test {
namespace {

using test::close;

LayerShape shape_of(int64_t layer, bool causal) {
  LayerShape out = test::shape_of(12, layer);
  out.causal = causal;
  out.position.type = "none";
  return out;
}

// A' v with A' = beta softmax + alpha I - gamma U, head by head; visible [B, T, T].
Tensor by_hand(const torch::nn::Module& mixer, const Tensor& x, const Tensor& visible) {
  const auto p = test::parameters(mixer);
  const int64_t heads = 3, size = 4;
  const auto qk = at::linear(x, p.at("qk.weight"), p.at("qk.bias")).chunk(2, -1);
  Tensor v = x;
  if (p.count("value.weight")) {
    v = at::linear(x, p.at("value.weight")) * p.at("value_gain") + x * p.at("value_skip_gain");
  }
  const Tensor seen = visible.to(x.scalar_type());
  const Tensor uniform = seen / seen.sum(-1, true);
  std::vector<Tensor> out;
  for (int64_t h = 0; h < heads; ++h) {
    const auto head = [&](const Tensor& t) { return t.narrow(-1, h * size, size); };
    const Tensor scores = at::matmul(head(qk[0]), head(qk[1]).transpose(1, 2)) / 2.0;
    const Tensor softmax = at::softmax(scores.masked_fill(visible.logical_not(), -INFINITY), -1);
    const Tensor map = p.at("map_gain")[h] * softmax +
                       p.at("identity_gain")[h] * at::eye(x.size(1), x.options()) -
                       p.at("uniform_gain")[h] * uniform;
    out.push_back(at::matmul(map, head(v)));
  }
  return at::cat(out, -1);
}

TEST(Shaped, ComputesTheFormula) {
  at::manual_seed(3);
  const Tensor place = at::arange(9, test::kLong);
  for (const bool causal : {true, false}) {
    for (const int64_t layer : {0, 2}) {
      for (const bool packed : {false, true}) {
        for (const bool padded : {false, true}) {
          SCOPED_TRACE(
              str("causal ", causal, " layer ", layer, " documents ", packed, " lengths ", padded));
          const auto mixer = test::mixer("shaped", "heads = 3", shape_of(layer, causal));
          mixer->to(at::kDouble);
          test::add_noise(*mixer, 0.5);
          const Tensor x = at::randn({2, 9, 12}, test::kDouble);
          Tensor visible = at::ones({2, 9, 9}, at::kBool);
          MixerContext context;
          Tensor rows = at::ones({2, 9}, at::kBool);
          if (causal) visible = visible.logical_and(place.unsqueeze(0).le(place.unsqueeze(1)));
          if (packed) {
            context.documents =
                at::tensor({0, 0, 0, 5, 5, 5, 5, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1}, test::kLong)
                    .view({2, 9});
            visible = visible.logical_and(
                context.documents.unsqueeze(1).eq(context.documents.unsqueeze(2)));
          }
          if (padded) {
            context.lengths = at::tensor({6, 9}, test::kLong);
            rows = place.lt(context.lengths.unsqueeze(1));
            visible = visible.logical_and(rows.unsqueeze(1));
          }
          const Tensor y = mixer->forward(x, context), expected = by_hand(*mixer, x, visible);
          EXPECT_TRUE(close(y.index({rows}), expected.index({rows}), 1e-10));
        }
      }
    }
  }
}

// The softmax term alone is plain attention without an output projection.
TEST(Shaped, WithoutIdentityAndMeanIsPlainAttention) {
  at::manual_seed(4);
  for (const bool causal : {true, false}) {
    for (const char* position : {"rope", "alibi"}) {
      LayerShape shape = shape_of(0, causal);
      shape.position.type = position;
      const auto shaped = test::mixer("shaped", "heads = 3", shape);
      shape.bias = true;
      const auto mha = test::mixer("mha", "heads = 3", shape);
      test::add_noise(*shaped, 0.5);
      const Tensor x = at::randn({2, 9, 12});
      const Tensor before = shaped->forward(x, {});
      test::set(*shaped, "map_gain", at::ones({3}));
      test::set(*shaped, "identity_gain", at::zeros({3}));
      test::set(*shaped, "uniform_gain", at::zeros({3}));
      const auto p = test::parameters(*shaped);
      const Tensor one = at::eye(12);
      const Tensor value =
          p.at("value.weight") * p.at("value_gain") + one * p.at("value_skip_gain");
      test::set(*mha, "qkv.weight", at::cat({p.at("qk.weight"), value}));
      test::set(*mha, "qkv.bias", at::cat({p.at("qk.bias"), at::zeros({12})}));
      test::set(*mha, "output.weight", one);
      test::set(*mha, "output.bias", at::zeros({12}));
      const Tensor y = shaped->forward(x, {});
      EXPECT_TRUE(close(y, mha->forward(x, {}), 1e-5)) << position << causal;
      EXPECT_FALSE(close(y, before, 1e-2)) << position << causal;
    }
  }
}

TEST(Shaped, StartsAsTheIdentity) {
  for (const int64_t layer : {0, 1}) {
    const auto mixer = test::mixer("shaped", "heads = 3", shape_of(layer, true));
    const Tensor x = at::randn({2, 7, 12});
    EXPECT_TRUE(close(mixer->forward(x, {}), x, 1e-5));
    EXPECT_EQ(test::parameters(*mixer).count("value.weight"), layer == 0 ? 1u : 0u);
    EXPECT_EQ(test::parameters(*mixer).at("qk.weight").narrow(0, 0, 12).abs().max().item<double>(),
              0);
  }
}

}  // namespace
}  // namespace headloom::shaped_test
