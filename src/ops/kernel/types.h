// What the arguments of all kernels have in common. No torch.
#pragma once

#include <cstdint>

#include "ops/kernel/inline.h"

namespace headloom::ops {

// The types that kernels read and write; they compute in float32.
enum class Type { kFloat, kBFloat16, kInt8 };

// [B, T, C], the channels next to each other; strides in elements. Absent where data is null.
struct Sequence {
  const void* data = nullptr;
  int64_t batch = 0, time = 0;
};

// [B, T, H, D], the last dimension's values next to each other; strides in elements. Absent where
// data is null.
struct HeadSequence {
  const void* data = nullptr;
  int64_t batch = 0, time = 0, head = 0;

  // The D values of one position and head.
  template <typename T>
  HL_INLINE const T* row(int64_t b, int64_t t, int64_t h) const {
    return static_cast<const T*>(data) + b * batch + t * time + h * head;
  }
};

}  // namespace headloom::ops
