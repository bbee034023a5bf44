// The mixers of the composed-attention family against their formulas: switched-off parts give the
// simpler mixer, parameters start as published, impossible options are refused.
#include "ops/composed_attention/op.h"
#include "support.h"

namespace headloom::composed_test {
namespace {

using test::close;
using test::parameters;

LayerShape shape_of(int64_t width = 96, int64_t layer = 0) {
  LayerShape out = test::shape_of(width, layer);
  out.position.type = "none";
  return out;
}

class ComposedMixers : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(21); }
};

// `mixer` computes what mha does once it has the same projections.
void expect_is_mha(TokenMixer& mixer, const std::string& options, const LayerShape& shape) {
  const auto mha = test::mixer("mha", options, shape);
  auto from = parameters(mixer);
  for (const auto& [name, value] : parameters(*mha)) test::set(*mha, name, from.at(name));
  const Tensor x = at::randn({2, 19, shape.width});
  EXPECT_TRUE(close(mixer.forward(x, {}), mha->forward(x, {}), 1e-5));
}

TEST_F(ComposedMixers, WithNothingComposedAreMha) {
  LayerShape shape = shape_of();
  shape.position.type = "rope";
  const std::string same = "heads = 6\nkv_heads = 3\nqk_norm = true\nwindow = 7";
  for (const char* off : {"query_wise = false\nkey_wise = false",
                          "projection = false\ngate = false", "pre = false\npost = false"}) {
    const auto mixer = test::mixer("dcmha", same + "\n" + off, shape);
    EXPECT_EQ(parameters(*mixer).size(), 4u) << off;
    expect_is_mha(*mixer, same, shape);
  }
  const auto silent = test::mixer("talking_heads", same + "\npre = false\npost = false", shape);
  EXPECT_EQ(parameters(*silent).size(), 4u);
  expect_is_mha(*silent, same, shape);
  const auto none = test::mixer("multi_token", "preset = \"none\"\n" + same, shape);
  EXPECT_EQ(parameters(*none).size(), 4u);
  expect_is_mha(*none, same, shape);
}

TEST_F(ComposedMixers, AtTheIdentityAreMha) {
  const LayerShape shape = shape_of(96, 2);
  const auto talking = test::mixer("talking_heads", "heads = 6", shape);
  test::set(*talking, "pre_mix", at::eye(6));
  test::set(*talking, "post_mix", at::eye(6));
  expect_is_mha(*talking, "heads = 6", shape);

  const auto skip =
      test::mixer("dcmha", "heads = 6\ngroups = 2\nstatic = \"add\"\nprojection = false", shape);
  test::set(*skip, "gate.weight", at::zeros({4 * 6, 96}));
  expect_is_mha(*skip, "heads = 6", shape);

  // Multi-token attention starts there.
  for (const char* options :
       {"norm = false", "norm = false\nconv_heads = 3\npost_conv = true\nconv_mask = \"exact\"",
        "norm = false\npre_mix = \"all\"\nconv_padding = \"left\"\nkey_kernel = 4",
        "norm = false\nconv_padding = \"right\"\nkey_kernel = 4\npost_conv = true"}) {
    const auto mixer = test::mixer("multi_token", str("heads = 6\n", options), shape);
    EXPECT_TRUE(parameters(*mixer).count("pre_conv")) << options;
    expect_is_mha(*mixer, "heads = 6", shape);
  }
}

