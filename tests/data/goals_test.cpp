// Tasks that ask for something else than the next token: hidden tokens, classes, sequences.
#include <algorithm>
#include <map>
#include <set>

#include "data/random.h"
#include "helpers.h"

namespace headloom::data::goals_test {
namespace {

// A folder with two files of text and a folder of two classes.
class Texts {
 public:
  Texts() {
    Random random({3});
    for (const char* name : {"prose", "verse"}) {
      std::string text;
      for (int i = 0; i < 3000; ++i) text += static_cast<char>(name[0] + random.below(8));
      folder_.write(std::string(name) + ".txt", text);
    }
    std::string pairs, tags, questions;
    for (int i = 0; i < 30; ++i) {
      pairs += str("text ", i, "\tanother ", i * i, "\t", i % 3 == 0 ? "no" : "yes", "\n");
      tags += str("word", i, "\tN\nand\tO\n\n");
      questions +=
          str(i > 0 ? "," : "", R"({"context": "it is )", i, R"( or so", "qas": [{"id": ")", i,
              R"(", "question": "is?", "answers": [{"text": ")", i, R"(", "answer_start": 6}]}]})");
    }
    files_.write("pairs.tsv", pairs);
    files_.write("tags.conll", tags);
    files_.write("questions.json", R"({"data": [{"paragraphs": [)" + questions + "]}]}");
  }
  std::string path() const { return folder_.path(); }
  // pairs.tsv, tags.conll, questions.json
  std::string file(const std::string& name) const { return files_.path(name); }

 private:
  TempFolder folder_, files_;
};

std::vector<std::string> configs(const Texts& made) {
  const std::string texts = made.path();
  const auto half_of = [&](const char* file) {
    return "\nheld_out = 0.5\npath = '" + made.file(file) + "'";
  };
  return {"type = 'masked_text'\npaths = '" + texts + "'\nlength = 40\nheld_out = 0.2",
          "type = 'classify_text'\npath = '" + texts + "'\nlength = 32\neval_sequences = 12",
          "type = 'classify_text'",
          "type = 'classify_text'\nlanguage = 'brackets'\nlength = 12\nsymbols = 4",
          "type = 'classify_pairs'",
          "type = 'classify_pairs'\nlength = 20" + half_of("pairs.tsv"),
          "type = 'tag_text'",
          "type = 'tag_text'\nlength = 12" + half_of("tags.conll"),
          "type = 'find_span'",
          "type = 'find_span'\nlength = 30" + half_of("questions.json"),
          "type = 'sequence'",
          "type = 'sequence'\nkind = 'sort'\ncount = 5\nmin_count = 5\nsymbols = 40"};
}

TEST(Goals, BatchesAreAFunctionOfSeedAndIndexAndFitTheGoal) {
  const Texts texts;
  for (const std::string& config : configs(texts)) {
    SCOPED_TRACE(config);
    const auto task = task_of(config, 5);
    const Batch third = task->train_batch(3, 4);
    EXPECT_TRUE(same(third, task->train_batch(3, 4)));
    EXPECT_FALSE(same(third, task->train_batch(2, 4)));
    EXPECT_TRUE(same(third, task_of(config, 5)->train_batch(3, 4)));
    EXPECT_FALSE(same(third, task_of(config, 6)->train_batch(3, 4)));
    // The stream does not depend on how it is cut into batches.
    EXPECT_TRUE(same(slice(third, 2, 2), task->train_batch(7, 2)));
    EXPECT_TRUE(same(task->eval_batch(0, 8), task_of(config, 6)->eval_batch(0, 8)));
    EXPECT_TRUE(same(slice(task->eval_batch(0, 8), 3, 2), task->eval_batch(3, 2)));
    EXPECT_THROW(task->eval_batch(task->eval_sequences() - 1, 2), Error);
    EXPECT_EQ(task->describe().back(), '.');

    EXPECT_EQ(third.inputs.sizes(), (at::IntArrayRef{4, task->length()}));
    EXPECT_GE(third.inputs.min().item<int64_t>(), 0);
    EXPECT_LT(third.inputs.max().item<int64_t>(), task->vocabulary());
    if (task->goal() == Goal::label) {
      EXPECT_EQ(third.targets.sizes(), (at::IntArrayRef{4}));
      EXPECT_GE(third.targets.min().item<int64_t>(), 0);
      EXPECT_LT(third.targets.max().item<int64_t>(), task->classes());
    } else if (task->goal() == Goal::span) {
      EXPECT_EQ(third.targets.sizes(), (at::IntArrayRef{4, 2}));
      EXPECT_TRUE(third.context.gather(1, third.targets).all().item<bool>());
      EXPECT_TRUE(third.targets.select(1, 0).le(third.targets.select(1, 1)).all().item<bool>());
      EXPECT_EQ(task->classes(), 0);
    } else {
      EXPECT_EQ(third.targets.sizes(), third.inputs.sizes());
      EXPECT_EQ(task->classes() > 0, task->goal() == Goal::tags);
      if (task->goal() == Goal::tags) {
        EXPECT_LT(third.targets.max().item<int64_t>(), task->classes());
      }
    }
    ASSERT_EQ(third.segments.defined(), task->segments() == 2);
    if (third.segments.defined()) {
      EXPECT_EQ(third.segments.amax(1).min().item<int64_t>(), 1);
    }
    EXPECT_EQ(third.source.defined(), task->goal() == Goal::sequence);
    for (const auto& [tokens, lengths, longest] :
         {std::tuple(third.inputs, third.lengths, task->length()),
          std::tuple(third.source, third.source_lengths, task->source_length())}) {
      if (!lengths.defined()) continue;
      EXPECT_EQ(tokens.size(1), longest);
      EXPECT_GE(lengths.min().item<int64_t>(), 1);
      EXPECT_LE(lengths.max().item<int64_t>(), longest);
    }
  }
}

