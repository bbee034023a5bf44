// The tasks that are made up on the fly: what each sequence must satisfy, and the streams.
#include <algorithm>
#include <cmath>
#include <functional>
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
    "type = 'mqar'\nvocabulary = 64\nlength = 24\npairs = 3",
    "type = 'forgetting_mqar'\nvocabulary = 64\nlength = 40\npairs = 4\nupdates = 2",
    "type = 'compositional_mqar'\nvocabulary = 64\nlength = 30\npairs = 4",
    "type = 'in_context_recall'\nlength = 24\neval_sequences = 512",
    "type = 'noisy_in_context_recall'\nlength = 24\neval_sequences = 512",
    "type = 'fuzzy_in_context_recall'\nlength = 40\neval_sequences = 512",
    "type = 'selective_copying'\nlength = 40\ntokens = 6\neval_sequences = 512",
    "type = 'memorization'\nlength = 12\neval_sequences = 512",
    "type = 'head_composition'\nrows = 3",
    "type = 'compression'\nlength = 12\neval_sequences = 512",
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

TEST(Generated, NoTaskTrainsOnWhatIsHeldOut) {
  for (const std::string& config : kSmallConfigs) {
    SCOPED_TRACE(config);
    const auto task = task_of(config);
    std::set<std::vector<int64_t>> held_out;
    const Batch eval = task->eval_batch(0, 200);
    for (int64_t i = 0; i < 200; ++i) held_out.insert(row(eval.inputs, i));
    const Batch train = task->train_batch(0, 400);
    for (int64_t i = 0; i < 400; ++i) EXPECT_FALSE(held_out.contains(row(train.inputs, i)));
  }
}

TEST(Generated, AFixedNumberOfExamplesIsRepeatedInAnotherOrder) {
  const std::string config = "type = 'copy'\nsymbols = 50\ncount = 8";
  const auto endless = task_of(config);
  const auto task = task_of(config + "\nexamples = 12");
  const auto sequences = [](const Task& of, int64_t batch) {
    std::vector<std::vector<int64_t>> out;
    const at::Tensor inputs = of.train_batch(batch, 12).inputs;
    for (int64_t i = 0; i < 12; ++i) out.push_back(row(inputs, i));
    return out;
  };
  const auto sorted = [](auto values) {
    std::sort(values.begin(), values.end());
    return values;
  };
  const auto first = sequences(*task, 0), second = sequences(*task, 1);
  EXPECT_EQ(sorted(first), sorted(sequences(*endless, 0)));
  EXPECT_EQ(sorted(second), sorted(first));
  EXPECT_NE(second, first);
}

// The guess at a position of a sequence, from the inputs up to it.
using Guesser = std::function<int64_t(const std::vector<int64_t>& inputs, Random& random)>;

// The accuracy of `guess` on held-out sequences, as the task counts it.
double accuracy_of(const Task& task, const Guesser& guess) {
  Random random({3});
  const Batch batch = task.eval_batch(0, task.eval_sequences());
  int64_t right = 0, asked = 0;
  for (int64_t i = 0; i < task.eval_sequences(); ++i) {
    const std::vector<int64_t> inputs = row(batch.inputs, i);
    const std::vector<int64_t> answers = row(batch.targets, i);
    int64_t hits = 0, targets = 0;
    for (size_t t = 0; t < answers.size(); ++t) {
      if (answers[t] == kIgnore) continue;
      ++targets;
      hits += guess({inputs.begin(), inputs.begin() + static_cast<int64_t>(t) + 1}, random) ==
              answers[t];
    }
    right += task.exact_match() ? hits == targets : hits;
    asked += task.exact_match() ? 1 : targets;
  }
  return static_cast<double>(right) / static_cast<double>(asked);
}

Guesser below(int64_t n, int64_t first = 0) {
  return [=](const std::vector<int64_t>&, Random& random) { return first + random.below(n); };
}

// One of the inputs first, first + step, ..., `count` in all.
Guesser one_of(int64_t first, int64_t step, int64_t count) {
  return [=](const std::vector<int64_t>& inputs, Random& random) {
    return inputs[static_cast<size_t>(first + step * random.below(count))];
  };
}

void check_floor(const std::string& config, const std::string& name, const Guesser& guess) {
  SCOPED_TRACE(config);
  const auto task = task_of(config + "\neval_sequences = 4000");
  for (const Floor& floor : task->floors()) {
    if (floor.name != name) continue;
    // About four standard deviations of 4000 guesses.
    EXPECT_NEAR(accuracy_of(*task, guess), floor.accuracy,
                4.0 * std::sqrt(floor.accuracy * (1.0 - floor.accuracy) / 4000.0));
    return;
  }
  FAIL() << "there is no floor '" << name << "'";
}

