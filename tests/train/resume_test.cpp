// Checkpoints: exact resumption, damage, a full disk, runs that diverge.
#include <gtest/gtest.h>
#include <sys/mount.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "support.h"
#include "testing/file_limit.h"
#include "train/load.h"
#include "train/metrics.h"
#include "train/result.h"
#include "train/state.h"

namespace headloom::test::resume_test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTwenty = "steps = 20\neval_every = 5\ncheckpoint_every = 10\n";

// A finished run of 20 steps with checkpoints at 10 and 20, made once.
class Resume : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    source_ = new TempFolder;
    train_quietly(config(), {.folder = whole()});
  }
  static void TearDownTestSuite() {
    delete source_;
    source_ = nullptr;
  }
  static Node config() { return tiny_run(kTwenty, "dropout = 0.1"); }
  static std::string whole() { return source_->path("whole"); }
  static std::string file(const std::string& run, int step, const char* name) {
    return str(run, "/checkpoints/step-", step, "/", name);
  }
  // A copy of the finished run that may be damaged.
  std::string copy() const {
    const std::string run = folder_.path("run");
    fs::remove_all(run);
    copy_folder(whole(), run);
    return run;
  }
  static void expect_same_end(const std::string& a, const std::string& b) {
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
      EXPECT_TRUE(bytes_of(file(a, 20, name)) == bytes_of(file(b, 20, name))) << name;
    }
    EXPECT_EQ(metrics_of(a), metrics_of(b));
  }
  const TempFolder folder_;
  static TempFolder* source_;
};
TempFolder* Resume::source_ = nullptr;

TEST_F(Resume, IsBitExact) {
  const std::string run = copy();
  // What a killed write left over is no checkpoint.
  fs::create_directories(run + "/checkpoints/writing");
  fs::copy_file(file(run, 20, "model.safetensors"), run + "/checkpoints/writing/model.safetensors");
  fs::remove_all(run + "/checkpoints/step-20");
  std::ofstream(run + "/checkpoints/step-30") << "no folder";
  EXPECT_EQ(CheckpointStore(run).steps(), std::vector<int64_t>{10});
  const TrainOutcome outcome = train_quietly(config(), {.folder = run, .resume = true});
  EXPECT_EQ(outcome.step, 20);
  EXPECT_EQ(outcome.evaluations.size(), 4u);
  EXPECT_GT(outcome.result.tokens_per_second, 0);
  expect_same_end(whole(), run);
  EXPECT_FALSE(fs::exists(run + "/checkpoints/writing"));
  EXPECT_EQ(bytes_of(run + "/config.toml"), bytes_of(whole() + "/config.toml"));
}

TEST_F(Resume, IsBitExactInBfloat16) {
  const Node bfloat = tiny_run(str(kTwenty, "dtype = 'bfloat16'\naccumulate = 2"), "dropout = 0.1");
  const std::string a = folder_.path("a"), b = folder_.path("b");
  train_quietly(bfloat, {.folder = a});
  copy_folder(a, b);
  train_quietly(bfloat, {.folder = b, .checkpoint = "10"});
  expect_same_end(a, b);
  EXPECT_FALSE(bytes_of(file(a, 20, "model.safetensors")) ==
               bytes_of(file(whole(), 20, "model.safetensors")));
}

// Performer's features are drawn again in step 8, after the checkpoint of step 6.
TEST(ResumeFeatures, RandomFeaturesAreDrawnAgainBitForBit) {
  const TempFolder folder;
  const auto run = [&](const char* name, const std::string& train, int64_t redraw) {
    Node config = tiny_run("steps = 10\n" + train);
    config.set("model", parse_toml(str("width = 16\ndepth = 2\n[[layer]]\nmixer = { type = "
                                       "'performer', heads = 2, redraw = ",
                                       redraw, " }\nchannel = { type = 'mlp', hidden = 8 }\n"),
                                   "model"));
    train_quietly(config, {.folder = folder.path(name)});
    return config;
  };
  const auto model = [&](const char* name, int step) {
    return folder.path(str(name, "/checkpoints/step-", step, "/model.safetensors"));
  };
  const auto features = [&](const char* name, int step, int layer) {
    for (const auto& [key, value] : read_safetensors(model(name, step))) {
      if (key == str("layer", layer, ".mixer.features")) return value.clone();
    }
    return Tensor();
  };
  const std::string sixth = "eval_every = 10\ncheckpoint_every = 6\n";
  const Node config = run("whole", sixth, 4);
  copy_folder(folder.path("whole"), folder.path("half"));
  train_quietly(config, {.folder = folder.path("half"), .checkpoint = "6"});
  EXPECT_TRUE(bytes_of(model("whole", 10)) == bytes_of(model("half", 10)));
  EXPECT_FALSE(at::equal(features("whole", 6, 0), features("whole", 10, 0)));
  EXPECT_FALSE(at::equal(features("whole", 10, 0), features("whole", 10, 1)));
  // Neither evaluations nor the pieces of a step draw.
  run("evaluated", "eval_every = 1\ncheckpoint_every = 10\naccumulate = 4\n", 4);
  EXPECT_TRUE(at::equal(features("evaluated", 10, 1), features("whole", 10, 1)));
  run("never", sixth, 0);
  EXPECT_TRUE(at::equal(features("never", 6, 0), features("never", 10, 0)));
}

