// Text: reading files, the split, the order, packing, and what is refused.
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>

#include "data/corpus.h"
#include "data/encoded.h"
#include "data/packed_text.h"
#include "data/random.h"
#include "data/stream.h"
#include "data/tokenizer.h"
#include "helpers.h"

namespace headloom::data::text_test {
namespace {

std::string letters(int64_t count, uint64_t seed) {
  Random random({seed});
  std::string text;
  for (int64_t i = 0; i < count; ++i) text += static_cast<char>('a' + random.below(26));
  return text;
}

std::vector<std::string> names_of(const CorpusOptions& options) {
  std::vector<std::string> names;
  const Corpus corpus = read_corpus(options);
  for (const Document& document : corpus.documents) names.push_back(document.name);
  return names;
}

std::string config(const std::string& paths, const std::string& more = "") {
  return "type = 'text'\npaths = [" + paths + "]\n" + more;
}

// Weights, archives and disk images stand beside texts. This one is larger than any memory.
TEST(Corpus, AHugeFileThatIsNoTextIsNotReadWhole) {
  const TempFolder folder;
  folder.write("one.txt", "one");
  folder.write("huge.bin", "PK");
  std::error_code refused;
  std::filesystem::resize_file(folder.path("huge.bin"), uintmax_t{1} << 42, refused);
  if (refused) GTEST_SKIP() << "the file system has no files of this size";
  const Corpus corpus = read_corpus({{folder.path()}, {}, {}});
  ASSERT_EQ(corpus.documents.size(), 1u);
  EXPECT_EQ(corpus.documents[0].text, "one");
  EXPECT_EQ(corpus.left_out.text(), "left out: 'huge.bin' is not text");
}

TEST(Corpus, WhatIsNoRegularFileIsNamed) {
  const TempFolder folder;
  folder.write("texts/one.txt", "one");
  folder.write("elsewhere/two.txt", "two");
  std::filesystem::create_symlink(folder.path("none.txt"), folder.path("texts/broken.txt"));
  std::filesystem::create_directory_symlink(folder.path("elsewhere"), folder.path("texts/linked"));
  std::filesystem::create_symlink(folder.path("elsewhere/two.txt"), folder.path("texts/two.txt"));
  ASSERT_EQ(::mkfifo(folder.path("texts/pipe").c_str(), 0600), 0);
  EXPECT_EQ(names_of({{folder.path("texts")}, {}, {}}),
            (std::vector<std::string>{"one.txt", "two.txt"}));
  EXPECT_EQ(read_corpus({{folder.path("texts")}, {}, {}}).left_out.text(),
            "left out: 'broken.txt', 'linked' and 'pipe' are no regular files");
  folder.write("links/.hidden", "");
  std::filesystem::create_directory_symlink(folder.path("elsewhere"), folder.path("links/linked"));
  EXPECT_THROW(
      {
        try {
          read_corpus({{folder.path("links")}, {}, {}});
        } catch (const Error& error) {
          EXPECT_EQ(error.what(),
                    "there is no text in " + folder.path("links") +
                        ": no file was found; left out: 'linked' is no regular file.");
          throw;
        }
      },
      Error);
  // Only those that end so were asked for; a linked folder may hold some.
  EXPECT_EQ(read_corpus({{folder.path("texts")}, {".txt"}, {}}).left_out.text(),
            "left out: 'broken.txt' and 'linked' are no regular files");
}

TEST(Corpus, FoldersAreReadInOrderWithoutHiddenBinaryEmptyAndRepeatedFiles) {
  const TempFolder folder;
  folder.write("b/two.txt", "two");
  folder.write("a/one.h", "one");
  folder.write("c.txt", "three");
  folder.write("copy.txt", "two");
  folder.write("empty.txt", "");
  folder.write("binary.txt", std::string("a\0b", 3));
  folder.write(".hidden.txt", "hidden");
  folder.write(".git/config.txt", "hidden too");
  using Names = std::vector<std::string>;
  EXPECT_EQ(names_of({{folder.path()}, {}, {}}), (Names{"a/one.h", "b/two.txt", "c.txt"}));
  EXPECT_EQ(read_corpus({{folder.path()}, {}, {}}).left_out.text(),
            "left out: 'binary.txt' is not text; 'empty.txt' is empty; 'copy.txt' has the content "
            "of another file");
  EXPECT_EQ(read_corpus({{folder.path("c.txt")}, {}, {}}).left_out.text(), "");
  const std::vector<std::string> more = {"e1.txt", "e2.txt", "e3.txt", "e4.txt"};
  for (const std::string& name : more) folder.write(name, "");
  expect_contains(read_corpus({{folder.path()}, {}, {}}).left_out.text(),
                  "; 'e1.txt', 'e2.txt', 'e3.txt' and 2 more are empty; ");
  for (const std::string& name : more) std::filesystem::remove(folder.path(name));
  EXPECT_EQ(names_of({{folder.path() + "/"}, {".txt"}, {}}), (Names{"b/two.txt", "c.txt"}));
  EXPECT_EQ(names_of({{folder.path("?")}, {}, {}}), (Names{"one.h", "two.txt"}));
  EXPECT_EQ(names_of({{folder.path("c*.txt"), folder.path("a")}, {}, {}}),
            (Names{"c.txt", "copy.txt", "one.h"}));
  // A file asked for by name is read whatever its extension, a hidden one too.
  EXPECT_EQ(names_of({{folder.path(".hidden.txt")}, {".h"}, {}}), (Names{".hidden.txt"}));
  // A name that looks like a glob but is there.
  folder.write("[x].txt", "bracket");
  EXPECT_EQ(names_of({{folder.path("[x].txt")}, {}, {}}), (Names{"[x].txt"}));
}

TEST(Corpus, MaxBytesTakesASampleThatDoesNotDependOnTheFoldersPlace) {
  const TempFolder one;
  const TempFolder other;
  for (int i = 0; i < 100; ++i) {
    const std::string name = str(i / 10, "/", i % 10, ".txt");
    one.write(name, letters(50, static_cast<uint64_t>(i)));
    other.write(name, letters(50, static_cast<uint64_t>(i)));
  }
  const std::vector<Document> documents = read_corpus({{one.path()}, {}, 1020}).documents;
  size_t bytes = 0;
  std::set<char> folders;
  for (const Document& document : documents) {
    bytes += document.text.size();
    folders.insert(document.name[0]);
  }
  EXPECT_EQ(bytes, 1020u);
  EXPECT_EQ(documents.size(), 21u);  // 20 whole and the beginning of one more
  EXPECT_GE(folders.size(), 7u);
  EXPECT_EQ(names_of({{one.path()}, {}, 1020}), names_of({{other.path()}, {}, 1020}));
}

TEST(Corpus, WhatCannotBeReadIsNamed) {
  const TempFolder folder;
  const auto message = [](const CorpusOptions& options) -> std::string {
    try {
      read_corpus(options);
    } catch (const Error& error) {
      return error.what();
    }
    return "(no error)";
  };
  EXPECT_EQ(message({{folder.path("gone")}, {}, {}}),
            "there is no file or folder '" + folder.path("gone") + "' to read text from.");
  EXPECT_EQ(message({{folder.path("*.txt")}, {}, {}}),
            "no file or folder matches '" + folder.path("*.txt") + "'.");
  EXPECT_EQ(message({{folder.path()}, {".txt"}, {}}),
            "there is no text in " + folder.path() + ": no file was found (looking for .txt).");
  folder.write("empty.txt", "");
  EXPECT_EQ(message({{folder.path("empty.txt")}, {}, {}}),
            "there is no text in " + folder.path("empty.txt") +
                ": the one file found is empty or not text.");
  folder.write("binary", std::string("ab\0", 3));
  EXPECT_EQ(message({{folder.path("binary")}, {}, {}}),
            "'" + folder.path("binary") + "' is not text: byte 2 is zero.");
  EXPECT_EQ(message({{"/dev/null"}, {}, {}}),
            "'/dev/null' is neither a file nor a folder, so no text can be read from it.");
  // A regular file whose reading fails for everyone, root included.
  if (std::filesystem::exists("/proc/self/mem")) {
    expect_contains(message({{"/proc/self/mem"}, {}, {}}), "cannot read '/proc/self/mem': ");
  }
}

TEST(Text, InputsAndTargetsAreTheBytesOfTheFile) {
  const TempFolder folder;
  const std::string text = letters(4000, 1);
  const std::string path = folder.write("a.txt", text);
  const auto task = task_of(config("'" + path + "'", "length = 50\nheld_out = 0.1"));
  EXPECT_EQ(task->vocabulary(), 256);
  EXPECT_EQ(task->length(), 50);
  EXPECT_EQ(task->bytes_per_token(), 1.0);
  EXPECT_EQ(task->end_token(), 0);
  EXPECT_FALSE(task->exact_match());
  EXPECT_EQ(task->decode(task->encode("h\xc3\xa9!")), "h\xc3\xa9!");
  EXPECT_EQ(task->encode("\xff"), (std::vector<int64_t>{255}));

  // A circle: the training text, the mark of its end (0), the training text again.
  const std::string train = text.substr(0, 3601) + std::string(1, '\0');
  const std::string circle = train + train;
  const Batch batch = task->train_batch(0, 72);
  EXPECT_FALSE(batch.documents.defined());
  for (int64_t i = 0; i < 72; ++i) {
    std::string window;
    for (int64_t token : row(batch.inputs, i)) window += static_cast<char>(token);
    const size_t place = circle.find(window);
    ASSERT_NE(place, std::string::npos);
    std::string targets;
    for (int64_t token : row(batch.targets, i)) targets += static_cast<char>(token);
    EXPECT_EQ(targets, circle.substr(place + 1, 50));
  }

  // The held-out sequences are the end of the text, each part of it once.
  ASSERT_EQ(task->eval_sequences(), 7);
  const Batch eval = task->eval_batch(0, 7);
  std::set<size_t> places;
  for (int64_t i = 0; i < 7; ++i) places.insert(text.find(task->decode(row(eval.inputs, i))));
  EXPECT_EQ(places, (std::set<size_t>{3601, 3651, 3701, 3751, 3801, 3851, 3901}));
  EXPECT_THROW(task->eval_batch(5, 3), Error);
}

TEST(Text, BatchesAreAFunctionOfSeedAndIndex) {
  const TempFolder folder;
  const std::string options =
      config("'" + folder.write("a.txt", letters(5000, 1)) + "'", "length = 20");
  const auto task = task_of(options, 5);
  const Batch late = task->train_batch(1000, 4);
  EXPECT_TRUE(same(late, task_of(options, 5)->train_batch(1000, 4)));
  task->train_batch(3, 4);
  EXPECT_TRUE(same(late, task->train_batch(1000, 4)));
  EXPECT_FALSE(same(late, task_of(options, 6)->train_batch(1000, 4)));
  EXPECT_TRUE(at::equal(late.inputs.slice(0, 2, 4), task->train_batch(2001, 2).inputs));
  EXPECT_TRUE(same(task->eval_batch(0, 5), task_of(options, 6)->eval_batch(0, 5)));
}

TEST(Text, EvalTokensLimitsTheHeldOutSequencesAndSpreadsThem) {
  const TempFolder folder;
  const std::string text = letters(10000, 3);
  const std::string path = "'" + folder.write("a.txt", text) + "'";
  const auto task = task_of(config(path, "length = 10\nheld_out = 0.5\neval_tokens = 100"));
  EXPECT_EQ(task->eval_sequences(), 10);
  const Batch eval = task->eval_batch(0, 10);
  std::vector<double> places;
  for (int64_t i = 0; i < 10; ++i) {
    places.push_back(static_cast<double>(text.find(task->decode(row(eval.inputs, i)))));
  }
  std::sort(places.begin(), places.end());
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_NEAR(places[i], 5000.0 + 500.0 * static_cast<double>(i), 12.0);
  }
}

// An evaluation may read fewer held-out sequences than there are.
TEST(Text, AnyFirstPartOfTheHeldOutSequencesIsSpreadOverTheText) {
  const TempFolder folder;
  const std::string text = letters(20000, 4);
  const std::string path = "'" + folder.write("a.txt", text) + "'";
  for (const char* type : {"text", "masked_text"}) {
    // Nothing is masked beyond recognition: every chosen token shows itself.
    const std::string options =
        str("type = '", type, "'\npaths = [", path, "]\nlength = 20\nheld_out = 0.5\n",
            type == std::string("text") ? "" : "replaced = 0.0\nrandom = 0.0");
    const auto task = task_of(options);
    ASSERT_EQ(task->eval_sequences(), 500);
    for (const int64_t count : {4, 7, 64, 125, 300, 500}) {
      const Batch eval = task->eval_batch(0, count);
      std::vector<double> places;
      for (int64_t i = 0; i < count; ++i) {
        places.push_back(static_cast<double>(text.find(task->decode(row(eval.inputs, i)))));
      }
      std::sort(places.begin(), places.end());
      const double step = 10000.0 / static_cast<double>(count);
      for (int64_t i = 0; i < count; ++i) {
        const double even = 10000.0 + step * static_cast<double>(i);
        EXPECT_NEAR(places[static_cast<size_t>(i)], even, 2 * step + 20) << type << " " << count;
      }
    }
  }
}

TEST(Text, ManyFilesAreHeldOutWhole) {
  const TempFolder folder;
  for (int i = 0; i < 200; ++i) {
    // Every file has a letter of its own, so each window shows which files it is from.
    folder.write(str("f", i, ".txt"), std::string(99, static_cast<char>(i + 40)));
  }
  const auto task = task_of(
      config("'" + folder.path() + "'", "length = 50\nheld_out = 0.1\nseparate_documents = true"));
  std::set<int64_t> held_out;
  for (int64_t i = 0; i < task->eval_sequences(); ++i) {
    for (int64_t token : row(task->eval_batch(i, 1).inputs, 0)) held_out.insert(token);
  }
  const Batch train = task->train_batch(0, 360);  // one epoch
  std::set<int64_t> trained;
  for (int64_t i = 0; i < 360; ++i) {
    const std::vector<int64_t> inputs = row(train.inputs, i);
    const std::vector<int64_t> documents = row(train.documents, i);
    trained.insert(inputs.begin(), inputs.end());
    // A document ends with its mark, and only there.
    for (size_t t = 0; t + 1 < inputs.size(); ++t) {
      EXPECT_EQ(documents[t + 1] != documents[t], inputs[t] == 0);
    }
  }
  held_out.erase(0);
  trained.erase(0);
  EXPECT_EQ(held_out.size(), 20u);
  EXPECT_EQ(trained.size(), 180u);
  for (int64_t letter : held_out) EXPECT_FALSE(trained.contains(letter));
  expect_contains(task->describe(), "20 whole files");
}

TEST(Text, FewFilesAreCutAtTheEnd) {
  const TempFolder folder;
  for (int i = 0; i < 10; ++i) folder.write(str(i), std::string(99, static_cast<char>('0' + i)));
  const auto task = task_of(config("'" + folder.path() + "'", "length = 10\nheld_out = 0.15"));
  std::set<int64_t> held_out;
  for (int64_t i = 0; i < task->eval_sequences(); ++i) {
    for (int64_t token : row(task->eval_batch(i, 1).inputs, 0)) held_out.insert(token);
  }
  EXPECT_EQ(held_out, (std::set<int64_t>{0, '8', '9'}));
  expect_contains(task->describe(), "the end of the text");
}

// The tokens that are targets.
std::string predicted(const Task& task, int64_t batch) {
  std::string all;
  const int64_t total = task.eval_sequences();
  for (int64_t first = 0; first < total; first += batch) {
    const Batch b = task.eval_batch(first, std::min(batch, total - first));
    EXPECT_FALSE(b.inputs.eq(kIgnore).any().item<bool>());
    for (int64_t r = 0; r < b.targets.size(0); ++r) {
      for (const int64_t token : row(b.targets, r)) {
        if (token != kIgnore) all += static_cast<char>(token == 0 ? '|' : token);
      }
    }
  }
  return all;
}

TEST(Text, AllOfItIsHeldOutToEvaluateOnly) {
  const TempFolder folder;
  for (const int64_t size : {11, 20, 21, 57, 100}) {
    const std::string text = letters(size, static_cast<uint64_t>(size));
    const std::string path = "'" + folder.write("a.txt", text) + "'";
    const auto task = task_of(config(path, "length = 10\nheld_out = 1.0\neval_tokens = 1000"));
    // Every token but the first is a target once, the mark of the end too.
    std::string found = predicted(*task, 3), expected = text.substr(1) + "|";
    std::sort(found.begin(), found.end());
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(found, expected) << size;
    EXPECT_EQ(task->eval_sequences(), (size + 9) / 10);
    EXPECT_EQ(task->data_size().count, size + 1);
    EXPECT_EQ(task->bytes_per_token(), 1.0);
    expect_contains(task->describe(), "held out, the whole text");
    try {
      task->train_batch(0, 1);
      FAIL() << "there is nothing to train on";
    } catch (const UsageError& error) {
      expect_contains(error.what(), "held_out = 1: there is nothing to train on");
    }
  }
  const std::string path = "'" + folder.write("a.txt", letters(9, 1)) + "'";
  expect_contains(error_of(config(path, "length = 10\nheld_out = 1.0")), "needs at least 11");
  expect_contains(error_of<UsageError>(config(path, "length = 10\nheld_out = 0.6")),
                  "expected at most 0.5, or 1 to evaluate all of the text");
}

TEST(Text, HiddenTokensOfAllOfItAreAskedForOnce) {
  const TempFolder folder;
  const std::string path = "'" + folder.write("a.txt", letters(24, 3)) + "'";
  const auto task = task_of("type = 'masked_text'\npaths = [" + path +
                            "]\nlength = 10\nheld_out = 1.0\nmasked = 1.0\n");
  // Two windows of ten letters, and one of the last ten, of which four are left.
  std::string found = predicted(*task, 3), expected = letters(24, 3);
  std::sort(found.begin(), found.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(found, expected);
}

TEST(Examples, AllOfThemAreHeldOutToEvaluateOnly) {
  const TempFolder folder;
  folder.write("classes/a.txt", letters(95, 1));
  folder.write("classes/b.txt", letters(5, 2));
  const auto task = task_of("type = 'classify_text'\npath = '" + folder.path("classes") +
                            "'\nlength = 10\nheld_out = 1.0\neval_sequences = 100");
  EXPECT_EQ(task->eval_sequences(), 11);
  EXPECT_EQ(task->data_size().count, 11);
  expect_contains(task->describe(), "90% of those held out are of the class a");
}

TEST(Sizes, AreKnownWithoutTheDataWhereTheyCanBe) {
  const auto known = [](const std::string& type, const std::string& more) {
    const auto spec = make_task_spec(type);
    Node node = parse_toml(more, "test.toml");
    read_fields(node, *spec);
    return spec->known_sizes();
  };
  const auto text = known("text", "paths = ['gone']\nlength = 12");
  ASSERT_TRUE(text.has_value());
  EXPECT_EQ(text->vocabulary, 256);
  EXPECT_EQ(text->length, 12);
  EXPECT_EQ(known("masked_text", "paths = ['gone']")->vocabulary, 257);
  EXPECT_EQ(known("find_span", "path = 'gone'")->segments, 2);
  EXPECT_EQ(known("tag_text", "path = 'gone'\nlabels = ['x', 'y', 'z']")->classes, 3);
  EXPECT_EQ(known("jsonl", "path = 'gone'\nlength = 12")->length, 12);
  EXPECT_EQ(known("token_shard", "path = 'gone'\nvocabulary = 99")->vocabulary, 99);
  for (const char* type : {"tag_text", "classify_pairs", "classify_text", "images"}) {
    EXPECT_FALSE(known(type, "path = 'gone'").has_value()) << type;
  }
  // What is generated says it at once, as the task does that is built.
  for (const TaskEntry& entry : tasks()) {
    if (entry.name.ends_with("text") && entry.name != "classify_text" && entry.name != "tag_text") {
      continue;
    }
    if (entry.name == "jsonl" || entry.name == "token_shard") continue;
    const auto spec = entry.make();
    const auto sizes = spec->known_sizes();
    ASSERT_TRUE(sizes.has_value()) << entry.name;
    const auto task = spec->build(3);
    EXPECT_EQ(sizes->goal, task->goal()) << entry.name;
    EXPECT_EQ(sizes->vocabulary, task->vocabulary()) << entry.name;
    EXPECT_EQ(sizes->classes, task->classes()) << entry.name;
  }
}

TEST(Text, WhatCannotBeUsedIsRefused) {
  const TempFolder folder;
  const std::string path = "'" + folder.write("a.txt", letters(100, 1)) + "'";
  EXPECT_EQ(
      error_of(config(path)),
      "the text is too short: 101 tokens with a mark after every document, but length = 256 needs "
      "at least 514, one sequence to train on and one held out.");
  EXPECT_EQ(error_of<UsageError>("type = 'text'"),
            "the task text needs 'paths', the files, folders or globs to read, as in --set "
            "'task.paths=[\"my/texts\"]'.");
  EXPECT_EQ(error_of<UsageError>(config(path, "extensions = ['txt']")),
            "'extensions' of the task text has 'txt', but an extension begins with a dot: '.txt'.");
  EXPECT_EQ(error_of<UsageError>(config(path, "extensions = ['']")),
            "'extensions' of the task text has '', but an extension begins with a dot: '.txt'.");
  expect_contains(error_of<UsageError>(config(path, "held_out = 0.0")), "held_out");
  expect_contains(error_of<UsageError>(config(path, "lenght = 5")), "length");
  // The smallest text that has both parts.
  const auto task =
      task_of(config("'" + folder.write("b.txt", letters(21, 2)) + "'", "length = 10"));
  EXPECT_EQ(task->eval_sequences(), 1);
  EXPECT_EQ(task->train_batch(0, 3).inputs.size(0), 3);
}

// Counts the documents that it encodes.
class CountingTokenizer final : public Tokenizer {
 public:
  explicit CountingTokenizer(std::string_view file) : Tokenizer(file) {}
  int64_t vocabulary() const override { return 256; }
  int64_t end_token() const override { return 0; }
  at::Tensor encode(std::string_view text) const override {
    ++encoded;
    return byte_tokenizer()->encode(text);
  }
  std::string piece(int64_t token) const override { return byte_tokenizer()->piece(token); }
  std::string name(int64_t token) const override { return byte_tokenizer()->name(token); }

  mutable int encoded = 0;
};

TEST(PackedText, TokensAreSharedWhileTheyAreHeldAndOfTheTextAsItIs) {
  const TempFolder folder;
  folder.write("a.txt", letters(100, 1));
  folder.write("b.txt", letters(100, 2));
  TextOptions options;
  options.corpus.paths = {folder.path()};
  options.length = 10;
  const CountingTokenizer tokenizer("file");
  auto first = std::make_unique<PackedText>(options, 0, tokenizer);
  EXPECT_EQ(tokenizer.encoded, 2);
  {
    // Another place and file of the same content, and what does not change tokens.
    const TempFolder copy;
    copy.write("a.txt", letters(100, 1));
    copy.write("b.txt", letters(100, 2));
    TextOptions same = options;
    same.corpus.paths = {copy.path()};
    same.eval_tokens = 10;
    const CountingTokenizer again("file");
    const PackedText second(same, 1, again);
    EXPECT_EQ(again.encoded, 0);
    EXPECT_EQ(second.tokens(), first->tokens());
    EXPECT_EQ(second.bytes_per_token(), first->bytes_per_token());
    EXPECT_TRUE(at::equal(second.held_out(0, 1).inputs, first->held_out(0, 1).inputs));
  }
  const CountingTokenizer other("another file");
  const PackedText third(options, 0, other);
  EXPECT_EQ(other.encoded, 2);
  {
    TextOptions longer = options;
    longer.length = 20;
    longer.held_out = 0.5;
    const PackedText fourth(longer, 0, tokenizer);
    EXPECT_EQ(tokenizer.encoded, 2);
  }

  // A file of the same size is written, and read.
  folder.write("b.txt", letters(100, 3));
  const PackedText changed(options, 0, tokenizer);
  EXPECT_EQ(tokenizer.encoded, 4);
  EXPECT_FALSE(at::equal(changed.held_out(0, 1).inputs, first->held_out(0, 1).inputs));
  // Nothing is kept that nobody holds.
  folder.write("b.txt", letters(100, 2));
  first.reset();
  first = std::make_unique<PackedText>(options, 0, tokenizer);
  EXPECT_EQ(tokenizer.encoded, 6);
}

class KeptTokens : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv("XDG_CACHE_HOME", cache_.path().c_str(), 1);
    for (const char* name : {"a.txt", "b.txt"}) {
      texts_.write(name, letters(kLeastKeptText / 2, static_cast<uint64_t>(name[0])));
    }
    options_.corpus.paths = {texts_.path()};
  }
  void TearDown() override { ::unsetenv("XDG_CACHE_HOME"); }