// The queries' law asks for the first keys soonest. Both numbers are of a simulation of that law
// alone, written apart from this program.
TEST(Floors, ThePlaceOfAQueryTellsSomethingOfItsKey) {
  const auto last = [](const std::string& config) { return task_of(config)->floors().back(); };
  EXPECT_NEAR(last("type = 'mqar'\nlength = 64\npairs = 4").accuracy, 0.288, 0.012);
  EXPECT_NEAR(last("type = 'mqar'\nlength = 8\npairs = 2").accuracy, 0.663, 0.012);
  EXPECT_EQ(last("type = 'recall'").name, "the value that is asked for most often at that place");
  // Many places are asked for seldom: the draws that say what comes most often there must not judge
  // it. With alpha = 1 no place tells anything.
  EXPECT_NEAR(last("type = 'mqar'\nlength = 1024\npairs = 64").accuracy, 0.0215, 0.0015);
  EXPECT_NEAR(last("type = 'mqar'\nlength = 512\npairs = 64\nalpha = 1").accuracy, 1.0 / 64, 5e-4);
}

TEST(Floors, AreWhatTheGuessersReach) {
  const std::string small = "\nvocabulary = 96\nlength = 40\npairs = 4";
  for (const std::string type : {"recall", "mqar"}) {
    const std::string config = "type = '" + type + "'" + small;
    check_floor(config, "any token", below(96));
    check_floor(config, "one of the values shown", one_of(1, 2, 4));
  }
  const std::string forgetting = "type = 'forgetting_mqar'" + small + "\nupdates = 2";
  check_floor(forgetting, "one of the values shown", one_of(1, 2, 6));
  check_floor("type = 'compositional_mqar'" + small, "one of the values shown", one_of(2, 3, 4));
  check_floor("type = 'copy'\nsymbols = 3\ncount = 3", "any symbols", below(3));
  check_floor("type = 'copy'\nsymbols = 3\ncount = 3", "any tokens", below(4));
  check_floor("type = 'induction'\nlength = 20", "any token but the marker", below(15));
  check_floor("type = 'needle'\nlength = 30\ndigits = 1", "any digits", below(10, 30));
  check_floor("type = 'selective_copying'\nlength = 13\ntokens = 6", "one of the tokens to copy",
              one_of(0, 1, 6));
  check_floor("type = 'in_context_recall'\nlength = 24", "any token of values", below(8, 8));
  check_floor("type = 'noisy_in_context_recall'\nlength = 24", "any token of values", below(8, 8));
  check_floor("type = 'fuzzy_in_context_recall'\nlength = 40", "any token of values", below(8, 7));
  for (const std::string type : {"in_context_recall", "noisy_in_context_recall"}) {
    // The first of those that have come most often, of values 8 to 15.
    check_floor("type = '" + type + "'",
                "the token of values that the sequence has shown most often",
                [](const std::vector<int64_t>& inputs, Random&) {
                  std::vector<int64_t> times(8, 0);
                  for (int64_t token : inputs) {
                    if (token >= 8 && token < 16) ++times[static_cast<size_t>(token - 8)];
                  }
                  return 8 + (std::max_element(times.begin(), times.end()) - times.begin());
                });
  }
  EXPECT_GT(task_of("type = 'in_context_recall'")->floors().back().accuracy, 0.25);
  check_floor("type = 'memorization'\nlength = 12\nvocabulary = 64", "any value", below(32, 31));
  check_floor("type = 'compression'\nlength = 8",
              "any token but the last, which is always the same",
              [](const std::vector<int64_t>& inputs, Random& random) -> int64_t {
                return inputs.size() < 8 ? random.below(15) : 15;
              });
  check_floor("type = 'find_block'\nblocks = 4\nanswer = 'first'", "one of the queried letters",
              one_of(24, 1, 2));
  check_floor("type = 'sequence'\ncount = 2\nsymbols = 9\nmin_count = 2",
              "any symbols, as many as the source has",
              [](const std::vector<int64_t>& inputs, Random& random) -> int64_t {
                return inputs.size() < 3 ? random.below(9) : 10;
              });
  check_floor("type = 'sequence'\nkind = 'sort'\ncount = 16\nsymbols = 2\nmin_count = 16",
              "the likeliest symbols in ascending order, as many as the source has",
              [](const std::vector<int64_t>& inputs, Random&) -> int64_t {
                return inputs.size() <= 8 ? 0 : inputs.size() <= 16 ? 1 : 3;
              });
  EXPECT_NEAR(task_of("type = 'sequence'\nkind = 'sort'\ncount = 5\nsymbols = 3\nmin_count = 5")
                  ->floors()
                  .back()
                  .accuracy,
              120.0 / (2 * 2 * 1) / 243, 1e-12);
}

