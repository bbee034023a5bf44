// What becomes of a run's folder: longer training, the start of another run, moving, two processes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "core/files.h"
#include "core/lock.h"
#include "data/tokenizer_json.h"
#include "support.h"
#include "train/load.h"
#include "train/run_folder.h"
#include "train/run_past.h"
#include "train/state.h"

namespace headloom::test::runs_test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTen = "steps = 10\neval_every = 5\n";

Node with(Node node, const std::vector<std::string>& overrides) {
  for (const std::string& assignment : overrides) apply_override(node, assignment);
  return node;
}

std::string weights_of(const std::string& run, int64_t step) {
  return bytes_of(str(run, "/checkpoints/step-", step, "/model.safetensors"));
}

// What train() says on stderr.
std::string said(const Node& config, const TrainControl& control) {
  ::testing::internal::CaptureStderr();
  train(config, control);
  return ::testing::internal::GetCapturedStderr();
}

// A text, a vocabulary of its bytes and a run on both in a folder that can be moved.
struct TextRun {
  TempFolder folder;
  Node config;

  explicit TextRun(const char* tokenizer = "tokenizer.json") {
    std::string text;
    for (int i = 0; i < 60; ++i) text += str("line ", i, " of some text\n");
    folder.write("data/corpus.txt", text);
    folder.write(str("data/", tokenizer), data::byte_tokenizer_json(false));
    config = tiny_run(kTen);
    config.set("task", parse_toml(str("type = 'text'\npaths = ['", folder.path("data"),
                                      "']\nextensions = ['.txt']\nlength = 8\ntokenizer = '",
                                      folder.path(str("data/", tokenizer)), "'\n"),
                                  "task"));
  }
};

TEST(Longer, GoesOnAsIfTheStepsHadBeenMoreFromTheStart) {
  // With a constant rate nothing before the change depends on the steps.
  const Node ten = tiny_run(str(kTen, "schedule = 'constant'"), "dropout = 0.1");
  const Node twenty = with(ten, {"train.steps=20"});
  const TempFolder folder;
  const std::string run = folder.path("run"), whole = folder.path("whole");
  train_quietly(ten, {.folder = run});
  const std::string earlier = bytes_of(run + "/config.toml");
  const std::string line = said(twenty, {.folder = run, .resume = true});
  EXPECT_TRUE(contains(line,
                       "goes on with train.steps = 20 (was 10); the learning rate is 0.003 at "
                       "step 11 (it was 0.003 at step 10) and 0.003 at step 20, the last"))
      << line;
  train_quietly(twenty, {.folder = whole});
  EXPECT_TRUE(weights_of(run, 20) == weights_of(whole, 20));
  EXPECT_EQ(metrics_of(run), metrics_of(whole));
  EXPECT_EQ(bytes_of(run + "/config.until-step-10.toml"), earlier);
  EXPECT_TRUE(bytes_of(run + "/config.toml")
                  .starts_with("# Until step 10 the configuration was "
                               "config.until-step-10.toml.\n"));
  EXPECT_EQ(run_config_in(run).train.steps, 20);

  // Once more, then without a change.
  train_quietly(with(twenty, {"train.steps=25"}), {.folder = run, .resume = true});
  train_quietly(with(twenty, {"train.steps=25"}), {.folder = run, .resume = true});
  const std::string config = bytes_of(run + "/config.toml");
  EXPECT_TRUE(contains(config, "# Until step 10 the"));
  EXPECT_TRUE(contains(config, "# Until step 20 the"));
  EXPECT_EQ(load_run(run, "last").step, 25);
}