TEST_F(Resume, ActivationCheckpointingChangesNothing) {
  Node again = config();
  apply_override(again, "train.activation_checkpointing=true");
  const std::string a = folder_.path("a"), b = copy();
  train_quietly(again, {.folder = a});
  expect_same_end(whole(), a);
  // It may begin or end in the middle of a run.
  train_quietly(again, {.folder = b, .checkpoint = "10"});
  expect_same_end(whole(), b);
}

TEST_F(Resume, BetweenEvaluationsKeepsTheMeanLoss) {
  const Node often = tiny_run("steps = 20\neval_every = 10\ncheckpoint_every = 7", "dropout = 0.1");
  const std::string a = folder_.path("a"), b = folder_.path("b");
  train_quietly(often, {.folder = a});
  copy_folder(a, b);
  train_quietly(often, {.folder = b, .checkpoint = "14"});
  expect_same_end(a, b);
}

TEST_F(Resume, OfAFinishedRunChangesNothing) {
  const std::string run = copy();
  const TrainOutcome outcome = train_quietly(config(), {.folder = run, .resume = true});
  EXPECT_EQ(outcome.step, 20);
  EXPECT_EQ(outcome.evaluations.size(), 4u);
  EXPECT_GT(outcome.result.tokens_per_second, 0) << "known from the steps before";
  expect_same_end(whole(), run);
}

TEST_F(Resume, ARunThatItsAccuracyHasEndedGoesOnWithoutItAlone) {
  const auto easy = [](const std::string& more) {
    Node config = tiny_run("steps = 20\neval_every = 10" + more);
    // A guess is right half of the time.
    apply_override(config, "task={type=\"induction\", vocabulary=3, length=8, eval_sequences=64}");
    return config;
  };
  const Node early = easy("\nstop_accuracy = 0.2");
  const std::string run = folder_.path("early");
  ASSERT_EQ(train_quietly(early, {.folder = run}).step, 10);
  const std::string before = bytes_of(run + "/config.toml");
  Node longer = early;
  apply_override(longer, "train.steps=30");
  EXPECT_EQ(message_of<UsageError>([&] { train_quietly(longer, {.folder = run, .resume = true}); }),
            run +
                ": at step 10 it has reached 'train.stop_accuracy' = 0.2, which leaves nothing to "
                "train, expected a higher one or none.");
  EXPECT_EQ(bytes_of(run + "/config.toml"), before);
  EXPECT_EQ(train_quietly(easy(""), {.folder = run, .resume = true}).step, 20);
}

TEST_F(Resume, RefusesOtherConfigurationsAndAPresentRun) {
  const std::string run = copy();
  const auto refused = [&](const Node& changed, const TrainControl& control) {
    return message_of<UsageError>([&] { train_quietly(changed, control); });
  };
  EXPECT_TRUE(contains(refused(config(), {.folder = run}), "already holds a run at step 20"));
  Node other = config();
  apply_override(other, "train.batch=16");
  const std::string message = refused(other, {.folder = run, .resume = true});
  EXPECT_TRUE(contains(message, run + "/config.toml"));
  EXPECT_TRUE(contains(message, "'train.batch' = 8, now it is 'train.batch' = 16"));
  EXPECT_TRUE(contains(refused(config(), {.folder = run, .checkpoint = "7"}),
                       "expected best, last or one of the steps 10, 20"));
  expect_same_end(whole(), run);
  // A configuration of one's own is not written over.
  folder_.write("own/config.toml", "mine = 1\n");
  EXPECT_TRUE(contains(refused(config(), {.folder = folder_.path("own")}), "own/config.toml"));
  EXPECT_EQ(bytes_of(folder_.path("own/config.toml")), "mine = 1\n");
}

