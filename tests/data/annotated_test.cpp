// Tasks on annotated text: tags of words, pairs with a label, answers in a context.
#include <algorithm>
#include <map>
#include <set>

#include "helpers.h"

namespace headloom::data::annotated_test {
namespace {

using Tokens = std::vector<int64_t>;
constexpr int64_t kNone = kIgnore;

// What is read of a sequence: its tokens without padding, and its targets without theirs.
struct Read {
  Tokens inputs, targets, segments;
  auto operator<=>(const Read&) const = default;
};

Read read_of(const Batch& batch, int64_t i) {
  Read out{row(batch.inputs, i), {}, {}};
  const auto length = static_cast<size_t>(batch.lengths[i].item<int64_t>());
  out.inputs.resize(length);
  if (batch.targets.dim() == 1) {
    out.targets = {batch.targets[i].item<int64_t>()};
  } else {
    out.targets = row(batch.targets, i);
    if (out.targets.size() > 2) {
      for (size_t t = length; t < out.targets.size(); ++t) EXPECT_EQ(out.targets[t], kIgnore);
      out.targets.resize(length);
    }
  }
  if (batch.segments.defined()) {
    out.segments = row(batch.segments, i);
    for (size_t t = length; t < out.segments.size(); ++t) EXPECT_EQ(out.segments[t], 0);
    out.segments.resize(length);
  }
  return out;
}

// Everything that is trained on, of a task with so many sequences.
std::set<Read> trained(const Task& task, int64_t count) {
  const Batch batch = task.train_batch(0, count);
  std::set<Read> out;
  for (int64_t i = 0; i < count; ++i) out.insert(read_of(batch, i));
  return out;
}

std::set<Read> held_out(const Task& task) {
  const Batch batch = task.eval_batch(0, task.eval_sequences());
  std::set<Read> out;
  for (int64_t i = 0; i < task.eval_sequences(); ++i) out.insert(read_of(batch, i));
  return out;
}

// A task of a file to train on and one to evaluate on.
struct Files {
  std::string type;
  TempFolder folder = {};
  std::string options(const std::string& train, const std::string& held_out,
                      const std::string& more = "") const {
    return "type = '" + type + "'\npath = '" + folder.write("train", train) +
           "'\nheld_out_path = '" + folder.write("dev", held_out) + "'\n" + more;
  }
  std::string tokenizer() const {
    return "tokenizer = '" + folder.write("tokenizer.json", letters_json()) + "'\n";
  }
};

// --- tag_text ----------------------------------------------------------------------------------

TEST(TagText, TheFirstTokenOfAWordHasItsTag) {
  const Files files{.type = "tag_text"};
  const std::string train = "\xEF\xBB\xBF-DOCSTART- -X- O\n\nab NN B-X\nc VB\tO\r\n\n\n"
                            "  -DOCSTART- O\nb NN O\n",
                    dev = "c O\n";
  const auto bytes = task_of(files.options(train, dev, "length = 8"));
  EXPECT_EQ(bytes->goal(), Goal::tags);
  EXPECT_EQ(bytes->labels(), (std::vector<std::string>{"B-X", "O"}));
  EXPECT_EQ(bytes->classes(), 2);
  EXPECT_EQ(bytes->segments(), 0);
  EXPECT_EQ(trained(*bytes, 2),
            (std::set<Read>{{{'a', 'b', ' ', 'c'}, {0, kNone, kNone, 1}, {}}, {{'b'}, {1}, {}}}));
  EXPECT_EQ(held_out(*bytes), (std::set<Read>{{{'c'}, {1}, {}}}));
  // Tokens: 4 is a, 31 is ##b, 6 is c.
  const auto words = task_of(files.options(train, dev, files.tokenizer() + "length = 8"));
  EXPECT_EQ(trained(*words, 2), (std::set<Read>{{{1, 4, 31, 6, 2}, {kNone, 0, kNone, 1, kNone}, {}},
                                                {{1, 5, 2}, {kNone, 1, kNone}, {}}}));
}

TEST(TagText, LongSentencesAreCutBetweenWordsAndLostOnesCounted) {
  const Files files{.type = "tag_text"};
  // U+0007 is a control character, which BertNormalizer removes.
  const std::string train = "ab X\nc Y\nabcdef X\nd Y\n\nd X\n\n\a X\ne Y\n", dev = "c Y\n";
  const auto task = task_of(files.options(train, dev, files.tokenizer() + "length = 5"));
  EXPECT_EQ(trained(*task, 5),
            (std::set<Read>{{{1, 4, 31, 6, 2}, {kNone, 0, kNone, 1, kNone}, {}},
                            {{1, 4, 31, 32, 2}, {kNone, 0, kNone, kNone, kNone}, {}},
                            {{1, 7, 2}, {kNone, 1, kNone}, {}},
                            {{1, 7, 2}, {kNone, 0, kNone}, {}},
                            {{1, 8, 2}, {kNone, 1, kNone}, {}}}));
  expect_contains(task->describe(),
                  "5 to train on and 1 of 1 held out; 1 of them longer than 5 "
                  "tokens and cut; 1 words that make no token left out.");
  // Bytes: what begins a sequence has no space before it.
  const auto bytes = task_of(files.options("ab X\nc Y\nd X\n", dev, "length = 4"));
  EXPECT_EQ(trained(*bytes, 2),
            (std::set<Read>{{{'a', 'b', ' ', 'c'}, {0, kNone, kNone, 1}, {}}, {{'d'}, {0}, {}}}));
}

TEST(TagText, AGuessKnowsWhatTagsAWordUsuallyHas) {
  const Files files{.type = "tag_text"};
  const std::string train = "b Y\nm X\n\nb Y\nn X\n\nb X\no X\n",
                    dev = "b Y\np X\n\nb Y\nq Y\n\nb X\nr X\n\na X\nt X\n\nt X\nb Y\n";
  const auto task = task_of(files.options(train, dev));
  const auto floors = task->floors();
  ASSERT_EQ(floors.size(), 3u);
  EXPECT_EQ(floors[0].name, "any class");
  EXPECT_DOUBLE_EQ(floors[0].accuracy, 0.5);
  EXPECT_EQ(floors[1].name, "the most frequent tag");
  EXPECT_DOUBLE_EQ(floors[1].accuracy, 6.0 / 10);
  // b has Y wherever it stands, and unknown words have X.
  EXPECT_EQ(floors[2].name, "each word's most frequent tag");
  EXPECT_DOUBLE_EQ(floors[2].accuracy, 8.0 / 10);
  // Of the sequences that are judged: one has X twice and one has Y twice.
  double sum = 0;
  for (int64_t i = 0; i < task->eval_sequences(); ++i) sum += task->floors_of({i}).back().accuracy;
  EXPECT_DOUBLE_EQ(sum, 1 + 0.5 + 1 + 1 + 1);
}

TEST(TagText, LabelsKeepTheirGivenOrder) {
  const Files files{.type = "tag_text"};
  const std::string train = "a X\nb Y\n", dev = "c Z\n";
  const auto task = task_of(files.options(train, dev, "labels = ['Z', 'Y', 'W', 'X']"));
  EXPECT_EQ(task->classes(), 4);
  EXPECT_EQ(trained(*task, 1), (std::set<Read>{{{'a', ' ', 'b'}, {3, kNone, 1}, {}}}));
  EXPECT_EQ(held_out(*task), (std::set<Read>{{{'c'}, {0}, {}}}));
  EXPECT_EQ(error_of(files.options(train, dev)),
            files.folder.path("dev") +
                ":1: has the label 'Z', which is in the held-out part alone; name all there are in "
                "'labels'.");
  EXPECT_EQ(error_of<UsageError>(files.options(train, dev, "labels = ['X', 'Z']")),
            files.folder.path("train") + ":2: has the label 'Y', expected one of labels = X, Z.");
}

TEST(TagText, WhatIsHeldOutIsNotTrainedOn) {
  const Files files{.type = "tag_text"};
  std::string text;
  for (int i = 0; i < 40; ++i) text += str("w", i % 20, " X\nand O\n\n");
  const std::string path =
      "type = 'tag_text'\nheld_out = 0.25\npath = '" + files.folder.write("all", text) + "'";
  const auto task = task_of(path);
  // Each sentence is there twice.
  EXPECT_EQ(task->eval_sequences(), 10);
  const auto out = held_out(*task);
  EXPECT_EQ(out.size(), 5u);
  for (const Read& read : trained(*task, 30)) EXPECT_FALSE(out.contains(read));
  const auto apart = task_of(files.options(text, "w3 X\nand O\n"));
  expect_contains(apart->describe(),
                  "38 to train on and 1 of 1 held out, 2 left aside as they are held out too");
}

TEST(TagText, AllCanBeHeldOutToEvaluateAModel) {
  const TempFolder folder;
  const std::string all = "type = 'tag_text'\nheld_out = 1.0\npath = '" +
                          folder.write("dev", "a X\n\na X\nb Y\n\na X\n") + "'\n";
  const auto task = task_of(all + "labels = ['Y', 'X']");
  EXPECT_EQ(task->eval_sequences(), 3);
  EXPECT_EQ(held_out(*task),
            (std::set<Read>{{{'a'}, {1}, {}}, {{'a', ' ', 'b'}, {1, kNone, 0}, {}}}));
  EXPECT_THROW(task->train_batch(0, 1), UsageError);
  expect_contains(error_of(all), "which is in the held-out part alone; name all there are");
}

TEST(TagText, WhatCannotBeUsedIsRefused) {
  const Files files{.type = "tag_text"};
  const std::string train = files.folder.path("train"), good = "a X\nb Y\n";
  EXPECT_EQ(
      error_of(files.options("a X\nword\n", good)),
      train + ":2: has one column, 'word', expected a token and, in the last column, its tag.");
  EXPECT_EQ(error_of(files.options("\n\n", good)),
            train + ": has no line with a token and its tag.");
  EXPECT_EQ(error_of(files.options("a X\nb X\n", "c X\n")),
            "there is one label alone, 'X', expected at least two.");
  EXPECT_EQ(error_of(files.options(good, good)),
            train + ": has nothing to train on that is not held out.");
  EXPECT_EQ(
      error_of("type = 'tag_text'\npath = '" + files.folder.write("one", good) + "'"),
      files.folder.path("one") +
          ": has 1 example, expected at least two that differ, to train on and to hold out.");
  EXPECT_EQ(error_of(files.options(std::string("a\0 X\n", 5), good)),
            train + ": is not text, as it has a byte 0.");
  expect_contains(error_of("type = 'tag_text'\npath = '/none'"), "/none");
  EXPECT_EQ(error_of<UsageError>(files.options(good, good, files.tokenizer() + "length = 2")),
            "tag_text has length = 2, but " + files.folder.path("tokenizer.json") +
                " puts 2 tokens around each text; expected at least 3.");
  EXPECT_EQ(error_of<UsageError>("type = 'tag_text'\nlabels = ['X', 'Y']"),
            "tag_text has 'labels' but no 'path', expected the files to read.");
  EXPECT_EQ(error_of<UsageError>("type = 'tag_text'\nheld_out = 0.5"),
            "tag_text has 'held_out' but no 'path', expected the files to read.");
  EXPECT_EQ(error_of<UsageError>(files.options(good, good, "symbols = 9")),
            "tag_text has 'symbols' and 'path', but what is read from files has no such option; "
            "leave it out.");
  EXPECT_EQ(error_of<UsageError>("type = 'tag_text'\npath = 'x'\nlabels = ['X', 'Y', 'X']"),
            "'task.labels' has 'X' twice, expected each label once.");
  EXPECT_EQ(error_of<UsageError>("type = 'tag_text'\nmin_length = 65"),
            "tag_text has min_length = 65, expected at most length = 64.");
}

TEST(TagText, GeneratedLettersKnowTheirNeighbours) {
  const auto task = task_of("type = 'tag_text'\nlength = 10\nmin_length = 3");
  const Batch batch = task->train_batch(0, 200);
  std::set<size_t> sizes;
  std::set<int64_t> tags;
  for (int64_t i = 0; i < 200; ++i) {
    const Read read = read_of(batch, i);
    const std::string text = task->decode(read.inputs);
    sizes.insert(text.size());
    for (size_t t = 0; t < text.size(); ++t) {
      const bool left = t > 0 && text[t - 1] < text[t];
      const bool right = t + 1 < text.size() && text[t + 1] < text[t];
      EXPECT_EQ(read.targets[t], (left ? 1 : 0) + (right ? 2 : 0));
      tags.insert(read.targets[t]);
    }
  }
  EXPECT_EQ(sizes, (std::set<size_t>{3, 4, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(tags.size(), 4u);
}

// The last letters of the alphabet have most others before them, so that a letter alone tells
// something of its tag.
TEST(TagText, AGuessKnowsTheGeneratedLetter) {
  const auto task = task_of("type = 'tag_text'\neval_sequences = 2000\nlength = 32");
  const auto floors = task->floors();
  EXPECT_EQ(floors.back().name, "each word's most frequent tag");
  // Inside a string a letter with p of the eight before it has the tag "neither" with probability
  // (1 - p)^2 and "both" with p^2. The means of the larger one and of the first over the letters,
  // to which ends of strings add a little:
  EXPECT_NEAR(floors.back().accuracy, 0.586, 0.02);
  EXPECT_EQ(floors[1].name, "the most frequent tag");
  EXPECT_NEAR(floors[1].accuracy, 0.398, 0.03);
}

// --- classify_pairs ----------------------------------------------------------------------------

TEST(ClassifyPairs, SegmentsTellTheTextsApart) {
  const Files files{.type = "classify_pairs"};
  const std::string train = "ab\tc\tyes\r\nc\t\tno\n\n", dev = "a\tb\tno\n";
  const auto bytes = task_of(files.options(train, dev));
  EXPECT_EQ(bytes->goal(), Goal::label);
  EXPECT_EQ(bytes->segments(), 2);
  EXPECT_EQ(bytes->labels(), (std::vector<std::string>{"no", "yes"}));
  EXPECT_EQ(trained(*bytes, 2),
            (std::set<Read>{{{'a', 'b', 0, 'c'}, {1}, {0, 0, 0, 1}}, {{'c', 0}, {0}, {0, 0}}}));
  const auto words = task_of(files.options(train, dev, files.tokenizer()));
  EXPECT_EQ(trained(*words, 2), (std::set<Read>{{{1, 4, 31, 2, 6, 2}, {1}, {0, 0, 0, 0, 1, 1}},
                                                {{1, 6, 2, 2}, {0}, {0, 0, 0, 1}}}));
  EXPECT_EQ(held_out(*words), (std::set<Read>{{{1, 4, 2, 5, 2}, {0}, {0, 0, 0, 1, 1}}}));
}

TEST(ClassifyPairs, TheMostFrequentClassIsThatOfTheTrainingData) {
  const Files files{.type = "classify_pairs"};
  // What is judged has more of the other class.
  const auto rare =
      task_of(files.options("a\tb\tX\nc\td\tX\ne\tf\tY\n", "g\th\tY\ni\tj\tY\nk\tl\tX\n"));
  ASSERT_EQ(rare->floors().size(), 1u);
  EXPECT_DOUBLE_EQ(rare->floors()[0].accuracy, 0.5);
  const auto often =
      task_of(files.options("a\tb\tX\nc\td\tX\ne\tf\tY\n", "g\th\tX\ni\tj\tX\nk\tl\tY\n"));
  ASSERT_EQ(often->floors().size(), 2u);
  EXPECT_EQ(often->floors()[1].name, "the most frequent class");
  EXPECT_DOUBLE_EQ(often->floors()[1].accuracy, 2.0 / 3);
  // Of the sequences that are judged, not of all.
  int right = 0;
  for (int64_t i = 0; i < 3; ++i) right += often->floors_of({i}).back().accuracy == 1.0;
  EXPECT_EQ(right, 2);
  // Nothing to train on: of what is judged itself.
  const auto all = task_of("type = 'classify_pairs'\nheld_out = 1\nlabels = ['X', 'Y']\npath = '" +
                           files.folder.write("all", "a\tb\tY\nc\td\tY\ne\tf\tX\n") + "'");
  EXPECT_DOUBLE_EQ(all->floors().back().accuracy, 2.0 / 3);
}

TEST(ClassifyPairs, TheLongerTextIsCut) {
  const Files files{.type = "classify_pairs"};
  const auto task = task_of(files.options("abcdef\tgh\tx\nab\tcdefgh\ty\na\tb\ty\n", "c\td\tx\n",
                                          files.tokenizer() + "length = 8"));
  const auto read = trained(*task, 3);
  EXPECT_TRUE(read.contains({{1, 4, 31, 32, 2, 10, 37, 2}, {0}, {0, 0, 0, 0, 0, 1, 1, 1}}));
  EXPECT_TRUE(read.contains({{1, 4, 31, 2, 6, 33, 34, 2}, {1}, {0, 0, 0, 0, 1, 1, 1, 1}}));
  expect_contains(task->describe(), "; 2 of them longer than 8 tokens and cut.");
}

// Pairs that a model cannot tell apart are not on both sides, whatever their files' letters are.
TEST(ClassifyPairs, WhatIsReadAlikeIsNotTrainedOnAndHeldOut) {
  const Files files{.type = "classify_pairs"};
  const std::string train = "AB\tc\tx\nab\td\tx\nabcdefgh\tc\tx\nb\tc\ty\n";
  const auto task =
      task_of(files.options(train, "ab\tC\tx\nabcdefff\tc\ty\n", files.tokenizer() + "length = 8"));
  expect_contains(task->describe(), "2 to train on and 2 of 2 held out");
  const auto read = trained(*task, 2);
  EXPECT_TRUE(read.contains({{1, 4, 31, 2, 7, 2}, {0}, {0, 0, 0, 0, 1, 1}}));
  EXPECT_TRUE(read.contains({{1, 5, 2, 6, 2}, {1}, {0, 0, 0, 1, 1}}));
}

TEST(ClassifyPairs, WhatCannotBeUsedIsRefused) {
  const Files files{.type = "classify_pairs"};
  const std::string train = files.folder.path("train"), good = "a\tb\tx\nb\tc\ty\n";
  EXPECT_EQ(error_of(files.options("a\tb\tx\na\tb\n", good)),
            train + ":2: has 2 columns, expected 3: two texts and a label with tabs between.");
  EXPECT_EQ(error_of(files.options("text\n", good)),
            train + ":1: has 1 column, expected 3: two texts and a label with tabs between.");
  EXPECT_EQ(error_of(files.options("", good)), train + ": has no pair of texts.");
  expect_contains(error_of(files.options(good, "c\td\tz\n")),
                  "dev:1: has the label 'z', which is in the held-out part alone");
  expect_contains(error_of<UsageError>(files.options(good, good, "length = 2")),
                  "classify_pairs has length = 2, but bytes puts 1 token around two texts");
  EXPECT_EQ(error_of<UsageError>("type = 'classify_pairs'\nheld_out_path = 'x'"),
            "classify_pairs has 'held_out_path' but no 'path', expected the files to read.");
  EXPECT_EQ(error_of<UsageError>("type = 'classify_pairs'\nlength = 200"),
            "classify_pairs has 'length' but no 'path', expected the files to read.");
  EXPECT_EQ(error_of<UsageError>("type = 'classify_pairs'\ncount = 11"),
            "classify_pairs has count = 11, expected less than symbols = 10.");
  EXPECT_EQ(error_of<UsageError>("type = 'classify_pairs'\ncount = 7\nchanged = 4"),
            "classify_pairs has changed = 4, expected at most count = 7 and symbols - count = 3.");
}

TEST(ClassifyPairs, GeneratedPairsDifferInTheLettersThatChanged) {
  const auto task = task_of("type = 'classify_pairs'\ncount = 5\nchanged = 2");
  EXPECT_EQ(task->length(), 11);
  const Batch batch = task->train_batch(0, 200);
  int64_t same = 0;
  for (int64_t i = 0; i < 200; ++i) {
    const Read read = read_of(batch, i);
    EXPECT_EQ(read.segments, (Tokens{0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1}));
    const std::string text = task->decode(read.inputs);
    EXPECT_EQ(text[5], '|');
    const std::set<char> first(text.begin(), text.begin() + 5),
        second(text.begin() + 6, text.end());
    EXPECT_EQ(first.size(), 5u);
    EXPECT_EQ(second.size(), 5u);
    int64_t differ = 0;
    for (const char c : second) differ += first.contains(c) ? 0 : 1;
    EXPECT_EQ(differ, read.targets[0] == 1 ? 0 : 2);
    same += read.targets[0];
  }
  EXPECT_NEAR(static_cast<double>(same), 100, 30);
}

// --- find_span ---------------------------------------------------------------------------------

struct Asked {
  std::string question, answer;
  int64_t start;
};

std::string squad(const std::string& context, const std::vector<Asked>& asked) {
  std::string out = R"({"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": ")" +
                    context + R"(", "qas": [)";
  for (const Asked& a : asked) {
    if (&a != asked.data()) out += ",";
    out += str(R"({"id": "1", "question": ")", a.question, R"(", "answers": [{"text": ")", a.answer,
               R"(", "answer_start": )", a.start, "}]}");
  }
  return out + "]}]}]}";
}

