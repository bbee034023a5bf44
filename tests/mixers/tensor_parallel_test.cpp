// Tensor parallelism: the outputs of all processes' parts of a mixer add up to those of the whole
// mixer, and so do the gradients.
#include "mixers/tensor_parallel.h"

#include <set>

#include "support.h"

namespace headloom::tensor_parallel_test {
namespace {

constexpr int64_t kWidth = 48;

struct Case {
  std::string mixer;
  std::string options;  // TOML, one a line
  bool channel = false;
  std::string position = "rope";
  bool bias = false;
  int64_t short_conv = 0;
  bool cross = false;

  LayerShape shape() const {
    LayerShape s = test::shape_of(kWidth);
    s.layer = 2;
    s.bias = bias;
    s.position.type = position;
    s.short_conv = short_conv;
    s.cross = cross;
    s.causal = !cross;
    return s;
  }
  std::shared_ptr<Mixer> build(const LayerShape& s) const {
    if (channel) return test::channel_mixer(mixer, options, s);
    return test::mixer(mixer, options, s);
  }
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.mixer << " {" << c.options << "}";
}

std::vector<Case> cases() {
  const std::string moe = "routed = 4\nactive = 2\nhidden = 12\n";
  return {
      {"mha", "heads = 6"},
      {"mha", "heads = 12\nkv_heads = 6\nhead_dim = 10\nqk_norm = true\nwindow = 5", false, "alibi",
       true},
      {.mixer = "mha", .options = "heads = 6", .bias = true, .cross = true},
      {"dcmha", "heads = 12\ngroups = 6"},
      {"dcmha", "heads = 12\nkv_heads = 6\ngroups = 6\nstatic = \"add\"", false, "rope", false, 4},
      {"dcmha",
       "heads = 12\ngroups = 6\nstatic = \"replace\"\nkey_wise = false\nprojection = false"},
      {.mixer = "dcmha", .options = "heads = 6\ngroups = 6", .cross = true},
      {"differential", "heads = 6\nkv_heads = 6", false, "alibi"},
      {"differential", "heads = 12\nkv_heads = 6\npairing = \"repeat\"", false, "rope", true},
      {"multi_token", "heads = 12\nconv_layers = \"all\"\ngate = \"full\"\npre_mix = \"groups\""},
      {"multi_token",
       "heads = 12\nconv_layers = \"all\"\nconv_heads = 2\npost_conv = true\nmix_heads = 2"},
      {"retention", "heads = 6"},
      {"gla", "heads = 6", false, "none", true},
      {"rwkv", "", false, "none", true, 3},
      {"mlp", "hidden = 60", true, "none", true},
      {"swiglu", "hidden = 60\ngate_groups = 12", true},
      {"rwkv_channel", "hidden = 60", true, "none", true},
      {"moe", moe + "shared = 2", true},
      {"moe", moe + "shared = 0\nscores = \"sigmoid\"\nbias_speed = 0.1", true},
  };
}

class EveryCut : public testing::TestWithParam<Case> {};

struct Result {
  Tensor y, x_gradient, memory_gradient;
  std::map<std::string, Tensor> gradients;
};

Result run(const Case& c, Mixer& mixer, const Tensor& x, const Tensor& memory,
           const Tensor& weight) {
  const Tensor in = x.detach().requires_grad_(true);
  MixerContext context;
  if (c.cross) context.memory = memory.detach().requires_grad_(true);
  AuxiliaryOutputs auxiliary;
  context.auxiliary = &auxiliary;
  Result out;
  out.y = c.channel ? dynamic_cast<ChannelMixer&>(mixer).forward(in, context)
                    : dynamic_cast<TokenMixer&>(mixer).forward(in, context);
  Tensor loss = (out.y * weight).sum();
  if (auxiliary.loss.defined()) loss = loss + 100 * auxiliary.loss;
  loss.backward();
  out.x_gradient = in.grad();
  if (c.cross) out.memory_gradient = context.memory.grad();
  for (const auto& item : mixer.named_parameters()) {
    if (item.value().grad().defined()) out.gradients[item.key()] = item.value().grad();
  }
  return out;
}

TEST_P(EveryCut, AddsUpToTheWhole) {
  const Case& c = GetParam();
  at::manual_seed(7);
  const auto whole = c.build(c.shape());
  test::add_noise(*whole, 0.1);
  whole->to(at::kDouble);
  const Tensor x = at::randn({2, 9, kWidth}, at::kDouble);
  const Tensor memory = at::randn({2, 7, kWidth}, at::kDouble);
  const Tensor weight = at::randn_like(x);
  const Result all = run(c, *whole, x, memory, weight);
  for (const int64_t size : {2, 3, 6}) {
    Result sum;
    std::map<std::string, std::vector<Tensor>> parts;
    std::map<std::string, ParameterCut> cuts;
    for (int64_t rank = 0; rank < size; ++rank) {
      LayerShape shape = c.shape();
      // Of each process what it adds itself: nothing comes from the others.
      shape.tensor_parallel = std::make_shared<TensorParallel>(
          TensorParallel{.size = size, .rank = rank, .sum = [](const Tensor&) {}});
      const auto part = c.build(shape);
      part->to(at::kDouble);
      cuts = parameter_cuts(*part);
      const auto values = test::parameters(*whole);
      for (const auto& [name, own] : named_tensors(*part)) {
        const bool cut = cuts.contains(name);
        const Tensor value =
            cut ? cuts.at(name).part_of(values.at(name), rank, size) : values.at(name);
        ASSERT_EQ(own.numel(), value.numel()) << name;
        if (cut) {
          ASSERT_EQ(cuts.at(name).whole_shape(own.sizes(), size), values.at(name).sizes().vec())
              << name;
        }
        at::NoGradGuard no_grad;
        own.view_as(value).copy_(value);
      }
      const Result own = run(c, *part, x, memory, weight);
      const auto add = [](Tensor& to, const Tensor& what) {
        if (what.defined()) to = to.defined() ? to + what : what;
      };
      add(sum.y, own.y);
      add(sum.x_gradient, own.x_gradient);
      add(sum.memory_gradient, own.memory_gradient);
      for (const auto& [name, gradient] : own.gradients) parts[name].push_back(gradient);
    }
    const auto close = [&](const Tensor& a, const Tensor& b, const std::string& what) {
      EXPECT_TRUE(at::allclose(a, b, 1e-9, 1e-10))
          << what << " of " << size << ": " << (a - b).abs().max().item<double>();
    };
    close(sum.y, all.y, "the output");
    close(sum.x_gradient, all.x_gradient, "the gradient of x");
    if (c.cross) close(sum.memory_gradient, all.memory_gradient, "the gradient of the memory");
    EXPECT_FALSE(cuts.empty());
    ASSERT_EQ(parts.size(), all.gradients.size());
    for (const auto& [name, gradient] : all.gradients) {
      ASSERT_EQ(static_cast<int64_t>(parts[name].size()), size) << name;
      const Tensor found =
          cuts.contains(name) ? cuts.at(name).joined(parts[name]) : at::stack(parts[name]).sum(0);
      close(found.view_as(gradient), gradient, name);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(TensorParallel, EveryCut, testing::ValuesIn(cases()));

TEST(TensorParallel, HasACaseForEveryMixerThatCan) {
  std::set<std::string> tested;
  for (const Case& c : cases()) tested.insert(c.mixer);
  for (const auto& entry : token_mixers()) {
    EXPECT_EQ(tested.contains(entry.name), entry.traits.tensor_parallel) << entry.name;
  }
  for (const auto& entry : channel_mixers()) {
    if (entry.name == "none") continue;  // has nothing to share out
    EXPECT_EQ(tested.contains(entry.name), entry.traits.tensor_parallel) << entry.name;
  }
}

TEST(TensorParallel, SaysWhatCannotBeShared) {
  const auto refusal = [](const std::string& mixer, const std::string& options, int64_t size) {
    LayerShape shape = test::shape_of(kWidth);
    shape.tensor_parallel =
        std::make_shared<TensorParallel>(TensorParallel{.size = size, .rank = 0, .sum = {}});
    return test::message_of<UsageError>([&] { test::mixer(mixer, options, shape); });
  };
  EXPECT_EQ(refusal("mha", "heads = 6", 4),
            "mha: heads is 6, which the 4 processes of train.tensor_parallel cannot share equally, "
            "expected a multiple of 4.");
  EXPECT_TRUE(refusal("mha", "heads = 6\nkv_heads = 3", 2).starts_with("mha: kv_heads is 3"));
  EXPECT_TRUE(refusal("dcmha", "heads = 6", 2).starts_with("dcmha: groups is 1"));
  EXPECT_TRUE(refusal("talking_heads", "heads = 6", 2)
                  .starts_with("talking_heads cannot share out its heads"));
  EXPECT_TRUE(refusal("multi_token", "heads = 6\npost_mix = \"all\"", 2)
                  .starts_with("multi_token: post_mix is \"all\""));
  EXPECT_EQ(
      refusal("multi_token", "heads = 4\nconv_heads = 2", 4),
      "multi_token: conv_heads is 2, but each of the 4 processes of train.tensor_parallel has "
      "1 of the 4 heads, expected a divisor of 1.");
  EXPECT_TRUE(refusal("multi_token", "heads = 4\nmix_heads = 4", 2)
                  .starts_with("multi_token: mix_heads is 4, but each of the 2 processes"));
}

TEST(TensorParallel, CutsAndJoinsSegments) {
  const Tensor whole = at::arange(24).view({2, 12});
  const ParameterCut cut{.dim = 1, .segments = {2, 1, 1}};
  std::vector<Tensor> parts;
  for (int64_t rank = 0; rank < 3; ++rank) parts.push_back(cut.part_of(whole, rank, 3));
  EXPECT_TRUE(parts[1].equal(at::tensor({2, 3, 7, 10, 14, 15, 19, 22}, at::kLong).view({2, 4})));
  EXPECT_TRUE(cut.joined(parts).equal(whole));
}

}  // namespace
}  // namespace headloom::tensor_parallel_test
