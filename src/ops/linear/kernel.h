// Free of torch. Rows are contiguous.
#pragma once

#include "ops/kernel/types.h"
#include "ops/linear/int4.h"

namespace headloom::ops::linear_kernel {

struct Args {
  int64_t rows, in;
  Type type, weight_type;  // of x, bias and y: kFloat or kBFloat16; of the weights: that or kInt8
  const void* x;           // [rows, in]
  const void* weight;      // [out, in]
  const float* scale;      // [out] or null
  const void* bias;        // [out] or null
  int64_t out;             // y's row stride
  void* y = nullptr;       // [rows, out]
  bool past_cache = true;  // weights are fetched past the second level of cache (prefetch.h)
};

// Outputs begin ... end of every row.
using Run = void(const Args& args, int64_t begin, int64_t end);
Run run_DEFAULT, run_AVX2, run_AVX512, run_AVX512_BF16;

// Weights of four bits, laid as int4.h says.
struct Int4Args {
  int64_t rows, in, out;
  Type type;                 // of x, bias and y
  const void* x;             // [rows, in]
  const uint8_t* weight;     // [out, groups * 16]
  const uint16_t* scale;     // [out, groups] bfloat16
  const void* bias;          // [out] or null
  void* y;                   // [rows, out]
  int64_t planes = 0;        // of digits of x: 3, or 2 where x is bfloat16
  char* prepared = nullptr;  // [rows, prepared_row(in, planes)], aligned to 64
  bool past_cache = true;    // as in Args
};

// What run_int4 reads in place of a row of x: for each block of 256 inputs its planes of digits
// (kernel_int4.h), then what the sums of each lane begin with, then each lane's scale.
constexpr int64_t kInt4Inputs = kInt4Group * kInt4Groups;
constexpr int64_t kInt4Lanes = 16;  // of a block's sums, two for each group
HL_INLINE constexpr int64_t prepared_block(int64_t planes) {
  return planes * kInt4Inputs + 2 * kInt4Lanes * static_cast<int64_t>(sizeof(float));
}
HL_INLINE constexpr int64_t prepared_row(int64_t in, int64_t planes) {
  return (in + kInt4Inputs - 1) / kInt4Inputs * prepared_block(planes);
}
// Writes rows begin ... end of `prepared`. False where a value is not finite, where a group's
// largest is below 1e-25 and not 0, and where the planes are too few for a group.
using PrepareInt4 = bool(const Int4Args& args, int64_t begin, int64_t end);
PrepareInt4 prepare_int4_DEFAULT, prepare_int4_AVX2, prepare_int4_AVX512, prepare_int4_AVX512_BF16;
// Outputs begin ... end of every row.
using RunInt4 = void(const Int4Args& args, int64_t begin, int64_t end);
RunInt4 run_int4_DEFAULT, run_int4_AVX2, run_int4_AVX512, run_int4_AVX512_BF16;

// Many rows of bfloat16 by weights of any type in integers (kernel_integers.h).
constexpr int64_t kIntegerRows = 6, kIntegerOutputs = 16;  // of a panel
// Inputs of x with one scale, where weights are int8, and where they are bfloat16 or four bits.
constexpr int64_t kInt8Group = 256, kBFloat16Group = 128;
struct IntegerArgs {
  int64_t rows, in, out;
  int64_t group;                          // of inputs that have one scale
  const void* x;                          // [rows, in] bfloat16
  const void* weight;                     // [out, in] bfloat16 or int8, or four bits as in Int4Args
  const float* row_scale = nullptr;       // [out] of int8
  const uint16_t* group_scale = nullptr;  // of four bits as in Int4Args
  const void* bias = nullptr;             // [out] bfloat16 or null
  void* y = nullptr;                      // [rows, out] bfloat16
  char* packed_x = nullptr;               // a panel for each kIntegerRows rows, aligned to 4
  uint8_t* unfit_rows = nullptr;          // [rows], 1 for those that cannot be held so
  uint8_t* unfit_outputs = nullptr;       // [out], the same for rows of weights

  // Of a panel of so many rows or outputs: their scales and pairs of inputs, for each group.
  int64_t panel_bytes(int64_t lanes) const {
    return (in + group - 1) / group * (1 + group / 2) * lanes * static_cast<int64_t>(sizeof(float));
  }
};
// Writes panels begin ... end of packed_x, and which of their rows are unfit: those that are not
// finite, or of which a group has values too far apart. Their results mean nothing.
using PackIntegers = void(const IntegerArgs& args, int64_t begin, int64_t end);
PackIntegers pack_integers_DEFAULT, pack_integers_AVX2, pack_integers_AVX512,
    pack_integers_AVX512_BF16;
// Outputs begin ... end of every row, and which of them are unfit; begin is a multiple of
// kIntegerOutputs. `packed` has room for the panels of these outputs, aligned to 4.
using RunIntegers = void(const IntegerArgs& args, int64_t begin, int64_t end, void* packed);
RunIntegers run_integers_DEFAULT, run_integers_AVX2, run_integers_AVX512, run_integers_AVX512_BF16;

// Some weights as values of a floating type: inputs i0 ... i1 of outputs begin ... end, [end -
// begin, i1 - i0]. Of four bits, i0 is a multiple of kInt4Group.
struct WidenArgs {
  const void* weight;     // int8 [out, in], or four bits as in Int4Args
  const uint16_t* scale;  // of four bits as in Int4Args; null for int8
  int64_t in;
  Type type;  // kFloat or kBFloat16
};
using Widen = void(const WidenArgs& args, int64_t begin, int64_t end, int64_t i0, int64_t i1,
                   void* to);
Widen widen_DEFAULT, widen_AVX2, widen_AVX512, widen_AVX512_BF16;

}  // namespace headloom::ops::linear_kernel