TEST(Longer, RefusesOtherDataThanTheRunHas) {
  const TextRun made;
  const std::string run = made.folder.path("run"), state = run + "/checkpoints/step-10/state.json";
  train_quietly(made.config, {.folder = run});
  const TrainState kept = parse_state(bytes_of(state), state);
  ASSERT_TRUE(kept.data);
  const Node more = with(made.config, {"train.steps=12"});
  // The same number of tokens, and one more.
  const std::string text = bytes_of(made.folder.path("data/corpus.txt"));
  std::string other = text;
  for (char& c : other) c = c == 'l' ? 'L' : c;
  for (const std::string& changed : {other, text + "."}) {
    made.folder.write("data/corpus.txt", changed);
    const std::string message =
        message_of<UsageError>([&] { train_quietly(more, {.folder = run, .resume = true}); });
    EXPECT_TRUE(contains(message,
                         ": the data of 'task.paths' are not those that the run was "
                         "trained on"))
        << message;
    EXPECT_EQ(
        contains(message, str("(", kept.data->count, " tokens, now ", kept.data->count + 1, ")")),
        changed.size() > text.size());
  }
  // Checkpoints that do not say what they were trained on are not compared.
  TrainState former = kept;
  former.data.reset();
  write_file(state, state_json(former));
  train_quietly(more, {.folder = run, .resume = true});
  EXPECT_TRUE(contains(bytes_of(run + "/checkpoints/step-12/state.json"), "fingerprint"));
}

TEST(Longer, KeepsTheConfigurationOfEachStepWhenItGoesBack) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  const Node first = tiny_run(kTen);
  train_quietly(first, {.folder = run});
  {  // as one leaves it that is killed before its next checkpoint
    const std::vector<std::string> changes = {"train.steps=20", "train.lr=1e-3"};
    RunConfig config = read_run_config(with(read_toml(run + "/config.toml"), changes));
    keep_config(run, 10, bytes_of(run + "/config.toml"));
    write_run_config(run, config, config_comments(run));
  }
  EXPECT_TRUE(contains(config_comments(run), "# Until step 10 the configuration was"));
  train_quietly(with(first, {"train.steps=20", "train.lr=1e-3"}),
                {.folder = run, .checkpoint = "5"});
  const std::vector<EarlierConfig> earlier = earlier_configs(run);
  ASSERT_EQ(earlier.size(), 1u);
  EXPECT_EQ(earlier[0].until, 5);
  const auto options = [&](const std::string& file) {
    return read_run_config(read_toml(run + "/" + file)).train;
  };
  EXPECT_EQ(options(earlier[0].file).lr, read_run_config(first).train.lr);
  EXPECT_EQ(options("config.toml").lr, 1e-3);
  EXPECT_TRUE(bytes_of(run + "/config.toml")
                  .starts_with("# Until step 5 the configuration was config.until-step-5.toml.\n"));
}

TEST(Longer, NamesWhatWasBeforeTheStepThatItGoesBackTo) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  const Node ten = tiny_run(kTen);
  train_quietly(ten, {.folder = run});
  const std::string first = bytes_of(run + "/config.toml");
  train_quietly(with(ten, {"train.steps=15", "train.lr=5e-4"}), {.folder = run, .resume = true});
  const std::string line =
      said(with(ten, {"train.steps=15", "train.lr=7e-4"}), {.folder = run, .checkpoint = "10"});
  EXPECT_TRUE(contains(line, "train.lr = 7e-04 (was 0.003)")) << line;
  EXPECT_TRUE(contains(line, "(it was 0.000481 at step 10)")) << line;
  EXPECT_EQ(bytes_of(run + "/config.until-step-10.toml"), first);
  // What is as it was before that step is no change.
  const std::string other = folder.path("other");
  train_quietly(ten, {.folder = other});
  train_quietly(with(ten, {"train.steps=8"}), {.folder = other, .checkpoint = "5"});
  EXPECT_FALSE(contains(said(ten, {.folder = other, .checkpoint = "5"}), "goes on with"));
  EXPECT_TRUE(earlier_configs(other).empty());
  EXPECT_EQ(bytes_of(other + "/config.toml"), first);
}

TEST(Longer, RestatesTheScheduleOverAllSteps) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  const Node ten = tiny_run(kTen), twenty = with(ten, {"train.steps=20", "train.lr=1e-3"});
  train_quietly(ten, {.folder = run});
  train_quietly(twenty, {.folder = run, .resume = true});
  const TrainOptions before = read_run_config(ten).train, after = read_run_config(twenty).train;
  for (const std::string& line : lines_of(run + "/metrics.jsonl")) {
    const size_t step_at = line.find("\"step\":"), lr_at = line.find("\"lr\":");
    if (lr_at == std::string::npos) continue;
    const int64_t step = std::stoll(line.substr(step_at + 7));
    const TrainOptions& options = step <= 10 ? before : after;
    EXPECT_NEAR(std::stod(line.substr(lr_at + 5)), options.lr_at(step - 1), 1e-12) << step;
  }
}

