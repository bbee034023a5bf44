// Every token mixer with every channel mixer in every block, causal and not: each trains, or is
// refused by a sentence that names the one that does not fit.
#include <gtest/gtest.h>

#include "blocks/block.h"
#include "support.h"

namespace headloom::test::combinations_test {
namespace {

constexpr int64_t kWidth = 32;

LayerShape shape_of(bool causal, const std::string& norm) {
  return {.width = kWidth, .depth = 2, .max_length = 16, .causal = causal, .norm = norm};
}

struct Parts {
  std::string mixer, channel, block;
  LayerShape shape;
};

// Two layers on top of each other. Throws UsageError where the parts do not fit.
std::vector<std::shared_ptr<Block>> build(const Parts& parts) {
  LayerShape shape = parts.shape;
  shape.shared = std::make_shared<std::map<std::string, Tensor>>();
  std::vector<std::shared_ptr<Block>> layers;
  for (shape.layer = 0; shape.layer < 2; ++shape.layer) {
    const auto mixer = make_spec(token_mixers(), "token mixer", parts.mixer)->build(shape);
    const auto channel = make_spec(channel_mixers(), "channel mixer", parts.channel)->build(shape);
    layers.push_back(
        make_spec(blocks(), "block", parts.block)
            ->build(
                {.shape = shape, .mixer = mixer, .channel = channel, .mixer_type = parts.mixer}));
  }
  return layers;
}

// One step down the gradient: all finite, and the loss falls.
void train(const std::vector<std::shared_ptr<Block>>& layers) {
  std::vector<std::pair<std::string, Tensor>> parameters;
  for (size_t i = 0; i < layers.size(); ++i) {
    for (const auto& item : layers[i]->named_parameters()) {
      parameters.emplace_back(str("layer", i, ".", item.key()), item.value());
    }
  }
  const Tensor x = at::randn({2, 12, kWidth}), target = at::randn({2, 12, kWidth});
  const auto loss = [&] {
    Tensor y = x;
    for (const auto& layer : layers) y = layer->forward(y, {});
    return (y - target).square().mean();
  };
  const Tensor before = loss();
  ASSERT_TRUE(before.isfinite().item<bool>());
  if (parameters.empty()) return;  // fnet without norms or channel mixer
  before.backward();
  double square = 0;
  for (const auto& [name, p] : parameters) {
    ASSERT_TRUE(p.grad().defined()) << name;
    ASSERT_TRUE(p.grad().isfinite().all().item<bool>()) << name;
    square += p.grad().square().sum().item<double>();
  }
  EXPECT_GT(square, 0);
  at::NoGradGuard no_grad;
  // So short a step that the loss falls by what the gradient says, nearly.
  const double step = 1e-3 * before.item<double>() / square;
  for (const auto& [name, p] : parameters) p.detach().sub_(p.grad() * step);
  EXPECT_LT(loss().item<double>(), before.item<double>());
}

TEST(Combinations, EveryOneTrainsOrIsRefusedByName) {
  at::manual_seed(5);
  for (const auto& mixer : token_mixers()) {
    for (const auto& channel : channel_mixers()) {
      for (const auto& block : blocks()) {
        for (const bool causal : {true, false}) {
          for (const char* norm : {"rms_norm", "none"}) {
            SCOPED_TRACE(str(mixer.name, " ", channel.name, " ", block.name, " ", norm,
                             causal ? " causal" : ""));
            // Only the simplified block is choosy; a mixer's traits say whether it can be causal,
            // not, or either.
            const bool fits = (block.name != "simplified" || mixer.name == "shaped") &&
                              (causal ? mixer.traits.causal
                                      : mixer.traits.bidirectional && channel.traits.bidirectional);
            try {
              const auto layers =
                  build({mixer.name, channel.name, block.name, shape_of(causal, norm)});
              EXPECT_TRUE(fits);
              train(layers);
            } catch (const UsageError& refusal) {
              const std::string sentence = refusal.what();
              EXPECT_FALSE(fits) << sentence;
              EXPECT_TRUE(sentence.starts_with(mixer.name) || sentence.starts_with(channel.name) ||
                          sentence.starts_with(block.name))
                  << sentence;
              EXPECT_EQ(sentence.back(), '.');
            }
          }
        }
      }
    }
    EXPECT_TRUE(mixer.traits.causal || mixer.traits.bidirectional) << mixer.name;
  }
}

}  // namespace
}  // namespace headloom::test::combinations_test