TEST(Goals, HeldOutSequencesAreNeverTrainedOn) {
  for (const std::string config :
       {"type = 'sequence'\nsymbols = 2\ncount = 6\neval_sequences = 100",
        "type = 'classify_text'\nlanguage = 'brackets'\nlength = 8\nsymbols = 2\nmin_length = 8\n"
        "eval_sequences = 100",
        "type = 'classify_pairs'\ncount = 2\neval_sequences = 100",
        "type = 'tag_text'\nsymbols = 2\nlength = 8\nmin_length = 6\neval_sequences = 100",
        "type = 'find_span'\ncount = 2\ndigits = 1\neval_sequences = 100"}) {
    const auto task = task_of(config);
    const auto key = [](const Batch& batch, int64_t i) {
      std::vector<int64_t> key = row(batch.source.defined() ? batch.source : batch.inputs, i);
      const at::Tensor& lengths = batch.source.defined() ? batch.source_lengths : batch.lengths;
      key.push_back(lengths[i].item<int64_t>());
      return key;
    };
    std::set<std::vector<int64_t>> trained;
    const Batch train = task->train_batch(0, 1000);
    for (int64_t i = 0; i < 1000; ++i) trained.insert(key(train, i));
    EXPECT_GE(trained.size(), 10u);
    const Batch eval = task->eval_batch(0, 100);
    for (int64_t i = 0; i < 100; ++i) EXPECT_FALSE(trained.contains(key(eval, i)));
  }
}