TEST_F(ComposedMixers, TalkingHeadsChangesTheNumberOfHeads) {
  const LayerShape shape = shape_of();
  const auto mixer =
      test::mixer("talking_heads", "heads = 8\nkey_heads = 4\nvalue_heads = 6", shape);
  auto p = parameters(*mixer);
  const Tensor x = at::randn({2, 9, 96});
  const Tensor qkv = at::linear(x, p["qkv.weight"]);
  const auto heads = [&](int64_t part, int64_t n) {
    return qkv.narrow(-1, 96 * part, 96).unflatten(-1, {n, 96 / n}).transpose(1, 2);
  };
  const Tensor future = at::ones({9, 9}, at::kBool).triu(1);
  Tensor a = at::matmul(heads(0, 4), heads(1, 4).transpose(-1, -2)) / std::sqrt(24.0);
  a = at::einsum("bhts,hm->bmts", {a, p["pre_mix"]}).masked_fill(future, -1e30);
  const Tensor w = at::einsum("bhts,hm->bmts", {at::softmax(a, -1), p["post_mix"]});
  const Tensor o = at::matmul(w, heads(2, 6)).transpose(1, 2).flatten(2);
  EXPECT_TRUE(close(mixer->forward(x, {}), at::linear(o, p["output.weight"]), 1e-5));
  // From copies and means of heads, plus noise: every map keeps the others' total weight.
  EXPECT_TRUE(close(p["pre_mix"].sum(0), at::ones({8}), 0.3));
  EXPECT_TRUE(close(p["pre_mix"][0], at::tensor({1., 1., 0., 0., 0., 0., 0., 0.}), 0.12));
  EXPECT_TRUE(close(p["post_mix"].sum(0), at::ones({6}), 0.3));
}

// SPEC's formulas for the dynamic weights of one side, group by group.
struct Dynamic {
  Tensor down, up, gate;
};
Dynamic one_side(std::map<std::string, Tensor>& p, const Tensor& x, int64_t side, int64_t heads,
                 int64_t groups, int64_t rank) {
  const int64_t n = heads / groups, hidden = 2 * n * rank;
  std::vector<Tensor> down, up;
  for (int64_t g = 0; g < groups; ++g) {
    const Tensor w1 = p["w1.weight"].narrow(0, (side * groups + g) * hidden, hidden);
    const Tensor w = at::matmul(at::gelu(at::linear(x, w1)), p["w2"][side][g]);
    const auto halves = w.chunk(2, -1);
    const Tensor d = halves[0].unflatten(-1, {rank, n});
    down.push_back(d / (d.square().mean(-1, true) + 1e-6).sqrt());
    up.push_back(halves[1].unflatten(-1, {rank, n}));
  }
  return {at::cat(down, -1), at::cat(up, -1),
          at::tanh(at::linear(x, p["gate.weight"].narrow(0, side * heads, heads)))};
}

TEST_F(ComposedMixers, DcmhaFollowsItsFormula) {
  for (const auto& [groups, memory_length] : {std::pair(1, 0), {3, 0}, {1, 13}, {2, 13}}) {
    const int64_t heads = 6, rank = 3;
    const auto mixer = test::mixer(
        "dcmha", str("heads = 6\nrank = 3\nstatic = \"replace\"\ngroups = ", groups), shape_of());
    auto p = parameters(*mixer);
    {
      at::NoGradGuard no_grad;
      p["w2"].mul_(300);  // from small starting values to some that count
      p["gate.weight"].mul_(30);
    }
    const Tensor x = at::randn({2, 9, 96});
    MixerContext context;
    if (memory_length > 0) context.memory = at::randn({2, memory_length, 96});
    const Tensor memory = memory_length > 0 ? context.memory : x;
    ops::ComposedAttentionOptions o;
    o.causal = memory_length == 0;
    int64_t side = 0;
    for (const bool post : {false, true}) {
      ops::HeadMix& mix = post ? o.post : o.pre;
      const Dynamic query = one_side(p, x, side++, heads, groups, rank);
      const Dynamic key = one_side(p, memory, side++, heads, groups, rank);
      mix = {.static_matrix = p[post ? "post_static" : "pre_static"],
             .q_down = query.down,
             .q_up = query.up,
             .q_gate = query.gate,
             .k_down = key.down,
             .k_up = key.up,
             .k_gate = key.gate,
             .groups = groups};
    }
    const auto part = [&](int64_t i, const Tensor& input) {
      return at::linear(input, p["qkv.weight"].narrow(0, 96 * i, 96)).unflatten(-1, {6, 16});
    };
    const Tensor expected =
        ops::composed_attention(part(0, x), part(1, memory), part(2, memory), o).flatten(-2);
    EXPECT_TRUE(close(mixer->forward(x, context), at::linear(expected, p["output.weight"]), 1e-5))
        << groups << " " << memory_length;
  }
}