TEST(Longer, ChangesWhatIsNotOfTheDataOrTheModel) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  const Node ten = tiny_run(kTen);
  train_quietly(ten, {.folder = run});
  const auto refused = [&](const std::string& assignment) {
    return message_of<UsageError>(
        [&] { train_quietly(with(ten, {assignment}), {.folder = run, .resume = true}); });
  };
  const std::string before = bytes_of(run + "/config.toml");
  EXPECT_TRUE(contains(refused("train.seed=2"), "'train.seed' = 1, now it is 'train.seed' = 2"));
  EXPECT_TRUE(contains(refused("train.batch=4"), "'train.batch' = 8"));
  EXPECT_TRUE(
      contains(refused("model.width=8"), "'model.width' = 16, now it is 'model.width' = 8"));
  EXPECT_TRUE(contains(refused("model.layer.0.mixer.window=3"),
                       "no 'model.layer.0.mixer.window', now it is"));
  EXPECT_TRUE(contains(refused("task.eval_sequences=8"), "'task.eval_sequences' = 16"));
  EXPECT_TRUE(contains(refused("train.lr=0.5"), "is at step 10, so 'train.steps' = 10"));
  EXPECT_TRUE(contains(refused("train.steps=7"), "is at step 10, so 'train.steps' = 7"));
  EXPECT_EQ(bytes_of(run + "/config.toml"), before);
  EXPECT_FALSE(fs::exists(run + "/config.until-step-10.toml"));
  // From an earlier checkpoint fewer steps are something to train.
  train_quietly(with(ten, {"train.steps=7", "train.accumulate=2", "train.eval_every=1"}),
                {.folder = run, .checkpoint = "5"});
  EXPECT_EQ(load_run(run, "last").step, 7);
  EXPECT_TRUE(fs::exists(run + "/config.until-step-5.toml"));
}

TEST(From, BeginsWithTheWeightsOfAnotherRun) {
  const TempFolder folder;
  const std::string source = folder.path("source"), run = folder.path("run");
  const Node base = tiny_run(kTen);
  train_quietly(base, {.folder = source});
  const std::string kept = bytes_of(source + "/metrics.jsonl");

  // The configuration says nothing of the model, and a rate of nearly nothing leaves it as it is.
  Node tuning = tiny_run("steps = 1\nlr = 1e-30\nweight_decay = 0\nwarmup = 0");
  std::erase_if(tuning.table(), [](const auto& entry) { return entry.first == "model"; });
  const std::string line = said(tuning, {.folder = run, .from = source, .from_checkpoint = "last"});
  EXPECT_TRUE(contains(line, str("the weights are those of ", source, ", step 10")));
  EXPECT_TRUE(weights_of(run, 1) == weights_of(source, 10));
  EXPECT_TRUE(bytes_of(run + "/config.toml")
                  .starts_with(str("# Began with the weights of ", source, ", step 10.\n")));
  EXPECT_EQ(bytes_of(source + "/metrics.jsonl"), kept);
  const std::string first = lines_of(run + "/metrics.jsonl")[0];
  EXPECT_TRUE(contains(first, "\"step\":1,")) << "steps and schedule begin anew";

  // A run goes on without the one that it began with.
  fs::rename(source, folder.path("gone"));
  train_quietly(with(read_toml(run + "/config.toml"), {"train.steps=2"}),
                {.folder = run, .resume = true});
  EXPECT_EQ(load_run(run, "last").step, 2);
}