TEST(MaskedText, HidesTheShareThatWasAskedForAndKeepsTheRest) {
  const Texts texts;
  const auto task = task_of("type = 'masked_text'\npaths = '" + texts.path() + "'\nlength = 100");
  EXPECT_EQ(task->goal(), Goal::masked_token);
  EXPECT_EQ(task->vocabulary(), 257);
  EXPECT_EQ(task->decode({'a', 256, 0, 'b'}), "a[?]b");
  const auto plain = task_of("type = 'text'\npaths = ['" + texts.path() + "']\nlength = 100", 1);
  const Batch batch = task->train_batch(0, 200), original = plain->train_batch(0, 200);
  const at::Tensor asked = batch.targets.ne(kIgnore);
  // The same windows as the task text reads, hidden in places.
  EXPECT_TRUE(at::equal(batch.targets.masked_select(asked), original.inputs.masked_select(asked)));
  EXPECT_TRUE(at::equal(batch.inputs.masked_fill(asked, 0), original.inputs.masked_fill(asked, 0)));
  EXPECT_EQ(original.inputs.masked_select(asked).eq(0).sum().item<int64_t>(), 0);
  const at::Tensor count = asked.sum(1);
  EXPECT_GE(count.min().item<int64_t>(), 14);  // 15% of 100, or of 98 with two ends of documents
  EXPECT_LE(count.max().item<int64_t>(), 15);
  const at::Tensor shown = batch.inputs.masked_select(asked);
  const double total = static_cast<double>(shown.numel());
  const double replaced = static_cast<double>(shown.eq(256).sum().item<int64_t>()) / total;
  const double kept =
      static_cast<double>(shown.eq(batch.targets.masked_select(asked)).sum().item<int64_t>()) /
      total;
  EXPECT_NEAR(replaced, 0.8, 0.03);
  EXPECT_NEAR(kept, 0.1, 0.03);
  // Guessing: what is shown as it is, and for the mask the most frequent one.
  const Batch judged = task->eval_batch(0, task->eval_sequences());
  const at::Tensor open = judged.targets.ne(kIgnore), masked = open & judged.inputs.eq(256);
  std::map<int64_t, int64_t> behind;
  for (const int64_t token : row(judged.targets.masked_select(masked).unsqueeze(0), 0)) {
    ++behind[token];
  }
  int64_t right = (open & judged.inputs.eq(judged.targets)).sum().item<int64_t>(), most = 0;
  for (const auto& [token, times] : behind) most = std::max(most, times);
  right += most;
  EXPECT_DOUBLE_EQ(task->floors().back().accuracy,
                   static_cast<double>(right) / open.sum().item<double>());
  // Another epoch hides other bytes.
  const auto all = task_of("type = 'masked_text'\npaths = '" + texts.path() +
                           "'\nlength = 100\nmasked = 1.0\nreplaced = 0.0\nrandom = 0.0");
  const Batch whole = all->train_batch(0, 20);
  EXPECT_TRUE(at::equal(whole.targets.eq(kIgnore), whole.inputs.eq(0)));
  EXPECT_EQ(error_of<UsageError>("type = 'masked_text'\npaths = 'x'\nrandom = 0.3"),
            "masked_text has replaced = 0.8 and random = 0.3, expected a sum of at most 1.");
  EXPECT_EQ(error_of<UsageError>("type = 'masked_text'"),
            "the task masked_text needs 'paths', the files, folders or globs to read, as in --set "
            "'task.paths=[\"my/texts\"]'.");
}

TEST(MaskedText, ShortSequencesHideAtLeastOneByte) {
  const Texts texts;
  const auto task = task_of("type = 'masked_text'\npaths = '" + texts.path() + "'\nlength = 2");
  const Batch batch = task->train_batch(0, 100);
  EXPECT_EQ(batch.targets.ne(kIgnore).sum(1).min().item<int64_t>(), 1);
}

TEST(MaskedText, ATokenizersOwnMaskAndFrame) {
  const Texts texts;
  const TempFolder folder;
  const std::string tokenizer = folder.write("tokenizer.json", letters_json());
  const std::string options = "\npaths = '" + texts.path() + "'\ntokenizer = '" + tokenizer + "'";
  const auto task =
      task_of("type = 'masked_text'\nlength = 40\nreplaced = 1.0\nrandom = 0.0" + options);
  EXPECT_EQ(task->vocabulary(), 56);
  const Batch batch = task->train_batch(0, 20);
  ASSERT_EQ(batch.inputs.size(1), 40);
  EXPECT_TRUE(batch.inputs.select(1, 0).eq(1).all().item<bool>());
  EXPECT_TRUE(batch.inputs.select(1, 39).eq(2).all().item<bool>());
  const at::Tensor asked = batch.targets.ne(kIgnore);
  EXPECT_TRUE(batch.inputs.masked_select(asked).eq(3).all().item<bool>());
  EXPECT_FALSE(asked.select(1, 0).any().item<bool>() || asked.select(1, 39).any().item<bool>());
  EXPECT_EQ(task->decode({1, 4, 31, 3}), " ab[?]");
  const auto apart =
      task_of("type = 'masked_text'\nlength = 40\nseparate_documents = true" + options);
  EXPECT_EQ(apart->eval_batch(0, 1).documents.sizes(), at::IntArrayRef({1, 40}));
  expect_contains(error_of<UsageError>("type = 'masked_text'\nlength = 2" + options),
                  "expected at least 3");
}

