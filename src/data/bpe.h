// Byte pair encoding (Sennrich et al. 2016) with given merges.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace headloom::data {

// The rules of one vocabulary. A word's symbols, one a character, are merged pair by pair, the
// pair with the lowest rank first and of equal ones the leftmost, until none is left.
struct BytePairs {
  struct Merge {
    int32_t rank = 0;
    int32_t id = 0;  // of what the two become
  };

  std::unordered_map<std::string, int32_t> vocabulary;
  std::unordered_map<uint64_t, Merge> merges;  // of key(left, right)
  bool whole_words = false;                    // a word in the vocabulary is not taken apart
  bool byte_fallback = false;      // an unknown character becomes the tokens <0xNN> of its bytes
  std::optional<int32_t> unknown;  // else becomes this, or nothing where there is none
  bool fuse_unknown = false;       // several unknown characters in a row become one

  static uint64_t key(int32_t left, int32_t right) {
    return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) |
           static_cast<uint32_t>(right);
  }
  // Appends the tokens of `word`, UTF-8.
  void encode(std::string_view word, std::vector<int32_t>& out) const;

 private:
  std::vector<int32_t> symbols(std::string_view word) const;
};

}  // namespace headloom::data
