// What the arguments of all kernels have in common. No torch.
#pragma once

#include <cstdint>

namespace headloom::ops {

// The types that kernels read and write; they compute in float32.
enum class Type { kFloat, kBFloat16, kInt8 };

// [B, T, C], the channels next to each other; strides in elements. Absent where data is null.
struct Sequence {
  const void* data = nullptr;
  int64_t batch = 0, time = 0;
};

}  // namespace headloom::ops
