// Tables with a row for each position, which a module makes from nothing but its options, keeps
// from call to call and grows on demand: Rotary's angles, retention's norms.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "mixers/decoding_state.h"

namespace headloom {

// Beyond so many rows a table is only made longer for calls of many positions: a text that is
// written for ever, by a model whose state does not grow, shall not take ever more memory.
inline constexpr int64_t kMostKeptRows = int64_t{1} << 16;

// Whether the rows of a call of `length` positions after those `seen` are made for it alone.
inline bool beyond_table(const at::Tensor& table, const Positions& seen,
                         const c10::SymInt& length) {
  if (seen.longest == 0) return false;
  const c10::SymInt end = seen.longest + length;
  // Where many positions are computed at a time, a table takes less memory than they do.
  return end > (length * 64).max(kMostKeptRows) && !(table.defined() && table.sym_size(0) >= end);
}

// Rows that a call of `length` positions after those `seen` needs, and later calls may.
inline c10::SymInt rows_needed(const Positions& seen, const c10::SymInt& length) {
  const c10::SymInt end = seen.longest + length;
  return seen.capacity == 0 ? end : end.max(std::min(seen.capacity, kMostKeptRows));
}

// How many rows to make, where `table` (undefined at first) is too short or not of this type and
// device. Twice as many where it was too short: calls that take turns between types do not lengthen
// it.
inline std::optional<c10::SymInt> rows_to_make(const at::Tensor& table, const c10::SymInt& needed,
                                               at::ScalarType type, at::Device device) {
  const c10::SymInt had = table.defined() ? table.sym_size(0) : 0;
  const bool fits = had > 0 && table.device() == device && table.scalar_type() == type;
  if (fits && had >= needed) return std::nullopt;
  return had == 0 ? needed : needed.max(fits ? 2 * had : had);
}

// [B or 1, T, C] of a table [L, C], for `places` [B or 1, T] int64.
inline at::Tensor rows_at(const at::Tensor& table, const at::Tensor& places) {
  return table.index_select(0, places.flatten())
      .view_symint({places.sym_size(0), places.sym_size(1), table.sym_size(1)});
}

}  // namespace headloom