TEST(ClassifyText, PiecesOfATokenizersTokens) {
  const TempFolder folder;
  const std::string tokenizer = folder.write("tokenizer.json", letters_json());
  folder.write("texts/x", std::string("ab ") + std::string(9, 'c') + " " + std::string(11, 'd'));
  folder.write("texts/y", "a b c d e f g h i j");
  const auto task = task_of("type = 'classify_text'\nlength = 6\npath = '" + folder.path("texts") +
                            "'\ntokenizer = '" + tokenizer + "'");
  EXPECT_EQ(task->vocabulary(), 56);
  const Batch batch = task->train_batch(0, 4);
  std::set<std::vector<int64_t>> seen;
  for (int64_t i = 0; i < 4; ++i) {
    const std::vector<int64_t> tokens = row(batch.inputs, i);
    const int64_t length = batch.lengths[i].item<int64_t>();
    EXPECT_EQ(tokens[0], 1);
    EXPECT_EQ(tokens[static_cast<size_t>(length - 1)], 2);
    seen.insert(tokens);
  }
  // "ab" and nine c, then the word that is too long.
  EXPECT_TRUE(seen.contains({1, 4, 31, 6, 32, 2}));
  expect_contains(task->describe(), "6 tokens");
}

TEST(ClassifyText, CountsTheFilesThatItLeavesOut) {
  const TempFolder folder;
  for (const char* name : {"a", "b"}) {
    folder.write(str(name, "/one.txt"), str("the text of ", name));
    folder.write(str(name, "/empty.txt"), "");
  }
  folder.write("a/picture.txt", std::string("x\0y", 3));
  const auto task = task_of("type = 'classify_text'\nlength = 6\npath = '" + folder.path() + "'");
  expect_contains(task->describe(),
                  folder.path() +
                      " (left out: 'a/picture.txt' is not text; 'a/empty.txt' and "
                      "'b/empty.txt' are empty): ");
}

std::vector<int64_t> tokens_of(const at::Tensor& rows, const at::Tensor& lengths, int64_t i) {
  std::vector<int64_t> tokens = row(rows, i);
  tokens.resize(static_cast<size_t>(lengths[i].item<int64_t>()));
  return tokens;
}

TEST(ClassifyText, NeighboursTellTheGrammarAndLettersDoNot) {
  const auto task = task_of("type = 'classify_text'");
  ASSERT_EQ(task->classes(), 4);
  std::vector<std::set<std::pair<int64_t, int64_t>>> pairs(4);
  std::vector<std::map<int64_t, int>> letters(4);
  std::set<size_t> sizes;
  const Batch train = task->train_batch(0, 800);
  for (int64_t i = 0; i < 800; ++i) {
    const auto label = static_cast<size_t>(train.targets[i].item<int64_t>());
    const auto text = tokens_of(train.inputs, train.lengths, i);
    sizes.insert(text.size());
    for (size_t t = 0; t < text.size(); ++t) {
      ++letters[label][text[t]];
      if (t > 0) pairs[label].insert({text[t - 1], text[t]});
    }
  }
  EXPECT_EQ(*sizes.begin(), 32u);
  EXPECT_EQ(*sizes.rbegin(), 64u);
  for (size_t c = 0; c < 4; ++c) {
    EXPECT_EQ(pairs[c].size(), 32u);  // half of the letters follow each of 8
    int total = 0;
    for (const auto& [letter, count] : letters[c]) total += count;
    for (const auto& [letter, count] : letters[c]) EXPECT_NEAR(count, total / 8, total / 80);
  }
  // What is held out fits the grammar of its class alone.
  const Batch eval = task->eval_batch(0, 100);
  for (int64_t i = 0; i < 100; ++i) {
    const auto text = tokens_of(eval.inputs, eval.lengths, i);
    for (size_t c = 0; c < 4; ++c) {
      bool fits = true;
      for (size_t t = 1; t < text.size(); ++t) fits &= pairs[c].contains({text[t - 1], text[t]});
      EXPECT_EQ(fits, static_cast<int64_t>(c) == eval.targets[i].item<int64_t>());
    }
  }
}

