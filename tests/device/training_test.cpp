// Runs on a device that is not the CPU: every kind of model trains, is evaluated, saved and resumed
// bit for bit, dropout included, and its checkpoints are read on the CPU.
#include <algorithm>
#include <cmath>
#include <iostream>

#include "../train/support.h"
#include "support.h"
#include "train/evaluate.h"
#include "train/load.h"

namespace headloom::test::device_training_test {
namespace {

const std::string kName = kDevice.str();

struct KindRun {
  std::string name, model, task;
};

std::vector<KindRun> kind_runs() {
  return {
      {"next", "kind = 'decoder'", "type = 'copy'\nsymbols = 8\ncount = 4\n"},
      {"experts",
       "kind = 'decoder'\n[[model.layer]]\nmixer = { type = 'performer', heads = 4, redraw = 2 "
       "}\nchannel = { type = 'moe', routed = 4, active = 2, hidden = 16, bias_speed = 0.01 }",
       "type = 'copy'\nsymbols = 8\ncount = 4\n"},
      {"pairs", "kind = 'encoder'", "type = 'classify_pairs'\ncount = 4\nchanged = 4\n"},
      {"tags", "kind = 'encoder'", "type = 'tag_text'\nlength = 16\n"},
      {"span", "kind = 'encoder'", "type = 'find_span'\ncount = 3\ndigits = 2\n"},
      {"sequence", "kind = 'encoder_decoder'",
       "type = 'sequence'\nkind = 'reverse'\nsymbols = 6\ncount = 4\n"},
      {"compression", "kind = 'auto_encoder'", "type = 'compression'\nlength = 8\nexamples = 32\n"},
      {"images", "kind = 'vit'", "type = 'images'\nsize = 8\n"}};
}

Node config_of(const KindRun& run, const std::string& device, const std::string& more = "",
               const char* dropout = "0.1") {
  const bool own = run.model.find("layer") != std::string::npos;
  return parse_toml(
      str("[model]\nwidth = 32\ndepth = 2\ndropout = ", dropout, "\n", run.model,
          own ? "" : "\n[[model.layer]]\nmixer = { type = 'mha', heads = 4 }",
          "\n[task]\neval_sequences = 16\n", run.task, "[train]\nlr = 3e-3\nwarmup = 4\n",
          "steps = 6\nbatch = 8\neval_every = 3\neval_sequences = 16\ndevice = '", device, "'\n",
          more),
      "run.toml");
}

// Two runs are the same bit for bit. Some operators of a real device have no fixed order of sums
// (SameOrder). There the losses may differ by their rounding, which is far less than other random
// numbers change, and a line says so.
void expect_same_run(const std::string& name, const std::string& one, const std::string& other) {
  bool same = metrics_of(one) == metrics_of(other);
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    const std::string path = str("/checkpoints/step-6/", file);
    const bool equal = bytes_of(one + path) == bytes_of(other + path);
    EXPECT_TRUE(equal || !kGuarded) << file;
    same = same && equal;
  }
  if (kGuarded) {
    EXPECT_EQ(metrics_of(one), metrics_of(other));
    return;
  }
  const std::vector<double> expected = losses_of(one), found = losses_of(other);
  ASSERT_EQ(found.size(), expected.size());
  ASSERT_GE(found.size(), 2u);
  double apart = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], 2e-5 * std::max(1.0, std::abs(expected[i]))) << i;
    apart = std::max(apart, std::abs(found[i] - expected[i]));
  }
  std::cout << name << (same ? ": the same bits" : str(": losses differ by up to ", apart)) << "\n";
}

TEST(DeviceTraining, EveryKindResumesBitForBit) {
  const TempFolder folder;
  const SameOrder same_order;
  for (const KindRun& run : kind_runs()) {
    SCOPED_TRACE(run.name);
    const Node config = config_of(run, kName);
    const std::string whole = folder.path(run.name), cut = folder.path(run.name + "-cut");
    const int64_t operators = device_operators();
    const TrainOutcome outcome = train_quietly(config, {.folder = whole});
    if (kGuarded) {
      EXPECT_GT(device_operators() - operators, 500);
    }
    ASSERT_EQ(outcome.evaluations.size(), 2u);
    copy_folder(whole, cut);
    train_quietly(config, {.folder = cut, .checkpoint = "3"});
    expect_same_run(run.name, whole, cut);
    // The CPU reads it, and so does another device.
    const LoadedRun loaded = load_run(whole, "last");
    const auto task = RunConfig(loaded.config).build_task();
    const Evaluation here = evaluate(*loaded.model, *task, 16, 8);
    EXPECT_NEAR(here.loss, outcome.evaluations.back().loss, 1e-4);
    loaded.model->to(kGuarded ? at::Device(at::kPrivateUse1, 0) : kDevice);
    EXPECT_NEAR(evaluate(*loaded.model, *task, 16, 8).loss, here.loss, 1e-4);
  }
}

