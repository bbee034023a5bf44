// Ids of packed documents, as recurrences, convolutions and position tables read them. Attention
// compares the ids of any two positions instead, so each document needs an id of its own there.
#pragma once

#include <ATen/ATen.h>

namespace headloom::ops {

// Where a document begins after the first position: ids [B, T] -> [B, T - 1] bool, entry t for
// position t + 1. Only neighbours are compared, so an id may come back for another document.
inline at::Tensor id_changes(const at::Tensor& documents) {
  const c10::SymInt rest = documents.sym_size(1) - 1;
  return documents.narrow_symint(1, 1, rest).ne(documents.narrow_symint(1, 0, rest));
}

}  // namespace headloom::ops