TEST_F(ComposedMixers, EveryDcmhaBranchIsSwitchedByItself) {
  const auto sides = [](const std::string& options) {
    return parameters(*test::mixer("dcmha", "heads = 6\n" + options, shape_of()));
  };
  EXPECT_EQ(sides("").at("w2").size(0), 4);
  EXPECT_EQ(sides("").at("gate.weight").size(0), 4 * 6);
  EXPECT_EQ(sides("").count("pre_static"), 0u);
  EXPECT_EQ(sides("pre = false").at("w2").size(0), 2);
  EXPECT_EQ(sides("post = false\nkey_wise = false").at("w2").size(0), 1);
  EXPECT_EQ(sides("projection = false").count("w1.weight"), 0u);
  EXPECT_EQ(sides("gate = false").count("gate.weight"), 0u);
  const auto only =
      sides("static = \"replace\"\nquery_wise = false\nkey_wise = false\npre = false");
  EXPECT_EQ(only.size(), 3u);
  EXPECT_EQ(only.at("post_static").sizes(), at::IntArrayRef({6, 6}));
  EXPECT_EQ(sides("static = \"add\"").at("pre_static").abs().max().item<double>(), 0);
  EXPECT_EQ(sides("static = \"replace\"\ngroups = 2").at("pre_static").sizes(),
            at::IntArrayRef({2, 3, 3}));
}

// Two separate attentions a head, as the paper writes it.
TEST_F(ComposedMixers, DifferentialIsTheDifferenceOfTwoAttentions) {
  for (const auto& [kv_heads, position] : {std::pair(6, "none"), {2, "none"}, {2, "alibi"}}) {
    LayerShape shape = shape_of(96, 3);
    shape.position.type = position;
    const auto mixer = test::mixer("differential", str("heads = 6\nkv_heads = ", kv_heads), shape);
    auto p = parameters(*mixer);
    const Tensor x = at::randn({2, 11, 96});
    const Tensor qkv = at::linear(x, p["qkv.weight"]);
    const Tensor q = qkv.narrow(-1, 0, 96).unflatten(-1, {12, 8}).transpose(1, 2);
    const Tensor k =
        qkv.narrow(-1, 96, 16 * kv_heads).unflatten(-1, {2 * kv_heads, 8}).transpose(1, 2);
    const Tensor v = qkv.narrow(-1, 96 + 16 * kv_heads, 16 * kv_heads)
                         .unflatten(-1, {kv_heads, 16})
                         .transpose(1, 2);
    const Tensor bias = alibi_bias(12, 11, 11, x.options())[0];
    const Tensor future = at::ones({11, 11}, at::kBool).triu(1);
    const auto map = [&](int64_t j, int64_t key) {
      Tensor a = at::matmul(q.select(1, j), k.select(1, key).transpose(-1, -2)) / std::sqrt(8.0);
      if (shape.position.type == "alibi") a = a + bias[j];
      return at::softmax(a.masked_fill(future, -1e30), -1);
    };
    const double start = 0.8 - 0.6 * std::exp(-0.3 * 3);
    const Tensor lambda = (p["lambda_q1"] * p["lambda_k1"]).sum().exp() -
                          (p["lambda_q2"] * p["lambda_k2"]).sum().exp() + start;
    std::vector<Tensor> heads;
    for (int64_t i = 0; i < 6; ++i) {
      const int64_t g = i / (6 / kv_heads);
      const Tensor weights = map(2 * i, 2 * g) - lambda * map(2 * i + 1, 2 * g + 1);
      const Tensor o = at::matmul(weights, v.select(1, g));
      heads.push_back(o / (o.square().mean(-1, true) + 1e-5).sqrt() * (1 - start));
    }
    const Tensor expected = at::linear(at::cat(heads, -1), p["output.weight"]);
    EXPECT_TRUE(close(mixer->forward(x, {}), expected, 1e-5)) << kv_heads << position;
  }
}