TEST_F(Resume, FindsDamageAndNamesAnIntactCheckpoint) {
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "state.json"}) {
    const std::string run = copy(), path = file(run, 20, name), whole_file = bytes_of(path);
    const size_t size = whole_file.size();
    // The weights are read without it.
    const bool of_training = name == std::string("optimizer.safetensors");
    std::vector<std::string> damaged = {"", whole_file.substr(0, size / 2),
                                        whole_file.substr(0, size - 3), whole_file + "x"};
    for (const size_t at : {size_t{0}, size / 3, size / 2, size - 2}) {
      damaged.push_back(whole_file);
      damaged.back()[at] = static_cast<char>(damaged.back()[at] ^ 4);
    }
    for (const std::string& content : damaged) {
      std::ofstream(path, std::ios::binary) << content;
      const std::string message =
          message_of([&] { train_quietly(config(), {.folder = run, .resume = true}); });
      EXPECT_TRUE(contains(message, path));
      EXPECT_TRUE(contains(message, "The checkpoint of step 10 is intact (--checkpoint 10)."));
      if (of_training) {
        EXPECT_EQ(load_run(run, "last").step, 20);
      } else {
        EXPECT_TRUE(contains(message_of([&] { load_run(run, "last"); }), "(--checkpoint 10)"));
      }
    }
    fs::remove(path);
    EXPECT_TRUE(contains(
        message_of([&] { train_quietly(config(), {.folder = run, .resume = true}); }), path));
    if (!of_training) {
      EXPECT_TRUE(contains(message_of([&] { load_run(run, "20"); }), path));
    }
    EXPECT_EQ(load_run(run, "10").step, 10);
    // Going on from the intact one replaces the damaged one.
    train_quietly(config(), {.folder = run, .checkpoint = "10"});
    expect_same_end(whole(), run);
    EXPECT_EQ(load_run(run, "last").step, 20);
  }
}

// One bit of each byte is flipped: bit 0 of the first byte, bit 1 of the second, and so on.
TEST_F(Resume, AFlippedBitOfTheStateIsFound) {
  const std::string run = copy(), path = file(run, 10, "state.json"), whole_file = bytes_of(path);
  const TrainState state = parse_state(whole_file, path);
  for (size_t i = 0; i < whole_file.size(); ++i) {
    std::string damaged = whole_file;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << i % 8));
    try {
      const TrainState other = parse_state(damaged, path);
      EXPECT_EQ(state_json(other), whole_file) << "byte " << i;
    } catch (const Error& error) {
      EXPECT_TRUE(contains(error.what(), path));
    }
  }
  EXPECT_EQ(state_json(state), whole_file);
}

TEST(State, NestedFarTooDeepIsRefused) {
  const std::string deep(200000, '['), end(200000, ']');
  EXPECT_TRUE(contains(
      message_of([&] { parse_state("{\"x\":" + deep + end + ",\"crc64\":1}", "a/state.json"); }),
      "a/state.json: is nested deeper than 64 levels."));
}

TEST_F(Resume, SaysWhenNothingElseIsIntact) {
  const std::string run = copy();
  for (const int step : {10, 20}) fs::resize_file(file(run, step, "model.safetensors"), 100);
  const std::string message =
      message_of([&] { train_quietly(config(), {.folder = run, .resume = true}); });
  EXPECT_TRUE(contains(message, "it has 100 bytes"));
  EXPECT_TRUE(contains(message, "No other checkpoint is intact."));
}

TEST_F(Resume, AFullDiskLeavesTheCheckpointBefore) {
  const std::string run = copy();
  std::string message;
  {
    const FileSizeLimit limit(6000);  // metrics fit, weights do not
    message = message_of([&] { train_quietly(config(), {.folder = run, .checkpoint = "10"}); });
  }
  EXPECT_TRUE(contains(message, "the checkpoint of step 20 could not be saved"));
  EXPECT_TRUE(contains(message, "File too large"));
  EXPECT_TRUE(contains(message, "The checkpoint of step 10 is intact."));
  EXPECT_FALSE(fs::exists(run + "/checkpoints/writing"));
  train_quietly(config(), {.folder = run, .resume = true});
  expect_same_end(whole(), run);
}