  // How many texts a process encodes that begins now.
  int encoded() {
    const CountingTokenizer tokenizer("file");
    const PackedText text(options_, 0, tokenizer);
    batches_.push_back({text.train(0, 2), text.held_out(0, 2)});
    EXPECT_TRUE(same(batches_.back().first, batches_[0].first) &&
                same(batches_.back().second, batches_[0].second));
    bytes_per_token_.insert(text.bytes_per_token());
    EXPECT_EQ(bytes_per_token_.size(), 1u);
    return tokenizer.encoded;
  }
  std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> out;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(cache_.path("headloom"), none)) {
      out.push_back(entry.path());
    }
    return out;
  }
  void overwrite(int64_t place) const {
    std::fstream file(files()[0], std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(place);
    const auto before = static_cast<char>(file.get());
    file.seekp(place);
    file.put(static_cast<char>(before ^ 1));
  }

  TempFolder cache_, texts_;
  TextOptions options_;
  std::vector<std::pair<Batch, Batch>> batches_;
  std::set<double> bytes_per_token_;
};

TEST_F(KeptTokens, AreReadByLaterProcessesOfAnyLengthAndSplit) {
  EXPECT_EQ(encoded(), 2);
  ASSERT_EQ(files().size(), 1u);
  EXPECT_EQ(encoded(), 0);
  TextOptions other = options_;
  other.length = 100;
  other.held_out = 0.3;
  const CountingTokenizer tokenizer("file"), another("another file");
  // Two documents end, and a third time the one with the cut.
  EXPECT_EQ(PackedText(other, 0, tokenizer).tokens(), kLeastKeptText + 3);
  EXPECT_EQ(tokenizer.encoded, 0);
  const PackedText text(other, 0, another);
  EXPECT_EQ(another.encoded, 2);
  EXPECT_EQ(files().size(), 2u);
}