TEST(DeviceTraining, LossesAreThoseOfTheCpu) {
  const TempFolder folder;
  const KindRun run = kind_runs()[0];
  for (const char* more :
       {"", "activation_checkpointing = true\naccumulate = 2\n", "dtype = 'bfloat16'\n"}) {
    const Node here = config_of(run, "cpu", more, "0"), away = config_of(run, kName, more, "0");
    const std::string name = std::to_string(std::string(more).size());
    const TrainOutcome expected = train_quietly(here, {.folder = folder.path("here" + name)});
    const TrainOutcome found = train_quietly(away, {.folder = folder.path("away" + name)});
    EXPECT_NEAR(found.evaluations.back().loss, expected.evaluations.back().loss,
                std::string(more).starts_with("dtype") ? 2e-2 : 1e-3)
        << more;
  }
}

TEST(DeviceTraining, ALayerThatIsComputedAgainDrawsTheSame) {
  const TempFolder folder;
  const SameOrder same_order;
  const KindRun run = kind_runs()[0];
  train_quietly(config_of(run, kName), {.folder = folder.path("kept")});
  train_quietly(config_of(run, kName, "activation_checkpointing = true\n"),
                {.folder = folder.path("again")});
  expect_same_run("computed again", folder.path("kept"), folder.path("again"));
}

TEST(DeviceTraining, ARunGoesOnOnAnotherDevice) {
  const TempFolder folder;
  const KindRun run = kind_runs()[0];
  train_quietly(config_of(run, kName, "", "0"), {.folder = folder.path("one")});
  for (const char* name : {"cpu", "guarded:0"}) {
    if (!kGuarded && std::string(name) != "cpu") continue;
    const std::string other = folder.path(name);
    copy_folder(folder.path("one"), other);
    const TrainOutcome outcome =
        train_quietly(config_of(run, name, "", "0"), {.folder = other, .checkpoint = "3"});
    EXPECT_EQ(outcome.step, 6);
    const LoadedRun first = load_run(folder.path("one"), "last"), second = load_run(other, "last");
    const auto expected = parameters_of(*first.model), found = parameters_of(*second.model);
    // Adam makes as much of a small gradient, which rounds otherwise, as of a large one.
    const double tolerance = kGuarded ? 1e-3 : 1e-2;
    for (const auto& [key, value] : expected) {
      EXPECT_TRUE(close(found.at(key), value, tolerance)) << key;
    }
  }
}

// The loss, the gradient's norm and nothing else: two waits a step.
TEST(DeviceTraining, AStepWaitsTwice) {
  if (!kGuarded) GTEST_SKIP() << kOnlyGuarded;
  const TempFolder folder;
  const auto waited = [&](int64_t steps) {
    Node config = config_of(kind_runs()[0], kName, str("checkpoint_every = 100\n"));
    Node& train = *config.find("train");
    const Node numbers = parse_toml(str("steps = ", steps, "\neval_every = 100\n"), "numbers");
    config.set("train", merged(train, numbers));
    return waits([&] { train_quietly(config, {.folder = folder.path(std::to_string(steps))}); });
  };
  EXPECT_EQ(waited(12) - waited(8), 8);
}

TEST(DeviceTraining, TheStateOfItsRandomNumbersIsKept) {
  seed_random(4, kDevice);
  const auto draw = [] { return at::rand({3}, at::TensorOptions(kDevice)).cpu(); };
  const Tensor first = draw();
  NamedTensors states = random_states(kDevice);
  ASSERT_EQ(states.size(), 2u);
  EXPECT_EQ(states[1].first, str("random_state.", kName));
  const Tensor second = draw();
  EXPECT_FALSE(at::equal(first, second));
  StoredTensors stored = as_stored(states);
  restore_random(stored, kDevice, "states");
  EXPECT_TRUE(at::equal(draw(), second));
  // Beside the CPU's: neither moves the other.
  at::manual_seed(1);
  const Tensor here = at::rand({3});
  at::manual_seed(1);
  draw();
  EXPECT_TRUE(at::equal(at::rand({3}), here));
}

TEST(Devices, AreFoundByTheirNames) {
  EXPECT_EQ(find_device(kName), kDevice);
  EXPECT_EQ(devices_here().front(), "cpu");
  if (!kGuarded) {
    const auto all = devices_here();
    EXPECT_TRUE(std::find(all.begin(), all.end(), kName) != all.end());
    EXPECT_NE(message_of([] {
                find_device(c10::DeviceTypeName(kDevice.type(), true) + ":99", "--device");
              }).find("--device is \""),
              std::string::npos);
    return;
  }
  EXPECT_EQ(find_device("guarded"), at::Device(at::kPrivateUse1, 0));
  EXPECT_EQ(find_device("guarded:1"), kDevice);
  EXPECT_EQ(message_of([] { find_device("guarded:2", "--device"); }),
            "--device is \"guarded:2\", but the GUARDED devices are \"guarded:0\" to "
            "\"guarded:1\".");
  EXPECT_EQ(devices_here().back(), "guarded:1");
}

}  // namespace
}  // namespace headloom::test::device_training_test