TEST(ClassifyText, BracketsAreBalancedOrNearlySo) {
  const auto task =
      task_of("type = 'classify_text'\nlanguage = 'brackets'\nlength = 20\nmin_length = 3");
  const Batch batch = task->train_batch(0, 300);
  std::map<int64_t, int> labels;
  std::set<size_t> sizes;
  for (int64_t i = 0; i < 300; ++i) {
    const auto text = tokens_of(batch.inputs, batch.lengths, i);
    sizes.insert(text.size());
    std::map<int64_t, int> count;
    std::string open;
    bool balanced = true;
    for (char c : task->decode(text)) {
      ++count[c];
      const std::string kinds = "()[]{}<>";
      const size_t kind = kinds.find(c);
      if (kind % 2 == 0) {
        open += kinds[kind + 1];
      } else if (balanced && !open.empty() && open.back() == c) {
        open.pop_back();
      } else {
        balanced = false;
      }
    }
    balanced = balanced && open.empty();
    EXPECT_EQ(batch.targets[i].item<int64_t>(), balanced);
    for (const auto& [left, right] :
         {std::pair('(', ')'), std::pair('[', ']'), std::pair('{', '}'), std::pair('<', '>')}) {
      EXPECT_EQ(count[left], count[right]);
    }
    ++labels[balanced];
  }
  EXPECT_EQ(sizes, (std::set<size_t>{4, 6, 8, 10, 12, 14, 16, 18, 20}));
  EXPECT_NEAR(labels[0], 150, 50);
}

TEST(ClassifyText, FoldersAndFilesAreClasses) {
  const TempFolder folder;
  for (int i = 0; i < 40; ++i) folder.write(str("a/", i, ".txt"), std::string(25, 'a') + str(i));
  folder.write("b/long.txt", std::string(1000, 'b'));
  folder.write("stray.txt", "not a class");
  folder.write(".hidden/x.txt", "hidden");
  const auto task = task_of("type = 'classify_text'\npath = '" + folder.path() + "'\nlength = 10");
  ASSERT_EQ(task->classes(), 2);
  // a: 40 files of three pieces, b: 100 pieces; a tenth of each is held out.
  ASSERT_EQ(task->eval_sequences(), 22);
  std::map<int64_t, std::set<std::string>> held, trained;
  std::map<int64_t, int> held_count, trained_count;
  for (const bool train : {false, true}) {
    const Batch batch = train ? task->train_batch(0, 198) : task->eval_batch(0, 22);
    for (int64_t i = 0; i < batch.inputs.size(0); ++i) {
      const int64_t label = batch.targets[i].item<int64_t>();
      const std::string text = task->decode(tokens_of(batch.inputs, batch.lengths, i));
      EXPECT_EQ(text.find(label == 0 ? 'b' : 'a'), std::string::npos);
      (train ? trained : held)[label].insert(text);
      ++(train ? trained_count : held_count)[label];
    }
  }
  // One epoch: every piece once.
  EXPECT_EQ(trained_count, (std::map<int64_t, int>{{0, 108}, {1, 90}}));
  EXPECT_EQ(held_count, (std::map<int64_t, int>{{0, 12}, {1, 10}}));
  // Whole files are held out where there are many: their numbered ends are not trained on.
  EXPECT_EQ(held[0].size(), 5u);
  for (const std::string& text : held[0]) {
    EXPECT_TRUE(text == "aaaaaaaaaa" || !trained[0].contains(text)) << text;
  }
  expect_contains(
      task->describe(),
      "198 to train on and 22 of 22 held out; 54% of those to train on are of the class a");
  EXPECT_EQ(task->floors().back().name, "the most frequent class");
  EXPECT_DOUBLE_EQ(task->floors().back().accuracy, 12.0 / 22);

  // The classes keep the numbers of a model, where a folder has other ones too.
  const std::string other =
      "type = 'classify_text'\nheld_out = 1\npath = '" + folder.path() + "'\n";
  const auto given = task_of(other + "labels = ['z', 'b', 'a']");
  EXPECT_EQ(given->classes(), 3);
  const Batch numbered = given->eval_batch(0, given->eval_sequences());
  for (int64_t i = 0; i < numbered.inputs.size(0); ++i) {
    const std::string text = given->decode(tokens_of(numbered.inputs, numbered.lengths, i));
    EXPECT_EQ(numbered.targets[i].item<int64_t>(), text.find('b') == std::string::npos ? 2 : 1);
  }
  EXPECT_EQ(error_of<UsageError>(other + "labels = ['z', 'b']"),
            "'" + folder.path("a") + "' is a class that is not among labels = z, b.");
  EXPECT_EQ(error_of<UsageError>(other + "labels = ['a', 'b', 'a']"),
            "'task.labels' has 'a' twice, expected each label once.");
  for (const std::string type : {"classify_text", "images"}) {
    EXPECT_EQ(error_of<UsageError>("type = '" + type + "'\nlabels = ['a', 'b']"),
              type + " has 'labels' but no 'path', expected the files to read.");
  }
  // A class that is not there would be missed by nobody.
  std::filesystem::create_symlink(folder.path("none"), folder.path("c"));
  EXPECT_EQ(error_of(other), "'" + folder.path("c") +
                                 "' is neither a folder nor a file, so it is no class; take it "
                                 "away or mend its link.");

  const Texts texts;
  EXPECT_EQ(task_of("type = 'classify_text'\npath = '" + texts.path() + "'")->classes(), 2);
}