const std::string kDev = squad("d e", {{"d?", "e", 2}});

// The text between the targets of each question, by the question.
std::map<std::string, std::string> answers(const Task& task, int64_t count) {
  const Batch batch = task.train_batch(0, count);
  std::map<std::string, std::string> out;
  for (int64_t i = 0; i < count; ++i) {
    const Read read = read_of(batch, i);
    const auto second = std::find(read.segments.begin(), read.segments.end(), 1);
    const Tokens question(read.inputs.begin(),
                          read.inputs.begin() + (second - read.segments.begin()));
    const Tokens answer(read.inputs.begin() + read.targets[0],
                        read.inputs.begin() + read.targets[1] + 1);
    EXPECT_TRUE(batch.context[i].slice(0, read.targets[0], read.targets[1] + 1).all().item<bool>());
    EXPECT_FALSE(batch.context[i].slice(0, 0, second - read.segments.begin()).any().item<bool>());
    out[task.decode(question)] = task.decode(answer);
  }
  return out;
}

TEST(FindSpan, AnswersAreTheTokensOfTheirCharacters) {
  const Files files{.type = "find_span"};
  // Characters are counted, not bytes; white space becomes one space; words may hold an answer.
  const std::string train =
      squad("caf\xc3\xa9  \xe2\x80\x9cin\\nthe 1990s\xe2\x80\x9d", {{"a", "caf\xc3\xa9", 0},
                                                                    {"b", "1990", 14},
                                                                    {"c", "in\\nthe 1990s", 7},
                                                                    {"d", "the ", 10},
                                                                    {"e", " \xe2\x80\x9cin", 5}});
  const auto task = task_of(files.options(train, kDev, "length = 64"));
  EXPECT_EQ(task->goal(), Goal::span);
  EXPECT_TRUE(task->exact_match());
  EXPECT_EQ(answers(*task, 5), (std::map<std::string, std::string>{{"a", "caf\xc3\xa9"},
                                                                   {"b", "1990"},
                                                                   {"c", "in the 1990s"},
                                                                   {"d", "the"},
                                                                   {"e", "\xe2\x80\x9cin"}}));
}

