// Weights of four bits: how they lie. Free of torch.
//
// A weight [O, I] is cut along I into groups of 32, of which the last of a row may be shorter and
// is filled up with zeros. A group has a scale in bfloat16, and weight o, i stands for scale q with
// q from -8 to 7. Eight groups make a block; the last of a row may have fewer, n. A block lies in
// 16 n bytes, of which byte 8 n h + 8 g + j (h < 2, j < 8) holds, of its group g, q + 8 of element
// 8 h + j in the low four bits and of element 16 + 8 h + j in the high four. So the bytes of a
// block as vectors meet the same groups in the same places (kernel_int4.h).
#pragma once

#include <cstdint>

namespace headloom::ops {

constexpr int64_t kInt4Group = 32;  // inputs that share a scale
constexpr int64_t kInt4Groups = 8;  // of a block

}  // namespace headloom::ops
