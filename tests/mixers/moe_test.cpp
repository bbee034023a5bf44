// The mixture of experts against the original authors' code and its formula token by token, its
// choice, its balance loss, its costs and what it refuses.
#include "support.h"
#include "testing/autocast.h"
#include "testing/errors.h"
#include "testing/golden.h"

namespace headloom::moe_test {
namespace {

using namespace test;

std::shared_ptr<ChannelMixer> moe(const std::string& options, int64_t width = 24) {
  return channel_mixer("moe", options, shape_of(width, 3));
}

TEST(MoeMixer, IsThePublishedOne) {
  const auto g = read_golden("deepseek_moe_v2_greedy");
  const auto mixer = moe("hidden = 20\nrouted = 8\nshared = 2\nactive = 3", 36);
  const auto joined = [](const Tensor& gate, const Tensor& up) { return at::cat({gate, up}); };
  set(*mixer, "gate.weight", g.at("gate.weight"));
  set(*mixer, "up", g.at("experts.gate_up_proj"));
  set(*mixer, "down", g.at("experts.down_proj"));
  set(*mixer, "shared_up.weight",
      joined(g.at("shared_experts.gate_proj.weight"), g.at("shared_experts.up_proj.weight")));
  set(*mixer, "shared_down.weight", g.at("shared_experts.down_proj.weight"));
  const Tensor x = leaf(g.at("x"));
  const Tensor y = mixer->forward(x, {});
  EXPECT_TRUE(close(y, g.at("out"), 1e-5));
  (y * g.at("cotangent")).sum().backward();
  const auto p = parameters(*mixer);
  EXPECT_TRUE(close(x.grad(), g.at("grad.x"), 1e-4));
  EXPECT_TRUE(close(p.at("gate.weight").grad(), g.at("grad.gate.weight"), 1e-4));
  EXPECT_TRUE(close(p.at("up").grad(), g.at("grad.experts.gate_up_proj"), 1e-4));
  EXPECT_TRUE(close(p.at("down").grad(), g.at("grad.experts.down_proj"), 1e-4));
  EXPECT_TRUE(close(p.at("shared_up.weight").grad(),
                    joined(g.at("grad.shared_experts.gate_proj.weight"),
                           g.at("grad.shared_experts.up_proj.weight")),
                    1e-4));
  EXPECT_TRUE(
      close(p.at("shared_down.weight").grad(), g.at("grad.shared_experts.down_proj.weight"), 1e-4));
}

struct Variant {
  const char* options;
  bool sigmoid = false, renormalise = false, bias = false;
  int64_t shared = 1, groups = 1, active_groups = 1;
  double scaling = 1;
};

// Six experts in all of them, two active.
std::vector<Variant> variants() {
  return {
      {.options = "routed = 6\nshared = 1\nactive = 2"},
      {.options = "routed = 6\nshared = 0\nactive = 2\nrenormalise = true",
       .renormalise = true,
       .shared = 0},
      {.options = "routed = 6\nshared = 1\nactive = 2\nscaling = 2.5", .scaling = 2.5},
      {.options = "routed = 6\nshared = 1\nactive = 2\nscores = 'sigmoid'\nbias_speed = 0.01\n"
                  "renormalise = true\nscaling = 2.5",
       .sigmoid = true,
       .renormalise = true,
       .bias = true,
       .scaling = 2.5},
      {.options = "routed = 6\nshared = 1\nactive = 2\ngroups = 3\nactive_groups = 1", .groups = 3},
      {.options = "routed = 6\nshared = 2\nactive = 2\ngroups = 2\nactive_groups = 1\n"
                  "scores = 'sigmoid'",
       .sigmoid = true,
       .shared = 2,
       .groups = 2}};
}

// One token, in double, by sorting.
Tensor naive(const Variant& v, std::map<std::string, Tensor>& p, const Tensor& x) {
  const int64_t routed = 6, size = routed / v.groups;
  const Tensor logits = at::mv(p["gate.weight"], x);
  const Tensor s = v.sigmoid ? logits.sigmoid() : logits.exp() / logits.exp().sum();
  std::vector<std::pair<double, int64_t>> order;
  std::vector<double> value(static_cast<size_t>(v.groups));
  std::vector<double> merit;
  for (int64_t i = 0; i < routed; ++i) {
    merit.push_back(s[i].item<double>() + (v.bias ? p["choice_bias"][i].item<double>() : 0));
  }
  for (int64_t g = 0; g < v.groups; ++g) {
    std::vector<double> of_group(merit.begin() + g * size, merit.begin() + (g + 1) * size);
    std::sort(of_group.rbegin(), of_group.rend());
    value[static_cast<size_t>(g)] = of_group[0] + (v.sigmoid && size > 1 ? of_group[1] : 0);
  }
  for (int64_t i = 0; i < routed; ++i) {
    int64_t better = 0;
    for (const double other : value) better += other > value[static_cast<size_t>(i / size)];
    if (better < v.active_groups) order.emplace_back(-merit[static_cast<size_t>(i)], i);
  }
  std::sort(order.begin(), order.end());
  const auto swiglu = [&](const Tensor& up, const Tensor& down) {
    const auto h = at::mv(up, x).chunk(2);
    return at::mv(down, h[0] * h[0].sigmoid() * h[1]);
  };
  Tensor y =
      v.shared > 0 ? swiglu(p["shared_up.weight"], p["shared_down.weight"]) : at::zeros_like(x);
  const double sum = (s[order[0].second] + s[order[1].second]).item<double>();
  for (int j = 0; j < 2; ++j) {
    const int64_t i = order[static_cast<size_t>(j)].second;
    const double weight = s[i].item<double>() / (v.renormalise ? sum : 1) * v.scaling;
    y = y + weight * swiglu(p["up"][i], p["down"][i]);
  }
  return y;
}

// The weight of the only expert is made 1, whatever its score.
TEST(MoeMixer, OfOneExpertIsSwiglu) {
  at::manual_seed(4);
  for (const char* scores : {"softmax", "sigmoid"}) {
    const auto one = moe(str("hidden = 20\nrouted = 1\nshared = 0\nactive = 1\n",
                             "renormalise = true\nscores = '", scores, "'"));
    const auto plain = channel_mixer("swiglu", "hidden = 20", shape_of(24, 3));
    add_noise(*one, 0.5);
    const auto p = parameters(*one);
    set(*plain, "up.weight", p.at("up")[0]);
    set(*plain, "down.weight", p.at("down")[0]);
    const Tensor x = at::randn({2, 9, 24});
    EXPECT_TRUE(close(one->forward(x, {}), plain->forward(x, {}), 1e-5)) << scores;
  }
}

TEST(MoeMixer, FollowsItsFormula) {
  at::NoGradGuard no_grad;
  for (const Variant& v : variants()) {
    at::manual_seed(3);
    const auto mixer = moe(v.options);
    for (auto& [name, p] : parameters(*mixer)) p.copy_(at::randn_like(p) * 0.4);
    mixer->to(at::kDouble);
    auto p = parameters(*mixer);
    const Tensor x = at::randn({2, 9, 24}, kDouble), y = mixer->forward(x, {});
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t t = 0; t < 9; ++t) {
        EXPECT_TRUE(close(y[b][t], naive(v, p, x[b][t]), 1e-10)) << v.options << " " << b << t;
      }
    }
    mixer->to(at::kFloat);
    EXPECT_TRUE(close(mixer->forward(x.to(at::kFloat), {}), y, 1e-5)) << v.options;
  }
}

