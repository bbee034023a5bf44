// Runs on a device that is not the CPU: every kind of model trains, is evaluated, saved and resumed
// bit for bit, dropout included, and its checkpoints are read on the CPU.
#include <cmath>

#include "../train/support.h"
#include "support.h"
#include "train/device.h"
#include "train/evaluate.h"
#include "train/load.h"

namespace headloom::test::device_training_test {
namespace {

constexpr const char* kName = "guarded:1";

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

TEST(DeviceTraining, EveryKindResumesBitForBit) {
  const TempFolder folder;
  for (const KindRun& run : kind_runs()) {
    SCOPED_TRACE(run.name);
    const Node config = config_of(run, kName);
    const std::string whole = folder.path(run.name), cut = folder.path(run.name + "-cut");
    const int64_t operators = device_operators();
    const TrainOutcome outcome = train_quietly(config, {.folder = whole});
    EXPECT_GT(device_operators() - operators, 500);
    ASSERT_EQ(outcome.evaluations.size(), 2u);
    copy_folder(whole, cut);
    train_quietly(config, {.folder = cut, .checkpoint = "3"});
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
      const std::string file = str("/checkpoints/step-6/", name);
      EXPECT_TRUE(bytes_of(whole + file) == bytes_of(cut + file)) << name;
    }
    EXPECT_EQ(metrics_of(whole), metrics_of(cut));
    // The CPU reads it, and so does another device.
    const LoadedRun loaded = load_run(whole, "last");
    const auto task = RunConfig(loaded.config).build_task();
    const Evaluation here = evaluate(*loaded.model, *task, 16, 8);
    EXPECT_NEAR(here.loss, outcome.evaluations.back().loss, 1e-4);
    loaded.model->to(at::Device(at::kPrivateUse1, 0));
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
  const KindRun run = kind_runs()[0];
  train_quietly(config_of(run, kName), {.folder = folder.path("kept")});
  train_quietly(config_of(run, kName, "activation_checkpointing = true\n"),
                {.folder = folder.path("again")});
  EXPECT_EQ(metrics_of(folder.path("kept")), metrics_of(folder.path("again")));
}

TEST(DeviceTraining, ARunGoesOnOnAnotherDevice) {
  const TempFolder folder;
  const KindRun run = kind_runs()[0];
  train_quietly(config_of(run, kName, "", "0"), {.folder = folder.path("one")});
  for (const char* name : {"cpu", "guarded:0"}) {
    const std::string other = folder.path(name);
    copy_folder(folder.path("one"), other);
    const TrainOutcome outcome =
        train_quietly(config_of(run, name, "", "0"), {.folder = other, .checkpoint = "3"});
    EXPECT_EQ(outcome.step, 6);
    const LoadedRun first = load_run(folder.path("one"), "last"), second = load_run(other, "last");
    const auto expected = parameters_of(*first.model), found = parameters_of(*second.model);
    for (const auto& [key, value] : expected) EXPECT_TRUE(close(found.at(key), value, 1e-3)) << key;
  }
}

// The loss, the gradient's norm and nothing else: two waits a step.
TEST(DeviceTraining, AStepWaitsTwice) {
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
  EXPECT_EQ(find_device("guarded"), at::Device(at::kPrivateUse1, 0));
  EXPECT_EQ(find_device("guarded:1"), kDevice);
  EXPECT_EQ(message_of([] { find_device("guarded:2", "--device"); }),
            "--device is \"guarded:2\", but the GUARDED devices are \"guarded:0\" to "
            "\"guarded:1\".");
  const auto here = devices_here();
  EXPECT_EQ(here.front(), "cpu");
  EXPECT_EQ(here.back(), "guarded:1");
}

}  // namespace
}  // namespace headloom::test::device_training_test