TEST(FindSpan, TokensThatHoldMoreAreTakenWhole) {
  const Files files{.type = "find_span"};
  const std::string train = squad(
      "ab CD \xc3\xa9"
      "fg",
      {{"x", "b", 1}, {"y", "C", 3}, {"z", "f", 7}});
  const auto task = task_of(files.options(train, kDev, files.tokenizer()));
  const Batch batch = task->train_batch(0, 3);
  std::map<int64_t, Read> by_question;
  for (int64_t i = 0; i < 3; ++i) {
    const Read read = read_of(batch, i);
    by_question[read.inputs[1]] = read;
    // [CLS] x [SEP] a ##b c ##d e ##f ##g [SEP]
    EXPECT_EQ(row(batch.context.to(at::kLong), i).at(3), 1);
    EXPECT_EQ(batch.context[i].sum().item<int64_t>(), 7);
    EXPECT_EQ(read.inputs, (Tokens{1, read.inputs[1], 2, 4, 31, 6, 33, 8, 35, 36, 2}));
    EXPECT_EQ(read.segments, (Tokens{0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}));
  }
  EXPECT_EQ(by_question[27].targets, (Tokens{4, 4})) << "x: ##b";
  EXPECT_EQ(by_question[28].targets, (Tokens{5, 5})) << "y: c, lower case";
  EXPECT_EQ(by_question[29].targets, (Tokens{7, 9})) << "z: an accent is gone, so the whole word";
}