TEST(MoeMixer, GradientsAgreeWithDifferences) {
  for (const char* options : {"routed = 5\nactive = 2",
                              "routed = 6\nactive = 2\nscores = 'sigmoid'\nrenormalise = true"}) {
    at::manual_seed(5);
    const auto mixer = moe(options, 8);
    {
      at::NoGradGuard no_grad;
      for (Tensor p : mixer->parameters()) p.copy_(at::randn_like(p) * 0.5);
    }
    mixer->to(at::kDouble);
    const Tensor x = at::randn({2, 5, 8}, kDouble).requires_grad_();
    const Tensor cotangent = at::randn({2, 5, 8}, kDouble);
    std::vector<Tensor> inputs = mixer->parameters();
    inputs.push_back(x);
    EXPECT_TRUE(gradients_agree(
        [&] {
          AuxiliaryOutputs auxiliary;
          MixerContext context;
          context.auxiliary = &auxiliary;
          const Tensor y = mixer->forward(x, context);
          return (y * cotangent).sum();
        },
        inputs, 1e-5))
        << options;
  }
}

TEST(MoeMixer, BalanceLossIsItsFormula) {
  at::manual_seed(7);
  const auto mixer = moe("routed = 6\nactive = 2\nbalance = 0.3");
  set(*mixer, "gate.weight", at::randn({6, 24}));
  const Tensor x = at::randn({2, 50, 24});
  AuxiliaryOutputs auxiliary;
  MixerContext context;
  context.auxiliary = &auxiliary;
  context.layer = 5;
  mixer->forward(x, context);
  const Tensor s =
      at::softmax(at::linear(x.flatten(0, 1), parameters(*mixer)["gate.weight"]).detach(), -1);
  const Tensor choice = std::get<1>(s.topk(2, -1));
  double expected = 0;
  for (int64_t i = 0; i < 6; ++i) {
    const double chosen = choice.eq(i).sum().item<double>();
    expected += 0.3 * 6 / (2 * 100.0) * chosen * s.select(1, i).mean().item<double>();
    EXPECT_EQ(auxiliary.load.at(5)[i].item<double>(), chosen);
  }
  EXPECT_NEAR(auxiliary.loss.item<double>(), expected, 1e-6);
  // It presses on the gate alone, and adds up over layers.
  auxiliary.loss.backward();
  EXPECT_GT(parameters(*mixer)["gate.weight"].grad().abs().max().item<double>(), 0);
  EXPECT_FALSE(parameters(*mixer)["up"].grad().defined());
  mixer->forward(x, context);
  EXPECT_NEAR(auxiliary.loss.item<double>(), 2 * expected, 1e-6);
  EXPECT_EQ(auxiliary.load.at(5).sum().item<int64_t>(), 2 * 200);
  // Equal load and equal scores give alpha.
  set(*mixer, "gate.weight", at::zeros({6, 24}));
  AuxiliaryOutputs equal;
  context.auxiliary = &equal;
  mixer->forward(x, context);
  EXPECT_NEAR(equal.loss.item<double>(), 0.3, 1e-6);
}