TEST_F(Resume, AFullFileSystemLeavesTheCheckpointBefore) {
  const std::string disk = folder_.path("disk");
  fs::create_directory(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=1m") != 0) {
    GTEST_SKIP() << "mounting a small file system needs root";
  }
  const std::string run = disk + "/run";
  copy_folder(whole(), run);
  fs::remove_all(run + "/checkpoints/step-20");
  {  // Leaves 24 KiB: the weights fit, the optimiser's state does not.
    std::ofstream fill(disk + "/fill", std::ios::binary);
    fill << std::string(fs::space(disk).available - 24576, 'x');
  }
  const std::string message =
      message_of([&] { train_quietly(config(), {.folder = run, .resume = true}); });
  EXPECT_TRUE(contains(message, "No space left on device"));
  EXPECT_TRUE(contains(message, "The checkpoint of step 10 is intact."));
  fs::remove(disk + "/fill");
  train_quietly(config(), {.folder = run, .resume = true});
  expect_same_end(whole(), run);
  ::umount(disk.c_str());
}

TEST_F(Resume, MetricsAfterTheCheckpointAreDropped) {
  const std::string run = copy();
  std::ofstream(run + "/metrics.jsonl", std::ios::app) << "{\"step\":21,\"loss\":1.0}\n{\"ste";
  train_quietly(config(), {.folder = run, .resume = true});
  EXPECT_EQ(metrics_of(whole()), metrics_of(run));
  for (const char* odd : {"null", "[]", "{\"step\":\"x\"}", "{\"step\":1,\"eval_loss\":[]}"}) {
    std::ofstream(run + "/metrics.jsonl") << odd << "\n";
    EXPECT_EQ(train_quietly(config(), {.folder = run, .resume = true}).step, 20) << odd;
    read_metrics(run + "/metrics.jsonl");
  }
}

TEST(Checkpoints, KeepTheTwoNewestAndTheBest) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  // The learning rate ruins what the first steps learned.
  train_quietly(tiny_run("steps = 12\neval_every = 2\nschedule = 'constant'\nwarmup = 8\nclip = 0\n"
                         "lr = 3.0"),
                {.folder = run});
  const auto steps = CheckpointStore(run).steps();
  const auto best = CheckpointStore(run).best();
  ASSERT_TRUE(best.has_value());
  EXPECT_LT(*best, 10) << "the run was to get worse";
  EXPECT_EQ(steps, (std::vector<int64_t>{*best, 10, 12}));
  double lowest = 1e30;
  int64_t at = 0;
  for (const EvalPoint& p : read_metrics(run + "/metrics.jsonl").evaluations) {
    if (p.loss < lowest) at = p.step;
    lowest = std::min(lowest, p.loss);
  }
  EXPECT_EQ(at, *best);
  EXPECT_EQ(load_run(run).step, *best);
  EXPECT_EQ(load_run(run, "last").step, 12);
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { load_run(run, "99"); }), "expected best, last"));
  EXPECT_TRUE(
      contains(message_of([&] { load_run(folder.path("no")); }), "not the folder of a run"));
}

TEST(Checkpoints, TheBestIsOneThatWasSaved) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  // The learning rate ruins what the first steps learned, and the lowest loss is at no checkpoint.
  const Node config = tiny_run(
      "steps = 20\neval_every = 1\ncheckpoint_every = 4\nschedule = 'constant'\nwarmup = 8\n"
      "clip = 0\nlr = 3.0");
  train_quietly(config, {.folder = run});
  std::map<int64_t, double> losses;
  for (const EvalPoint& p : read_metrics(run + "/metrics.jsonl").evaluations) {
    losses[p.step] = p.loss;
  }
  int64_t lowest = 4;
  for (const int64_t step : {8, 12, 16, 20}) {
    if (losses[step] < losses[lowest]) lowest = step;
  }
  EXPECT_LT(lowest, 16) << "the run was to get worse";
  EXPECT_TRUE(std::any_of(losses.begin(), losses.end(), [&](const auto& one) {
    return one.second < losses[lowest];
  })) << "the lowest loss was to be at another step";
  EXPECT_EQ(CheckpointStore(run).steps(), (std::vector<int64_t>{lowest, 16, 20}));
  EXPECT_EQ(load_run(run).step, lowest);
  // Losses on other sequences are not compared with those before.
  Node others = config;
  for (const char* change : {"train.steps=24", "train.eval_sequences=8"}) {
    apply_override(others, change);
  }
  train_quietly(others, {.folder = run, .resume = true});
  EXPECT_EQ(load_run(run).step, 24);
}

