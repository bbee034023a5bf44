// mqar with segments: several lengths and numbers of pairs in one task.
#include <map>
#include <set>

#include "helpers.h"

namespace headloom::data::recall_segments_test {
namespace {

const std::string kMixed =
    "type = 'mqar'\nvocabulary = 64\nsegments = ['16:2:6', '24:4:4']\n"
    "eval_segments = ['16:2', '16:4', '48:8']\neval_sequences = 24\n";

int64_t targets_of(const Batch& batch, int64_t index) {
  return batch.targets.select(0, index).ne(kIgnore).sum().item<int64_t>();
}

TEST(RecallSegments, TrainingGoesThroughThemInOrderEveryEpoch) {
  const auto task = task_of(kMixed);
  EXPECT_EQ(task->length(), 48);
  EXPECT_EQ(task->train_length(), (6 * 16 + 4 * 24) / 10.0);
  // A batch is as long as its longest sequence.
  const Batch first = task->train_batch(0, 6), both = task->train_batch(0, 10);
  EXPECT_EQ(first.inputs.size(1), 16);
  EXPECT_EQ(both.inputs.size(1), 24);
  for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(targets_of(both, i), i < 6 ? 2 : 4);
  EXPECT_TRUE(at::equal(both.inputs.slice(0, 0, 6).slice(1, 0, 16), first.inputs));
  EXPECT_EQ(both.inputs.slice(0, 0, 6).slice(1, 16).abs().sum().item<int64_t>(), 0);
  EXPECT_TRUE(both.targets.slice(0, 0, 6).slice(1, 16).eq(kIgnore).all().item<bool>());
  EXPECT_TRUE(same(task->train_batch(1, 10), both));  // the second epoch
  EXPECT_TRUE(same(task->train_batch(7, 10), both));
  std::set<std::vector<int64_t>> different;
  for (int64_t i = 0; i < 10; ++i) different.insert(row(both.inputs, i));
  EXPECT_EQ(different.size(), 10u);
  EXPECT_FALSE(same(task_of(kMixed, 2)->train_batch(0, 10), both));
}

TEST(RecallSegments, EverySegmentHasAsManyHeldOutSequences) {
  const auto task = task_of(kMixed);
  const Batch batch = task->eval_batch(0, 24);
  EXPECT_EQ(batch.inputs.size(1), 48);
  std::map<int64_t, int> times;
  for (int64_t i = 0; i < 24; i += 2) {
    // One of a pair of neighbours is validation data and the other test data.
    EXPECT_EQ(targets_of(batch, i), targets_of(batch, i + 1));
    ++times[targets_of(batch, i)];
  }
  EXPECT_EQ(times, (std::map<int64_t, int>{{2, 4}, {4, 4}, {8, 4}}));
  EXPECT_TRUE(same(task_of(kMixed, 2)->eval_batch(0, 24), batch));
  EXPECT_EQ(task->eval_batch(0, 2).inputs.size(1), 16);
  EXPECT_TRUE(
      at::equal(task->eval_batch(2, 2).inputs, batch.inputs.slice(0, 2, 4).slice(1, 0, 16)));
}

TEST(RecallSegments, AreSequencesOfMqarOfTheirSizes) {
  const auto task = task_of(kMixed);
  const Batch batch = task->eval_batch(0, 24);
  for (int64_t i = 0; i < 24; ++i) {
    const std::vector<int64_t> inputs = row(batch.inputs, i), targets = row(batch.targets, i);
    const int64_t pairs = targets_of(batch, i);
    std::map<int64_t, int64_t> values;
    for (int64_t p = 0; p < pairs; ++p) {
      values[inputs[static_cast<size_t>(2 * p)]] = inputs[static_cast<size_t>(2 * p + 1)];
    }
    ASSERT_EQ(values.size(), static_cast<size_t>(pairs));
    for (size_t t = 0; t < targets.size(); ++t) {
      if (targets[t] != kIgnore) {
        EXPECT_EQ(targets[t], values.at(inputs[t]));
      }
    }
  }
}

TEST(RecallSegments, HeldOutSequencesAreNotTrainedOn) {
  // So few sequences that streams without a split would meet.
  const auto task = task_of(
      "type = 'mqar'\nvocabulary = 24\nsegments = ['4:1:300']\neval_sequences = 8");
  std::set<std::vector<int64_t>> trained;
  const Batch train = task->train_batch(0, 300), eval = task->eval_batch(0, 8);
  for (int64_t i = 0; i < 300; ++i) trained.insert(row(train.inputs, i));
  for (int64_t i = 0; i < 8; ++i) EXPECT_FALSE(trained.contains(row(eval.inputs, i)));
  EXPECT_GT(trained.size(), 80u);  // of 132 in all
}

TEST(RecallSegments, FloorsAreMeansOverTheHeldOutSegments) {
  const auto best = [](const std::string& sizes) {
    return task_of("type = 'mqar'\nvocabulary = 64\n" + sizes)->floors().back().accuracy;
  };
  const double mean = (best("length = 16\npairs = 2") + best("length = 16\npairs = 4") +
                       best("length = 48\npairs = 8")) /
                      3.0;
  EXPECT_NEAR(task_of(kMixed)->floors().back().accuracy, mean, 1e-12);
  for (const Floor& floor : task_of(kMixed)->floors()) {
    if (floor.name == "one of the values shown") {
      EXPECT_NEAR(floor.accuracy, (1.0 / 2 + 1.0 / 4 + 1.0 / 8) / 3, 1e-12);
    }
  }
  EXPECT_EQ(task_of(kMixed)->accuracy(), Accuracy::share);
}

TEST(RecallSegments, WrongOnesAreRefused) {
  const auto error = [](const std::string& options) {
    return error_of<UsageError>("type = 'mqar'\n" + options);
  };
  EXPECT_EQ(error("segments = ['64:4']"),
            "mqar has \"64:4\" in segments, expected numbers like \"64:4:100000\" "
            "(length:pairs:examples).");
  for (const char* text : {"64:x:3", "64:4:3:", "64:4:0", "", ":64:4:3", "64;4;3"}) {
    expect_contains(error(str("segments = ['", text, "']")), "expected numbers like");
  }
  expect_contains(error("segments = ['8:4:100']"), "need at least 16");
  expect_contains(error("eval_segments = ['64:4']"), "eval_segments but no segments");
  expect_contains(error("segments = ['64:4:9']\nlength = 32"), "has segments and length");
  expect_contains(error("segments = ['64:4:9']\nexamples = 3"), "has segments and examples");
  expect_contains(error("segments = ['64:4:9', '64:5:9', '64:6:9']"),
                  "eval_sequences = 512, expected a multiple of 6");
  expect_contains(error_of<UsageError>("type = 'forgetting_mqar'\nsegments = ['64:4:9']"),
                  "segments");
}

}  // namespace
}  // namespace headloom::data::recall_segments_test
