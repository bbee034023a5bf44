// The tasks that are made up on the fly: what each sequence must satisfy, and the streams.
#include <algorithm>
#include <map>
#include <set>

#include "data/random.h"
#include "helpers.h"

namespace headloom::data::generated_test {
namespace {

const std::vector<std::string> kSmallConfigs = {
    "type = 'find_block'\nblocks = 4",
    "type = 'recall'\nvocabulary = 64\nlength = 24\npairs = 3",
    "type = 'copy'\nsymbols = 7\ncount = 9",
    "type = 'induction'\nlength = 20",
    "type = 'needle'\nlength = 60",
};

TEST(Random, IsTheSameOnEveryMachine) {
  // Recorded once: the standard fixes the engine and the seeding, random.h the rest.
  Random random({1, 2, 3});
  std::vector<int64_t> draws;
  for (int i = 0; i < 6; ++i) draws.push_back(random.below(1000));
  EXPECT_EQ(draws, (std::vector<int64_t>{174, 117, 709, 673, 348, 667}));
}

TEST(Random, DistinctNumbersAreDistinctAndCoverTheRange) {
  Random random({7});
  std::map<int64_t, int> first;
  for (int i = 0; i < 3000; ++i) {
    const std::vector<int64_t> picked = random.distinct(6, 4);
    ASSERT_EQ(std::set<int64_t>(picked.begin(), picked.end()).size(), 4u);
    ++first[picked[0]];
  }
  ASSERT_EQ(first.size(), 6u);
  for (const auto& [value, count] : first) {
    EXPECT_TRUE(value >= 0 && value < 6);
    EXPECT_NEAR(count, 500, 110);  // five standard deviations
  }
}

TEST(Generated, BatchesAreAFunctionOfSeedAndIndex) {
  for (const std::string& config : kSmallConfigs) {
    SCOPED_TRACE(config);
    const auto task = task_of(config, 5);
    const Batch third = task->train_batch(3, 4);
    EXPECT_EQ(third.inputs.sizes(), (at::IntArrayRef{4, task->length()}));
    EXPECT_EQ(third.targets.sizes(), third.inputs.sizes());
    EXPECT_FALSE(same(third, task->train_batch(2, 4)));
    EXPECT_TRUE(same(third, task->train_batch(3, 4)));
    EXPECT_TRUE(same(third, task_of(config, 5)->train_batch(3, 4)));
    EXPECT_FALSE(same(third, task_of(config, 6)->train_batch(3, 4)));
    // The stream does not depend on how it is cut into batches.
    EXPECT_TRUE(at::equal(third.inputs.slice(0, 2, 4), task->train_batch(7, 2).inputs));
    // What is held out is the same for every seed.
    EXPECT_TRUE(same(task->eval_batch(0, 8), task_of(config, 6)->eval_batch(0, 8)));
    EXPECT_TRUE(
        at::equal(task->eval_batch(0, 8).inputs.slice(0, 3, 5), task->eval_batch(3, 2).inputs));
    EXPECT_EQ(task->eval_sequences(), 512);
    EXPECT_THROW(task->eval_batch(510, 3), Error);
    EXPECT_GE(third.inputs.min().item<int64_t>(), 0);
    EXPECT_LT(third.inputs.max().item<int64_t>(), task->vocabulary());
    EXPECT_EQ(task->describe().back(), '.');
    const std::vector<int64_t> tokens = row(third.inputs, 0);
    EXPECT_EQ(task->encode(task->decode(tokens)), tokens);
    EXPECT_THROW(task->encode("!"), UsageError);
  }
}

TEST(Generated, HeldOutSequencesAreNeverTrainedOn) {
  // So few sequences (2^6) that streams without a split would surely meet.
  const auto task = task_of("type = 'copy'\nsymbols = 2\ncount = 6\neval_sequences = 200");
  std::set<std::vector<int64_t>> held_out;
  const Batch eval = task->eval_batch(0, 200);
  for (int64_t i = 0; i < 200; ++i) held_out.insert(row(eval.inputs, i));
  std::set<std::vector<int64_t>> trained;
  const Batch train = task->train_batch(0, 2000);
  for (int64_t i = 0; i < 2000; ++i) trained.insert(row(train.inputs, i));
  EXPECT_GE(held_out.size(), 1u);
  EXPECT_GE(trained.size(), 40u);
  for (const auto& sequence : held_out) EXPECT_FALSE(trained.contains(sequence));
}

TEST(Generated, TooFewSequencesAreRefused) {
  expect_contains(error_of<UsageError>("type = 'induction'\nvocabulary = 3\nlength = 3"),
                  "too few different sequences");
}

// The parts of a find_block sequence.
struct Parts {
  std::vector<std::string> blocks;
  std::string query;
  std::string answer;
};

Parts parts_of(const Task& task, const Batch& batch, int64_t index, size_t query_letters) {
  const std::vector<int64_t> inputs = row(batch.inputs, index);
  const std::vector<int64_t> targets = row(batch.targets, index);
  const std::string text = task.decode(inputs);
  Parts parts;
  const size_t mark = text.find('#');
  for (size_t begin = 0; begin < mark;) {
    const size_t end = std::min(text.find('.', begin), mark);
    parts.blocks.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parts.query = text.substr(mark + 1, query_letters);
  std::vector<int64_t> answer;
  for (size_t t = 0; t < targets.size(); ++t) {
    // Only the answer has loss: from the last letter of the query on.
    EXPECT_EQ(targets[t] != kIgnore, t >= mark + query_letters);
    if (targets[t] != kIgnore) answer.push_back(targets[t]);
    if (targets[t] != kIgnore && t + 1 < inputs.size()) {
      EXPECT_EQ(targets[t], inputs[t + 1]);
    }
  }
  parts.answer = task.decode(answer);
  return parts;
}

void check_find_block(const std::string& options, size_t blocks, size_t letters,
                      size_t query_letters, const std::string& answer) {
  SCOPED_TRACE(options);
  const auto task = task_of("type = 'find_block'\n" + options);
  EXPECT_TRUE(task->exact_match());
  const Batch batch = task->train_batch(0, 50);
  std::set<size_t> places;
  for (int64_t i = 0; i < 50; ++i) {
    const Parts parts = parts_of(*task, batch, i, query_letters);
    ASSERT_EQ(parts.blocks.size(), blocks);
    ASSERT_EQ(parts.query.size(), query_letters);
    std::vector<size_t> matches;
    for (size_t b = 0; b < blocks; ++b) {
      ASSERT_EQ(parts.blocks[b].size(), letters);
      EXPECT_EQ(std::set<char>(parts.blocks[b].begin(), parts.blocks[b].end()).size(), letters);
      if (std::all_of(parts.query.begin(), parts.query.end(),
                      [&](char c) { return parts.blocks[b].find(c) != std::string::npos; })) {
        matches.push_back(b);
      }
    }
    ASSERT_EQ(matches.size(), 1u);
    places.insert(matches[0]);
    EXPECT_EQ(std::set<char>(parts.query.begin(), parts.query.end()).size(), query_letters);
    const std::string& block = parts.blocks[matches[0]];
    EXPECT_EQ(parts.answer, answer == "all"     ? block
                            : answer == "first" ? block.substr(0, 1)
                                                : block.substr(letters - 1));
  }
  EXPECT_GT(places.size(), 3u);
}

TEST(FindBlock, OneBlockHasAllQueriedLettersAndIsTheAnswer) {
  check_find_block("blocks = 8", 8, 5, 2, "all");
  check_find_block("blocks = 8\nanswer = 'first'", 8, 5, 2, "first");
  check_find_block("blocks = 8\nanswer = 'last'", 8, 5, 2, "last");
  check_find_block("blocks = 9\nblock_letters = 8\nquery_letters = 3", 9, 8, 3, "all");
  check_find_block("", 52, 5, 2, "all");
}

TEST(FindBlock, PublishedSizeHas319Characters) {
  const auto task = task_of("type = 'find_block'");
  const Batch batch = task->eval_batch(0, 1);
  // The model sees all characters but the last of the answer.
  EXPECT_EQ(task->length() + 1, 319);
  EXPECT_EQ(batch.inputs.size(1) + 1, 319);
  EXPECT_EQ(task->vocabulary(), 28);
}

TEST(FindBlock, ImpossibleOptionsAreRefused) {
  EXPECT_EQ(error_of<UsageError>("type = 'find_block'\nblock_letters = 3\nquery_letters = 4"),
            "find_block has query_letters = 4, but a block has only block_letters = 3.");
  expect_contains(error_of<UsageError>("type = 'find_block'\nblock_letters = 26"), "block_letters");
  expect_contains(error_of<UsageError>("type = 'find_block'\nanswer = 'al'"), "answer");
  expect_contains(error_of<UsageError>("type = 'find_blok'"), "find_block");
  expect_contains(error_of<UsageError>("type = 'find_block'\nblok = 3"), "blok");
}

TEST(Recall, EachKeyIsAskedForOnceAndItsValueIsTheTarget) {
  const int64_t pairs = 5;
  const auto task = task_of("type = 'recall'\nvocabulary = 100\nlength = 40\npairs = 5");
  EXPECT_FALSE(task->exact_match());
  const Batch batch = task->train_batch(0, 50);
  for (int64_t i = 0; i < 50; ++i) {
    const std::vector<int64_t> inputs = row(batch.inputs, i);
    const std::vector<int64_t> targets = row(batch.targets, i);
    std::map<int64_t, int64_t> value_of;
    for (size_t p = 0; p < pairs; ++p) {
      EXPECT_TRUE(inputs[2 * p] >= 1 && inputs[2 * p] < 50);
      EXPECT_TRUE(inputs[2 * p + 1] >= 50 && inputs[2 * p + 1] < 100);
      value_of[inputs[2 * p]] = inputs[2 * p + 1];
    }
    ASSERT_EQ(value_of.size(), static_cast<size_t>(pairs));
    std::set<int64_t> asked;
    for (size_t t = 0; t < targets.size(); ++t) {
      if (targets[t] == kIgnore) continue;
      EXPECT_GE(t, static_cast<size_t>(2 * pairs));
      EXPECT_EQ(t % 2, 0u);
      ASSERT_TRUE(value_of.contains(inputs[t]));
      EXPECT_EQ(targets[t], value_of[inputs[t]]);
      asked.insert(inputs[t]);
    }
    EXPECT_EQ(asked.size(), static_cast<size_t>(pairs));
  }
}

// The mean distance of the queries from the end of the pairs.
double mean_distance(const std::string& alpha) {
  const auto task = task_of("type = 'recall'\nlength = 128\npairs = 4\nalpha = " + alpha);
  const at::Tensor places = task->train_batch(0, 300).targets.ne(kIgnore).nonzero().select(1, 1);
  return places.to(at::kDouble).mean().item<double>() - 8.0;
}

TEST(Recall, QueriesFollowThePowerLaw) {
  EXPECT_NEAR(mean_distance("1.0"), 59.0, 5.0);  // uniform over 0, 2, ..., 118
  EXPECT_LT(mean_distance("0.01"), 40.0);
}

TEST(Recall, ImpossibleOptionsAreRefused) {
  EXPECT_EQ(error_of<UsageError>("type = 'recall'\nlength = 63\npairs = 16"),
            "recall has length = 63, but 16 pairs and their queries need at least 64.");
  EXPECT_EQ(error_of<UsageError>("type = 'recall'\nvocabulary = 8"),
            "recall has pairs = 4, but a vocabulary of 8 has only 3 keys.");
}

TEST(Copy, AnswersWithTheSequence) {
  const auto task = task_of("type = 'copy'\nsymbols = 9\ncount = 5");
  const Batch batch = task->train_batch(0, 10);
  for (int64_t i = 0; i < 10; ++i) {
    const std::vector<int64_t> inputs = row(batch.inputs, i);
    const std::vector<int64_t> targets = row(batch.targets, i);
    ASSERT_EQ(inputs.size(), 10u);
    EXPECT_EQ(inputs[5], 9);
    for (size_t t = 0; t < 10; ++t) EXPECT_EQ(targets[t], t < 5 ? kIgnore : inputs[t - 5]);
  }
}

TEST(Induction, AnswersWithTheTokenAfterTheMarker) {
  const auto task = task_of("type = 'induction'\nlength = 12");
  const Batch batch = task->train_batch(0, 50);
  for (int64_t i = 0; i < 50; ++i) {
    const std::vector<int64_t> inputs = row(batch.inputs, i);
    const std::vector<int64_t> targets = row(batch.targets, i);
    EXPECT_EQ(std::count(inputs.begin(), inputs.end(), 15), 2);
    EXPECT_EQ(inputs.back(), 15);
    EXPECT_EQ(std::count(targets.begin(), targets.end() - 1, kIgnore), 11);
    EXPECT_EQ(targets.back(), *(std::find(inputs.begin(), inputs.end(), 15) + 1));
    EXPECT_NE(targets.back(), 15);
  }
}

TEST(Needle, StatesTheNumberOnceAtTheGivenDepth) {
  for (const auto& [depth, place] :
       std::map<std::string, size_t>{{"0.0", 0}, {"0.5", 44}, {"1.0", 88}}) {
    const auto task = task_of("type = 'needle'\nlength = 100\ndepth = " + depth);
    const Batch batch = task->train_batch(0, 10);
    for (int64_t i = 0; i < 10; ++i) {
      const std::string text = task->decode(row(batch.inputs, i));
      std::vector<int64_t> answer;
      for (int64_t target : row(batch.targets, i)) {
        if (target != kIgnore) answer.push_back(target);
      }
      ASSERT_EQ(answer.size(), 5u);
      EXPECT_EQ(text.find_first_of("0123456789"), place + 1);
      EXPECT_EQ(text.find("=" + task->decode(answer) + "."), place);
      EXPECT_EQ(text.find('#'), 95u);
    }
  }
  expect_contains(error_of<UsageError>("type = 'needle'\nlength = 10"), "needs at least 12");
}

TEST(Registry, EveryTaskHasADefaultSpecOfItsName) {
  EXPECT_GE(tasks().size(), 6u);
  for (const TaskEntry& entry : tasks()) {
    const auto spec = make_task_spec(entry.name);
    EXPECT_EQ(spec->type(), entry.name);
    EXPECT_EQ(entry.doc.back(), '.');
    Lister lister;
    spec->fields(lister);
    EXPECT_FALSE(lister.options().empty());
  }
  try {
    make_task_spec("recal");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "there is no task 'recal'; did you mean 'recall'?");
  }
}

}  // namespace
}  // namespace headloom::data::generated_test