TEST(FindSpan, AnswersBeyondTheLengthAreLeftOutAndCounted) {
  const Files files{.type = "find_span"};
  const std::string train =
      squad("a b c d e", {{"x", "a", 0}, {"y", "c", 4}, {"z", "c d", 4}, {"a b c d", "a", 0}});
  const auto task = task_of(files.options(train, kDev, files.tokenizer() + "length = 7"));
  // Three tokens around, one of a question: three are left.
  const Batch batch = task->train_batch(0, 2);
  EXPECT_EQ(batch.lengths.min().item<int64_t>(), 7);
  EXPECT_EQ(trained(*task, 2),
            (std::set<Read>{{{1, 27, 2, 4, 5, 6, 2}, {3, 3}, {0, 0, 0, 1, 1, 1, 1}},
                            {{1, 28, 2, 4, 5, 6, 2}, {5, 5}, {0, 0, 0, 1, 1, 1, 1}}}));
  expect_contains(task->describe(),
                  "2 to train on and 1 of 1 held out; 2 whose answer is not whole "
                  "within 7 tokens left out; 2 of them longer than 7 tokens and cut at the end of "
                  "their context.");
  EXPECT_EQ(
      error_of(files.options(squad("aaaaa bbb", {{"x", "bbb", 6}}), kDev, "length = 9")),
      files.folder.path("train") + ": has no question whose answer is whole within 9 tokens.");
}