TEST(From, BeginsAgainWithTheSameWeightsWhereItHasNoCheckpoint) {
  const TempFolder folder;
  const std::string source = folder.path("source"), run = folder.path("run");
  train_quietly(tiny_run(kTen), {.folder = source});
  const Node tuning = tiny_run("steps = 1\nlr = 1e-30\nweight_decay = 0\nwarmup = 0");
  train_quietly(tuning, {.folder = run, .from = source, .from_checkpoint = "5"});
  fs::remove_all(run + "/checkpoints");
  const Node config = read_toml(run + "/config.toml");
  train_quietly(config, {.folder = run, .resume = true});
  EXPECT_TRUE(weights_of(run, 1) == weights_of(source, 5));
  fs::remove_all(run + "/checkpoints");
  fs::rename(source, folder.path("gone"));
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { train_quietly(config, {.folder = run, .resume = true}); }),
      str(run, ": began with the weights of ", source, ", step 5, and has no checkpoint")));
  // What begins without --from begins with weights of its own.
  train_quietly(config, {.folder = run});
  EXPECT_FALSE(read_origin(run));
}

TEST(From, WeightsAreKnownByHowTheyWereTrained) {
  const TempFolder folder;
  const std::string source = folder.path("source"), other = folder.path("other");
  const Node ten = tiny_run(str(kTen, "schedule = 'constant'"));
  int runs = 0;
  const auto begun = [&](const std::string& from, const char* step) {
    const std::string tuned = folder.path(str("tuned", runs++));
    train_quietly(tiny_run("steps = 1\nwarmup = 0"),
                  {.folder = tuned, .from = from, .from_checkpoint = step});
    return *read_origin(tuned);
  };
  train_quietly(ten, {.folder = source});
  const Origin first = begun(source, "10"), early = begun(source, "5");
  // What comes later is no part of it, nor is the seed.
  train_quietly(with(ten, {"train.steps=15", "train.lr=1e-3"}), {.folder = source, .resume = true});
  const Origin again = begun(source, "10"), later = begun(source, "15");
  train_quietly(with(ten, {"train.seed=7"}), {.folder = other});
  const Origin sister = begun(other, "10");
  EXPECT_EQ(again.identity, first.identity);
  EXPECT_EQ(again.weights, first.weights);
  EXPECT_EQ(sister.identity, first.identity);
  EXPECT_NE(sister.weights, first.weights);
  EXPECT_NE(early.identity, first.identity);
  EXPECT_NE(later.identity, first.identity);
  // A run that was longer from the start is the same at its step 10.
  const std::string longer = folder.path("longer");
  train_quietly(with(ten, {"train.steps=15"}), {.folder = longer});
  EXPECT_EQ(begun(longer, "10").identity, first.identity);
  train_quietly(with(ten, {"train.seed=7", "train.steps=15"}), {.folder = other, .resume = true});
  EXPECT_EQ(begun(other, "15").identity, begun(longer, "15").identity);
}

// What goes on has weights of its own. The command that began it may be given again.
TEST(From, IsThatOfTheRunWhichGoesOn) {
  const TempFolder folder;
  const std::string source = folder.path("source"), other = folder.path("other");
  for (const std::string& run : {source, other}) train_quietly(tiny_run(kTen), {.folder = run});
  const std::string run = folder.path("run");
  const Node config = tiny_run("steps = 2\nwarmup = 0");
  train_quietly(config, {.folder = run, .from = source});
  train_quietly(with(config, {"train.steps=3"}),
                {.folder = run, .resume = true, .from = source + "/"});
  EXPECT_EQ(load_run(run, "last").step, 3);
  const auto refused = [&](const std::string& goes_on) {
    return message_of<UsageError>([&] {
      train_quietly(with(config, {"train.steps=4"}),
                    {.folder = goes_on, .resume = true, .from = other});
    });
  };
  EXPECT_EQ(refused(run), str("--from ", other, ": ", run,
                              " goes on with its own weights, and began with those of ", source,
                              "; leave --from out, or choose another folder with --out."));
  EXPECT_TRUE(contains(refused(source), "goes on with its own weights, and began without others'"));
}

