// Documents packed end to end, and the order in which windows of them are visited.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "data/encoded.h"
#include "data/task.h"

namespace headloom::data {

// Tokens in a circle: the first document follows the last.
struct PackedStream {
  at::Tensor tokens;         // [N], or those of which `pieces` takes some
  at::Tensor document_ends;  // [D] int64, where each document ends (exclusive), ascending
  // Where the stream is made of pieces of `tokens`, which are then not copied: where each ends in
  // the stream, ascending, and how far further on in `tokens` it lies. [P] int64.
  struct Pieces {
    at::Tensor ends, shifts;
  };
  std::optional<Pieces> pieces = {};

  int64_t size() const;
  // Windows that begin at `starts` [B], in [0, N): inputs are T tokens and targets the T one
  // further on. length < N. Document ids are filled in where asked for.
  Batch windows(const at::Tensor& starts, int64_t length, bool documents) const;
  // The same of windows that do not go around the circle: one that would begins early enough to be
  // full, and has no targets for what is before `starts`.
  Batch full_windows(const std::vector<int64_t>& starts, int64_t length, bool documents) const;
};

struct Split {
  PackedStream train;
  PackedStream held_out;
  bool by_document = false;  // otherwise the last part of the stream is held out
  int64_t held_out_documents = 0;
};

// Parts documents into a training and a held-out stream, in which each ends with its token. Whole
// documents are held out, by lot, where that can meet the share closely; otherwise the tail of the
// stream. Both have more than `length` tokens. Throws Error where the documents are too short for
// that. With held_out = 1 nothing is left to train on, and more than `length` tokens are enough.
Split split_documents(const EncodedDocuments& documents, const std::vector<uint64_t>& lots,
                      double held_out, int64_t length);

// Cuts a circle of `size` tokens into size / length windows, at an offset and in an order of its
// own every epoch: each window of an epoch is visited once. A pure function of (seed, number);
// thread-safe.
class WindowOrder {
 public:
  WindowOrder(uint64_t seed, int64_t size, int64_t length);
  int64_t windows() const { return windows_; }
  // Where windows first, first + 1, ..., first + count - 1 begin.
  std::vector<int64_t> starts(int64_t first, int64_t count) const;

 private:
  struct Epoch {
    int64_t index = -1;
    int64_t offset = 0;
    std::vector<int64_t> order;
  };
  std::shared_ptr<const Epoch> epoch(int64_t index) const;

  uint64_t seed_;
  int64_t size_;
  int64_t length_;
  int64_t windows_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const Epoch>
      latest_;  // a cache: epochs are made from (seed, index) alone
};

}  // namespace headloom::data
