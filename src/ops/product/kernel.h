// Dense matrix products in blocks that fit the caches: C = A B (+ bias), or C += A B.
//
// Both factors are copied into panels in the order in which the innermost loop reads them, so that
// any strides of theirs cost the same. The caller cuts the product into blocks
// (product/blocked.cpp) and packs one factor once for all threads: A where it has few rows, and B
// elsewhere. Of the other factor each thread packs what it multiplies. Where few columns share the
// work of packing them, rows of A are read where they are. A sum over k is never cut among threads,
// so that results do not depend on their number. Free of torch.
#pragma once

#include "ops/kernel/types.h"

namespace headloom::ops::product_kernel {

// Element (i, j) is at data[i * row + j * column].
struct Matrix {
  const void* data = nullptr;
  int64_t row = 0, column = 0;
};

// Pieces of memory of `bytes` each, the i-th at `from` + i * `apart`. None where `count` is 0.
struct Pieces {
  const char* from = nullptr;
  int64_t count = 0, bytes = 0, apart = 0;
};

struct Args {
  Type type = Type::kFloat;      // of A and B: kFloat or kBFloat16; of B see b_float
  Type out_type = Type::kFloat;  // of C and bias: that, or kFloat
  Matrix a, b;                   // [m, k] and [k, n]
  void* c = nullptr;             // [m, n], rows of adjacent values
  int64_t c_row = 0;
  const float* scale = nullptr;  // [n] of the sums, or null
  const void* bias = nullptr;    // [n] or null
  Pieces next = {};              // what the thread packs after this block, fetched meanwhile
  bool amx = false;              // bfloat16 by the tile registers of AMX (kernel/tiles.h)
  bool b_float = false;          // amx: B is float, and is rounded to bfloat16 where it is packed
};

// A range of the rows, of the columns and of what is summed over.
struct Block {
  int64_t m0, m1, n0, n1, k0, k1;
};

// Sizes that suit the instruction set. A panel of A has `mr` rows, one of B has `nr` columns.
struct Sizes {
  int64_t mr, nr;
  int64_t kc;           // most values that are summed over at once; a multiple of kr
  int64_t kc_adjacent;  // the same where reads_rows() holds for rows that are adjacent in memory
  int64_t kr;           // panels have a multiple of so many values along k, with zeros at the end
  int64_t mc;           // rows of A that a thread packs at once
  // Bytes of a panel's line: of mr or nr values, or of so many pairs along k.
  int64_t a_line, b_line;
  bool pairs;  // a line holds pairs
};
using SizesOf = Sizes(Type type, bool amx, int64_t k);
SizesOf sizes_DEFAULT, sizes_AVX2, sizes_AVX512, sizes_AVX512_BF16;

// pack_rows copies A[m0 ... m1, k0 ... k1] to panels of `mr` rows, and pack_columns copies
// B[k0 ... k1, n0 ... n1] to panels of `nr` columns; n0 is a multiple of nr.
using Pack = void(const Args& args, const Block& block, void* to);
Pack pack_rows_DEFAULT, pack_rows_AVX2, pack_rows_AVX512, pack_rows_AVX512_BF16;
Pack pack_columns_DEFAULT, pack_columns_AVX2, pack_columns_AVX512, pack_columns_AVX512_BF16;

// Whether run() multiplies the rows of such a block of A from where they are.
using ReadsRows = bool(const Args& args, const Block& block);
ReadsRows reads_rows_DEFAULT, reads_rows_AVX2, reads_rows_AVX512, reads_rows_AVX512_BF16;

// C[m0 ... m1, n0 ... n1] = the block's product, scaled, and the bias, or += the block's product.
// `b` is what pack_columns() made of that block of B. With `shared`, `a` is what pack_rows() made
// of that block of A; otherwise it has room for that, and rows that have to be packed are packed
// here. C is of `out_type`; where it is bfloat16, `add` is false and k0 ... k1 the whole sum.
using Run = void(const Args& args, const Block& block, bool add, const void* b, void* a,
                 bool shared);
Run run_DEFAULT, run_AVX2, run_AVX512, run_AVX512_BF16;

}  // namespace headloom::ops::product_kernel