TEST(Floors, EveryTaskOfNoFilesHasSomeInAscendingOrder) {
  for (const TaskEntry& entry : tasks()) {
    SCOPED_TRACE(entry.name);
    const auto spec = make_task_spec(entry.name);
    if (entry.name == "text" || entry.name == "masked_text" || entry.name == "jsonl" ||
        entry.name == "token_shard")
      continue;
    const auto floors = spec->build(1)->floors();
    ASSERT_FALSE(floors.empty());
    for (size_t i = 0; i < floors.size(); ++i) {
      EXPECT_LT(floors[i].accuracy, 1.0);
      EXPECT_GE(floors[i].accuracy, i == 0 ? 0.0 : floors[i - 1].accuracy);
    }
  }
}

TEST(Generated, NoSequenceIsBothValidationAndTestData) {
  // 27 inputs are possible, of which few are held out.
  const auto task =
      task_of("type = 'compression'\nvocabulary = 4\nlength = 4\neval_sequences = 200");
  std::array<std::set<std::vector<int64_t>>, 2> halves;
  for (const int64_t first : {100, 0}) {  // in whatever order they are asked for
    const Batch batch = task->eval_batch(first, 100);
    for (int64_t i = 0; i < 100; ++i) halves[is_test(first + i)].insert(row(batch.inputs, i));
  }
  EXPECT_FALSE(halves[0].empty() || halves[1].empty());
  for (const auto& inputs : halves[0]) EXPECT_FALSE(halves[1].contains(inputs));
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

TEST(Floors, OneOfTheBlocksIsRightByTheirNumber) {
  const auto task = task_of("type = 'find_block'\nblocks = 4\neval_sequences = 2000");
  const Batch batch = task->eval_batch(0, 2000);
  Random random({3});
  int64_t right = 0;
  for (int64_t i = 0; i < 2000; ++i) {
    const Parts parts = parts_of(*task, batch, i, 2);
    right += parts.blocks[static_cast<size_t>(random.below(4))] == parts.answer;
  }
  EXPECT_EQ(task->floors().back().name, "one of the blocks");
  EXPECT_NEAR(static_cast<double>(right) / 2000.0, task->floors().back().accuracy, 0.04);
}

// Any character is a better guess than one of many blocks.
TEST(FindBlock, TheBestFloorIsTheLast) {
  const auto task =
      task_of("type = 'find_block'\nblocks = 52\nblock_letters = 1\nquery_letters = 1");
  ASSERT_EQ(task->floors().size(), 1u);
  EXPECT_EQ(task->floors()[0].name, "any characters");
  EXPECT_EQ(task_of("type = 'find_block'\nblocks = 4")->floors().back().name, "one of the blocks");
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

TEST(Mqar, TheRestIsZeroUnlessAskedFor) {
  const std::string config = "type = 'mqar'\nvocabulary = 96\nlength = 40\npairs = 4";
  const auto others = [](const Batch& batch) {
    return batch.inputs.slice(1, 8).masked_select(batch.targets.slice(1, 8).eq(kIgnore));
  };
  EXPECT_TRUE(others(task_of(config)->train_batch(0, 20)).eq(0).all().item<bool>());
  const Batch random = task_of(config + "\nrandom_non_queries = true")->train_batch(0, 20);
  EXPECT_GT(others(random).ne(0).to(at::kDouble).mean().item<double>(), 0.9);
  // Then it is recall, to the token.
  const auto recall = task_of("type = 'recall'\nvocabulary = 96\nlength = 40\npairs = 4");
  EXPECT_TRUE(same(random, recall->train_batch(0, 20)));
}

TEST(Recall, StreamIsThatOfEarlierVersions) {
  StableHash hash;
  const Batch batch = task_of("type = 'recall'")->train_batch(0, 8);
  for (int64_t i = 0; i < 8; ++i) {
    for (int64_t token : row(batch.inputs, i)) hash.add(static_cast<uint64_t>(token));
    for (int64_t token : row(batch.targets, i)) hash.add(static_cast<uint64_t>(token));
  }
  EXPECT_EQ(hash.value(), 930072851335496522u);
}

TEST(ForgettingMqar, TheSecondValueCounts) {
  const auto task =
      task_of("type = 'forgetting_mqar'\nvocabulary = 64\nlength = 40\npairs = 4\nupdates = 2");
  const Batch batch = task->train_batch(0, 50);
  for (int64_t i = 0; i < 50; ++i) {
    const std::vector<int64_t> inputs = row(batch.inputs, i);
    const std::vector<int64_t> targets = row(batch.targets, i);
    std::map<int64_t, int64_t> first, last;
    for (size_t p = 0; p < 6; ++p) {
      first.try_emplace(inputs[2 * p], inputs[2 * p + 1]);
      last[inputs[2 * p]] = inputs[2 * p + 1];
    }
    ASSERT_EQ(last.size(), 4u);
    int64_t asked = 0, updated = 0;
    for (size_t t = 12; t < targets.size(); ++t) {
      if (targets[t] == kIgnore) continue;
      ++asked;
      EXPECT_EQ(targets[t], last.at(inputs[t]));
      updated += first.at(inputs[t]) != last.at(inputs[t]);
    }
    EXPECT_EQ(asked, 4);
    EXPECT_EQ(updated, 2);
  }
  expect_contains(error_of<UsageError>("type = 'forgetting_mqar'\npairs = 3\nupdates = 4"),
                  "updates = 4, expected at most pairs = 3.");
}

TEST(CompositionalMqar, OneTokenOfAKeyLeavesSeveralValues) {
  const auto task = task_of("type = 'compositional_mqar'\nvocabulary = 96\nlength = 60\npairs = 9");
  const Batch batch = task->train_batch(0, 50);
  for (int64_t i = 0; i < 50; ++i) {
    const std::vector<int64_t> inputs = row(batch.inputs, i);
    const std::vector<int64_t> targets = row(batch.targets, i);
    std::map<std::pair<int64_t, int64_t>, int64_t> values;
    std::map<int64_t, int> firsts, seconds;
    for (size_t p = 0; p < 27; p += 3) {
      values[{inputs[p], inputs[p + 1]}] = inputs[p + 2];
      ++firsts[inputs[p]];
      ++seconds[inputs[p + 1]];
      EXPECT_TRUE(inputs[p] >= 1 && inputs[p] < 32 && inputs[p + 1] >= 32 && inputs[p + 1] < 64);
      EXPECT_GE(inputs[p + 2], 64);
    }
    ASSERT_EQ(values.size(), 9u);
    for (const auto& counts : {firsts, seconds}) {
      for (const auto& [token, count] : counts) EXPECT_EQ(count, 3);
    }
    int64_t asked = 0;
    for (size_t t = 28; t < targets.size(); ++t) {
      if (targets[t] == kIgnore) continue;
      ++asked;
      EXPECT_EQ(targets[t], values.at({inputs[t - 1], inputs[t]}));
    }
    EXPECT_EQ(asked, 9);
  }
  expect_contains(error_of<UsageError>("type = 'compositional_mqar'\npairs = 5"),
                  "pairs = 5, expected a square such as 4, 9 or 16.");
}

TEST(InContextRecall, HeldOutTargetsAreValuesOfKeysThatWereShown) {
  for (const std::string type : {"in_context_recall", "noisy_in_context_recall"}) {
    SCOPED_TRACE(type);
    const auto task = task_of("type = '" + type + "'\nlength = 64");
    ASSERT_EQ(task->length(), 63);
    const Batch train = task->train_batch(0, 20);
    EXPECT_TRUE(
        at::equal(train.targets.slice(1, 0, 62), train.inputs.slice(1, 1)));  // every next token
    const Batch eval = task->eval_batch(0, 50);
    int64_t noise = 0;
    for (int64_t i = 0; i < 50; ++i) {
      const std::vector<int64_t> inputs = row(eval.inputs, i);
      const std::vector<int64_t> targets = row(eval.targets, i);
      std::map<int64_t, int64_t> values;
      for (size_t t = 0; t < 63; t += 2) {
        const bool is_noise = inputs[t] >= 16;
        noise += is_noise;
        const bool known = !is_noise && values.contains(inputs[t]);
        EXPECT_EQ(targets[t], known ? values[inputs[t]] : kIgnore);
        if (t == 62) {
          EXPECT_TRUE(known);
          break;
        }
        EXPECT_EQ(targets[t + 1], kIgnore);
        if (is_noise) continue;
        EXPECT_EQ(values.try_emplace(inputs[t], inputs[t + 1]).first->second, inputs[t + 1]);
      }
    }
    // 31 pairs a sequence, one of them never noise.
    EXPECT_NEAR(static_cast<double>(noise) / (50 * 30), type[0] == 'n' ? 0.2 : 0.0, 0.05);
  }
}

TEST(FuzzyRecall, HeldOutTargetsAreValuesOfKeysThatWereShown) {
  const auto task = task_of("type = 'fuzzy_in_context_recall'\nlength = 60");
  const Batch eval = task->eval_batch(0, 100);
  for (int64_t i = 0; i < 100; ++i) {
    const std::vector<int64_t> inputs = row(eval.inputs, i);
    const std::vector<int64_t> targets = row(eval.targets, i);
    // The inputs lack the last token, which is the last target.
    std::vector<int64_t> tokens = inputs;
    tokens.push_back(targets.back());
    EXPECT_NE(targets.back(), kIgnore);
    size_t at = 0;
    while (tokens[at] == 15) ++at;
    std::map<std::vector<int64_t>, std::vector<int64_t>> values;
    while (at < tokens.size()) {
      std::vector<int64_t> key, value;
      while (at < tokens.size() && tokens[at] < 7) key.push_back(tokens[at++]);
      const size_t begin = at;
      while (at < tokens.size() && tokens[at] >= 7) value.push_back(tokens[at++]);
      ASSERT_EQ(key.size(), 3u);
      ASSERT_TRUE(value.size() >= 1 && value.size() <= 3);
      const bool known = values.contains(key);
      EXPECT_EQ(values.try_emplace(key, value).first->second, value);
      for (size_t t = begin; t < at; ++t) EXPECT_EQ(targets[t - 1], known ? tokens[t] : kIgnore);
    }
  }
}

TEST(SelectiveCopying, AnswersWithTheTokensAmongTheBlanks) {
  const auto task = task_of("type = 'selective_copying'\nlength = 40\ntokens = 6");
  const Batch batch = task->train_batch(0, 50);
  for (int64_t i = 0; i < 50; ++i) {
    const std::vector<int64_t> inputs = row(batch.inputs, i);
    const std::vector<int64_t> targets = row(batch.targets, i);
    std::vector<int64_t> data;
    for (size_t t = 0; t < 33; ++t) {
      if (inputs[t] != 14) data.push_back(inputs[t]);
    }
    EXPECT_NE(inputs[32], 14);  // no blank stands after the last token
    EXPECT_EQ(inputs[33], 15);
    for (size_t t = 34; t < 40; ++t) EXPECT_EQ(inputs[t], 14);
    EXPECT_EQ(std::vector<int64_t>(targets.begin() + 34, targets.end()), data);
  }
}

TEST(Memorization, OneMapServesEverySequenceAndSeed) {
  std::map<int64_t, int64_t> values;
  for (uint64_t seed : {1, 2}) {
    const auto task = task_of("type = 'memorization'\nvocabulary = 64", seed);
    for (const Batch& batch : {task->train_batch(0, 30), task->eval_batch(0, 30)}) {
      for (int64_t i = 0; i < 30; ++i) {
        const std::vector<int64_t> inputs = row(batch.inputs, i);
        const std::vector<int64_t> targets = row(batch.targets, i);
        for (size_t t = 0; t < inputs.size(); t += 2) {
          EXPECT_EQ(inputs[t + 1], 63);
          EXPECT_EQ(targets[t], kIgnore);
          EXPECT_EQ(values.try_emplace(inputs[t], targets[t + 1]).first->second, targets[t + 1]);
        }
      }
    }
  }
  EXPECT_EQ(values.size(), 31u);
}

TEST(Compression, AsksForTheInputsOnceMore) {
  const auto task = task_of("type = 'compression'\nvocabulary = 9\nlength = 20");
  EXPECT_EQ(task->goal(), Goal::reconstruction);
  EXPECT_EQ(task->length(), 20);
  const Batch batch = task->train_batch(0, 200);
  EXPECT_TRUE(at::equal(batch.inputs, batch.targets));
  EXPECT_FALSE(batch.lengths.defined());
  EXPECT_TRUE(batch.inputs.slice(1, 19).eq(8).all().item<bool>());
  const at::Tensor data = batch.inputs.slice(1, 0, 19);
  EXPECT_EQ(data.max().item<int64_t>(), 7);
  EXPECT_EQ(data.min().item<int64_t>(), 0);
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
    EXPECT_NE(entry.doc.back(), '.') << "the reference adds it, after the source";
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