TEST_F(KeptTokens, AreMadeAnewWhereTheFileIsDamaged) {
  EXPECT_EQ(encoded(), 2);
  const auto size = static_cast<int64_t>(std::filesystem::file_size(files()[0]));
  for (const int64_t place : {int64_t{0}, int64_t{20}, size / 2, size - 1}) {
    overwrite(place);
    EXPECT_EQ(encoded(), 2) << place;
    EXPECT_EQ(encoded(), 0) << place;
  }
  for (const int64_t left : {int64_t{0}, int64_t{5}, size / 2, size - 1}) {
    std::filesystem::resize_file(files()[0], static_cast<uintmax_t>(left));
    EXPECT_EQ(encoded(), 2) << left;
    EXPECT_EQ(encoded(), 0) << left;
  }
  EXPECT_EQ(files().size(), 1u);
}

TEST_F(KeptTokens, AreMissedByNobodyWhereNothingCanBeWritten) {
  cache_.write("headloom", "a file where the folder would be");
  EXPECT_EQ(encoded(), 2);
  EXPECT_EQ(encoded(), 2);
  ::setenv("XDG_CACHE_HOME", "/proc/none", 1);
  EXPECT_EQ(encoded(), 2);
}

TEST_F(KeptTokens, AreNotKeptOfShortTextsAndOfBytes) {
  const PackedText bytes(options_, 0, *byte_tokenizer());
  texts_.write("b.txt", letters(kLeastKeptText / 2 - 1, 2));
  const CountingTokenizer tokenizer("file");
  const PackedText text(options_, 0, tokenizer);
  EXPECT_TRUE(files().empty());
}

