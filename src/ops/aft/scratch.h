// Where things lie in a task's scratch: rows of kChannels or, of X and what is like it, of 2
// kChannels floats. Written once for sizes (from null) and addresses.
#pragma once

#include "ops/aft/kernel.h"
#include "ops/kernel/inline.h"

namespace headloom::ops::aft_kernel {
namespace {

constexpr int64_t kPair = 2 * kChannels;
constexpr int64_t kAlign = 16;  // most lanes of a vector

HL_INLINE int64_t padded(int64_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

struct Scratch {
  int64_t history;          // rows of a chunk and what its first position sees: W - 1 + kChunk
  int64_t band_line;        // floats from one row of `band` to the next
  int64_t columns_line;     // and of `columns`
  float *k, *v;             // [history, kChannels]
  float *x, *sums;          // [history, kPair], [kChunk, kPair]: with v, then without
  float* band;              // [kRows, band_line]: e^w of a few queries, shifted
  float *running, *middle;  // [3, kChannels], [kChannels]
  // Backward; null without it.
  float *grad_sums = nullptr, *grad_x = nullptr;  // as sums, x
  float* columns = nullptr;                       // [kPair, columns_line]: x transposed
  float* grad_band = nullptr;                     // as band
  // [W - 1, kPair]: gradients of positions before the chunk, v then k
  float* pending = nullptr;
  float* carried = nullptr;  // [2, kChannels]: gradients of the running sums after the chunk
  int64_t size;

  HL_INLINE Scratch(int64_t window, bool backward, float* base) {
    int64_t used = 0;
    const auto take = [&](int64_t floats) {
      float* p = base ? base + used : nullptr;
      used += padded(floats);
      return p;
    };
    history = window - 1 + kChunk;
    band_line = padded(window - 1 + kRows) + kAlign;
    columns_line = padded(history) + 2 * kAlign;
    k = take(history * kChannels);
    v = take(history * kChannels);
    x = take(history * kPair);
    sums = take(kChunk * kPair);
    band = take(kRows * band_line);
    running = take(3 * kChannels);
    middle = take(kChannels);
    if (backward) {
      grad_sums = take(kChunk * kPair);
      // Transposes read whole fours of rows of x: up to three beyond it, within what follows.
      grad_x = take(history * kPair);
      columns = take(kPair * columns_line);
      grad_band = take(kRows * band_line);
      pending = take((window - 1) * kPair);
      carried = take(2 * kChannels);
    }
    size = used;
  }
};

}  // namespace
}  // namespace headloom::ops::aft_kernel
