#include "data/packed_text.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/sizes.h"
#include "core/text.h"

namespace headloom::data {
namespace {

// 0 .. count - 1 by their bits read backwards (van der Corput 1935): the first n of them are spread
// over the whole for every n.
std::vector<int64_t> spread_order(int64_t count) {
  const auto size = std::bit_ceil(static_cast<uint64_t>(count));
  std::vector<int64_t> order;
  order.reserve(static_cast<size_t>(count));
  for (uint64_t i = 0; i < size; ++i) {
    uint64_t place = 0;
    for (uint64_t bit = 1; bit < size; bit <<= 1)
      place = place << 1 | static_cast<uint64_t>((i & bit) != 0);
    if (place < static_cast<uint64_t>(count)) order.push_back(static_cast<int64_t>(place));
  }
  return order;
}

double text_bytes(const std::vector<Document>& documents) {
  double bytes = 0.0;
  for (const Document& document : documents) bytes += static_cast<double>(document.text.size());
  return bytes;
}

Split split_text(const TextOptions& options, const std::vector<Document>& documents,
                 const EncodedDocuments& encoded) {
  std::vector<uint64_t> lots;
  for (const Document& document : documents) {
    lots.push_back(document_lot(document.name, kSplitSalt));
  }
  const int64_t length = options.split_length > 0 ? options.split_length : options.length;
  Split split = split_documents(encoded, lots, options.held_out, length);
  if (split.held_out.size() <= options.length) {
    usage_error("the held-out part of the text has ", counted(split.held_out.size(), "token"),
                ", but a sequence of ", options.length, " and its last target take ",
                options.length + 1, ".");
  }
  return split;
}

// Of what is evaluated; the mark of a document's end counts as a byte.
double held_out_bytes_per_token(const PackedStream& held_out, const EncodedDocuments& encoded,
                                double of_text, const Tokenizer& tokenizer) {
  std::vector<int64_t> counts(static_cast<size_t>(tokenizer.vocabulary()));
  const int64_t* ends = held_out.pieces->ends.const_data_ptr<int64_t>();
  const int64_t* shifts = held_out.pieces->shifts.const_data_ptr<int64_t>();
  for (int64_t i = 0, begin = 0; i < held_out.pieces->ends.size(0); begin = ends[i++]) {
    count_tokens(held_out.tokens, begin + shifts[i], ends[i] + shifts[i], counts);
  }
  const double pieces = piece_bytes(counts, tokenizer);
  // The pieces of a tokenizer that changes the text have not as many bytes as it.
  const double bytes = encoded.piece_bytes > 0 ? pieces * (of_text / encoded.piece_bytes) : 0.0;
  const auto marks = static_cast<double>(counts[static_cast<size_t>(tokenizer.end_token())]);
  return (bytes + marks) / static_cast<double>(held_out.size());
}

}  // namespace

void TextOptions::fields(Fields& f) {
  f.field("paths", corpus.paths,
          "files, folders (every text file below them) and globs (* ? [abc])");
  f.field("extensions", corpus.extensions,
          "take only files of folders that end so, \".txt\"; empty: every text file");
  f.field("max_bytes", corpus.max_bytes,
          "use at most so many bytes, of files chosen by a hash of their names; absent: all",
          at_least(1));
  f.field("length", length, "tokens in a sequence (T)", size_from(1));
  f.field("held_out", held_out,
          "share of the text kept for evaluation, at most 0.5: whole files where there are many, "
          "else the end; 1: all, to evaluate only",
          Range<double>{.low = 0.0, .high = 1.0, .open_low = true});
  f.field("eval_tokens", eval_tokens, "evaluate on at most so many held-out tokens, spread evenly",
          at_least(1));
  f.field("separate_documents", separate_documents,
          "keep attention inside a file where a sequence spans several");
}

void TextOptions::check(const std::string& task) const {
  if (corpus.paths.empty()) {
    refuse_without(task, "paths", "the files, folders or globs to read", "[\"my/texts\"]");
  }
  if (held_out > 0.5 && held_out < 1.0) {
    usage_error("the task ", task, " has held_out = ", held_out,
                ", expected at most 0.5, or 1 to evaluate all of the text");
  }
  check_extensions(corpus.extensions, task);
}

std::vector<DataPath> TextOptions::data_paths() {
  std::vector<DataPath> out;
  for (std::string& path : corpus.paths) out.push_back({"paths", &path});
  return out;
}

void TextOptions::hold_out_all() {
  held_out = 1.0;
  eval_tokens = std::numeric_limits<int64_t>::max();
}

PackedText::PackedText(const TextOptions& options, uint64_t seed, const Tokenizer& tokenizer)
    : PackedText(options, seed, read_corpus(options.corpus), tokenizer) {}

PackedText::PackedText(const TextOptions& options, uint64_t seed, Corpus corpus,
                       const Tokenizer& tokenizer)
    : options_(options),
      documents_(std::ssize(corpus.documents)),
      left_out_(std::move(corpus.left_out)),
      bytes_(text_bytes(corpus.documents)),
      encoded_(encode_documents(corpus.documents, tokenizer)),
      split_(split_text(options, corpus.documents, *encoded_)),
      bytes_per_token_(held_out_bytes_per_token(split_.held_out, *encoded_, bytes_, tokenizer)),
      order_(seed, split_.train.size(), options.length),
      eval_order_(spread_order(eval_sequences())) {}

Batch PackedText::train(int64_t first, int64_t count) const {
  if (split_.train.size() == 0) {
    usage_error("the task has held_out = 1: there is nothing to train on");
  }
  return split_.train.windows(at::tensor(order_.starts(first, count), at::kLong), options_.length,
                              options_.separate_documents);
}

int64_t PackedText::held_out_windows() const {
  const int64_t predicted = split_.held_out.size() - 1;
  const bool whole = split_.train.size() == 0;
  return (predicted + (whole ? options_.length - 1 : 0)) / options_.length;
}

int64_t PackedText::eval_sequences() const {
  return std::min(held_out_windows(), std::max<int64_t>(1, options_.eval_tokens / options_.length));
}

Batch PackedText::held_out(int64_t first, int64_t count) const {
  check_held_out(first, count, eval_sequences());
  std::vector<int64_t> starts;
  for (int64_t i = first; i < first + count; ++i) {
    // An evaluation may read fewer sequences than there are, so the order spreads any first part.
    const int64_t place = eval_order_[static_cast<size_t>(i)];
    starts.push_back(place * held_out_windows() / eval_sequences() * options_.length);
  }
  return split_.held_out.full_windows(starts, options_.length, options_.separate_documents);
}

std::string PackedText::describe() const {
  return str(
      counted(documents_, "file"), " in ", join(options_.corpus.paths), left_out_.in_brackets(),
      ": ", human_count(static_cast<double>(split_.train.size())), " tokens to train on and ",
      human_count(static_cast<double>(split_.held_out.size())), " held out, ",
      split_.train.size() == 0 ? std::string("the whole text")
      : split_.by_document     ? counted(split_.held_out_documents, "whole file")
                               : std::string("the end of the text"),
      ", of which at most ", counted(eval_sequences(), "sequence"), " of ",
      counted(options_.length, "token"), eval_sequences() == 1 ? " is" : " are", " evaluated");
}

}  // namespace headloom::data
