// What decoding keeps of the positions seen so far: the KV cache of attention, the recurrent state
// of what replaces it, and how many positions each sequence of a batch has seen. Mixers write into
// it, AutoregressiveModel::extend() passes it from step to step.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace headloom {

// How many positions each sequence of a batch has seen. A batch is padded on the left: all
// sequences end at the newest position, and one that has seen fewer begins later.
struct Positions {
  int64_t longest = 0;  // seen by the sequence that has seen most
  // [B] int64, on the CPU: how many fewer each has seen; undefined: none has.
  at::Tensor left_padding = {};
  int64_t capacity = 0;  // positions that memory is taken for in advance; 0: not known

  // What sequence `b` has seen.
  int64_t of(int64_t b) const;
  // The position ids of the next `n`, [B, n] int64, or [1, n] where all have seen as many, on
  // `device`. 0 before a sequence's first.
  at::Tensor position_ids(const c10::SymInt& n, at::Device device) const;
  // Which of the newest `columns` are a sequence's own, [B, 1, 1, columns] boolean on `device`; the
  // others are left padding. Undefined: all.
  at::Tensor padding_mask(int64_t columns, at::Device device) const;
  // The newest `columns` alone, counted from 0.
  Positions newest(int64_t columns) const;
  Positions select(const at::Tensor& which) const;
  Positions& operator+=(int64_t n) {
    longest += n;
    return *this;
  }
};

// Which positions attention forgets so that its state stays within a budget. After each piece,
// over which attention is full, at most `budget` positions are kept:
//
//   window  the newest
//   sinks   the first 4 and the newest, with positions counted anew among those kept (Xiao et al.
//           2023, StreamingLLM)
//   tova    those with the largest softmax weight in the newest query's row, averaged over the
//           heads (Oren et al. 2024)
//
// and in which type it keeps the keys and values of the others.
struct CachePolicy {
  std::string type = "full";  // "full" forgets nothing
  int64_t budget = 0;         // positions
  std::string dtype = {};     // "int8" with a scale for each position and head; "": as computed

  static constexpr int64_t kSinks = 4;

  // Of "full", "window:512", "sinks:512", "tova:512", and of "int8" or "". Throws UsageError.
  static CachePolicy parse(const std::string& text, const std::string& dtype = "");
  // Itself. Throws UsageError where parse() would: for a policy that was filled in code.
  const CachePolicy& checked() const;
  // What is forgotten.
  std::string text() const;
  bool evicts() const { return type != "full"; }
  bool operator==(const CachePolicy&) const = default;
};

// One tensor of a KV cache: vectors of consecutive positions, [B, n, ...], to which new ones are
// appended in place, in memory that is taken ahead. Move-only, since two could not both append.
class CacheTensor {
 public:
  CacheTensor() = default;
  CacheTensor(CacheTensor&& other) noexcept { swap(other); }
  CacheTensor& operator=(CacheTensor&& other) noexcept {
    CacheTensor(std::move(other)).swap(*this);
    return *this;
  }

  // Appends t [B, n, ...] and returns all positions kept, oldest first. Gradients do not flow
  // through what is kept: call it without them.
  at::Tensor append(const at::Tensor& t);
  // Forgets all but the newest `n` positions.
  void keep_last(int64_t n);
  // Forgets all but positions `which`, ascending: [m] int64, or [B, m] for each sequence its own.
  // Throws Error for one that is not kept.
  void keep(const at::Tensor& which);
  // Before an append: there will be `positions` in all (0: not known), and at most `most` are kept
  // from one piece to the next. Memory for what is known is taken at once.
  void reserve(int64_t positions, std::optional<int64_t> most);
  // All positions kept, oldest first, in this memory: what the last append() returned, or what
  // was not forgotten since. After the first append.
  at::Tensor kept() const;
  // Positions kept.
  int64_t size() const { return end_ - begin_; }
  // Of the positions kept, not of the memory taken.
  int64_t bytes() const;
  // The newest `n` positions of the sequences that `which` [m] int64 names.
  CacheTensor select(const at::Tensor& which, int64_t n) const;
  // Forgets all but the newest `n` positions of sequences `which`; see DecoderState::keep.
  void keep_sequences(const std::vector<int64_t>& which, int64_t n);
  // Appends the sequences of others to its own, padded on the left with zeros.
  void add(const std::vector<const CacheTensor*>& others);
  // Sequences; 0 before the first append.
  int64_t batch() const { return batch_; }
  // The same memory under another name. Only one of the two may append.
  CacheTensor alias() const { return CacheTensor(*this); }

 private:
  CacheTensor(const CacheTensor&) = default;
  void swap(CacheTensor& other) noexcept;
  at::Tensor view(int64_t begin, int64_t count) const;
  // Writes t [B, n, ...] after the positions kept, where memory is taken for it.
  void put(const at::Tensor& t);
  // Takes memory for `sequences`, for `before` positions in front of those kept and for `after`
  // ones after them. Positions move within the memory there is if that suffices for a while, else
  // into new memory for `capacity` positions.
  void grow(int64_t sequences, int64_t before, int64_t after, int64_t capacity);
  void move_to(int64_t sequences, int64_t capacity, int64_t begin);

  at::Tensor data_;  // [sequences, capacity, ...]
  int64_t batch_ = 0, begin_ = 0, end_ = 0, reserved_ = 0;
};

// Tensors by their names in the mixer that keeps them ("key", "conv", "wkv").
template <typename T>
using Named = std::map<std::string, T, std::less<>>;

// What one mixer keeps. Which names there are is its business; they are the same at every step.
struct MixerState {
  Positions position = {};           // seen; whoever runs the mixer counts them
  Named<CacheTensor> cache = {};     // a KV cache: all positions, or some of them
  Named<at::Tensor> recurrent = {};  // [B, ...], of constant size
  CachePolicy policy = {};

  int64_t bytes() const;
  // Sequences; 0 for a state that has nothing.
  int64_t batch() const;
  // The state of the sequences that `which` [n] int64 names, one as often as it is named.
  MixerState select(const at::Tensor& which) const;
  // Forgets other sequences than `which`; see DecoderState::keep.
  void keep(const std::vector<int64_t>& which);
  // Appends the sequences of others to its own. Throws Error where they are not of one model and
  // policy, or some have seen nothing.
  void add(const std::vector<const MixerState*>& others);
  // See CacheTensor::alias().
  MixerState alias() const;
};

// What the mixers of one layer keep.
struct LayerState {
  MixerState mixer = {}, channel = {};
  MixerState cross = {};  // what cross-attention keeps of its memory

  int64_t bytes() const { return mixer.bytes() + channel.bytes() + cross.bytes(); }
  LayerState select(const at::Tensor& which) const;
  void keep(const std::vector<int64_t>& which);
  void add(const std::vector<const LayerState*>& others);
  LayerState alias() const {
    return {.mixer = mixer.alias(), .channel = channel.alias(), .cross = cross.alias()};
  }
};

}  // namespace headloom