TEST(FindSpan, AContextIsHeldOutWithAllItsQuestions) {
  std::string paragraphs;
  for (int i = 0; i < 10; ++i) {
    paragraphs += str(i > 0 ? "," : "", R"({"context": "it is )", i, R"(", "qas": [)");
    for (int q = 0; q < 3; ++q) {
      paragraphs += str(q > 0 ? "," : "", R"({"question": "q)", q,
                        R"(", "answers": [{"text": "is", "answer_start": 3}]})");
    }
    paragraphs += "]}";
  }
  const TempFolder folder;
  const auto task =
      task_of("type = 'find_span'\nheld_out = 0.2\npath = '" +
              folder.write("q.json", R"({"data": [{"paragraphs": [)" + paragraphs + "]}]}") + "'");
  EXPECT_EQ(task->eval_sequences(), 6);
  expect_contains(task->describe(), "about 10 contexts: 24 to train on and 6 of 6 held out.");
  std::set<int64_t> out;
  const Batch held = task->eval_batch(0, 6), train = task->train_batch(0, 24);
  const auto digit = [](const Batch& batch, int64_t i) { return read_of(batch, i).inputs.back(); };
  for (int64_t i = 0; i < 6; ++i) out.insert(digit(held, i));
  EXPECT_EQ(out.size(), 2u);
  for (int64_t i = 0; i < 24; ++i) EXPECT_FALSE(out.contains(digit(train, i)));
}

