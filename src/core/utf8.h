// What of bytes is UTF-8.
#pragma once

#include <cstddef>
#include <string_view>

namespace headloom {

// Of the sequence that begins bytes (not empty): how long it is, whether it is a character, and
// whether it may become one when more bytes come.
struct FirstCharacter {
  size_t size;
  bool valid, open;
};
FirstCharacter first_character(std::string_view bytes);

bool is_utf8(std::string_view bytes);

}  // namespace headloom