TEST(MoeMixer, PaddingAndOtherProcessesDoNotChangeTheBalance) {
  at::manual_seed(8);
  for (const char* scores : {"softmax", "sigmoid"}) {
    const auto mixer = moe(str("routed = 6\nactive = 2\nbalance = 0.3\nscores = '", scores, "'"));
    set(*mixer, "gate.weight", at::randn({6, 24}));
    const Tensor x = at::randn({3, 8, 24});
    const auto balance_of = [&](const Tensor& batch, const Tensor& lengths,
                                AuxiliaryOutputs auxiliary = {}) {
      const Tensor leaf = batch.detach().clone().requires_grad_();
      mixer->forward(leaf, {.lengths = lengths, .auxiliary = &auxiliary});
      auxiliary.loss.backward();
      return std::tuple(auxiliary.loss.item<double>(), auxiliary.load.at(0), leaf.grad());
    };
    const auto [loss, load, grad] = balance_of(x, {});
    // Whatever the padding holds.
    const Tensor padded = at::randn({3, 13, 24}) * 100;
    padded.narrow(1, 0, 8).copy_(x);
    const auto [same_loss, same_load, same_grad] = balance_of(padded, at::full({3}, 8, at::kLong));
    EXPECT_NEAR(same_loss, loss, 1e-7);
    EXPECT_TRUE(at::equal(same_load, load));
    EXPECT_TRUE(close(same_grad.narrow(1, 0, 8), grad, 1e-6));
    EXPECT_TRUE(same_grad.narrow(1, 8, 5).eq(0).all().item<bool>());
    // Processes with 16 and 8 of the tokens: their mean is the loss of all.
    const auto counts_of = [&](const Tensor& part) { return std::get<1>(balance_of(part, {})); };
    const Tensor all = at::cat(
        {counts_of(x.narrow(0, 0, 2)) + counts_of(x.narrow(0, 2, 1)), at::full({1}, 2, at::kLong)});
    AuxiliaryOutputs shared;
    shared.sum_counts = [&](const Tensor&) { return all; };
    const double first = std::get<0>(balance_of(x.narrow(0, 0, 2), {}, shared));
    const double second = std::get<0>(balance_of(x.narrow(0, 2, 1), {}, shared));
    EXPECT_NEAR((first + second) / 2, loss, 1e-7);
    // Nothing to balance.
    EXPECT_EQ(std::get<0>(balance_of(x.narrow(0, 0, 0), {})), 0);
    EXPECT_EQ(std::get<0>(balance_of(x, at::zeros({3}, at::kLong))), 0);
  }
}

