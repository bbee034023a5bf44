// AdamW against its formula in double precision, learning rates, accumulation of gradients.
#include "train/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <set>

#include "model/model.h"
#include "support.h"
#include "testing/compare.h"
#include "train/device.h"
#include "train/gradients.h"

namespace headloom::test::optimizer_test {
namespace {

struct Parts : torch::nn::Module {
  Parts() {
    for (const auto& [name, shape] : std::vector<std::pair<const char*, std::vector<int64_t>>>{
             {"matrix", {3, 4}}, {"vector", {5}}, {"kernel", {2, 3, 2}}, {"unused", {2, 2}}}) {
      register_parameter(name, at::randn(shape, kDouble));
    }
  }
};

// RWKV's time_decay was called decay in checkpoints of old.
TEST(CopyTensors, ReadsTheNamesOfOldCheckpoints) {
  const Tensor now = at::zeros({3}), mean = at::zeros({3}), then = at::arange(3.0);
  const NamedTensors old = {{"layer0.mixer.decay", then}, {"mean.layer0.mixer.decay", then + 1}};
  copy_tensors(
      as_stored(old),
      NamedTensors{{"layer0.mixer.time_decay", now}, {"mean.layer0.mixer.time_decay", mean}},
      "old");
  EXPECT_TRUE(at::equal(now, then.to(now.scalar_type())));
  EXPECT_TRUE(at::equal(mean, now + 1));
  EXPECT_TRUE(contains(message_of([&] {
                         copy_tensors({{"mixer.decay", {.parts = {then}}}}, NamedTensors{}, "old");
                       }),
                       "mixer.decay"));
}

TEST(AdamW, IsTheFormula) {
  at::manual_seed(1);
  Parts parts;
  TrainOptions o;
  o.weight_decay = 0.3;
  o.clip = 1.5;
  o.beta2 = 0.99;
  AdamW optimizer(parts, o);
  std::map<std::string, Tensor> w, m, v;
  for (const auto& item : parts.named_parameters()) {
    w[item.key()] = item.value().detach().clone();
    m[item.key()] = at::zeros_like(item.value());
    v[item.key()] = at::zeros_like(item.value());
  }
  const Tensor unused = w["unused"].clone();
  bool clipped = false, free = false;
  for (int t = 1; t <= 12; ++t) {
    const double lr = 0.1 / t;
    double square = 0;
    std::map<std::string, Tensor> g;
    for (auto& item : parts.named_parameters()) {
      if (item.key() == "unused") continue;
      g[item.key()] = at::randn(item.value().sizes(), kDouble) * (t % 2 == 0 ? 0.1 : 2.0);
      // A gradient laid out unlike its parameter must not be misread.
      const bool transposed = item.key() == "matrix" && t % 3 == 0;
      item.value().mutable_grad() =
          transposed ? g[item.key()].t().contiguous().t() : g[item.key()].clone();
      square += g[item.key()].square().sum().item<double>();
    }
    const double norm = std::sqrt(square);
    const double factor = norm > 1.5 ? 1.5 / (norm + 1e-6) : 1.0;
    (norm > 1.5 ? clipped : free) = true;
    for (auto& [name, gradient] : g) {
      const Tensor scaled = gradient * factor;
      const double decay = name == "vector" ? 0.0 : 0.3;
      w[name] = w[name] * (1 - lr * decay);
      m[name] = 0.9 * m[name] + 0.1 * scaled;
      v[name] = 0.99 * v[name] + 0.01 * scaled.square();
      const Tensor mean = m[name] / (1 - std::pow(0.9, t));
      const Tensor root = at::sqrt(v[name] / (1 - std::pow(0.99, t)));
      w[name] = w[name] - lr * mean / (root + 1e-8);
    }
    EXPECT_NEAR(optimizer.step(lr), norm, 1e-9 * norm);
  }
  EXPECT_TRUE(clipped && free);
  for (const auto& item : parts.named_parameters()) {
    EXPECT_TRUE(close(item.value(), w[item.key()], 1e-9)) << item.key();
    EXPECT_FALSE(item.value().grad().defined()) << "gradients are cleared";
  }
  EXPECT_TRUE(w["unused"].equal(unused));
  for (const auto& [name, tensor] : optimizer.state()) {
    if (name == "mean.kernel") {
      EXPECT_TRUE(close(tensor, m["kernel"], 1e-9));
    }
    if (name == "steps.vector") {
      EXPECT_EQ(tensor.item<double>(), 12);
    }
  }
}

// A group's rate is a multiple of the others', its weight decay is its own; the first that names a
// parameter counts.
TEST(AdamW, GroupsHaveARateAndADecayOfTheirOwn) {
  Parts parts;
  TrainOptions o;
  o.weight_decay = 0.5;
  o.clip = 0;
  o.beta1 = o.beta2 = 0;
  o.groups.resize(3);
  o.groups[0] = {.parameters = "v*", .lr = 0.5, .weight_decay = 0.25};
  o.groups[1] = {.parameters = "*e*", .lr = 0, .weight_decay = {}};  // vector, kernel, unused
  o.groups[2] = {.parameters = "m?trix", .lr = 2, .weight_decay = {}};
  AdamW optimizer(parts, o);
  std::map<std::string, Tensor> before;
  for (auto& item : parts.named_parameters()) {
    before[item.key()] = item.value().detach().clone();
    item.value().mutable_grad() = at::zeros_like(item.value());
  }
  optimizer.step(0.1);
  const std::map<std::string, double> shrunk = {
      {"matrix", 1 - 0.2 * 0.5}, {"vector", 1 - 0.05 * 0.25}, {"kernel", 1}, {"unused", 1}};
  for (const auto& item : parts.named_parameters()) {
    EXPECT_TRUE(close(item.value(), before[item.key()] * shrunk.at(item.key()), 1e-9))
        << item.key();
  }
  o.groups[1].parameters = "nothing*";
  const std::string said = message_of([&] { AdamW(parts, o); });
  EXPECT_TRUE(contains(said, "'train.group[1].parameters' is \"nothing*\"")) << said;
  EXPECT_TRUE(contains(said, "matrix, vector, kernel")) << said;
}

// The same batch on its own process and on two that share it: the parts add up, in the first step,
// which learns when gradients are complete, and in the second, which sends them as they come.
TEST(AccumulateGradients, ProcessesShareABatch) {
  struct Half : Communicator {
    explicit Half(int64_t rank) : number(rank) {}
    int64_t rank() const override { return number; }
    int64_t size() const override { return 2; }
    // The other has as many targets, as long sequences and gradients of the same parameters.
    std::vector<Tensor> gather(const Tensor& own) override { return {own, own}; }
    void sum(const std::vector<Tensor>& tensors) override {
      if (tensors[0].scalar_type() == at::kLong) tensors[0].mul_(2);
    }
    // Gradients stay this process's part.
    std::function<void()> start_sum(const Tensor& tensor) override {
      elements += tensor.numel();
      return [] {};
    }
    int64_t number, elements = 0;
  };
  RunConfig run = read_run_config(parse_toml(
      "[model]\nwidth = 16\ndepth = 1\n[[model.layer]]\nmixer = { type = 'mha', heads = 2 }\n"
      "[task]\ntype = 'copy'\n[train]\nbatch = 8\naccumulate = 2\n",
      "test"));
  const auto task = run.build_task();
  at::manual_seed(3);
  const auto model = build_model(run.model);
  Communicator alone;
  GradientSum of_one(model->parameters(), alone);
  const StepLoss whole = accumulate_gradients(*model, *task, run.train, 5, at::kCPU, of_one);
  std::vector<Tensor> expected;
  int64_t elements = 0;
  for (const Tensor& p : model->parameters()) {
    expected.push_back(p.grad().clone());
    elements += p.numel();
  }
  std::array<double, 2> loss = {};
  std::array<std::vector<Tensor>, 2> sums;
  for (int64_t rank = 0; rank < 2; ++rank) {
    Half half(rank);
    GradientSum of_two(model->parameters(), half);
    for (size_t time = 0; time < 2; ++time) {
      model->zero_grad();
      half.elements = 0;
      loss[time] += accumulate_gradients(*model, *task, run.train, 5, at::kCPU, of_two).loss;
      EXPECT_EQ(half.elements, elements);  // each is sent once
      size_t i = 0;
      for (const Tensor& p : model->parameters()) {
        if (rank == 0) sums[time].push_back(at::zeros_like(p));
        sums[time][i++] += p.grad();
      }
    }
  }
  for (size_t time = 0; time < 2; ++time) {
    EXPECT_NEAR(loss[time], whole.loss, 1e-6);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(close(sums[time][i], expected[i], 1e-5)) << time << " " << i;
    }
  }
}

TEST(Device, SaysWhatThereIs) {
  EXPECT_TRUE(find_device("cpu").is_cpu());
  for (const char* name : {"gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", ""}) {
    const std::string said = message_of([&] { find_device(name); });
    EXPECT_TRUE(contains(said, "expected \"cpu\", \"cuda\" or \"cuda:1\"")) << said;
  }
  const std::string said = message_of([] { find_device("cuda:999"); });
  EXPECT_TRUE(contains(said, "'train.device' is \"cuda:999\", but")) << said;
}

TEST(AdamW, LoadRefusesAStateThatDoesNotFit) {
  Parts parts;
  AdamW optimizer(parts, {});
  NamedTensors state = optimizer.state();
  optimizer.load(as_stored(state), "file");
  NamedTensors missing(state.begin() + 1, state.end());
  EXPECT_TRUE(contains(message_of([&] { optimizer.load(as_stored(missing), "file"); }),
                       "file: has no tensor 'mean.matrix'"));
  NamedTensors extra = state;
  extra.emplace_back("other", at::ones({1}));
  EXPECT_TRUE(contains(message_of([&] { optimizer.load(as_stored(extra), "file"); }),
                       "has a tensor 'other'"));
  state[0].second = at::ones({4, 3});
  EXPECT_TRUE(contains(message_of([&] { optimizer.load(as_stored(state), "file"); }),
                       "'mean.matrix' has shape [4, 3], expected [3, 4]"));
}

// Of every parameter that has two dimensions or more but is not decayed, the last part of its name;
// of the others, whether there are any.
std::set<std::string> exempt(const std::string& model) {
  ModelConfig config;
  read_fields(
      parse_toml("vocabulary = 16\nmax_length = 8\nwidth = 16\ndepth = 1\n" + model, "test"),
      config, "model");
  const auto built = build_model(config);
  TrainOptions options;
  options.weight_decay = 0.5;
  options.beta1 = options.beta2 = 0;
  AdamW optimizer(*built, options);
  std::map<std::string, Tensor> before;
  for (auto& item : built->named_parameters()) {
    at::NoGradGuard no_grad;
    item.value().fill_(2);
    before[item.key()] = item.value().clone();
    item.value().mutable_grad() = at::zeros_like(item.value());
  }
  optimizer.step(0.1);
  std::set<std::string> kept;
  for (const auto& item : built->named_parameters()) {
    const Tensor &now = item.value(), &was = before[item.key()];
    if (now.equal(was)) {
      if (now.dim() >= 2) kept.insert(item.key().substr(item.key().rfind('.') + 1));
    } else {
      EXPECT_GE(now.dim(), 2) << item.key();
      EXPECT_TRUE(close(now, was * (1 - 0.1 * 0.5), 1e-6)) << item.key();
    }
  }
  return kept;
}

TEST(AdamW, DecaysMatricesButForThoseThatAreExempt) {
  using Names = std::set<std::string>;
  const auto of = [](const std::string& mixer, const std::string& channel = "type = 'swiglu'") {
    return exempt("[[layer]]\nmixer = { " + mixer + " }\nchannel = { " + channel + " }\n");
  };
  EXPECT_EQ(of("type = 'mha', heads = 2, qk_norm = true"), Names());
  EXPECT_EQ(of("type = 'dcmha', heads = 2, static = 'add'"), Names());
  EXPECT_EQ(of("type = 'multi_token', heads = 2, preset = 'released'"), Names());
  EXPECT_EQ(of("type = 'differential', heads = 2"), Names());
  EXPECT_EQ(of("type = 'retention', heads = 2", "type = 'moe', routed = 4, active = 2"), Names());
  EXPECT_EQ(of("type = 'mamba'"), Names{"A_log"});
  EXPECT_EQ(of("type = 'rwkv'"), Names{"mix"});
  EXPECT_EQ(of("type = 'mha', heads = 2", "type = 'rwkv_channel'"), Names{"mix"});
  EXPECT_EQ(of("type = 'talking_heads', heads = 2"), (Names{"pre_mix", "post_mix"}));
  EXPECT_EQ(of("type = 'aft', form = 'local', reach = 4"), Names{"bias"});
  EXPECT_EQ(of("type = 'aft', form = 'conv', heads = 2, reach = 4"), Names{"bias"});
  EXPECT_EQ(of("type = 'aft', form = 'full', factor = 2"), (Names{"bias_u", "bias_v"}));
  EXPECT_EQ(exempt("position = { type = 'learned' }\nnorm = 'layer_norm'\nbias = true\n"), Names());
}

TEST(AdamW, DecaysNoPositionsOfImages) {
  ModelConfig config;
  read_fields(parse_toml("kind = 'vit'\nclasses = 3\nwidth = 16\ndepth = 1\npool = 'first'\n"
                         "position = { type = 'learned' }\n"
                         "image = { channels = 1, height = 8, width = 8, patch = 4 }\n"
                         "[[layer]]\nmixer = { type = 'mha', heads = 2 }\n",
                         "test"),
              config, "model");
  const auto model = build_model(config);
  const std::set<std::string> decayed = decayed_parameters(*model);
  EXPECT_FALSE(decayed.contains("positions"));
  EXPECT_FALSE(decayed.contains("class_token"));
  EXPECT_TRUE(decayed.contains("patch.weight"));
  EXPECT_TRUE(decayed.contains("layer0.mixer.qkv.weight"));
}

TEST(LearningRate, WarmsUpAndFollowsItsSchedule) {
  TrainOptions o;
  o.lr = 0.5;
  o.steps = 110;
  o.warmup = 10;
  o.min_lr = 0.2;
  for (const char* schedule : {"cosine", "constant", "inverse_sqrt"}) {
    o.schedule = schedule;
    for (int64_t step = 0; step < 10; ++step) {
      EXPECT_DOUBLE_EQ(o.lr_at(step), 0.5 * static_cast<double>(step + 1) / 10) << schedule;
    }
  }
  EXPECT_NEAR(o.lr_at(9), 0.5, 1e-12);
  EXPECT_NEAR(o.lr_at(39), 0.5 * std::sqrt(10.0 / 40), 1e-12);
  o.schedule = "constant";
  EXPECT_EQ(o.lr_at(109), 0.5);
  o.schedule = "cosine";
  EXPECT_NEAR(o.lr_at(10), 0.5, 1e-12);
  EXPECT_NEAR(o.lr_at(60), 0.5 * (0.2 + 0.8 * 0.5), 1e-12);
  EXPECT_NEAR(o.lr_at(35), 0.5 * (0.2 + 0.4 * (1 + std::cos(std::numbers::pi / 4))), 1e-12);
  EXPECT_NEAR(o.lr_at(110), 0.1, 1e-12);
  o.warmup = 0;
  EXPECT_NEAR(o.lr_at(0), 0.5, 1e-12);
  o.schedule = "inverse_sqrt";
  EXPECT_NEAR(o.lr_at(0), 0.5, 1e-12);
  EXPECT_NEAR(o.lr_at(3), 0.25, 1e-12);
  o.warmup = 200;  // longer than the run
  o.schedule = "cosine";
  EXPECT_NEAR(o.lr_at(109), 0.5 * 110 / 200, 1e-12);
}

TEST(Accumulation, PiecesGiveTheGradientOfTheWholeBatch) {
  const TempFolder folder;
  std::vector<NamedTensors> weights;
  std::vector<TrainOutcome> outcomes;
  for (const int64_t pieces : {1, 4}) {
    const std::string run = folder.path(str("pieces-", pieces));
    outcomes.push_back(train_quietly(
        tiny_run(str("steps = 4\neval_every = 4\naccumulate = ", pieces)), {.folder = run}));
    weights.push_back(read_safetensors(run + "/checkpoints/step-4/model.safetensors"));
  }
  for (size_t i = 0; i < weights[0].size(); ++i) {
    EXPECT_TRUE(close(weights[1][i].second, weights[0][i].second, 1e-4)) << weights[0][i].first;
  }
  EXPECT_NEAR(outcomes[0].evaluations[0].train_loss, outcomes[1].evaluations[0].train_loss, 1e-5);
  EXPECT_NEAR(outcomes[0].evaluations[0].loss, outcomes[1].evaluations[0].loss, 1e-5);
  EXPECT_TRUE(contains(message_of<UsageError>([&] {
                         train_quietly(tiny_run("accumulate = 3"), {.folder = folder.path("x")});
                       }),
                       "'train.accumulate' is 3, expected a divisor of train.batch = 8"));
}

}  // namespace
}  // namespace headloom::test::optimizer_test
