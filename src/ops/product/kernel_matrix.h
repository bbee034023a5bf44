// What the kernels of vectors and of tiles share: where values are, and how sums are written.
#pragma once

#include "ops/kernel/vec.h"
#include "ops/product/kernel.h"

namespace headloom::ops::product_kernel {
namespace {

template <typename T>
const T* place(const Matrix& m, int64_t row, int64_t column) {
  return static_cast<const T*>(m.data) + row * m.row + column * m.column;
}

// Writes the sums of a row of C, at most as many as a panel has columns.
template <typename C>
void finish_row(const float* sums, C* to, int64_t columns, bool add, const float* scale,
                const C* bias) {
  for (int64_t j = 0; j < columns; j += VL) {
    vf sum = load(sums + j);
    if (scale != nullptr) sum = sum * load_some(scale + j, columns - j);
    if (bias != nullptr) sum = sum + load_some(bias + j, columns - j);
    if (add) sum = sum + load_some(to + j, columns - j);
    store_some(to + j, sum, columns - j);
  }
}

}  // namespace
}  // namespace headloom::ops::product_kernel