TEST(MoeMixer, TheBiasIsABufferThatBalanceMovesTowardsEqualLoad) {
  at::manual_seed(9);
  const auto mixer = moe("routed = 4\nactive = 1\nscores = 'sigmoid'\nbias_speed = 0.01");
  const Tensor gate = at::zeros({4, 24});
  gate[2].fill_(1);
  set(*mixer, "gate.weight", gate);
  const Tensor x = at::rand({1, 30, 24});  // positive: all choose expert 2
  const auto bias = [&] { return mixer->named_buffers()["choice_bias"].clone(); };
  ASSERT_EQ(mixer->named_parameters().find("choice_bias"), nullptr);
  const auto step = [&](int pieces) {
    AuxiliaryOutputs auxiliary;
    MixerContext context;
    context.auxiliary = &auxiliary;
    for (int i = 0; i < pieces; ++i) mixer->forward(x, context);
    const Tensor before = bias();
    mixer->balance(auxiliary.load.at(0));
    return bias() - before;
  };
  mixer->train();
  mixer->forward(x, {});
  EXPECT_TRUE(at::equal(bias(), at::zeros({4})));
  // Once a step, whatever it was cut into.
  for (const int pieces : {1, 3}) {
    EXPECT_TRUE(close(step(pieces), at::tensor({0.01, 0.01, -0.01, 0.01}), 1e-6)) << pieces;
  }
  for (int i = 0; i < 60; ++i) step(1);
  // Its score is 1 where the others' are 1/2.
  EXPECT_NEAR((bias()[0] - bias()[2]).item<double>(), 0.5, 0.1);
  // Equal load moves nothing.
  const Tensor before = bias();
  mixer->balance(at::full({4}, 7, at::kLong));
  EXPECT_TRUE(at::equal(bias(), before));
  EXPECT_TRUE(mixer->balances());
  EXPECT_FALSE(moe("routed = 4\nactive = 1")->balances());
}

TEST(MoeMixer, TokensAreIndependentAndPrecisionFollows) {
  at::manual_seed(11);
  const auto mixer = moe("");
  const Tensor x = at::randn({2, 33, 24});
  const Tensor y = mixer->forward(x, {});
  EXPECT_EQ(y.sizes(), x.sizes());
  EXPECT_TRUE(close(mixer->forward(x.narrow(1, 7, 1), {}), y.narrow(1, 7, 1), 1e-5));
  const Tensor cast = under_autocast([&] { return mixer->forward(x, {}); });
  EXPECT_TRUE(close(cast, y, 0.03));  // the scores are float32: no choice changes
  y.square().sum().backward();
  for (const auto& item : mixer->named_parameters()) {
    EXPECT_TRUE(item.value().grad().defined()) << item.key();
  }
  mixer->to(at::kBFloat16);
  EXPECT_EQ(mixer->forward(x.to(at::kBFloat16), {}).scalar_type(), at::kBFloat16);
}

TEST(MoeMixer, CostsTellWhatWorksFromWhatIsThere) {
  const auto mixer = moe("hidden = 10\nrouted = 8\nshared = 2\nactive = 3\nbias_speed = 0.001");
  int64_t parameters = 0, counted = 0, idle = 0;
  for (const Tensor& p : mixer->parameters()) parameters += p.numel();
  double flops = 0;
  for (const Cost& cost : mixer->costs()) {
    counted += cost.parameters;
    idle += cost.idle_parameters;
    flops += cost.flops_per_token;
  }
  EXPECT_EQ(counted, parameters);
  EXPECT_EQ(idle, 5 * 3 * 24 * 10);
  EXPECT_EQ(flops, 2.0 * (3 * 24 * 10 * (3 + 2) + 24 * 8));
}

TEST(MoeMixer, RefusesWhatDoesNotFit) {
  const auto message = [](const char* options) {
    return message_of<UsageError>([&] { moe(options); });
  };
  EXPECT_EQ(message("routed = 4"), "moe: active is 6, expected at most routed = 4.");
  EXPECT_TRUE(contains(message("groups = 5"), "groups is 5, expected a divisor of routed = 64"));
  EXPECT_TRUE(contains(message("active_groups = 2"), "active_groups is 2"));
  EXPECT_TRUE(contains(message("groups = 16\nactive_groups = 1"), "the 4 experts of 1 of 16"));
  EXPECT_TRUE(contains(message("scores = 'hard'"), "scores"));
  EXPECT_TRUE(contains(message("routed = 0"), "routed"));
  EXPECT_TRUE(contains(message("scaling = 0.0"), "scaling"));
}

}  // namespace
}  // namespace headloom::moe_test