TEST_F(ComposedMixers, DifferentialPairingsAgreeWithoutGroups) {
  const Tensor x = at::randn({2, 11, 96});
  const auto run = [&](const char* options) {
    at::manual_seed(5);
    return test::mixer("differential", options, shape_of())->forward(x, {});
  };
  EXPECT_TRUE(close(run("heads = 6\npairing = \"repeat\""), run("heads = 6"), 1e-6));
  EXPECT_FALSE(close(run("heads = 6\nkv_heads = 2\npairing = \"repeat\""),
                     run("heads = 6\nkv_heads = 2"), 1e-2));
}

TEST_F(ComposedMixers, MultiTokenPresetsAndLayers) {
  const auto names = [](const std::string& options, int64_t layer) {
    std::string out;
    for (const auto& [name, value] :
         parameters(*test::mixer("multi_token", options, shape_of(96, layer)))) {
      out += name + " ";
    }
    return out;
  };
  EXPECT_EQ(names("", 0), "norm output.weight post_mix qkv.weight ");
  EXPECT_EQ(names("", 2), "norm output.weight post_mix pre_conv qkv.weight ");
  EXPECT_EQ(names("", 6), names("", 2));
  EXPECT_EQ(names("conv_layers = \"all\"", 0), names("", 2));
  EXPECT_EQ(names("preset = \"released\"", 2),
            "gate.bias gate.weight norm output.weight post_conv post_mix pre_conv pre_mix "
            "qkv.weight ");
  EXPECT_EQ(names("preset = \"released\"", 3),
            "gate.bias gate.weight norm output.weight post_mix pre_mix qkv.weight ");
  // What is written beside a preset wins, in any order.
  EXPECT_EQ(names("gate = \"none\"\npreset = \"released\"", 3),
            "norm output.weight post_mix pre_mix qkv.weight ");
  const auto p = parameters(*test::mixer("multi_token", "preset = \"released\"", shape_of(96, 2)));
  EXPECT_EQ(p.at("pre_conv").sizes(), at::IntArrayRef({8, 6, 11}));
  EXPECT_EQ(p.at("post_mix").sizes(), at::IntArrayRef({8, 8}));
  EXPECT_EQ(p.at("gate.weight").sizes(), at::IntArrayRef({1, 12}));
  const auto text = parameters(*test::mixer("multi_token", "", shape_of(96, 2)));
  EXPECT_EQ(text.at("post_mix").sizes(), at::IntArrayRef({4, 2, 2}));
}

TEST_F(ComposedMixers, MultiTokenNormFactorAndGate) {
  const Tensor x = at::randn({2, 11, 96});
  const auto base = [&](const std::string& options, int64_t layer) {
    at::manual_seed(5);
    const auto mixer =
        test::mixer("multi_token", "preset = \"none\"\nheads = 6\n" + options, shape_of(96, layer));
    // Without the output projection the heads themselves come out.
    test::set(*mixer, "output.weight", at::eye(96));
    return std::pair(mixer, mixer->forward(x, {}).unflatten(-1, {6, 16}));
  };
  const Tensor o = base("", 5).second;
  const Tensor normed = o / (o.square().mean(-1, true) + 1e-5).sqrt();
  EXPECT_TRUE(close(base("norm = true", 5).second, normed, 1e-5));
  const double factor = 1 - (0.8 - 0.6 * std::exp(-0.3 * 5));
  const Tensor scaled = base("norm = true\ndepth_scale = true", 5).second;
  EXPECT_TRUE(close(scaled, normed * factor, 1e-5));
  for (const char* gate : {"head", "full"}) {
    const auto [mixer, out] = base(str("norm = true\ngate = \"", gate, "\""), 5);
    const auto p = parameters(*mixer);
    const Tensor g = at::sigmoid(at::linear(normed, p.at("gate.weight"), p.at("gate.bias")));
    EXPECT_TRUE(close(out, normed * g, 1e-5)) << gate;
  }
}

