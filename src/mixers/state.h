// What decoding keeps of the positions seen so far.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace headloom {

// Vectors of consecutive positions, [B, n, ...], to which new ones are appended in place.
class Rows {
 public:
  // Appends t [B, n, ...] and returns all rows kept, oldest first. An undefined t leaves and
  // returns nothing. Gradients do not flow through what is kept: call it without them.
  at::Tensor append(const at::Tensor& t);
  // Forgets all but the newest `n` rows.
  void keep_last(int64_t n);
  // Makes room for `rows` rows ahead of the first append, so that no later one has to move them.
  void reserve(int64_t rows) { reserved_ = rows; }
  int64_t size() const { return end_ - begin_; }
  // Of the rows kept, not of the room made.
  int64_t bytes() const;
  // The rows of the sequences that `which` [n] int64 names.
  Rows select(const at::Tensor& which) const;

 private:
  at::Tensor data_;  // [B, capacity, ...]
  int64_t begin_ = 0, end_ = 0, reserved_ = 0;
};

// A mixer's own: what `rows` and `tensors` mean, and how many there are, is its business.
struct MixerState {
  int64_t position = 0;             // positions seen
  std::vector<Rows> rows;           // grow with the positions, or hold a window of them
  std::vector<at::Tensor> tensors;  // [B, ...], of constant size

  int64_t bytes() const;
  // The state of the sequences that `which` [n] int64 names, one as often as it is named.
  MixerState select(const at::Tensor& which) const;
};

// Of one layer.
struct LayerState {
  MixerState mixer, channel;

  int64_t bytes() const { return mixer.bytes() + channel.bytes(); }
};

}  // namespace headloom