TEST(Divergence, StopsWithTheStepAndTheLastGoodCheckpoint) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  const std::string message = message_of([&] {
    // A decay that multiplies the weights by -9 every step.
    train_quietly(tiny_run("steps = 60\neval_every = 2\nschedule = 'constant'\nclip = 0\n"
                           "weight_decay = 3333"),
                  {.folder = run});
  });
  EXPECT_TRUE(contains(message, "became"));
  EXPECT_TRUE(contains(message, "at step "));
  const auto steps = CheckpointStore(run).steps();
  ASSERT_FALSE(steps.empty());
  EXPECT_TRUE(contains(
      message, str("the last good checkpoint is ", run, "/checkpoints/step-", steps.back(), ".")));
  for (const int64_t step : steps) {
    for (const auto& [name, tensor] :
         read_safetensors(str(run, "/checkpoints/step-", step, "/model.safetensors"))) {
      EXPECT_TRUE(tensor.isfinite().all().item<bool>()) << name;
    }
  }
  EXPECT_TRUE(contains(message, "train.lr"));
}

TEST(Divergence, AFinishedRunThatEndsAboveItsStartSaysSo) {
  const TempFolder folder;
  const TrainOutcome exploded =
      train_quietly(tiny_run("steps = 30\neval_every = 10\nlr = 10.0\nclip = 0.0"),
                    {.folder = folder.path("exploded")});
  EXPECT_TRUE(
      contains(exploded.result.warning, "the run has diverged: the loss of its first batch was 2."))
      << exploded.result.warning;
  EXPECT_GT(exploded.evaluations.back().train_loss, 3);
  // It stays with the run, also where a later call has nothing left to train.
  const std::string result = folder.path("exploded/result.json"), kept = read_file(result);
  EXPECT_EQ(read_result(result)->warning, exploded.result.warning);
  train_quietly(tiny_run("steps = 30\neval_every = 10\nlr = 10.0\nclip = 0.0"),
                {.folder = folder.path("exploded"), .resume = true});
  EXPECT_EQ(read_file(result), kept);
  const TrainOutcome good =
      train_quietly(tiny_run("steps = 30\neval_every = 10"), {.folder = folder.path("good")});
  EXPECT_EQ(good.result.warning, "");
  // Neither does a run whose loss moves by noise alone.
  const TrainOutcome still = train_quietly(tiny_run("steps = 6\neval_every = 1\nlr = 1e-9"),
                                           {.folder = folder.path("still")});
  EXPECT_EQ(still.result.warning, "");
  // Nor one whose last batches were much harder than its first, as the file has it here.
  const std::string file = folder.path("still/metrics.jsonl");
  std::string lines = read_file(file);
  const size_t loss = lines.rfind("\"train_loss\":") + 13;
  lines.replace(loss, lines.find('}', loss) - loss, "9.0");
  write_file(file, lines);
  std::filesystem::remove(folder.path("still/result.json"));
  const TrainOutcome harder = train_quietly(tiny_run("steps = 6\neval_every = 1\nlr = 1e-9"),
                                            {.folder = folder.path("still"), .resume = true});
  EXPECT_EQ(harder.evaluations.back().train_loss, 9);
  EXPECT_EQ(harder.result.warning, "");
  // What a resumed run says is of the whole run.
  std::filesystem::remove(result);
  const TrainOutcome again =
      train_quietly(tiny_run("steps = 30\neval_every = 10\nlr = 10.0\nclip = 0.0"),
                    {.folder = folder.path("exploded"), .resume = true});
  EXPECT_EQ(again.result.warning, exploded.result.warning);
}

TEST(Divergence, BeforeTheFirstCheckpointSaysSo) {
  const TempFolder folder;
  const std::string message = message_of([&] {
    train_quietly(tiny_run("steps = 9\nclip = 0\nlr = 1e30"), {.folder = folder.path("run")});
  });
  EXPECT_TRUE(contains(message, "at step "));
  EXPECT_TRUE(contains(message, "there is no checkpoint before it"));
}

}  // namespace
}  // namespace headloom::test::resume_test