TEST_F(ComposedMixers, StartAsPublished) {
  const int64_t width = 768, heads = 32;
  const auto near_normal = [](const Tensor& t, double std, const char* what) {
    ASSERT_GT(t.numel(), 500) << what;
    EXPECT_NEAR(t.std().item<double>() / std, 1, 4 / std::sqrt(2.0 * t.numel())) << what;
    EXPECT_LT(std::abs(t.mean().item<double>()), 5 * std / std::sqrt(1.0 * t.numel())) << what;
    EXPECT_GT(t.abs().max().item<double>(), 2.5 * std) << what;  // not uniform
  };
  for (const int64_t groups : {1, 4}) {
    const auto p = parameters(*test::mixer(
        "dcmha", str("heads = 32\nstatic = \"replace\"\ngroups = ", groups), shape_of(width)));
    const double n = 1.0 * heads / groups, r = 2, c = width;
    near_normal(p.at("w1.weight"), std::sqrt(2 / (c + 2 * n * r)), "w1");
    near_normal(p.at("w2"), 0.02 / (std::sqrt(2 * n * r) * (n + r)), "w2");
    near_normal(p.at("gate.weight"), 0.05 * std::sqrt(2 / (c + n)), "gate");
    near_normal(at::cat({p.at("pre_static").flatten(), p.at("post_static").flatten()}),
                std::sqrt(1 / n), "static");
    near_normal(p.at("qkv.weight"), 0.02, "qkv");
    near_normal(p.at("output.weight"), 0.02 / std::sqrt(2.0 * 4), "output");
  }
  const auto d =
      parameters(*test::mixer("differential", "heads = 1\nhead_dim = 400", shape_of(width)));
  near_normal(at::cat({d.at("lambda_q1"), d.at("lambda_k1"), d.at("lambda_q2"), d.at("lambda_k2")}),
              0.1, "lambda");
  EXPECT_TRUE(at::equal(d.at("norm"), at::ones({800})));
  const auto t = parameters(*test::mixer("talking_heads", "heads = 32", shape_of(width)));
  near_normal(t.at("pre_mix") - at::eye(32), 0.02, "pre_mix");
  near_normal(t.at("post_mix") - at::eye(32), 0.02, "post_mix");
}

// Keys visible to a query, averaged, from the maps' FLOPs.
TEST_F(ComposedMixers, MapCostsCountVisibleKeys) {
  for (const bool causal : {true, false}) {
    for (const int64_t window : {0, 1, 4, 9, 40}) {
      const int64_t length = 9;
      LayerShape shape = shape_of();
      shape.causal = causal;
      const auto mixer =
          test::mixer("mha", window > 0 ? str("heads = 6\nwindow = ", window) : "heads = 6", shape);
      double pairs = 0;
      for (int64_t t = 0; t < length; ++t) {
        for (int64_t s = 0; s < length; ++s) {
          const bool near = window == 0 || std::abs(t - s) < window;
          pairs += near && (!causal || s <= t) ? 1 : 0;
        }
      }
      for (const Cost& cost : mixer->costs(length)) {
        if (cost.part != "maps") continue;
        EXPECT_NEAR(cost.flops_per_token, pairs / length * 4 * 96, 1e-6) << causal << window;
      }
    }
  }
}

