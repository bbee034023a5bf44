// Lines of JSON: what is predicted, the split, and what is said of broken lines.
#include <algorithm>
#include <numeric>
#include <set>

#include "core/files.h"
#include "data/random.h"
#include "helpers.h"

namespace headloom::data::jsonl_test {
namespace {

std::string config_of(const TempFolder& folder, const std::string& content,
                      const std::string& options = "") {
  const std::string path = folder.path("data.jsonl");
  write_file(path, content);
  return str("type = 'jsonl'\npath = '", path, "'\n", options);
}

std::string sums() {
  std::string lines;
  for (int a = 0; a < 10; ++a) {
    for (int b = 0; b < 10; ++b) {
      lines += str(R"({"input": ")", a, "+", b, R"(=", "label": ")", a + b, "\"}\n");
    }
  }
  return lines;
}

TEST(Jsonl, PredictsTheLabelAndTheEnd) {
  const TempFolder folder;
  const auto task = task_of(config_of(folder, sums(), "length = 8"));
  EXPECT_TRUE(task->exact_match());
  EXPECT_EQ(task->eval_sequences(), 10);
  std::set<std::vector<int64_t>> held_out;
  const Batch eval = task->eval_batch(0, 10);
  for (int64_t i = 0; i < 10; ++i) held_out.insert(row(eval.inputs, i));
  const Batch train = task->train_batch(0, 90);
  std::set<std::vector<int64_t>> trained;
  for (int64_t i = 0; i < 90; ++i) {
    const std::vector<int64_t> inputs = row(train.inputs, i);
    EXPECT_FALSE(held_out.contains(inputs));
    trained.insert(inputs);
    const int64_t sum = inputs[0] - '0' + inputs[2] - '0';
    std::string answer;
    for (int64_t target : row(train.targets, i)) {
      if (target > 0) answer += static_cast<char>(target);
    }
    EXPECT_EQ(answer, std::to_string(sum));
    EXPECT_EQ(row(train.targets, i)[3 + answer.size()], 0);  // the end
  }
  EXPECT_EQ(trained.size(), 90u);
  EXPECT_NEAR(task->floors()[0].accuracy, (55.0 + 45.0 / 256.0) / 100.0 / 65536.0, 1e-9);
}

// A question with several answers, or one that is there several times, is on one side alone, and
// there in one half.
TEST(Jsonl, AQuestionIsInOnePartAlone) {
  const TempFolder folder;
  std::string lines;
  for (int i = 0; i < 60; ++i) {
    for (int answer = 0; answer < 1 + i % 4; ++answer) {
      lines += str("{\"input\": \"", i, "?\", \"label\": \"", answer, "\"}\n");
    }
  }
  const auto task = task_of(config_of(folder, lines, "length = 8\nheld_out = 0.4"));
  const int64_t count = task->eval_sequences();
  const auto questions = [](const Batch& batch, const auto& wanted) {
    std::set<std::vector<int64_t>> out;
    for (int64_t i = 0; i < batch.inputs.size(0); ++i) {
      std::vector<int64_t> tokens = row(batch.inputs, i);
      tokens.resize(
          static_cast<size_t>(std::find(tokens.begin(), tokens.end(), '?') - tokens.begin()));
      if (wanted(i)) out.insert(tokens);
    }
    return out;
  };
  const auto common = [](const auto& a, const auto& b) {
    return std::count_if(a.begin(), a.end(), [&](const auto& one) { return b.contains(one); });
  };
  const Batch eval = task->eval_batch(0, count);
  const auto all = [](int64_t) { return true; };
  EXPECT_EQ(common(questions(task->train_batch(0, 150 - count), all), questions(eval, all)), 0);
  // Of an odd number the last one is in no half.
  const auto in_half = [&](bool test) {
    return questions(eval, [&](int64_t i) { return i < count / 2 * 2 && is_test(i) == test; });
  };
  const auto validation = in_half(false), test = in_half(true);
  EXPECT_GT(validation.size(), 5u);
  EXPECT_GT(test.size(), 5u);
  EXPECT_EQ(common(validation, test), 0);
}

// Also by halves, as earlier runs were trained.
TEST(Jsonl, WhatIsThereOnceIsShuffledAndNothingElse) {
  const TempFolder folder;
  std::string lines;
  for (int i = 0; i < 41; ++i) {
    lines += str("{\"text\": \"", static_cast<char>('0' + i), "\"}\n");
  }
  const auto task = task_of(config_of(folder, lines, "length = 8\nheld_out = 1.0"));
  std::vector<int64_t> order(41);
  std::iota(order.begin(), order.end(), int64_t{'0'});
  Random random({0});
  random.shuffle(order);
  EXPECT_EQ(row(task->eval_batch(0, 41).inputs.transpose(0, 1), 0), order);
}

TEST(Jsonl, PaddingHasNoLength) {
  const TempFolder folder;
  const auto task = task_of(config_of(folder, sums(), "length = 8"));
  const Batch batch = task->train_batch(0, 20);
  ASSERT_TRUE(batch.lengths.defined());
  const at::Tensor last = batch.targets.ne(kIgnore).to(at::kLong).mul(at::arange(8)).amax(1);
  EXPECT_TRUE(at::equal(batch.lengths, last + 1));
  EXPECT_FALSE(task_of("type = 'copy'\ncount = 3")->train_batch(0, 4).lengths.defined());
}

TEST(Jsonl, AGuessKnowsTheMostFrequentToken) {
  const TempFolder folder;
  const auto task = task_of(config_of(folder, "{\"text\": \"xaabaa\"}\n{\"text\": \"yaabaa\"}\n",
                                      "length = 8\nheld_out = 0.5"));
  const auto floors = task->floors();
  ASSERT_EQ(floors.size(), 2u);
  EXPECT_EQ(floors[1].name, "the most frequent token");
  EXPECT_DOUBLE_EQ(floors[1].accuracy, 4.0 / 6);  // of a, a, b, a, a and the end
}

TEST(Jsonl, AGuessKnowsTheUsualLabel) {
  const TempFolder folder;
  std::string lines;
  for (int i = 0; i < 40; ++i) {
    lines += str("{\"input\": \"", i, "\", \"label\": \"", i % 4 == 0 ? "no" : "yes", "\"}\n");
  }
  const auto task = task_of(config_of(folder, lines, "length = 8\nheld_out = 0.5"));
  const Batch eval = task->eval_batch(0, task->eval_sequences());
  int64_t yes = 0;
  for (int64_t i = 0; i < eval.targets.size(0); ++i) {
    const std::vector<int64_t> targets = row(eval.targets, i);
    yes += std::count(targets.begin(), targets.end(), 'y');
  }
  EXPECT_EQ(task->floors().back().name, "the most frequent label");
  EXPECT_DOUBLE_EQ(task->floors().back().accuracy,
                   static_cast<double>(yes) / static_cast<double>(eval.targets.size(0)));
}

TEST(Jsonl, PredictsEveryTokenOfATextAndCutsLongOnes) {
  const TempFolder folder;
  const auto task =
      task_of(config_of(folder, "{\"text\": \"abcdefgh\"}\n\n{\"text\": \"xy\"}\n", "length = 4"));
  EXPECT_FALSE(task->exact_match());
  std::set<std::string> seen;
  for (const Batch& batch : {task->train_batch(0, 1), task->eval_batch(0, 1)}) {
    std::string predicted;
    for (int64_t target : row(batch.targets, 0)) {
      predicted += target == kIgnore ? "-"
                   : target == 0     ? "$"
                                     : std::string(1, static_cast<char>(target));
    }
    seen.insert(predicted);
  }
  EXPECT_EQ(seen, (std::set<std::string>{"bcde", "y$--"}));
  expect_contains(task->describe(), "; 1 of them longer than 4 tokens and cut at the end.");
}

// What is not read may be anything, keys that come twice in it included.
TEST(Jsonl, OtherKeysAreNotRead) {
  const TempFolder folder;
  const std::string more = ", \"meta\": {\"a\": {\"label\": 1}, \"a\": [{\"b\": 1, \"b\": 2}]}}\n";
  std::string lines;
  for (const char* input : {"a", "b", "c", "d"}) {
    lines += str("{\"input\": \"", input, "\", \"label\": \"x\"", more);
  }
  EXPECT_EQ(error_of(config_of(folder, lines, "length = 4\nheld_out = 0.5")), "(no such error)");
}

TEST(Jsonl, BrokenLinesAreNamedAndNumbered) {
  const TempFolder folder;
  const std::string good = "{\"input\": \"a\", \"label\": \"b\"}\n";
  const auto error = [&](const std::string& line) {
    return error_of(config_of(folder, good + line, "length = 4"));
  };
  const std::string place = folder.path("data.jsonl") + ", line 2: ";
  expect_contains(error("{\"input\": \"a\""), place + "is not JSON");
  expect_contains(error("[1]"), place + "is JSON, but not an object");
  expect_contains(error("{\"input\": \"a\"}"), place + "has no \"label\".");
  expect_contains(error("{\"input\": \"a\", \"label\": 3}"),
                  place + "has a \"label\" that is no text.");
  expect_contains(error("{\"input\": \"a\", \"label\": \"a\\u0000b\"}"),
                  place + "has a character 0 in \"label\".");
  expect_contains(error("{\"text\": \"a\"}"), place + "has \"text\", but the lines before it");
  expect_contains(error("{\"other\": \"a\"}"), place + "has no \"text\" and no \"input\"");
  expect_contains(error("{\"input\": \"a\", \"label\": \"\"}"), place + "has an empty \"label\".");
  expect_contains(error("{\"input\": \"a\", \"label\": \"b\", \"l\\u0061bel\": \"c\"}"),
                  place + "has the key \"label\" twice");
  expect_contains(
      error("{\"input\": \"a\", \"label\": \"12345\"}"),
      place + "has a label of 6 tokens with the end token, but the context is length = 4");
}

}  // namespace
}  // namespace headloom::data::jsonl_test