// As above: here white space, and what is cut off.
TEST(FindSpan, ContextsThatAreReadAlikeAreNotTrainedOnAndHeldOut) {
  const Files files{.type = "find_span"};
  const std::string other = squad("e e", {{"x", "e", 0}});
  for (const auto& [context, alike] :
       {std::pair("a  b cdef", true), std::pair("a b cdxyz", true), std::pair("a b ce", false)}) {
    const std::string article = squad(context, {{"y", "a", 0}});
    const std::string train =
        other.substr(0, other.size() - 2) + ", " + article.substr(article.find("{\"title\""));
    const auto task =
        task_of(files.options(train, squad("a b cdef", {{"z", "b", 2}}), "length = 7"));
    expect_contains(task->describe(), str(alike ? 1 : 2, " to train on and 1 of 1 held out"));
  }
}

TEST(FindSpan, WhatCannotBeUsedIsRefused) {
  const Files files{.type = "find_span"};
  const std::string train = files.folder.path("train");
  const auto error = [&](const std::string& json) { return error_of(files.options(json, kDev)); };
  EXPECT_EQ(error("[]"), train + ": is JSON, but not an object ({...}).");
  EXPECT_EQ(error("{}"), train + ": has no 'data', expected a list of articles.");
  EXPECT_EQ(error(R"({"data": 3})"),
            train + ": has an integer as 'data', expected a list of articles.");
  EXPECT_EQ(error(R"({"data": []})"), train + ": has no question.");
  EXPECT_EQ(error(R"({"data": [{}]})"),
            train + ": an article of 'data' has no 'paragraphs', expected a list of paragraphs.");
  const auto qas = [&](const std::string& qa) {
    return error(R"({"data": [{"paragraphs": [{"context": "a b", "qas": [)" + qa + "]}]}]}");
  };
  EXPECT_EQ(qas("{}"), train + ": a question has no 'question', expected a text.");
  EXPECT_EQ(qas(R"({"question": "q?"})"),
            train + ": the question 'q?' has no 'answers', expected a list of answers.");
  EXPECT_EQ(qas(R"({"question": "q?", "answers": []})"),
            train + ": the question 'q?' has no answer, expected at least one.");
  EXPECT_EQ(qas(R"({"question": "q?", "answers": [{"text": "a"}]})"),
            train + ": the question 'q?': an answer has no 'answer_start', expected an integer.");
  for (const int64_t start : {-1, 3, 1000}) {
    EXPECT_EQ(error(squad("a b", {{"q?", "b", start}})),
              str(train, ": the question 'q?' has answer_start = ", start,
                  ", which is not in its context."));
  }
  EXPECT_EQ(error(squad("a b", {{"q?", "c", 2}})),
            train +
                ": the question 'q?' has the answer 'c', but its context has 'b' at "
                "answer_start = 2.");
  expect_contains(error(squad("a b", {{"q?", "", 0}})), "has the answer ''");
  EXPECT_EQ(error_of<UsageError>("type = 'find_span'\ncount = 9"),
            "find_span has count = 9, expected at most symbols = 8.");
}

TEST(FindSpan, GeneratedAnswersAreALetterAndItsDigits) {
  const auto task = task_of("type = 'find_span'\ncount = 4\ndigits = 3");
  EXPECT_EQ(task->length(), 18);
  const Batch batch = task->train_batch(0, 100);
  std::set<int64_t> sizes;
  for (int64_t i = 0; i < 100; ++i) {
    const Read read = read_of(batch, i);
    const std::string text = task->decode(read.inputs);
    ASSERT_EQ(text[1], '|');
    const auto [first, last] =
        std::pair(static_cast<size_t>(read.targets[0]), static_cast<size_t>(read.targets[1]));
    EXPECT_EQ(text[first], text[0]);
    EXPECT_EQ(text.find_first_not_of("0123456789", first + 1),
              last + 1 < text.size() ? last + 1 : std::string::npos);
    EXPECT_EQ(batch.context[i].sum().item<int64_t>(), static_cast<int64_t>(text.size()) - 2);
    sizes.insert(read.targets[1] - read.targets[0]);
  }
  EXPECT_EQ(sizes, (std::set<int64_t>{1, 2, 3}));
}

}  // namespace
}  // namespace headloom::data::annotated_test