TEST_F(ComposedMixers, MechanismCostsAreTheirFormulas) {
  const auto flops = [](const std::string& name, const std::string& options, const char* part) {
    for (const Cost& cost : test::mixer(name, options, shape_of(96, 2))->costs(9)) {
      if (cost.part == part) return cost.mechanism ? cost.flops_per_token : -1;
    }
    return -2.0;
  };
  const double keys = 5;  // (9 + 1) / 2
  EXPECT_EQ(flops("dcmha", "heads = 6", "dynamic projections"), 2 * 4 * 24 * (96 + 24));
  EXPECT_EQ(flops("dcmha", "heads = 6\ngroups = 3", "dynamic projections"), 2 * 4 * 24 * (96 + 8));
  EXPECT_EQ(flops("dcmha", "heads = 6", "gates"), 2 * 4 * 96 * 6);
  EXPECT_EQ(flops("dcmha", "heads = 6", "dynamic composition"), 2 * 4 * keys * 6 * 5);
  EXPECT_EQ(flops("dcmha", "heads = 6\nstatic = \"add\"", "static composition"), 2 * 2 * keys * 36);
  EXPECT_EQ(flops("talking_heads", "heads = 6", "head mixing"), 2 * 2 * keys * 36);
  EXPECT_EQ(flops("differential", "heads = 6", "difference"), 2 * keys * 6);
  EXPECT_EQ(flops("multi_token", "heads = 6", "convolution"), 2 * keys * 6 * 66);
  EXPECT_EQ(flops("multi_token", "heads = 6", "head mixing"), 2 * keys * 6 * 2);
}

TEST_F(ComposedMixers, StateBytes) {
  const auto bytes = [](const std::string& name, const std::string& options) {
    return test::mixer(name, options, shape_of())->state_bytes(10) / 10;
  };
  EXPECT_EQ(bytes("mha", "heads = 6\nkv_heads = 2"), 4 * 2 * 32);
  EXPECT_EQ(bytes("dcmha", "heads = 6"), 4 * (2 * 96 + 2 * (2 * 2 * 6 + 6)));
  EXPECT_EQ(bytes("dcmha", "heads = 6\nkey_wise = false"), 4 * 2 * 96);
  EXPECT_EQ(bytes("dcmha", "heads = 6\npre = false\ngate = false"), 4 * (2 * 96 + 2 * 2 * 6));
  EXPECT_EQ(bytes("differential", "heads = 6\nkv_heads = 3"), 4 * (6 * 8 + 3 * 16));
}

TEST_F(ComposedMixers, RefuseWhatDoesNotFit) {
  const struct {
    const char* mixer;
    const char* options;
    const char* message;
  } cases[] = {
      {"mha", "heads = 7", "heads is 7, expected a divisor of the model's width = 96"},
      {"mha", "heads = 6\nkv_heads = 4", "kv_heads is 4, expected a divisor of heads = 6"},
      {"mha", "window = 0", "window"},
      {"mha", "heds = 4", "did you mean 'mha.heads'"},
      {"dcmha", "heads = 6\ngroups = 4", "groups is 4, expected a divisor of heads = 6"},
      {"dcmha", "heads = 5", "heads is 5"},
      {"dcmha", "rank = 0", "rank"},
      {"dcmha", "static = \"on\"", "static"},
      {"talking_heads", "heads = 6\npre = false\nkey_heads = 3", "key_heads is 3"},
      {"talking_heads", "heads = 6\npost = false\nvalue_heads = 3", "value_heads is 3"},
      {"talking_heads", "key_heads = 7", "key_heads is 7"},
      {"talking_heads", "heads = 6\nvalue_heads = 4\nkv_heads = 3", "kv_heads is 3"},
      {"differential", "heads = 5", "heads is 5"},
      {"differential", "heads = 6\nkv_heads = 4", "kv_heads is 4"},
      {"differential", "pairing = \"half\"", "pairing"},
      {"multi_token", "heads = 3", "expected a divisor of heads = 3"},
      {"multi_token", "key_kernel = 10", "key_kernel is 10, expected an odd number"},
      {"multi_token", "conv_heads = 5", "conv_heads is 5"},
      {"multi_token", "preset = \"txt\"", "preset"},
  };
  for (const auto& c : cases) {
    try {
      test::mixer(c.mixer, c.options, shape_of());
      ADD_FAILURE() << c.mixer << " accepts " << c.options;
    } catch (const UsageError& e) {
      const std::string message = e.what();
      EXPECT_NE(message.find(c.message), std::string::npos) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace headloom::composed_test
