// What decoding keeps of the positions seen so far.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

namespace headloom {

// How many positions each sequence of a batch has seen. What is kept of them is aligned at the
// newest: a sequence that has seen fewer begins later.
struct Positions {
  int64_t longest = 0;   // of the sequence that has seen most
  at::Tensor late = {};  // [B] int64: how many fewer each has seen; undefined: none has
  int64_t room = 0;      // that it is going to see in all, as far as is known; 0: not known

  // Of sequence `b`.
  int64_t of(int64_t b) const;
  // The next `n`, [B, n] int64, or [1, n] where all have seen as many. 0 before a sequence's first.
  at::Tensor next(int64_t n) const;
  // Which of the newest `columns` are a sequence's own, [B, 1, 1, columns] boolean; the others were
  // before its first. Undefined: all.
  at::Tensor present(int64_t columns) const;
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
struct CachePolicy {
  std::string type = "full";  // "full" forgets nothing
  int64_t budget = 0;         // positions

  static constexpr int64_t kSinks = 4;

  // Of "full", "window:512", "sinks:512", "tova:512". Throws UsageError.
  static CachePolicy parse(const std::string& text);
  std::string text() const;
  bool evicts() const { return type != "full"; }
  bool operator==(const CachePolicy&) const = default;
};

// Vectors of consecutive positions, [B, n, ...], to which new ones are appended in place. A copy
// shares them with the original, of which only one can go on.
class Rows {
 public:
  // Appends t [B, n, ...] and returns all rows kept, oldest first. An undefined t leaves and
  // returns nothing. Gradients do not flow through what is kept: call it without them.
  at::Tensor append(const at::Tensor& t);
  // Forgets all but the newest `n` rows.
  void keep_last(int64_t n);
  // Forgets all but rows `which`, ascending: [m] int64, or [B, m] for each sequence its own.
  void keep(const at::Tensor& which);
  // Before an append: there will be `positions` in all (0: not known), and at most `most` are kept
  // from one piece to the next. What is known is allocated at once.
  void expect(int64_t positions, std::optional<int64_t> most);
  int64_t size() const { return end_ - begin_; }
  // Of the rows kept, not of the room made.
  int64_t bytes() const;
  // The newest `n` rows of the sequences that `which` [m] int64 names.
  Rows select(const at::Tensor& which, int64_t n) const;
  // Forgets all but the newest `n` rows of sequences `which`; see DecoderState::keep.
  void keep_sequences(const std::vector<int64_t>& which, int64_t n);
  // Puts the sequences of others behind its own, aligned at the newest; zeros stand before what is
  // shorter.
  void add(const std::vector<const Rows*>& others);
  // Of sequences; 0 before the first append.
  int64_t batch() const { return batch_; }

 private:
  at::Tensor view(int64_t begin, int64_t count) const;
  at::Tensor kept() const;
  // Room for `sequences` and, in front of and behind the rows kept, for `before` and `behind` more.
  // Where there is none, rows move within what there is if that suffices for a while, else into new
  // room of `capacity` positions.
  void put(const at::Tensor& t);  // behind the kept rows, where there is room
  void make_room(int64_t sequences, int64_t before, int64_t behind, int64_t capacity);
  void move_to(int64_t sequences, int64_t capacity, int64_t begin);

  at::Tensor data_;  // [sequences, capacity, ...]: the room
  int64_t batch_ = 0, begin_ = 0, end_ = 0, reserved_ = 0;
};

// A mixer's own: what `rows` and `tensors` mean, and how many there are, is its business.
struct MixerState {
  Positions position = {};               // seen
  std::vector<Rows> rows = {};           // grow with the positions, or hold some of them
  std::vector<at::Tensor> tensors = {};  // [B, ...], of constant size; or undefined
  CachePolicy policy = {};

  int64_t bytes() const;
  // Sequences; 0 for a state that has nothing.
  int64_t batch() const;
  // The state of the sequences that `which` [n] int64 names, one as often as it is named.
  MixerState select(const at::Tensor& which) const;
  // Forgets other sequences than `which`; see DecoderState::keep.
  void keep(const std::vector<int64_t>& which);
  // Puts the sequences of others behind its own. Throws Error where they are not of one model and
  // policy, or some have seen nothing.
  void add(const std::vector<const MixerState*>& others);
  // Several batches as one, in their order.
  static MixerState join(const std::vector<const MixerState*>& parts);
};

// Of one layer.
struct LayerState {
  MixerState mixer = {}, channel = {};
  MixerState cross = {};  // what cross-attention keeps of its memory

  int64_t bytes() const { return mixer.bytes() + channel.bytes() + cross.bytes(); }
  LayerState select(const at::Tensor& which) const;
  void keep(const std::vector<int64_t>& which);
  void add(const std::vector<const LayerState*>& others);
};

}  // namespace headloom
