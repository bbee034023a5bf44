#include "core/utf8.h"

namespace headloom {

FirstCharacter first_character(std::string_view bytes) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return {1, true, false};
  if (lead < 0xc2 || lead > 0xf4) return {1, false, false};
  const size_t size = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  for (size_t i = 1; i < size; ++i) {
    if (i == bytes.size()) return {i, false, true};
    // The second byte's limits exclude longer forms than needed, surrogates and what is above
    // U+10FFFF (Unicode 15, table 3-7).
    const unsigned char low = i > 1 ? 0x80 : lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char high = i > 1 ? 0xbf : lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (at(i) < low || at(i) > high) return {i, false, false};
  }
  return {size, true, false};
}

bool is_utf8(std::string_view bytes) {
  while (!bytes.empty()) {
    const FirstCharacter start = first_character(bytes);
    if (!start.valid) return false;
    bytes.remove_prefix(start.size);
  }
  return true;
}

}  // namespace headloom
