// What the torch side of the CPU kernels (an operator's cpu.cpp) shares: tensors as the pointers
// that kernels take.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "ops/kernel/capability.h"
#include "ops/kernel/types.h"

namespace headloom::ops {

inline Type kernel_type(const at::Tensor& t) {
  return t.scalar_type() == at::kBFloat16 ? Type::kBFloat16
         : t.scalar_type() == at::kChar   ? Type::kInt8
                                          : Type::kFloat;
}

// Tensors that kernels read through pointers, kept alive as long as this. An undefined tensor gives
// null.
class Held {
 public:
  // By value: what is kept moves in memory as more comes.
  at::Tensor hold(at::Tensor t) { return kept_.emplace_back(std::move(t)); }

  // Its values one after the other.
  template <typename T = void>
  const T* whole(const at::Tensor& t) {
    if (!t.defined()) return nullptr;
    return static_cast<const T*>(hold(t.contiguous()).const_data_ptr());
  }
  // The same, as float32.
  const float* floats(const at::Tensor& t) {
    return t.defined() ? whole<float>(t.to(at::kFloat)) : nullptr;
  }
  // [B, T, C], read in place where the channels are adjacent.
  Sequence sequence(const at::Tensor& t) {
    if (!t.defined()) return {};
    const at::Tensor held = hold(t.stride(2) == 1 ? t : t.contiguous());
    return {held.const_data_ptr(), held.stride(0), held.stride(1)};
  }
  // [B, T, H, D], read in place where the last dimension is contiguous.
  HeadSequence head_sequence(const at::Tensor& t) {
    if (!t.defined()) return {};
    const at::Tensor held = hold(t.stride(3) == 1 ? t : t.contiguous());
    return {held.const_data_ptr(), held.stride(0), held.stride(1), held.stride(2)};
  }

 private:
  c10::SmallVector<at::Tensor, 8> kept_;
};

// Memory to work in that a thread keeps from call to call: the system clears pages that it hands
// out anew, which takes as long as packing. More than `most` bytes are not kept.
class KeptMemory {
 public:
  explicit KeptMemory(int64_t most) : most_(most) {}

  // At least so many bytes. What an earlier call gave is the same memory.
  at::Tensor bytes(int64_t count) {
    const auto fresh = [&] { return at::empty({count}, at::TensorOptions().dtype(at::kByte)); };
    // With deterministic algorithms PyTorch fills fresh memory, so that it reveals what was not
    // written.
    const at::Context& context = at::globalContext();
    const bool filled =
        context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
    if (count > most_ || filled) return fresh();
    if (!kept_.defined() || kept_.numel() < count) kept_ = fresh();
    return kept_;
  }

 private:
  int64_t most_;
  at::Tensor kept_;
};

inline int64_t thread_count() { return std::max(at::get_num_threads(), 1); }

// How many items of so much work (numbers read, or multiplications) are worth a thread: below,
// starting it takes longer than they do. Items may be empty.
inline int64_t grain(int64_t work) {
  return std::max<int64_t>(1, (int64_t{1} << 14) / std::max<int64_t>(work, 1));
}

// f(worker, begin, end) for each worker's share of `count` items. What is summed by worker depends
// on the number of workers alone.
template <typename F>
void for_each_share(int64_t count, int64_t workers, const F& f) {
  at::parallel_for(0, workers, 1, [&](int64_t first, int64_t last) {
    for (int64_t w = first; w < last; ++w) f(w, count * w / workers, count * (w + 1) / workers);
  });
}

// task(i) for each i below `count`. Every thread begins with a share of its own, the same rows as
// in other operators, which its caches may still have: cores that share no cache read each other's
// rows slowly. Threads do not run evenly: one that is ahead takes tasks from others' shares.
template <typename F>
void each_task(int64_t threads, int64_t count, const F& task) {
  const int64_t shares = std::min(threads, count);
  std::vector<std::atomic<int64_t>> next(static_cast<size_t>(shares));
  for (int64_t s = 0; s < shares; ++s) next[static_cast<size_t>(s)] = count * s / shares;
  at::parallel_for(0, shares, 1, [&](int64_t first, int64_t) {
    for (int64_t k = 0; k < shares; ++k) {
      const int64_t s = (first + k) % shares, end = count * (s + 1) / shares;
      std::atomic<int64_t>& own = next[static_cast<size_t>(s)];
      for (int64_t i = own++; i < end; i = own++) task(i);
    }
  });
}

}  // namespace headloom::ops
