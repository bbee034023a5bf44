// Activation checkpointing changes nothing but memory: loss, gradients, statistics and the random
// numbers that follow are those of a step without it, bit for bit.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/node.h>

#include <unordered_set>

#include "model/model.h"
#include "support.h"
#include "testing/autocast.h"

namespace headloom::test::activation_checkpoint_test {
namespace {

struct Step {
  Tensor loss = {}, next = {};  // next: what the random generator gives after it
  std::map<std::string, Tensor> gradients = {};
  std::map<int64_t, Tensor> load = {};
  size_t nodes = 0;  // of the loss's graph
};

size_t graph_nodes(const Tensor& t) {
  std::vector<torch::autograd::Node*> open = {t.grad_fn().get()};
  std::unordered_set<torch::autograd::Node*> seen(open.begin(), open.end());
  while (!open.empty()) {
    torch::autograd::Node* const node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) {
      if (edge.function && seen.insert(edge.function.get()).second) {
        open.push_back(edge.function.get());
      }
    }
  }
  return seen.size();
}

Step step_of(Model& model, ModelInput input, const Tensor& targets, bool checkpoint, bool narrow) {
  clear_gradients(model.parameters());
  model.train();
  at::manual_seed(11);
  AuxiliaryOutputs auxiliary;
  input.auxiliary = &auxiliary;
  input.activation_checkpointing = checkpoint;
  const auto loss_of = [&] {
    const Tensor hidden = model.hidden(input);
    return model.loss(hidden.flatten(0, -2), targets.flatten()).sum;
  };
  Tensor loss = narrow ? under_autocast(loss_of) : loss_of();
  if (auxiliary.loss.defined()) loss = loss + auxiliary.loss * 100;
  Step out{.loss = loss.detach(), .load = auxiliary.load, .nodes = graph_nodes(loss)};
  loss.backward();
  out.next = at::rand({4});
  for (const auto& [name, p] : parameters_of(model)) {
    out.gradients[name] = p.grad().defined() ? p.grad().clone() : Tensor();
  }
  return out;
}

void expect_equal(Model& model, const ModelInput& input, const Tensor& targets, bool narrow) {
  const Step plain = step_of(model, input, targets, false, narrow);
  const Step again = step_of(model, input, targets, true, narrow);
  EXPECT_LT(again.nodes, plain.nodes);
  EXPECT_TRUE(again.loss.equal(plain.loss));
  EXPECT_TRUE(again.next.equal(plain.next));
  ASSERT_EQ(again.load.size(), plain.load.size());
  for (const auto& [layer, load] : plain.load) EXPECT_TRUE(again.load.at(layer).equal(load));
  for (const auto& [name, gradient] : plain.gradients) {
    const Tensor& other = again.gradients.at(name);
    ASSERT_EQ(other.defined(), gradient.defined()) << name;
    // What several layers share gets its sums in another order.
    if (!gradient.defined()) continue;
    EXPECT_TRUE(close(other, gradient, narrow ? 1e-2 : 1e-6)) << name;
  }
}

TEST(ActivationCheckpoint, EveryPresetTrainsAsWithoutIt) {
  for (const ModelPreset& preset : model_presets()) {
    if (!preset.name.ends_with("-tiny")) continue;
    SCOPED_TRACE(preset.name);
    ModelConfig config =
        model_of(str("preset = \"", preset.name, "\"\nwidth = 64\ndepth = 2\n", "dropout = 0.1\n"));
    config.complete({.vocabulary = 31,
                     .length = 24,
                     .source_length = 9,
                     .classes = 3,
                     .segments = 0,
                     .image = {3, 16, 16}});
    at::manual_seed(3);
    const auto model = build_model(config);
    ModelInput input;
    Tensor targets = at::randint(config.kind == "vit" ? 3 : 31, {2, 24}, kLong);
    if (config.kind == "vit") {
      input.images = at::randn({2, 3, 16, 16});
      targets = targets.select(1, 0);
    } else {
      input.tokens = tokens(2, 24, 31);
    }
    if (config.kind == "encoder_decoder") {
      input.source = tokens(2, 9, 31);
      input.source_lengths = at::tensor({9, 4}, kLong);
    }
    if (config.kind == "encoder") input.lengths = at::tensor({24, 11}, kLong);
    for (const bool narrow : {false, true}) expect_equal(*model, input, targets, narrow);
  }
}

// Of few rows there are kernels without a gradient, and a memory is read in several places.
TEST(ActivationCheckpoint, FewRowsAndAMemoryAreTheSameBits) {
  for (const std::string kind : {"decoder", "encoder_decoder"}) {
    SCOPED_TRACE(kind);
    ModelConfig config =
        model_of("kind = '" + kind +
                 "'\nwidth = 32\ndepth = 2\n[[layer]]\nmixer = { type = 'dcmha', heads = 4 }\n");
    config.complete({.vocabulary = 31, .length = 8, .source_length = 7});
    at::manual_seed(3);
    const auto model = build_model(config);
    ModelInput input;
    input.tokens = tokens(2, 8, 31);
    if (kind == "encoder_decoder") {
      input.source = tokens(2, 7, 31);
      input.source_lengths = at::tensor({7, 4}, kLong);
    }
    const Tensor targets = at::randint(31, {2, 8}, kLong);
    for (const bool narrow : {false, true}) {
      const Step plain = step_of(*model, input, targets, false, narrow);
      const Step again = step_of(*model, input, targets, true, narrow);
      EXPECT_TRUE(again.loss.equal(plain.loss));
      for (const auto& [name, gradient] : plain.gradients) {
        EXPECT_TRUE(again.gradients.at(name).equal(gradient)) << name;
      }
    }
  }
}

TEST(ActivationCheckpoint, ExpertsAreCountedOnceAndBalanced) {
  const ModelConfig config = model_of(
      "width = 32\ndepth = 3\nvocabulary = 31\nmax_length = 24\n[[layer]]\n"
      "mixer = { type = 'mha', heads = 4 }\n"
      "channel = { type = 'moe', routed = 8, active = 2, shared = 1, balance = 0.1 }\n");
  at::manual_seed(3);
  const auto model = build_model(config);
  ModelInput input{.tokens = tokens(2, 24, 31)};
  input.documents = at::arange(24, kLong).div(10, "floor").expand({2, 24});
  const Tensor targets = at::randint(31, {2, 24}, kLong);
  expect_equal(*model, input, targets, false);
  const Step again = step_of(*model, input, targets, true, false);
  ASSERT_EQ(again.load.size(), 3u);
  for (const auto& [layer, load] : again.load) EXPECT_EQ(load.sum().item<int64_t>(), 2 * 48);
}

// Without gradients there is nothing to compute again.
TEST(ActivationCheckpoint, EvaluationIsAsBefore) {
  const auto model = build_model(model_of("width = 32\ndepth = 2\nvocabulary = 31\n"));
  model->eval();
  at::NoGradGuard no_grad;
  const Tensor input = tokens(2, 8, 31);
  EXPECT_TRUE(model->hidden({.tokens = input, .activation_checkpointing = true})
                  .equal(model->hidden({.tokens = input})));
}

}  // namespace
}  // namespace headloom::test::activation_checkpoint_test
