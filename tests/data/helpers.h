// What the tests of the data layer share.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

#include "core/config.h"
#include "core/error.h"
#include "core/fields.h"
#include "data/task.h"
#include "testing/temp_folder.h"

namespace headloom::data {

using test::TempFolder;

// The task of a config like "type = 'copy'\ncount = 3", before it is made.
inline std::shared_ptr<TaskSpec> spec_of(const std::string& toml) {
  Node node = parse_toml(toml, "test.toml");
  std::shared_ptr<TaskSpec> spec;
  struct Holder {
    std::shared_ptr<TaskSpec>& spec;
    void fields(Fields& f) { f.variant("task", spec, "the task", task_names(), make_task_spec); }
  } holder{spec};
  Node root;
  root.set("task", std::move(node));
  read_fields(root, holder);
  return spec;
}

inline std::shared_ptr<Task> task_of(const std::string& toml, uint64_t seed = 1) {
  return spec_of(toml)->build(seed);
}

// The message of the error that making the task of `toml` ends with.
template <typename Exception = Error>
std::string error_of(const std::string& toml) {
  try {
    task_of(toml);
  } catch (const Exception& error) {
    return error.what();
  }
  return "(no such error)";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "in: " << text;
}

inline bool same(Batch a, Batch b) {
  const auto equal = [](const at::Tensor* x, const at::Tensor* y) {
    return x->defined() == y->defined() && (!x->defined() || at::equal(*x, *y));
  };
  const auto left = a.tensors(), right = b.tensors();
  return std::equal(left.begin(), left.end(), right.begin(), equal);
}

// Examples [first, first + count) of a batch.
inline Batch slice(Batch batch, int64_t first, int64_t count) {
  for (at::Tensor* t : batch.tensors()) {
    if (t->defined()) *t = t->slice(0, first, first + count);
  }
  return batch;
}

// WordPiece of single letters: [CLS] text [SEP], hidden by [MASK].
inline std::string letters_json() {
  std::string vocabulary = "\"[UNK]\":0,\"[CLS]\":1,\"[SEP]\":2,\"[MASK]\":3", added;
  for (int i = 0; i < 52; ++i) {
    const std::string letter(1, static_cast<char>('a' + i % 26));
    vocabulary += str(",\"", i < 26 ? "" : "##", letter, "\":", 4 + i);
  }
  for (const char* token : {"0,\"content\":\"[UNK]\"", "1,\"content\":\"[CLS]\"",
                            "2,\"content\":\"[SEP]\"", "3,\"content\":\"[MASK]\""}) {
    added += str(added.empty() ? "" : ",", "{\"special\":true,\"id\":", token, "}");
  }
  return str("{\"added_tokens\":[", added,
             "],\"normalizer\":{\"type\":\"BertNormalizer\"},"
             "\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"},"
             "\"post_processor\":{\"type\":\"BertProcessing\",\"cls\":[\"[CLS]\",1],"
             "\"sep\":[\"[SEP]\",2]},\"model\":{\"type\":\"WordPiece\",\"unk_token\":\"[UNK]\","
             "\"continuing_subword_prefix\":\"##\",\"max_input_chars_per_word\":10,"
             "\"vocab\":{",
             vocabulary, "}}}");
}

inline std::vector<int64_t> row(const at::Tensor& tensor, int64_t index) {
  const at::Tensor values = tensor.select(0, index).contiguous();
  return {values.data_ptr<int64_t>(), values.data_ptr<int64_t>() + values.size(0)};
}

}  // namespace headloom::data