TEST(ClassifyText, WhatCannotBeUsedIsRefused) {
  const TempFolder folder;
  const std::string path = "type = 'classify_text'\npath = '" + folder.path() + "'";
  EXPECT_EQ(error_of("type = 'classify_text'\npath = '/none'"),
            "there is no folder '/none' whose sub-folders or files are the classes.");
  folder.write("a.txt", "text");
  expect_contains(error_of(path), "has 0 sub-folders and 1 file, expected at least two");
  folder.write("b.txt", "");
  EXPECT_EQ(error_of(path + "\nlength = 2"), "there is no text in " + folder.path("b.txt") +
                                                 ": the one file found is empty or not text.");
  folder.write("b.txt", "b");
  expect_contains(error_of(path + "\nlength = 2"), "b.txt' has fewer than two pieces of 2 bytes");
  expect_contains(error_of<UsageError>(path + "\nextensions = 'txt'"), "begins with a dot");
  const std::string made = "type = 'classify_text'\n";
  EXPECT_EQ(error_of<UsageError>(made + "min_length = 65"),
            "classify_text has min_length = 65, expected at most length = 64.");
  EXPECT_EQ(error_of<UsageError>(made + "length = 10"),
            "classify_text has min_length = 5 and symbols = 8, but grammars need at least 8 of 5 "
            "letters.");
  EXPECT_EQ(error_of<UsageError>(made + "symbols = 5\nclasses = 100"),
            "classify_text has classes = 100, but of 5 letters there are only 24 grammars.");
  EXPECT_EQ(error_of<UsageError>(made + "language = 'brackets'\nsymbols = 5"),
            "classify_text has symbols = 5, expected 2, 4, 6 or 8 brackets.");
  expect_contains(error_of<UsageError>(made + "language = 'brackets'\nlength = 5\nmin_length = 5"),
                  "even");
}

TEST(Sequence, TheAnswerIsTheSourceInItsOrderBetweenBeginAndEnd) {
  for (const std::string kind : {"copy", "reverse", "sort"}) {
    SCOPED_TRACE(kind);
    const auto task =
        task_of("type = 'sequence'\nkind = '" + kind + "'\nsymbols = 9\ncount = 7\nmin_count = 3");
    EXPECT_EQ(task->goal(), Goal::sequence);
    EXPECT_TRUE(task->exact_match());
    EXPECT_EQ(task->vocabulary(), 11);
    EXPECT_EQ(task->length(), 8);
    EXPECT_EQ(task->source_length(), 7);
    EXPECT_EQ(task->end_token(), 10);
    const Batch batch = task->train_batch(0, 100);
    std::set<size_t> sizes;
    for (int64_t i = 0; i < 100; ++i) {
      auto answer = tokens_of(batch.source, batch.source_lengths, i);
      sizes.insert(answer.size());
      if (kind == "reverse") std::reverse(answer.begin(), answer.end());
      if (kind == "sort") std::sort(answer.begin(), answer.end());
      std::vector<int64_t> inputs = answer, targets = answer;
      inputs.insert(inputs.begin(), 9);
      targets.push_back(10);
      targets.resize(8, kIgnore);
      EXPECT_EQ(tokens_of(batch.inputs, batch.lengths, i), inputs);
      EXPECT_EQ(row(batch.targets, i), targets);
    }
    EXPECT_EQ(sizes, (std::set<size_t>{3, 4, 5, 6, 7}));
  }
  EXPECT_EQ(error_of<UsageError>("type = 'sequence'\ncount = 3\nmin_count = 4"),
            "sequence has min_count = 4, expected at most count = 3.");
}

}  // namespace
}  // namespace headloom::data::goals_test
