// Simplified blocks against tensors recorded from the authors' code, and what they refuse.
#include "testing/golden.h"

#include <gtest/gtest.h>

#include "blocks/block.h"
#include "ops/positionwise/op.h"
#include "support.h"

namespace headloom::test::simplified_test {
namespace {

LayerShape shape_of(int64_t width, int64_t layer, const std::string& norm = "rms_norm") {
  return {.width = width, .layer = layer, .depth = 3, .norm = norm, .position = {.type = "none"}};
}

std::shared_ptr<Block> block_of(const LayerShape& shape, const std::string& options,
                                const std::string& mixer = "shaped", int64_t heads = 6) {
  const auto token = make_spec(token_mixers(), "token mixer", mixer);
  read_fields(parse_toml(str("heads = ", heads), "test"), *token);
  const auto channel = make_spec(channel_mixers(), "channel mixer", "mlp");
  read_fields(parse_toml("activation = 'relu'", "test"), *channel);
  const auto block = make_spec(blocks(), "block", "simplified");
  read_fields(parse_toml(options, "test"), *block);
  return block->build({.shape = shape,
                       .mixer = token->build(shape),
                       .channel = channel->build(shape),
                       .mixer_type = mixer});
}

void against_recording(const std::string& name, const std::string& form) {
  const Tensors g = read_golden(name);
  const auto block = block_of(shape_of(60, 1), "form = '" + form + "'");
  const bool serial = form == "serial";
  // Our name, theirs, whether theirs is transposed ([in, out]).
  std::vector<std::tuple<std::string, std::string, bool>> names = {
      {"norm.weight", "ln_1.scale", false},
      {"mixer.qk.weight", "attn.qk_attn.weight", true},
      {"mixer.qk.bias", "attn.qk_attn.bias", false},
      {"mixer.identity_gain", "attn.attn_mat_skip_gain", false},
      {"mixer.map_gain", "attn.attn_mat_resid_gain", false},
      {"mixer.uniform_gain", "attn.centre_attn_gain", false},
      {"mixer_gain", "attn_block_resid_gain", false},
      {"channel_gain", "mlp_block_resid_gain", false},
      {"channel.up.weight", "mlp.c_fc.weight", true},
      {"channel.down.weight", "mlp.c_proj.weight", true}};
  if (serial) {
    names.push_back({"skip_gain", "mlp_block_skip_gain", false});
    names.push_back({"channel_norm.weight", "ln_2.scale", false});
  }
  auto parameters = parameters_of(*block);
  EXPECT_EQ(parameters.size(), names.size());
  const auto theirs = [&](const std::string& key, bool transposed, const Tensor& like) {
    const Tensor t = g.at(key);
    return transposed ? t.t() : t.reshape(like.sizes());
  };
  for (const auto& [ours, key, transposed] : names) {
    at::NoGradGuard no_grad;
    parameters.at(ours).copy_(theirs(key, transposed, parameters.at(ours)));
  }
  const Tensor x = leaf(g.at("x"));
  const Tensor y = block->forward(x, {});
  EXPECT_TRUE(close(y, g.at("out"), 1e-4));
  (y * g.at("cotangent")).sum().backward();
  EXPECT_TRUE(close(x.grad(), g.at("grad.x"), 1e-3));
  for (const auto& [ours, key, transposed] : names) {
    const Tensor& p = parameters.at(ours);
    EXPECT_TRUE(close(p.grad(), theirs("grad." + key, transposed, p), 1e-3)) << ours;
  }
}

TEST(Simplified, SerialGolden) { against_recording("simplified_sas_layer1", "serial"); }

TEST(Simplified, ParallelGolden) { against_recording("simplified_sasp_layer1", "parallel"); }

TEST(Simplified, StartsAsTheNormAndATenthOfTheChannelMixer) {
  const Tensor x = at::randn({2, 5, 12});
  for (const int64_t layer : {0, 1}) {
    for (const std::string form : {"serial", "parallel"}) {
      const auto block = block_of(shape_of(12, layer), "form = '" + form + "'", "shaped", 3);
      const auto p = parameters_of(*block);
      const Tensor normed = ops::rms_norm(x, {}, 1e-6);
      const Tensor inner = form == "serial" ? ops::rms_norm(normed, {}, 1e-6) : normed;
      const Tensor mlp = at::linear(at::relu(at::linear(inner, p.at("channel.up.weight"))),
                                    p.at("channel.down.weight"));
      EXPECT_TRUE(close(block->forward(x, {}), normed + 0.1 * mlp, 1e-4));
    }
  }
}

TEST(Simplified, WithoutNormsTheFirstLayerKeepsItsOwn) {
  for (const std::string form : {"serial", "parallel"}) {
    const auto norms = [&](int64_t layer) {
      int64_t count = 0;
      const auto block =
          block_of(shape_of(12, layer, "none"), "form = '" + form + "'", "shaped", 3);
      for (const auto& [name, value] : parameters_of(*block)) {
        count += name.find("norm") != std::string::npos;
      }
      return count;
    };
    EXPECT_EQ(norms(0), form == "serial" ? 2 : 1);
    EXPECT_EQ(norms(1), 0);
  }
}

TEST(Simplified, CombAddsTheInput) {
  const Tensor x = at::randn({2, 5, 12});
  at::manual_seed(4);
  const auto plain = block_of(shape_of(12, 1), "form = 'parallel'", "shaped", 3);
  at::manual_seed(4);
  const auto comb = block_of(shape_of(12, 1), "form = 'parallel'\ncomb = 0.5", "shaped", 3);
  EXPECT_TRUE(close(comb->forward(x, {}), plain->forward(x, {}) + 0.5 * x, 1e-5));
  comb->forward(x, {}).sum().backward();
  EXPECT_TRUE(parameters_of(*comb).at("comb").grad().defined());
  EXPECT_EQ(message_of<UsageError>([] { block_of(shape_of(12, 1), "comb = 0.5", "shaped", 3); }),
            "simplified: comb is 0.5, expected none where form is \"serial\".");
}

TEST(Simplified, RefusesMixersThatNeedASkip) {
  EXPECT_EQ(message_of<UsageError>([] { block_of(shape_of(12, 1), "", "mha", 3); }),
            "simplified has no skip around its token mixer, so mha cannot be in it; expected "
            "shaped.");
}

}  // namespace
}  // namespace headloom::test::simplified_test
