// Token shards: the format, the split, and what is said of other files.
#include <set>

#include "core/files.h"
#include "helpers.h"

namespace headloom::data::token_shard_test {
namespace {

// Tokens 0, 1, ..., count - 1 after a header.
std::string shard(int32_t count, int32_t magic = 20240520, int32_t version = 1) {
  std::string bytes(256 * 4, '\0');
  const auto put = [&](size_t at, int32_t value) {
    for (size_t i = 0; i < 4; ++i) bytes[at + i] = static_cast<char>(value >> (8 * i));
  };
  put(0, magic);
  put(4, version);
  put(8, count);
  for (int32_t token = 0; token < count; ++token) {
    bytes += static_cast<char>(token & 0xff);
    bytes += static_cast<char>(token >> 8);
  }
  return bytes;
}

std::string config_of(const TempFolder& folder, const std::string& bytes,
                      const std::string& options = "") {
  write_file(folder.path("a.bin"), bytes);
  return str("type = 'token_shard'\nlength = 10\npath = '", folder.path("a.bin"), "'\n", options);
}

TEST(TokenShard, PredictsTheNextTokenAndHoldsTheEndOut) {
  const TempFolder folder;
  const auto task = task_of(config_of(folder, shard(1000), "vocabulary = 1000\nheld_out = 0.1"));
  EXPECT_EQ(task->vocabulary(), 1000);
  ASSERT_EQ(task->eval_sequences(), 9);
  const Batch eval = task->eval_batch(0, 9);
  EXPECT_TRUE(at::equal(eval.targets, eval.inputs + 1));
  EXPECT_GE(eval.inputs.min().item<int64_t>(), 900);
  // One epoch: the windows do not overlap, and none reaches into the held-out part.
  const Batch train = task->train_batch(0, 90);
  std::set<int64_t> seen;
  for (int64_t i = 0; i < 90; ++i) {
    for (int64_t token : row(train.inputs, i)) seen.insert(token);
  }
  EXPECT_EQ(seen.size(), 900u);
  EXPECT_LT(*seen.rbegin(), 900);
}

TEST(TokenShard, OfAWholeFileEveryTokenButTheFirstIsPredictedOnce) {
  const TempFolder folder;
  for (const int32_t count : {11, 20, 21, 22, 95}) {
    const auto task = task_of(config_of(folder, shard(count), "vocabulary = 100\nheld_out = 1.0"));
    const Batch eval = task->eval_batch(0, task->eval_sequences());
    std::multiset<int64_t> predicted;
    for (int64_t i = 0; i < task->eval_sequences(); ++i) {
      const std::vector<int64_t> inputs = row(eval.inputs, i), targets = row(eval.targets, i);
      for (size_t t = 0; t < targets.size(); ++t) {
        if (targets[t] == kIgnore) continue;
        predicted.insert(targets[t]);
        EXPECT_EQ(targets[t], inputs[t] + 1);
      }
    }
    std::multiset<int64_t> all;
    for (int64_t token = 1; token < count; ++token) all.insert(token);
    EXPECT_EQ(predicted, all) << count;
  }
}

TEST(TokenShard, OtherFilesAreRefused) {
  const TempFolder folder;
  const std::string path = folder.path("a.bin");
  expect_contains(error_of(config_of(folder, "text")),
                  path + ": has 4 bytes, expected a token shard with a header of 1024.");
  expect_contains(error_of(config_of(folder, shard(100, 7))), "begins with 7");
  expect_contains(error_of(config_of(folder, shard(100, 20240520, 2))), "version 2, expected 1");
  expect_contains(error_of(config_of(folder, shard(100) + "ab")),
                  "says that it has 100 tokens of 2 bytes, but 202 bytes follow");
  expect_contains(error_of(config_of(folder, shard(100), "vocabulary = 50")),
                  "has token 50 at place 50, but the task has vocabulary = 50.");
  expect_contains(error_of(config_of(folder, shard(100))), "leaves 5 tokens");
  const std::string same = folder.path("./a.bin");
  expect_contains(error_of(config_of(folder, shard(1000), "held_out_path = '" + same + "'")),
                  path + ": is both 'path' and 'held_out_path', expected other data to hold out.");
  write_file(folder.path("copy.bin"), shard(1000));
  const std::string copy = "held_out_path = '" + folder.path("copy.bin") + "'";
  expect_contains(error_of(config_of(folder, shard(1000), copy)),
                  path + ": holds the same tokens as 'held_out_path', expected other data");
}

}  // namespace
}  // namespace headloom::data::token_shard_test