TEST(From, RefusesOtherWeightsInTheSamePlace) {
  const TempFolder folder;
  const std::string source = folder.path("source"), run = folder.path("run");
  train_quietly(tiny_run(kTen), {.folder = source});
  train_quietly(tiny_run("steps = 1"), {.folder = run, .from = source, .from_checkpoint = "5"});
  fs::remove_all(run + "/checkpoints");
  const Node config = read_toml(run + "/config.toml");
  const auto refused = [&] {
    return message_of<UsageError>([&] { train_quietly(config, {.folder = run, .resume = true}); });
  };
  fs::remove_all(source);
  train_quietly(with(tiny_run(kTen), {"train.seed=9"}), {.folder = source});
  EXPECT_TRUE(contains(refused(), "but those have been replaced by others; begin a new run."));
  fs::remove_all(source + "/checkpoints/step-5");
  EXPECT_TRUE(contains(refused(), "but those are not there any more; begin a new run."));
  // Somebody's file of that name.
  folder.write("mine/origin.json", "{}");
  EXPECT_TRUE(contains(message_of<UsageError>(
                           [&] { train_quietly(tiny_run(kTen), {.folder = folder.path("mine")}); }),
                       "holds 'origin.json', which would be overwritten"));
}

TEST(From, TakesTheModelThatTheWeightsAreOf) {
  const TempFolder folder;
  const std::string source = folder.path("source");
  const Node base = tiny_run(kTen);
  train_quietly(base, {.folder = source});
  const auto refused = [&](const std::vector<std::string>& overrides) {
    const std::string message = message_of<UsageError>([&] {
      train_quietly(with(base, overrides), {.folder = folder.path("run"), .from = source});
    });
    EXPECT_FALSE(fs::exists(folder.path("run"))) << message;
    return message;
  };
  EXPECT_TRUE(contains(refused({"model.width=32", "model.depth=3"}),
                       "are of a model with 'model.width' = 16, but the configuration has "
                       "'model.width' = 32; leave [model] out"));
  EXPECT_TRUE(contains(refused({"model.layer.0.mixer.type=talking_heads"}),
                       "'model.layer.0.mixer.type' = 'mha'"));
  EXPECT_TRUE(contains(message_of([&] {
                         train_quietly(
                             base, {.folder = folder.path("run"), .from = folder.path("missing")});
                       }),
                       "missing: is not the folder of a run"));
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] {
        train_quietly(base, {.folder = folder.path("run"), .from = source, .from_checkpoint = "7"});
      }),
      "expected best, last or one of the steps 5, 10"));
  // What is not of the weights may differ.
  train_quietly(with(base, {"model.dropout=0.2", "model.max_length=64"}),
                {.folder = folder.path("run"), .from = source});
}

TEST(From, BringsTheTokenizer) {
  TextRun source;
  const std::string folder = source.folder.path();
  train_quietly(source.config, {.folder = folder + "/source"});
  Node tuning = source.config;
  std::erase_if(tuning.find("task")->table(),
                [](const auto& entry) { return entry.first == "tokenizer"; });
  fs::remove(folder + "/data/tokenizer.json");
  train_quietly(tuning, {.folder = folder + "/run", .from = folder + "/source"});
  EXPECT_EQ(bytes_of(folder + "/run/tokenizer.json"), bytes_of(folder + "/source/tokenizer.json"));
  // Another one is refused.
  const std::string message = message_of<UsageError>([&] {
    train_quietly(with(tuning, {"task.tokenizer=bytes"}),
                  {.folder = folder + "/other", .from = folder + "/source"});
  });
  EXPECT_TRUE(contains(message, "'task.tokenizer' is \"bytes\", but the run in "));
}

TEST(Moved, ARunGoesOnAndIsReadAnywhere) {
  TextRun made;
  const std::string folder = made.folder.path();
  train_quietly(made.config, {.folder = folder + "/run"});
  const std::string config = bytes_of(folder + "/run/config.toml");
  EXPECT_TRUE(contains(config, "tokenizer = 'tokenizer.json'"));
  fs::rename(folder + "/run", folder + "/elsewhere");
  fs::remove(folder + "/data/tokenizer.json");
  const Node longer = with(read_toml(folder + "/elsewhere/config.toml"), {"train.steps=12"});
  train_quietly(longer, {.folder = folder + "/elsewhere", .resume = true});
  EXPECT_EQ(load_run(folder + "/elsewhere", "last").step, 12);

  // The data stand elsewhere too.
  fs::rename(folder + "/data", folder + "/texts");
  const Node more = with(longer, {"train.steps=14"});
  const std::string message =
      message_of([&] { train_quietly(more, {.folder = folder + "/elsewhere", .resume = true}); });
  EXPECT_EQ(message,
            str("there is no file or folder '", folder, "/data', which 'task.paths' names; ",
                "say where the data is with --set 'task.paths=[\"PATH\"]'."));
  train_quietly(with(more, {str("task.paths=['", folder, "/texts']")}),
                {.folder = folder + "/elsewhere", .resume = true});
  EXPECT_TRUE(contains(bytes_of(folder + "/elsewhere/config.toml"), "/texts']"));
}

