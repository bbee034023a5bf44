// Tokenizers: bytes, byte-level BPE of a tokenizer.json, SentencePiece; a task on either.
#include "data/tokenizer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "data/sentencepiece.h"
#include "data/vocabulary.h"
#include "helpers.h"
#include "testing/errors.h"

namespace headloom::data::tokenizer_test {
namespace {

// Every byte, "he", "ll", "hell" and the end of a document; U+0120 names the space.
std::string small_json(bool with_end = true) {
  std::string vocabulary;
  int id = 0;
  const auto add = [&](const std::string& token) {
    vocabulary += (id == 0 ? "\"" : ",\"") + token + "\":" + std::to_string(id);
    ++id;
  };
  for (int b = 0; b < 256; ++b) {
    const bool printable =
        (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
    static int next;
    if (b == 0) next = 0x100;
    char text[8];
    std::snprintf(text, sizeof text, "\\u%04x", printable ? b : next++);
    add(text);
  }
  for (const char* token : {"he", "ll", "hell"}) add(token);
  return "{\"added_tokens\":[" +
         std::string(with_end ? "{\"id\":259,\"content\":\"<|endoftext|>\",\"special\":true}"
                              : "") +
         "],\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},\"model\":{"
         "\"type\":\"BPE\",\"vocab\":{" +
         vocabulary + "},\"merges\":[\"h e\",\"l l\",\"he ll\"]}}";
}

TEST(Tokenizer, EveryByteSequenceComesBackFromBytePairs) {
  const TempFolder folder;
  const auto tokenizer = make_tokenizer(folder.write("tokenizer.json", small_json()));
  EXPECT_EQ(tokenizer->vocabulary(), 260);
  EXPECT_EQ(tokenizer->end_token(), 259);
  EXPECT_EQ(tokens_of(*tokenizer, "hello"), (std::vector<int64_t>{258, 'o'}));
  EXPECT_EQ(tokens_of(*tokenizer, "<|endoftext|>lle"), (std::vector<int64_t>{259, 257, 'e'}));
  EXPECT_EQ(tokenizer->encode("x").scalar_type(), at::kShort);
  EXPECT_EQ(tokenizer->encode("").size(0), 0);
  std::string all = "hello \xc3\xa9\xe4\xbd\xa0 \xf0\x9f\x99\x82 ";
  for (int b = 1; b < 256; ++b) all += static_cast<char>(b);
  all += "he\xc3";  // ends within a character
  EXPECT_EQ(tokenizer->decode(tokens_of(*tokenizer, all)), all);
  EXPECT_EQ(tokenizer->decode({258, 259, 100000, -1}), "hell");
  // Without a name of the end in the file there is one more token.
  const auto endless = make_tokenizer(folder.write("endless.json", small_json(false)));
  EXPECT_EQ(endless->vocabulary(), 260);
  EXPECT_EQ(endless->end_token(), 259);
  EXPECT_EQ(endless->piece(259), "");
}

std::string sentences(int count) {
  std::string text;
  const char* words[] = {"the", "weaver", "threads", "heads", "loom", "and", "cloth", "under"};
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < 7; ++j)
      text += str(words[(i * 5 + j * j + i * j) % 8], j == 6 ? ".\n" : " ");
  }
  return text;
}

TEST(Tokenizer, ALearnedVocabularyKeepsEveryText) {
  const TempFolder folder;
  for (const char* method : {"bpe", "unigram"}) {
    const std::string model = learn_vocabulary({{"a", "a", sentences(200)}, {"b", "b", "\n\nxyz"}},
                                               {.size = 285, .method = method});
    EXPECT_EQ(model, learn_vocabulary({{"a", "a", sentences(200)}, {"b", "b", "\n\nxyz"}},
                                      {.size = 285, .method = method}));
    const auto tokenizer = make_tokenizer(folder.write(str(method, ".model"), model));
    EXPECT_EQ(tokenizer->vocabulary(), 285);
    EXPECT_EQ(tokenizer->start_token(), std::nullopt);
    const std::string text = "  the weaver\n\n\tthreads  \xe4\xbd\xa0 r\xc3\xa9sum\xc3\xa9 under. ";
    const auto tokens = tokens_of(*tokenizer, text);
    EXPECT_LT(tokens.size(), text.size());
    EXPECT_EQ(tokenizer->decode(tokens), text) << method;
    std::string pieces;
    for (const int64_t token : tokens) pieces += tokenizer->piece(token);
    EXPECT_EQ(pieces, text) << method;
    EXPECT_EQ(tokenizer->piece(tokenizer->end_token()), "");
  }
  expect_contains(
      test::message_of([] { learn_vocabulary({{"a", "a", "too little"}}, {.size = 4000}); }),
      "--size 4000 is too large for this text");
}

// As each of its lines has them: a long text is read in parts, and what stands before a word is no
// reason to cut it otherwise.
TEST(Tokenizer, ALongTextHasTheTokensOfItsLines) {
  std::string sample;
  uint32_t number = 1;
  for (int word = 0; word < 6000; ++word) {
    const char* parts[] = {"the", "wea", "ver", "s", "loom", "and", "read", "un"};
    const int count = 1 + word % 4;
    for (int i = 0; i < count; ++i) {
      number = number * 1664525 + 1013904223;
      sample += parts[number >> 29];
    }
    sample += word % 9 == 0 ? "\n" : " ";
  }
  sample += '\n';
  const auto learned = [&](const std::string& method, const std::string& space_first,
                           const std::string& normalization) {
    std::string model;
    size_t at = 0;
    std::string line;
    const std::function<const std::string*()> next = [&]() -> const std::string* {
      if (at == sample.size()) return nullptr;
      const size_t end = sample.find('\n', at);
      line = sample.substr(at, end - at);
      at = end + 1;
      return &line;
    };
    EXPECT_EQ(sentencepiece().learn({{"vocab_size", "900"},
                                     {"model_type", method},
                                     {"byte_fallback", "true"},
                                     {"normalization_rule_name", normalization},
                                     {"remove_extra_whitespaces", "false"},
                                     {"add_dummy_prefix", space_first},
                                     {"minloglevel", "2"}},
                                    next, model),
              "");
    return sentencepiece().read(model);
  };
  const std::string words =
      "  under heads,\r\n\t andeav  clothe hreadloo thea vereads unde eadclo loom . "
      "\xe4\xbd\xa0\n\n";
  std::string text;
  for (int i = 0; i < 100; ++i) text += words;
  const auto bpe = learned("bpe", "false", "identity");
  const std::vector<int> tokens = bpe->encode(words);
  std::vector<int> expected;
  for (int i = 0; i < 100; ++i) expected.insert(expected.end(), tokens.begin(), tokens.end());
  EXPECT_EQ(bpe->encode(text), expected);

  // A model may put a space before a text, once.
  const auto space_first = learned("bpe", "true", "identity");
  const std::vector<int> next = space_first->encode("\n" + words);
  expected = space_first->encode(words);
  for (int i = 1; i < 100; ++i) {
    expected.pop_back();  // the line's end before `words`
    expected.insert(expected.end(), next.begin() + 1, next.end());
  }
  EXPECT_EQ(space_first->encode(text), expected);
  EXPECT_EQ(space_first->decode(space_first->encode(text)), text);

  // A character that no token has costs a unigram model the most.
  const auto unigram = learned("unigram", "false", "identity");
  std::string costly;
  for (int i = 0; i < 1000; ++i) costly += "\xc3\xa9";
  costly += '\n';
  const std::vector<int> first = unigram->encode(costly);
  std::string long_text;
  expected.clear();
  for (int i = 0; i < 600; ++i) {
    long_text += costly;
    expected.insert(expected.end(), first.begin(), first.end());
  }
  const std::vector<int> last = unigram->encode(sample);
  expected.insert(expected.end(), last.begin(), last.end());
  EXPECT_TRUE(unigram->encode(long_text + sample) == expected);

  // A model may read a line's end as a space, which a token can begin with.
  const auto spaces = learned("bpe", "false", "nmt_nfkc");
  std::string one_line = text;
  std::replace(one_line.begin(), one_line.end(), '\n', ' ');
  EXPECT_EQ(spaces->encode(text), spaces->encode(one_line));
}

TEST(Tokenizer, APostProcessorSaysWhichTokenIsPutFirst) {
  const TempFolder folder;
  const std::string bert = letters_json();
  const auto start_by = [&](const std::string& type) {
    std::string json = bert;
    json.replace(json.find("BertProcessing"), std::strlen("BertProcessing"), type);
    return make_tokenizer(folder.write(type + ".json", json))->start_token();
  };
  EXPECT_EQ(start_by("BertProcessing"), 1);
  EXPECT_EQ(start_by("RobertaProcessing"), 1);
  EXPECT_EQ(start_by("ByteLevel"), std::nullopt);
  expect_contains(test::message_of([&] { start_by("Nonsense"); }),
                  "its post_processor is 'Nonsense', expected TemplateProcessing");
}

// SentencePiece skips lines of more than 65536 bytes.
TEST(Tokenizer, AVocabularyIsLearnedFromOneLongLine) {
  const TempFolder folder;
  std::string line;
  while (line.size() < 200000) line += sentences(1) + " ";
  std::replace(line.begin(), line.end(), '\n', ' ');
  std::string spaceless;
  while (spaceless.size() < 200000) spaceless += "\xe4\xbd\xa0\xe5\xa5\xbd";
  for (const auto& [text, size] : {std::pair{line, 285}, std::pair{spaceless, 262}}) {
    const auto tokenizer = make_tokenizer(folder.write(
        "long.model", learn_vocabulary({{"a", "a", text}}, {.size = size, .method = "bpe"})));
    const std::string start = text.substr(0, 300);
    EXPECT_LT(tokens_of(*tokenizer, start).size(), start.size() / 2);
    EXPECT_EQ(tokenizer->decode(tokens_of(*tokenizer, start)), start);
  }
}

TEST(Tokenizer, WhatIsNoTokenizerIsRefused) {
  const TempFolder folder;
  expect_contains(test::message_of([] { make_tokenizer("tokens.txt"); }), "expected \"bytes\"");
  expect_contains(test::message_of([&] { make_tokenizer(folder.path("no.json")); }), "no.json");
  expect_contains(test::message_of([&] { make_tokenizer(folder.path("no.model")); }), "no.model");
  // Normalizers inside each other: reading them recurses.
  std::string deep = R"({"model":{"type":"BPE","vocab":{},"merges":[]},"normalizer":)", end;
  for (int i = 0; i < 100000; ++i) {
    deep += R"({"type":"Sequence","normalizers":[)";
    end += "]}";
  }
  const std::string file = folder.write("deep.json", deep + end + "}");
  EXPECT_EQ(test::message_of([&] { make_tokenizer(file); }),
            file + ": is nested deeper than 64 levels.");
  const std::string model =
      learn_vocabulary({{"a", "a", sentences(50)}}, {.size = 290, .method = "bpe"});
  for (size_t length = 0; length + 1 < model.size(); length += 1 + model.size() / 40) {
    try {  // some truncations are models of fewer tokens
      make_tokenizer(folder.write("cut.model", model.substr(0, length)))->encode("the loom");
    } catch (const Error& error) {
      expect_contains(error.what(), "cut.model");
    }
  }
}

TEST(TextTask, SubWordsCountBytesOfWhatIsEvaluated) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 400; ++i) text += "hello ";
  folder.write("text.txt", text);
  const std::string config = "type = 'text'\npaths = ['" + folder.path("text.txt") +
                             "']\nlength = 8\nheld_out = 0.1\ntokenizer = '" +
                             folder.write("tokenizer.json", small_json()) + "'\n";
  const auto task = task_of(config);
  EXPECT_EQ(task->vocabulary(), 260);
  EXPECT_EQ(task->end_token(), 259);
  // "hell", "o", " ": 6 bytes in 3 tokens; the document's end is a byte.
  EXPECT_NEAR(task->bytes_per_token(), 2.0, 0.03);
  const at::Tensor inputs = task->eval_batch(0, 1).inputs;
  EXPECT_EQ(inputs.scalar_type(), at::kLong);
  EXPECT_TRUE(inputs.eq(258).any().item<bool>());
}

// Of WordPiece the spaces between words are no tokens, and an unknown word has the name of its
// token, which is not as long as it.
TEST(TextTask, ATokenizerThatChangesTheTextCountsTheBytesOfTheFile) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 300; ++i) text += i % 3 == 0 ? "ab   cd\n" : "(1234567890)";
  folder.write("text.txt", text);
  const auto task = task_of("type = 'text'\npaths = ['" + folder.path("text.txt") +
                            "']\nlength = 8\nheld_out = 1\ntokenizer = '" +
                            folder.write("tokenizer.json", letters_json()) + "'\n");
  const auto tokens = static_cast<double>(task->data_size().count);
  EXPECT_NEAR(task->bytes_per_token() * tokens, static_cast<double>(text.size() + 1), 1e-6);
}

}  // namespace
}  // namespace headloom::data::tokenizer_test
