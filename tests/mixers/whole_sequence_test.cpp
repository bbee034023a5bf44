// Mixers of whole sequences: fnet and linformer.
#include "support.h"
#include "testing/errors.h"
#include "testing/golden.h"

namespace headloom::whole_sequence_test {
namespace {

using test::close;
using test::message_of;

LayerShape shape_of(int64_t width, int64_t length = 32) {
  return {.width = width, .max_length = length, .causal = false, .position = {.type = "none"}};
}

TEST(FNet, IsTheRealPartOfTwoTransforms) {
  at::manual_seed(1);
  for (const auto& [length, width] : {std::pair(1, 4), std::pair(6, 5), std::pair(7, 8)}) {
    const Tensor x = at::randn({2, length, width}, test::kDouble);
    Tensor expected = at::zeros_like(x);
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t c = 0; c < width; ++c) {
        Tensor sum = at::zeros({2}, test::kDouble);
        for (int64_t s = 0; s < length; ++s) {
          for (int64_t d = 0; d < width; ++d) {
            const double turns =
                static_cast<double>(t * s) / length + static_cast<double>(c * d) / width;
            sum += x.select(1, s).select(1, d) * std::cos(2 * M_PI * turns);
          }
        }
        expected.select(1, t).select(1, c).copy_(sum);
      }
    }
    const auto mixer = test::mixer("fnet", "", shape_of(width));
    EXPECT_TRUE(mixer->parameters().empty());
    EXPECT_TRUE(close(mixer->forward(x, {}), expected, 1e-12));
  }
}

TEST(FNet, Golden) {
  const test::Tensors g = test::read_golden("fnet_mix_odd");
  const auto mixer = test::mixer("fnet", "", shape_of(30));
  const Tensor x = test::leaf(g.at("x"));
  const Tensor y = mixer->forward(x, {});
  EXPECT_TRUE(close(y, g.at("out"), 1e-5));
  (y * g.at("cotangent")).sum().backward();
  EXPECT_TRUE(close(x.grad(), g.at("grad.x"), 1e-5));
}

TEST(FNet, RefusesWhatItCannot) {
  LayerShape causal = shape_of(8);
  causal.causal = true;
  EXPECT_EQ(message_of<UsageError>([&] { test::mixer("fnet", "", causal); }),
            "fnet mixes the whole sequence, but the model is causal.");
  const auto mixer = test::mixer("fnet", "", shape_of(8));
  MixerContext packed;
  packed.documents = at::zeros({1, 4}, test::kLong);
  EXPECT_EQ(message_of<UsageError>([&] { mixer->forward(at::ones({1, 4, 8}), packed); }),
            "fnet: documents are packed in a sequence, all of which it mixes, expected none (in a "
            "configuration: task.separate_documents = false).");
}

TEST(Linformer, Golden) {
  const test::Tensors g = test::read_golden("linformer");
  const auto mixer = test::mixer("linformer", "heads = 6\nrank = 8", shape_of(60));
  test::set(*mixer, "qkv.weight",
            at::cat({g.at("to_q.weight"), g.at("to_k.weight"), g.at("to_v.weight")}));
  test::set(*mixer, "output.weight", g.at("to_out.weight"));
  test::set(*mixer, "e", g.at("proj_k"));
  test::set(*mixer, "f", g.at("proj_v"));
  const Tensor x = test::leaf(g.at("x"));
  const Tensor y = mixer->forward(x, {}) + g.at("to_out.bias");
  EXPECT_TRUE(close(y, g.at("out"), 1e-4));
  (y * g.at("cotangent")).sum().backward();
  EXPECT_TRUE(close(x.grad(), g.at("grad.x"), 1e-3));
  const auto p = test::parameters(*mixer);
  const auto grad = [&](const std::string& name) { return g.at("grad." + name); };
  EXPECT_TRUE(close(p.at("qkv.weight").grad(),
                    at::cat({grad("to_q.weight"), grad("to_k.weight"), grad("to_v.weight")}),
                    1e-3));
  EXPECT_TRUE(close(p.at("output.weight").grad(), grad("to_out.weight"), 1e-3));
  EXPECT_TRUE(close(p.at("e").grad(), grad("proj_k"), 1e-3));
  EXPECT_TRUE(close(p.at("f").grad(), grad("proj_v"), 1e-3));
}

// The formula, head by head, in double.
Tensor by_hand(const torch::nn::Module& mixer, const Tensor& x, int64_t heads, bool per_head) {
  const auto p = test::parameters(mixer);
  const int64_t length = x.size(1), size = x.size(2) / heads;
  const auto qkv = at::linear(x, p.at("qkv.weight")).chunk(3, -1);
  const Tensor e = p.at("e"), f = p.count("f") ? p.at("f") : e;
  std::vector<Tensor> out;
  for (int64_t h = 0; h < heads; ++h) {
    const auto head = [&](const Tensor& t) { return t.narrow(-1, h * size, size); };
    const auto rows = [&](const Tensor& w) {
      return (per_head ? w[h] : w).narrow(0, 0, length).t();
    };
    const Tensor k = at::matmul(rows(e), head(qkv[1])), v = at::matmul(rows(f), head(qkv[2]));
    const Tensor scores =
        at::matmul(head(qkv[0]), k.transpose(1, 2)) / std::sqrt(static_cast<double>(size));
    out.push_back(at::matmul(at::softmax(scores, -1), v));
  }
  return at::linear(at::cat(out, -1), p.at("output.weight"));
}

