// Which examples of files are held out: about the share that is asked for, whole questions, and the
// same ones whatever length they are read in.
#include <cctype>
#include <filesystem>
#include <set>

#include "core/files.h"
#include "core/text.h"
#include "helpers.h"

namespace headloom::data::held_out_test {
namespace {

// Words of example `number`, more than any length here: "n007 q7a q7b ...".
std::string words_of_example(int number, char separator = ' ') {
  std::string out = formatted("n%03.0f", number);
  for (int i = 0; i < 60; ++i) out += str(separator, 'q', number, static_cast<char>('a' + i % 26));
  return out;
}

// The numbers of the examples that a batch reads.
std::set<std::string> numbers_in(const Task& task, const Batch& batch) {
  std::set<std::string> out;
  for (int64_t i = 0; i < batch.inputs.size(0); ++i) {
    const std::string text = task.decode(row(batch.inputs, i));
    const auto digit = [&](size_t at) {
      return at < text.size() && std::isdigit(static_cast<unsigned char>(text[at])) != 0;
    };
    for (size_t at = text.find('n'); at != std::string::npos; at = text.find('n', at + 1)) {
      if (digit(at + 1) && digit(at + 2) && digit(at + 3)) out.insert(text.substr(at + 1, 3));
    }
  }
  return out;
}

std::set<std::string> held_out_of(const std::string& toml, const TaskSpec* as = nullptr) {
  const auto spec = spec_of(toml);
  if (as != nullptr) spec->split_as(*as);
  const auto task = spec->build(1);
  return numbers_in(*task, task->eval_batch(0, task->eval_sequences()));
}

// A file of 60 examples of each kind: the configuration of its task without the length.
std::vector<std::string> files_of_all_kinds(const TempFolder& folder) {
  std::string texts, questions, pairs, spans, tags;
  for (int i = 0; i < 60; ++i) {
    const std::string words = words_of_example(i);
    texts += str("{\"text\": \"", words, "\"}\n");
    // An input keeps its end.
    questions +=
        str("{\"input\": \"", words.substr(5), " ", words.substr(0, 4), "=\", \"label\": \"",
            std::string(static_cast<size_t>(1 + i % 3), 'y'), "\"}\n");
    pairs += str(words, "\t", words.substr(5), "\t", i % 2, "\n");
    spans += str(i > 0 ? ", " : "", "{\"context\": \"", words,
                 "\", \"qas\": [{\"question\": \"a?\", \"answers\": [{\"text\": \"",
                 words.substr(0, 4), "\", \"answer_start\": 0}]}]}");
    for (const char c : words_of_example(i, '\n') + "\n")
      tags += c == '\n' ? " X\n" : std::string(1, c);
    tags += "\n";
  }
  write_file(folder.path("texts.jsonl"), texts);
  write_file(folder.path("questions.jsonl"), questions);
  write_file(folder.path("pairs.tsv"), pairs);
  write_file(folder.path("spans.json"), str("{\"data\": [{\"paragraphs\": [", spans, "]}]}"));
  write_file(folder.path("tags.txt"), tags + "z Y\n\n");
  const auto config = [&](const char* type, const char* file) {
    return str("type = '", type, "'\npath = '", folder.path(file), "'\nheld_out = 0.15\n");
  };
  return {config("jsonl", "texts.jsonl"), config("jsonl", "questions.jsonl"),
          config("classify_pairs", "pairs.tsv"), config("find_span", "spans.json"),
          config("tag_text", "tags.txt")};
}

TEST(HeldOut, IsTheRunsWhateverTheLength) {
  const TempFolder folder;
  for (const std::string& config : files_of_all_kinds(folder)) {
    const auto trained = spec_of(config + "length = 48");
    const std::set<std::string> own = held_out_of(config + "length = 48");
    ASSERT_GE(own.size(), 5u) << config;
    for (const char* length : {"length = 40", "length = 96", "length = 200"}) {
      EXPECT_EQ(held_out_of(config + length, trained.get()), own) << config << length;
    }
  }
}

TEST(HeldOut, PiecesOfATextAreTheRunsWhateverTheLength) {
  const TempFolder folder;
  for (const char* name : {"a", "b"}) {
    std::string text;
    for (int i = 0; i < 250; ++i) text += formatted("n%03.0f", i);
    write_file(folder.path(str(name, ".txt")), text);
  }
  const std::string config = str("type = 'classify_text'\npath = '", folder.path(), "'\n");
  const auto trained = spec_of(config + "length = 64");
  const std::set<std::string> own = held_out_of(config + "length = 64");
  EXPECT_NEAR(static_cast<double>(own.size()), 25, 10);
  for (const char* length : {"length = 8", "length = 40", "length = 256"}) {
    // Pieces may cut a number in two, at their ends.
    const std::set<std::string> found = held_out_of(config + length, trained.get());
    ASSERT_FALSE(found.empty()) << length;
    EXPECT_GE(*found.begin(), *own.begin()) << length;
    EXPECT_GE(*found.rbegin(), "248") << length;
  }
}

// Its label takes tokens from a question that is cut.
TEST(HeldOut, AQuestionIsOnOneSideWhateverTheLengthsOfItsAnswers) {
  const TempFolder folder;
  std::string lines;
  for (int i = 0; i < 100; ++i) {
    for (const char* label : {"a", "bbb"}) {
      lines += str("{\"input\": \"", words_of_example(i).substr(5, 40), formatted(" n%03.0f", i),
                   "=\", \"label\": \"", label, "\"}\n");
    }
  }
  write_file(folder.path("data.jsonl"), lines);
  const auto task =
      task_of(str("type = 'jsonl'\npath = '", folder.path("data.jsonl"), "'\nlength = 32"));
  const int64_t held = task->eval_sequences();
  EXPECT_EQ(held, 20);
  const std::set<std::string> out = numbers_in(*task, task->eval_batch(0, held));
  EXPECT_EQ(out.size(), 10u);
  for (const std::string& trained : numbers_in(*task, task->train_batch(0, 200 - held))) {
    EXPECT_FALSE(out.contains(trained)) << trained;
  }
}

// Whole lots are held out, but none that is far larger than what is asked for.
TEST(HeldOut, IsAboutTheShareThatIsAskedFor) {
  const TempFolder folder;
  for (int wording = 0; wording < 12; ++wording) {
    std::string lines;
    for (int i = 0; i < 50; ++i) {
      lines += str("{\"input\": \"same ", wording, "\", \"label\": \"", i, "\"}\n");
      lines += str("{\"input\": \"other ", i, "\", \"label\": \"", i, "\"}\n");
    }
    write_file(folder.path("data.jsonl"), lines);
    const auto task =
        task_of(str("type = 'jsonl'\npath = '", folder.path("data.jsonl"), "'\nlength = 16"));
    EXPECT_EQ(task->eval_sequences(), 10) << wording;
  }
  for (int large = 0; large < 24; ++large) {
    const std::string classes = folder.path(str("classes", large));
    for (const char* name : {"a", "b"}) {
      std::filesystem::create_directories(classes + "/" + name);
      for (int i = 0; i < 24; ++i) {
        std::string text;
        while (text.size() < (i == large ? 20'000 : 100)) text += str(name, i, "-", text.size());
        write_file(str(classes, "/", name, "/", i, ".txt"), text);
      }
    }
    for (const double share : {0.1, 0.3}) {
      const auto task = task_of(str("type = 'classify_text'\npath = '", classes,
                                    "'\neval_sequences = 9999\nheld_out = ", share));
      const auto held = static_cast<double>(task->eval_sequences());
      const double all = static_cast<double>(task->data_size().count);
      EXPECT_GE(held, 0.5 * share * all) << large;
      EXPECT_LE(held, 2 * share * all) << large;
    }
  }
  // Contexts that all have more than is wanted, but for one: not that one alone.
  std::string spans;
  for (int context = 0; context < 5; ++context) {
    std::string questions;
    for (int i = 0; i < (context == 2 ? 1 : 30); ++i) {
      questions += str(i > 0 ? ", " : "", "{\"question\": \"q", i,
                       "?\", \"answers\": [{\"text\": \"n\", \"answer_start\": 0}]}");
    }
    spans += str(context > 0 ? ", " : "", "{\"context\": \"n ", context, "\", \"qas\": [",
                 questions, "]}");
  }
  write_file(folder.path("spans.json"), str("{\"data\": [{\"paragraphs\": [", spans, "]}]}"));
  const auto questions =
      task_of(str("type = 'find_span'\npath = '", folder.path("spans.json"), "'\nlength = 32"));
  EXPECT_GE(questions->eval_sequences(), 30);
  EXPECT_LE(questions->eval_sequences(), 31);
}

// Guesses that count tokens, by hand: of two tokens that are drawn evenly from two kinds the more
// frequent kind has 1.5 on average, and of three from three kinds 51 / 27.
TEST(HeldOut, FloorsKnowTheTokenThatComesMostOften) {
  const auto copying =
      task_of("type = 'selective_copying'\nlength = 16\nvocabulary = 4\ntokens = 2");
  EXPECT_NEAR(copying->floors().back().accuracy, 0.75, 0.02);
  const auto compression = task_of("type = 'compression'\nlength = 4\nvocabulary = 4");
  EXPECT_NEAR(compression->floors().back().accuracy, (51.0 / 27 + 1) / 4, 0.02);
}

}  // namespace
}  // namespace headloom::data::held_out_test
