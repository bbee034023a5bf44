// The instructions of python/headloom/gpu/mixes.cu for emulation.h. BF16 is defined before.
#pragma once

#include "emulation.h"

template <class T>
inline void copy(T* to, const void* from) {
  emulation::now->copy(to, from, sizeof(T));
}
inline void wait_for_copies() { emulation::now->finish_copies(); }
inline void wait_for_block() {
  wait_for_copies();
  emulation::now->wait(emulation::Wait::block);
}
inline void in_order() { emulation::now->wait(emulation::Wait::order); }

inline float shuffle_xor(float x, int mask) {
  return emulation::exchange(emulation::Wait::shuffle, {x})[emulation::lane() ^ mask][0];
}
inline unsigned shuffle_xor(unsigned x, int mask) {
  return emulation::exchange(emulation::Wait::shuffle, {x})[emulation::lane() ^ mask][0];
}
inline unsigned shuffle(unsigned x, int lane) {
  return emulation::exchange(emulation::Wait::shuffle, {x})[lane & 31][0];
}

inline uint3 block_place() { return blockIdx; }
inline float from_bits(unsigned x) { return emulation::of_bits(x); }
inline unsigned to_bits(float x) { return emulation::bits_of(x); }

// Subnormal numbers are 0.
inline float exp2_of(float x) {
  float y = exp2f(std::fpclassify(x) == FP_SUBNORMAL ? 0.f : x);
  return std::fpclassify(y) == FP_SUBNORMAL ? 0.f : y;
}

inline float lower(unsigned x) {
  return BF16 ? emulation::of_bfloat16(x & 0xffffu) : emulation::of_float16(x & 0xffffu);
}
inline float upper(unsigned x) {
  return BF16 ? emulation::of_bfloat16(x >> 16) : emulation::of_float16(x >> 16);
}
inline unsigned packed(float lower, float upper) {
  return BF16 ? emulation::bfloat16_of(lower) | emulation::bfloat16_of(upper) << 16
              : emulation::float16_of(lower) | emulation::float16_of(upper) << 16;
}

// A product of two numbers is exact in float64, and the sum nearly. It is rounded to the odd one of
// two float32, so that the next rounding is the only one.
inline float multiply_add(float x, float y, float z) {
  const double exact = double(x) * y + z;
  float near = float(exact);
  if (double(near) != exact && std::isfinite(near)) {
    if (std::fabs(double(near)) > std::fabs(exact)) near = std::nextafter(near, 0.f);
    near = emulation::of_bits(emulation::bits_of(near) | 1);
  }
  return near;
}
inline unsigned multiply_add(unsigned x, unsigned y, unsigned z) {
  return packed(multiply_add(lower(x), lower(y), lower(z)),
                multiply_add(upper(x), upper(y), upper(z)));
}
inline unsigned upper_twice(unsigned x) { return x >> 16 | (x & 0xffff0000u); }
inline unsigned lower_halves(unsigned x, unsigned y) { return (x & 0xffffu) | y << 16; }
inline unsigned upper_halves(unsigned x, unsigned y) { return x >> 16 | (y & 0xffff0000u); }
inline unsigned larger(unsigned x, unsigned y) {
  return packed(std::fmax(lower(x), lower(y)), std::fmax(upper(x), upper(y)));
}

inline uint2 load_map(const void* from) {
  uint2 x;
  memcpy(&x, from, sizeof(x));
  return x;
}
inline void store_map(void* to, uint2 x) { memcpy(to, &x, sizeof(x)); }

// PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type": of a [16, 16] the thread 4
// g + j has the rows g and g + 8 and the columns 2 j, 2 j + 1, 2 j + 8 and 2 j + 9, of b [16, 8]
// these rows and the column g, and of d [16, 8] the rows g and g + 8 and the columns 2 j and 2 j
// + 1.
inline void product(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                    unsigned b1) {
  const float (*all)[emulation::VALUES] =
      emulation::exchange(emulation::Wait::product_16,
                          {lower(a0), upper(a0), lower(a1), upper(a1), lower(a2), upper(a2),
                           lower(a3), upper(a3), lower(b0), upper(b0), lower(b1), upper(b1)});
  const int g = emulation::lane() / 4, j = emulation::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int second = i / 2, column = 2 * j + i % 2;
    d[i] = 0.f;
    for (int k = 0; k < 16; ++k) {
      const int from = k % 8 / 2, half = k / 8;
      d[i] += all[4 * g + from][4 * half + 2 * second + k % 2] *
              all[4 * column + from][8 + 2 * half + k % 2];
    }
  }
}
// mma.m16n8k8: the same without the columns of a and the rows of b from 8 on.
inline void product(float (&d)[4], unsigned a0, unsigned a1, unsigned b0) {
  const float (*all)[emulation::VALUES] =
      emulation::exchange(emulation::Wait::product_8,
                          {lower(a0), upper(a0), lower(a1), upper(a1), lower(b0), upper(b0)});
  const int g = emulation::lane() / 4, j = emulation::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int second = i / 2, column = 2 * j + i % 2;
    d[i] = 0.f;
    for (int k = 0; k < 8; ++k) {
      d[i] += all[4 * g + k / 2][2 * second + k % 2] * all[4 * column + k / 2][4 + k % 2];
    }
  }
}
// movmatrix.m8n8.trans.b16: the thread 4 g + j has row g and the columns 2 j and 2 j + 1, before
// and after.
inline unsigned transposed(unsigned x) {
  const unsigned (*all)[emulation::VALUES] = emulation::exchange(emulation::Wait::transposed, {x});
  const int g = emulation::lane() / 4, j = emulation::lane() % 4;
  const int shift = 16 * (g % 2);
  return (all[4 * (2 * j) + g / 2][0] >> shift & 0xffffu) |
         (all[4 * (2 * j + 1) + g / 2][0] >> shift & 0xffffu) << 16;
}
