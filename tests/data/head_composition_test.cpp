// head_composition: every row is answered again here, from its words alone.
#include <map>
#include <set>
#include <sstream>

#include "data/random.h"
#include "helpers.h"

namespace headloom::data::head_composition_test {
namespace {

using Words = std::vector<std::string>;

Words words_of_text(const std::string& text) {
  std::istringstream in(text);
  Words words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

// A row without its mark: the statements, the words of the question, and the answer.
struct Row {
  std::vector<Words> facts;
  Words question;
  std::string answer;
};

std::vector<Row> rows_of(const Task& task, const std::vector<int64_t>& inputs,
                         const std::vector<int64_t>& targets) {
  // The last answer of the longest rows is a target only.
  std::vector<Row> rows;
  Row row;
  Words words;
  const Words all = words_of_text(task.decode(inputs));
  for (size_t t = 0; t < all.size(); ++t) {
    if (all[t] == "<pad>") continue;
    if (all[t] == "|") {
      row.answer = words.back();
      words.pop_back();
      row.question = words;
      rows.push_back(row);
      row = {};
      words = {};
      continue;
    }
    if (all[t] == ".") {
      row.facts.push_back(words);
      words = {};
      continue;
    }
    words.push_back(all[t]);
  }
  if (!words.empty()) {
    EXPECT_NE(targets.back(), kIgnore);
    row.answer = words_of_text(task.decode({targets.back()}))[0];
    row.question = words;
    rows.push_back(row);
  }
  return rows;
}

// What a few things become, chosen from all parts of the lists.
const std::map<std::string, std::map<std::string, std::string>> kKnown = {
    {"object_kind", {{"apple", "fruit"}, {"organ", "instrument"}, {"oak", "tree"}}},
    {"tool_use", {{"knife", "cut"}, {"thread", "sew"}, {"bag", "carry"}}},
    {"city_country", {{"paris", "france"}, {"osaka", "japan"}, {"larissa", "greece"}}},
    {"country_capital", {{"france", "paris"}, {"turkey", "ankara"}, {"greece", "athens"}}},
    {"opposite", {{"hot", "cold"}, {"cold", "hot"}, {"narrow", "wide"}}},
    {"time_before", {{"monday", "tuesday"}, {"december", "january"}, {"twelve", "one"}}},
    {"time_after", {{"monday", "sunday"}, {"january", "december"}, {"spring", "winter"}}},
};

// The thing and the person of a fact: those words that are not of the phrase.
std::pair<std::string, std::string> person_and_thing(const Words& fact, bool reversed) {
  return reversed ? std::pair{fact.back(), fact.front()} : std::pair{fact.front(), fact.back()};
}

// The answer of a row whose transformation is `becomes`, by the pattern's name.
std::string solve(const Row& row, const std::string& pattern,
                  const std::map<std::string, std::string>& becomes) {
  if (pattern == "not_in_set" || pattern == "different") {
    std::map<std::string, int> times;
    for (size_t i = 2; i < row.facts[0].size(); ++i) ++times[row.facts[0][i]];
    EXPECT_EQ(times.size(), 2u);
    if (pattern == "not_in_set") {
      EXPECT_EQ(times.at(row.question[3]), 2);
    }
    for (const auto& [thing, count] : times) {
      if (count == 1) return becomes.at(thing);
    }
    return "(none)";
  }
  const bool reversed = pattern.ends_with("_reversed");
  std::multimap<std::string, std::string> things;   // by person
  std::multimap<std::string, std::string> persons;  // by result
  for (const Words& fact : row.facts) {
    const auto [person, thing] = person_and_thing(fact, reversed);
    things.emplace(person, thing);
    persons.emplace(becomes.at(thing), person);
  }
  EXPECT_EQ(things.size(), 3u);
  if (pattern.starts_with("same_person")) {
    EXPECT_EQ(things.count(row.question[0]), 1u);
    return becomes.at(things.find(row.question[0])->second);
  }
  if (pattern.starts_with("other_person")) {
    EXPECT_EQ(things.count(row.question[0]), 2u);
    for (const auto& [person, thing] : things) {
      if (person != row.question[0]) return becomes.at(thing);
    }
  }
  const std::string& asked = row.question[row.question.size() - 2];  // before "?"
  if (pattern.starts_with("who_not")) {
    EXPECT_EQ(persons.count(asked), 2u);
    for (const auto& [result, person] : persons) {
      if (result != asked) return person;
    }
  }
  EXPECT_EQ(persons.count(asked), 1u);
  return persons.find(asked)->second;
}

Choices options_of_kind(const std::string& key) {
  const auto spec = make_task_spec("head_composition");
  const Node node = write_fields(*spec);
  Choices names;
  for (const Node& item : node.find(key)->array()) {
    names.push_back(std::get<std::string>(item.value));
  }
  return names;
}

// What every thing of a transformation becomes, read off rows of the pattern same_person.
std::map<std::string, std::string> learn(const std::string& transformation) {
  const auto task = task_of(
      "type = 'head_composition'\npatterns = 'same_person'\nrows = 8\n"
      "transformations = '" +
      transformation + "'");
  std::map<std::string, std::string> becomes;
  const Batch batch = task->train_batch(0, 400);
  for (int64_t i = 0; i < 400; ++i) {
    for (const Row& r : rows_of(*task, row(batch.inputs, i), row(batch.targets, i))) {
      if (r.answer.empty() || r.facts.size() != 3) continue;
      for (const Words& fact : r.facts) {
        if (fact.front() != r.question.front()) continue;
        const auto [known, added] = becomes.emplace(fact.back(), r.answer);
        EXPECT_EQ(known->second, r.answer);  // one map for all sequences
      }
    }
  }
  return becomes;
}

TEST(HeadComposition, HasAtLeastAsManyTasksAsThePaper) {
  EXPECT_EQ(options_of_kind("patterns").size() * options_of_kind("transformations").size(), 100u);
}

TEST(HeadComposition, EveryRowOfEveryTaskIsAnsweredByItsWords) {
  std::set<std::vector<int64_t>> held_out_rows;
  for (const std::string& transformation : options_of_kind("transformations")) {
    const auto becomes = learn(transformation);
    if (kKnown.contains(transformation)) {
      for (const auto& [thing, result] : kKnown.at(transformation)) {
        EXPECT_EQ(becomes.at(thing), result) << transformation;
      }
    } else {
      for (const auto& [thing, result] : becomes) EXPECT_EQ(thing, result);
    }
    for (const std::string& pattern : options_of_kind("patterns")) {
      SCOPED_TRACE(pattern + " " + transformation);
      const auto task = task_of("type = 'head_composition'\nrows = 4\nshots = 1\npatterns = '" +
                                pattern + "'\ntransformations = '" + transformation + "'");
      const Batch batch = task->eval_batch(0, 20);
      std::set<std::string> answers;
      for (int64_t i = 0; i < 20; ++i) {
        const std::vector<int64_t> inputs = row(batch.inputs, i), targets = row(batch.targets, i);
        std::vector<std::string> wanted;
        for (size_t t = 0; t < targets.size(); ++t) {
          if (targets[t] == kIgnore) continue;
          wanted.push_back(words_of_text(task->decode({targets[t]}))[0]);
          // The target is the next word.
          if (t + 1 < inputs.size()) {
            EXPECT_EQ(targets[t], inputs[t + 1]);
          }
        }
        ASSERT_EQ(wanted.size(), 3u);
        const std::vector<Row> rows = rows_of(*task, inputs, targets);
        ASSERT_EQ(rows.size(), 4u);
        for (size_t r = 0; r < 4; ++r) {
          EXPECT_EQ(solve(rows[r], pattern, becomes), rows[r].answer);
          answers.insert(rows[r].answer);
          if (r >= 1) {
            EXPECT_EQ(rows[r].answer, wanted[r - 1]);
          }
        }
      }
      EXPECT_GT(answers.size(), 5u);
    }
  }
}

TEST(HeadComposition, NoRowThatIsHeldOutIsTrainedOn) {
  // The fewest different rows of all tasks.
  const auto task =
      task_of("type = 'head_composition'\npatterns = 'different'\ntransformations = 'time_after'");
  const auto texts = [&](const Batch& batch) {
    std::set<Words> rows;
    for (int64_t i = 0; i < batch.inputs.size(0); ++i) {
      for (const Row& r : rows_of(*task, row(batch.inputs, i), row(batch.targets, i))) {
        rows.insert(r.facts[0]);
      }
    }
    return rows;
  };
  const auto trained = texts(task->train_batch(0, 500)), held_out = texts(task->eval_batch(0, 500));
  EXPECT_GT(trained.size(), 600u);
  EXPECT_GT(held_out.size(), 150u);
  for (const Words& facts : held_out) EXPECT_FALSE(trained.contains(facts));
}

// A guess that knows the task but looks nothing up.
void check_guess(const std::string& pattern, double expected) {
  SCOPED_TRACE(pattern);
  const auto task = task_of("type = 'head_composition'\ntransformations = 'object'\npatterns = '" +
                            pattern + "'");
  Random random({3});
  const Batch batch = task->eval_batch(0, 512);
  int64_t right = 0, asked = 0;
  for (int64_t i = 0; i < 512; ++i) {
    const auto rows = rows_of(*task, row(batch.inputs, i), row(batch.targets, i));
    for (size_t r = 2; r < rows.size(); ++r) {
      std::set<std::string> shown;
      if (pattern == "different") {
        shown.insert(rows[r].facts[0].begin() + 2, rows[r].facts[0].end());
      } else {
        for (const Words& fact : rows[r].facts) {
          const auto [person, thing] = person_and_thing(fact, false);
          shown.insert(pattern == "who" ? person : thing);
        }
      }
      const Words choices(shown.begin(), shown.end());
      right += choices[static_cast<size_t>(random.below(static_cast<int64_t>(choices.size())))] ==
               rows[r].answer;
      ++asked;
    }
  }
  ASSERT_EQ(asked, 512 * 6);
  EXPECT_NEAR(task->floors().back().accuracy, expected, 1e-12);
  EXPECT_NEAR(static_cast<double>(right) / static_cast<double>(asked), expected, 0.035);
}

TEST(HeadComposition, TheFloorIsOneOfTheAnswersShown) {
  check_guess("same_person", 1.0 / 3.0);
  check_guess("other_person", 1.0 / 3.0);
  check_guess("who", 1.0 / 3.0);
  check_guess("different", 1.0 / 2.0);
  const auto mixed = task_of("type = 'head_composition'\npatterns = ['who', 'different']");
  EXPECT_NEAR(mixed->floors().back().accuracy, 5.0 / 12.0, 1e-12);
}

TEST(HeadComposition, ImpossibleOptionsAreRefused) {
  expect_contains(error_of<UsageError>("type = 'head_composition'\nshots = 8"),
                  "has shots = 8, expected fewer than rows = 8");
  expect_contains(error_of<UsageError>("type = 'head_composition'\npatterns = []"),
                  "empty list of patterns");
  expect_contains(error_of<UsageError>("type = 'head_composition'\npatterns = ['whom']"),
                  "did you mean");
}

}  // namespace
}  // namespace headloom::data::head_composition_test
