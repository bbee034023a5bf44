// A section of a table that is as long as the longest sequence.
#pragma once

#include <ATen/ATen.h>

namespace headloom::ops {

// `count` entries of a dimension, as narrow() gives them. In a graph that is traced for any length
// it is a copy: of a view PyTorch takes the whole table, which is contiguous, for a case of its
// own.
inline at::Tensor section(const at::Tensor& t, int64_t dim, const c10::SymInt& from,
                          const c10::SymInt& count) {
  if (count.maybe_as_int()) return t.narrow_symint(dim, from, count);
  const auto ids = t.options().dtype(at::kLong).requires_grad(false);
  return t.index_select(dim, at::arange(c10::Scalar(from), c10::Scalar(from + count), ids));
}

}  // namespace headloom::ops