TEST(Moved, RelativePathsAreStoredAsAbsoluteOnes) {
  TextRun made;
  const std::string folder = made.folder.path();
  const fs::path before = fs::current_path();
  fs::current_path(folder);
  const Node relative =
      with(made.config, {"task.paths=[\"./data/*.txt\"]", "task.tokenizer=data/tokenizer.json"});
  train_quietly(relative, {.folder = "run"});
  fs::current_path(before);
  const Node stored = read_toml(folder + "/run/config.toml");
  EXPECT_EQ(std::get<std::string>(stored.find("task")->find("paths")->array()[0].value),
            folder + "/data/*.txt");
  EXPECT_EQ(train_quietly(stored, {.folder = folder + "/run", .resume = true}).step, 10);
}

// config.toml of runs that were made before data's paths were stored as absolute ones and the
// tokenizer by the name of its copy.
TEST(Moved, RunsOfEarlierVersionsGoOn) {
  TextRun made;
  const std::string folder = made.folder.path();
  const std::string run = folder + "/run";
  train_quietly(made.config, {.folder = run});
  RunConfig config = read_run_config(made.config);
  config.build_task();
  std::ofstream(run + "/config.toml") << to_toml(write_fields(config));
  EXPECT_EQ(train_quietly(made.config, {.folder = run, .resume = true}).step, 10);
  EXPECT_EQ(load_run(run, "last").config.task->tokenizer()->vocabulary(), 256);
  // Bytes are another vocabulary, and so is a file for a run of bytes.
  const auto going_on = [&](const Node& with_config, const std::string& in) {
    return message_of<UsageError>(
        [&] { train_quietly(with_config, {.folder = in, .resume = true}); });
  };
  const Node bytes = with(made.config, {"task.tokenizer=bytes"});
  EXPECT_EQ(going_on(bytes, run),
            str("'task.tokenizer' is \"bytes\", but the run was made with another one, ", run,
                "/tokenizer.json; leave it out to take that."));
  train_quietly(bytes, {.folder = folder + "/of_bytes"});
  EXPECT_TRUE(contains(going_on(made.config, folder + "/of_bytes"),
                       "but the run was made with \"bytes\"; leave it out"));
  // Another tokenizer under the same name is another one.
  made.folder.write("data/tokenizer.json", data::byte_tokenizer_json(true));
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { train_quietly(made.config, {.folder = run, .resume = true}); }),
      "but the run was made with another one"));
}

TEST(Lock, ARunIsTrainedByOneProcess) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  const Node config = tiny_run(kTen);
  train_quietly(config, {.folder = run});
  EXPECT_FALSE(fs::exists(FolderLock::lock_file(run)));
  const auto before = bytes_of(run + "/metrics.jsonl");
  {
    const FolderLock other(run);
    for (const bool resume : {false, true}) {
      EXPECT_TRUE(
          contains(message_of([&] { train_quietly(config, {.folder = run, .resume = resume}); }),
                   str(run, " is in use by process ", ::getpid(), " on host ")));
    }
    EXPECT_EQ(load_run(run).step, load_run(run, "best").step) << "readers need no lock";
  }
  EXPECT_EQ(bytes_of(run + "/metrics.jsonl"), before);
}

