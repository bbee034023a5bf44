#include "storage/crc64.h"

#include <c10/util/ConstexprCrc.h>

#include <array>
#include <bit>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headloom {
namespace {

// kTables[k][b] is the checksum of byte b followed by k zero bytes.
constexpr auto kTables = [] {
  std::array<std::array<uint64_t, 256>, 8> tables{};
  for (size_t b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    tables[0][b] = c10::util::detail::crc64impl(0, &byte, 1);
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t b = 0; b < 256; ++b) {
      const uint64_t before = tables[k - 1][b];
      tables[k][b] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}();

#if defined(__x86_64__)

// x^(63 + n) modulo the polynomial. A word's lowest bit stands for x^63.
constexpr uint64_t power(size_t n) {
  const uint64_t polynomial = kTables[0][0x80];
  uint64_t out = 1;
  for (size_t i = 0; i < n; ++i) out = (out >> 1) ^ ((out & 1) != 0 ? polynomial : 0);
  return out;
}

// Bytes a step. Four registers hide the latency of the products.
constexpr size_t kFolded = 64;

bool has_products() {
  static const bool has = __builtin_cpu_supports("pclmul") != 0;
  return has;
}

__m128i load(const char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

// `size` is a multiple of kFolded and not 0. The registers hold a polynomial that is congruent to
// everything read so far (Gopal et al., Intel 2009, "Fast CRC computation for generic polynomials
// using PCLMULQDQ"): a step multiplies it by x^512, in two halves, and adds the next 64 bytes.
__attribute__((target("pclmul"))) uint64_t crc64_by_products(uint64_t sum, const char* bytes,
                                                             size_t size) {
  // The lower half of a register has the higher powers. The product of two words in this order of
  // bits comes out multiplied by x, so the powers are one less.
  constexpr uint64_t kLow = power(8 * kFolded), kHigh = power(8 * kFolded - 64);
  const __m128i by = _mm_set_epi64x(static_cast<int64_t>(kHigh), static_cast<int64_t>(kLow));
  constexpr size_t kRegisters = kFolded / 16;
  __m128i folded[kRegisters];
  for (size_t i = 0; i < kRegisters; ++i) folded[i] = load(bytes + 16 * i);
  folded[0] = _mm_xor_si128(folded[0], _mm_cvtsi64_si128(static_cast<int64_t>(sum)));
  for (size_t at = kFolded; at < size; at += kFolded) {
    for (size_t i = 0; i < kRegisters; ++i) {
      const __m128i low = _mm_clmulepi64_si128(folded[i], by, 0x00);
      const __m128i high = _mm_clmulepi64_si128(folded[i], by, 0x11);
      folded[i] = _mm_xor_si128(_mm_xor_si128(low, high), load(bytes + at + 16 * i));
    }
  }
  return crc64_by_tables(0, folded, kFolded);
}

#endif

}  // namespace

// Eight bytes at a time.
uint64_t crc64_by_tables(uint64_t sum, const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  if constexpr (std::endian::native == std::endian::little) {
    for (; size >= 8; size -= 8, bytes += 8) {
      uint64_t word = 0;
      std::memcpy(&word, bytes, 8);
      word ^= sum;
      sum = 0;
      for (size_t i = 0; i < 8; ++i) sum ^= kTables[7 - i][(word >> (8 * i)) & 0xff];
    }
  }
  return c10::util::detail::crc64impl(sum, bytes, size);
}

uint64_t crc64(uint64_t sum, const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
#if defined(__x86_64__)
  if (const size_t folded = size - size % kFolded; folded > 0 && has_products()) {
    sum = crc64_by_products(sum, bytes, folded);
    bytes += folded;
    size -= folded;
  }
#endif
  return crc64_by_tables(sum, bytes, size);
}

}  // namespace headloom