TEST(Linformer, EverySharingComputesTheFormulaOnShortSequencesToo) {
  at::manual_seed(2);
  for (const std::string sharing : {"none", "headwise", "kv", "layerwise"}) {
    SCOPED_TRACE(sharing);
    const auto mixer = test::mixer(
        "linformer", "heads = 3\nrank = 5\nsharing = \"" + sharing + "\"", shape_of(12, 9));
    mixer->to(at::kDouble);
    const auto p = test::parameters(*mixer);
    EXPECT_EQ(p.count("f"), sharing == "none" || sharing == "headwise" ? 1u : 0u);
    EXPECT_EQ(p.at("e").dim(), sharing == "none" ? 3 : 2);
    const double bound = std::sqrt(6.0 / (9 + 5));
    EXPECT_LE(p.at("e").abs().max().item<double>(), bound);
    EXPECT_GT(p.at("e").abs().max().item<double>(), 0.5 * bound);
    for (const int64_t length : {1, 4, 9}) {
      const Tensor x = at::randn({2, length, 12}, test::kDouble);
      EXPECT_TRUE(close(mixer->forward(x, {}), by_hand(*mixer, x, 3, sharing == "none"), 1e-10));
    }
    EXPECT_EQ(
        message_of<UsageError>([&] { mixer->forward(at::ones({1, 10, 12}, test::kDouble), {}); }),
        "linformer: the sequence has 10 positions, but its projections are for 9 at most "
        "(model.max_length).");
  }
}

// Projections that are the identity leave every key and value as it is.
TEST(Linformer, OfTheWholeLengthsRankIsPlainAttention) {
  at::manual_seed(3);
  for (const char* position : {"none", "rope"}) {
    LayerShape shape = shape_of(12, 7);
    shape.position.type = position;
    const auto linformer = test::mixer("linformer", "heads = 3\nrank = 7", shape);
    const auto mha = test::mixer("mha", "heads = 3", shape);
    test::add_noise(*linformer, 0.5);
    const auto p = test::parameters(*linformer);
    for (const char* name : {"qkv.weight", "output.weight"}) test::set(*mha, name, p.at(name));
    const Tensor x = at::randn({2, 7, 12}), expected = mha->forward(x, {});
    EXPECT_FALSE(close(linformer->forward(x, {}), expected, 1e-2)) << position;
    for (const char* name : {"e", "f"}) test::set(*linformer, name, at::eye(7));
    EXPECT_TRUE(close(linformer->forward(x, {}), expected, 1e-5)) << position;
  }
}

TEST(Linformer, LayersShareOneProjectionWhereTheModelLetsThem) {
  LayerShape shape = shape_of(12, 9);
  shape.shared = std::make_shared<std::map<std::string, Tensor>>();
  const std::string options = "heads = 3\nrank = 5\nsharing = \"layerwise\"";
  const auto first = test::mixer("linformer", options, shape);
  const auto second = test::mixer("linformer", options, shape);
  EXPECT_EQ(test::parameters(*first).count("e"), 1u);
  EXPECT_EQ(test::parameters(*second).count("e"), 0u);
  const Tensor x = at::randn({1, 9, 12});
  const Tensor before = second->forward(x, {});
  second->forward(x, {}).sum().backward();
  EXPECT_TRUE(test::parameters(*first).at("e").grad().defined());
  test::set(*first, "e", at::zeros({9, 5}));
  EXPECT_FALSE(close(second->forward(x, {}), before, 1e-3));
  // The second layer's costs do not count it again.
  EXPECT_EQ(first->costs(9).back().parameters, 45);
  EXPECT_EQ(second->costs(9).back().parameters, 0);
  const auto other =
      test::mixer("linformer", "heads = 3\nrank = 4\nsharing = \"layerwise\"", shape);
  EXPECT_EQ(test::parameters(*other).count("e"), 1u);
}

TEST(Linformer, RefusesWhatItCannot) {
  LayerShape causal = shape_of(12);
  causal.causal = true;
  EXPECT_EQ(message_of<UsageError>([&] { test::mixer("linformer", "heads = 3", causal); }),
            "linformer mixes the whole sequence, but the model is causal.");
  EXPECT_TRUE(test::contains(
      message_of<UsageError>([&] { test::mixer("linformer", "heads = 5", shape_of(12)); }),
      "linformer: heads is 5"));
  LayerShape alibi = shape_of(12);
  alibi.position.type = "alibi";
  EXPECT_TRUE(test::contains(
      message_of<UsageError>([&] { test::mixer("linformer", "heads = 3", alibi); }), "alibi"));
  const auto mixer = test::mixer("linformer", "heads = 3", shape_of(12));
  MixerContext packed;
  packed.documents = at::zeros({1, 4}, test::kLong);
  EXPECT_TRUE(test::contains(
      message_of<UsageError>([&] { mixer->forward(at::ones({1, 4, 12}), packed); }), "documents"));
}

}  // namespace
}  // namespace headloom::whole_sequence_test
