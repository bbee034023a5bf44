// Random numbers that are the same on every machine: the standard fixes std::mt19937_64 and
// std::seed_seq to the bit, but not its distributions, std::shuffle or std::sample.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/hash.h"

namespace headloom::data {

class Random {
 public:
  // Equal keys give equal numbers; {seed, stream, number} addresses one sequence of one stream.
  // NOLINTNEXTLINE(bugprone-random-generator-seed): the engine is seeded in the body.
  explicit Random(std::initializer_list<uint64_t> key) {
    std::vector<uint32_t> words;
    for (uint64_t word : key) {
      words.push_back(static_cast<uint32_t>(word));
      words.push_back(static_cast<uint32_t>(word >> 32));
    }
    std::seed_seq sequence(words.begin(), words.end());
    engine_.seed(sequence);
  }

  // Uniform in [0, n), n >= 1.
  int64_t below(int64_t n) {
    const uint64_t bound = static_cast<uint64_t>(n);
    const uint64_t biased = (UINT64_MAX % bound + 1) % bound;  // 2^64 mod n
    uint64_t bits = engine_();
    while (bits > UINT64_MAX - biased) bits = engine_();
    return static_cast<int64_t>(bits % bound);
  }

  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) {
      std::swap(values[i - 1], values[static_cast<size_t>(below(static_cast<int64_t>(i)))]);
    }
  }

  // `count` different numbers of [0, n) in random order; count <= n. (Floyd's sampling.)
  std::vector<int64_t> distinct(int64_t n, int64_t count) {
    std::vector<int64_t> chosen;
    chosen.reserve(static_cast<size_t>(count));
    std::unordered_set<int64_t> taken;
    for (int64_t last = n - count; last < n; ++last) {
      const int64_t pick = below(last + 1);
      chosen.push_back(taken.contains(pick) ? last : pick);
      taken.insert(chosen.back());
    }
    shuffle(chosen);
    return chosen;
  }

 private:
  std::mt19937_64 engine_;
};

// FNV-1a with a finisher that spreads it over all bits.
class StableHash : public Fnv1a {
 public:
  uint64_t value() const {
    uint64_t h = Fnv1a::value();
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ULL;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebULL;
    return h ^ (h >> 31);
  }
};

}  // namespace headloom::data