TEST(Lock, ARunOfAComparisonBelongsToIt) {
  const TempFolder folder;
  folder.write("c/config.toml", "[[models]]\nname = 'a'\n");
  const std::string run = folder.path("c/runs/copy/a/seed-1");
  const Node config = tiny_run(kTen);
  train_quietly(config, {.folder = run});
  EXPECT_EQ(comparison_of(run), folder.path("c"));
  EXPECT_EQ(comparison_of(run + "/"), folder.path("c"));
  EXPECT_EQ(comparison_of(folder.path("c/robustness/copy/a/seed-1")), folder.path("c"));
  EXPECT_EQ(comparison_of(folder.path("c/runs/copy/a")), std::nullopt);
  {
    const FolderLock compared(folder.path("c"));
    EXPECT_TRUE(
        contains(message_of([&] { train_quietly(config, {.folder = run, .resume = true}); }),
                 str(folder.path("c"), " is in use by process ")));
  }
  EXPECT_TRUE(contains(message_of<UsageError>([&] {
                         train_quietly(with(config, {"train.steps=12"}),
                                       {.folder = run, .resume = true});
                       }),
                       "a run of the comparison " + folder.path("c")));
  train_quietly(config, {.folder = run, .resume = true});
}

// A reader sees whole checkpoints only, while a run writes and removes them.
TEST(Readers, MeetWholeCheckpointsOnly) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  train_quietly(tiny_run("steps = 1"), {.folder = run});
  const CheckpointStore store(run);
  const LoadedRun writer = load_run(run), reader = load_run(run);
  std::atomic<bool> done = false;
  std::thread trainer([&] {
    const AdamW optimizer(*writer.model, writer.config.train);
    for (int64_t step = 2; step <= 200; ++step) {
      TrainState state;
      state.step = step;
      state.best_step = step;
      store.save(Snapshot::take(*writer.model, optimizer, state));
    }
    done = true;
  });
  int64_t reads = 0, newest = 0;
  std::string problem;
  while (!done && problem.empty()) {
    try {
      const int64_t step = store.load_weights("last", *reader.model).step;
      EXPECT_GE(step, newest);
      newest = step;
      ++reads;
    } catch (const std::exception& error) {
      problem = error.what();
    }
  }
  trainer.join();
  EXPECT_EQ(problem, "");
  EXPECT_GT(reads, 3);
}

// Before checkpoints kept the [model] table, shapes alone told another model.
TEST(Readers, EarlierCheckpointsAreKnownByTheirShapes) {
  const TempFolder folder;
  const std::string run = folder.path("run");
  train_quietly(tiny_run("steps = 1"), {.folder = run});
  const CheckpointStore store(run);
  const LoadedRun made = load_run(run);
  TrainState state;
  state.step = 2;
  Snapshot snapshot = Snapshot::take(*made.model, AdamW(*made.model, made.config.train), state);
  snapshot.state.model.clear();
  store.save(snapshot);
  const auto other = [&](const auto& change) {
    ModelConfig config = made.config.model;
    change(config);
    return build_model(config);
  };
  const auto base = other([](ModelConfig& config) { config.position.base = 5; });
  const auto wider = other([](ModelConfig& config) { config.width = 32; });
  EXPECT_EQ(
      message_of([&] { store.load_weights("1", *base); }),
      str(run, "/checkpoints/step-1: its weights are of a model with 'model.position.base' = ",
          "10000.0, but the configuration (config.toml of a run) has ",
          "'model.position.base' = 5.0."));
  EXPECT_EQ(store.load_weights("2", *base).step, 2);
  EXPECT_TRUE(contains(message_of([&] { store.load_weights("2", *wider); }),
                       "The file is not damaged: [model] in the configuration (config.toml of a "
                       "run) does not fit its weights."));
}

TEST(Readers, ImportedWeightsAreABeginningAndNoTrainingToGoOnWith) {
  const TempFolder folder;
  const std::string source = folder.path("source");
  const Node config = tiny_run(kTen);
  train_quietly(config, {.folder = source});
  const LoadedRun run = load_run(source, "last");
  fs::remove_all(source + "/checkpoints");
  CheckpointStore(source).save_weights(*run.model, {});
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { train_quietly(config, {.folder = source, .resume = true}); }),
      "has weights alone, as of an imported model, and no training to go on with; "
      "begin a new run with them: headloom train CONFIG --from " +
          source));
  train_quietly(config, {.folder = folder.path("tuned"), .from = source});
  EXPECT_EQ(load_run(folder.path("tuned"), "last").step, 10);
}

}  // namespace
}  // namespace headloom::test::runs_test
