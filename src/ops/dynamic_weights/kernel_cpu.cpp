// Compiled once for each instruction set, with CPU_CAPABILITY its name.
#include <cmath>

#include "ops/dynamic_weights/kernel.h"
#include "ops/kernel/vec.h"

namespace headloom::ops::dynamic_weights_kernel {
namespace {

float gelu(float x) { return 0.5f * x * (1 + std::erf(x * 0.70710678f)); }

// y[j] += x * w[j], j < n.
HL_INLINE void add_scaled(float x, const float* w, int64_t n, float* y) {
  for (int64_t j = 0; j < n; j += VL) {
    store_some(y + j, fma(bcast(x), load_some(w + j, n - j), load_some(y + j, n - j)), n - j);
  }
}

// One side of one group; `sums` are in between.
template <typename T>
void one(const Args& a, const T* hidden, const float* w2, float* sums, T* y) {
  const int64_t n = a.heads, width = 2 * a.rank * n;
  for (int64_t j = 0; j < width; ++j) sums[j] = 0;
  for (int64_t i = 0; i < a.inner; ++i) {
    add_scaled(gelu(widen(hidden[i])), w2 + i * width, width, sums);
  }
  for (int64_t r = 0; r < 2 * a.rank; ++r) {
    const float* row = sums + r * n;
    float factor = 1;
    if (r < a.rank) {
      float squares = 0;
      for (int64_t j = 0; j < n; ++j) squares += row[j] * row[j];
      factor = 1 / std::sqrt(squares / static_cast<float>(n) + 1e-6f);
    }
    T* to = y + r * a.groups * n;
    for (int64_t j = 0; j < n; ++j) narrow(factor * row[j], to + j);
  }
}

template <typename T>
void run(const Args& a, int64_t begin, int64_t end) {
  float sums[kMostWeights];
  const int64_t width = 2 * a.rank * a.heads;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t s = 0; s < a.sides; ++s) {
      for (int64_t g = 0; g < a.groups; ++g) {
        const int64_t part = s * a.groups + g;
        one(a, static_cast<const T*>(a.hidden) + (row * a.sides * a.groups + part) * a.inner,
            a.w2 + part * a.inner * width, sums,
            static_cast<T*>(a.y) + (row * a.sides + s) * width * a.groups + g * a.heads);
      }
    }
  }
}

}  // namespace

void HL_KERNEL(run)(const Args& args, int64_t begin, int64_t end) {
  return args.type == Type::kBFloat16 ? run<BFloat16>(args, begin, end)
                                      : run<float>(args, begin, end);
}

}  // namespace headloom::ops::dynamic_weights_kernel