TEST(MakeRoomForTokens, RemovesTheLeastRecentlyUsed) {
  const TempFolder folder;
  const auto now = std::filesystem::file_time_type::clock::now();
  for (const char* name : {"tokens-a", "tokens-b", "tokens-c", "other"}) {
    folder.write(name, std::string(100, 'x'));
    std::filesystem::last_write_time(folder.path(name),
                                     now - std::chrono::hours(std::string_view(name).back()));
  }
  const auto there = [&](const char* name) { return std::filesystem::exists(folder.path(name)); };
  make_room_for_tokens(folder.path(), 100, 400);
  EXPECT_TRUE(there("tokens-a") && there("tokens-b") && there("tokens-c"));
  make_room_for_tokens(folder.path(), 150, 400);
  EXPECT_TRUE(there("tokens-a") && there("tokens-b") && !there("tokens-c"));
  make_room_for_tokens(folder.path(), 400, 400);
  EXPECT_TRUE(!there("tokens-a") && !there("tokens-b") && there("other"));
}

TEST(WindowOrder, EveryEpochVisitsEveryWindowOnceInANewOrder) {
  const WindowOrder order(9, 1003, 10);
  ASSERT_EQ(order.windows(), 100);
  std::vector<std::vector<int64_t>> epochs;
  for (int64_t e = 0; e < 3; ++e) {
    epochs.push_back(order.starts(e * 100, 100));
    // Windows tile the circle: sorted by their distance from one of them, they lie 10 apart.
    std::set<int64_t> covered;
    for (int64_t start : epochs.back()) {
      for (int64_t t = 0; t < 10; ++t) covered.insert((start + t) % 1003);
    }
    EXPECT_EQ(covered.size(), 1000u);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
  // Across the border of two epochs, and back again.
  std::vector<int64_t> across(epochs[0].end() - 5, epochs[0].end());
  across.insert(across.end(), epochs[1].begin(), epochs[1].begin() + 5);
  EXPECT_EQ(order.starts(95, 10), across);
  EXPECT_EQ(order.starts(0, 100), epochs[0]);
}

TEST(PackedStream, WindowsWrapAndADocumentMetAgainIsAnotherOne) {
  const PackedStream stream{at::arange(6, at::kByte),
                            at::tensor(std::vector<int64_t>{2, 6}, at::kLong)};
  const Batch batch = stream.windows(at::tensor(std::vector<int64_t>{1, 4}, at::kLong), 5, true);
  EXPECT_EQ(row(batch.inputs, 0), (std::vector<int64_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(row(batch.targets, 0), (std::vector<int64_t>{2, 3, 4, 5, 0}));
  EXPECT_EQ(row(batch.documents, 0), (std::vector<int64_t>{0, 1, 1, 1, 1}));
  EXPECT_EQ(row(batch.inputs, 1), (std::vector<int64_t>{4, 5, 0, 1, 2}));
  EXPECT_EQ(row(batch.documents, 1), (std::vector<int64_t>{1, 1, 2, 2, 3}));
}

}  // namespace
}  // namespace headloom::data::text_test
