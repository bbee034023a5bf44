// Commands that a user can paste.
#pragma once

#include <string>
#include <string_view>

namespace headloom {

// A word as a POSIX shell reads it back: as it is where it holds nothing that a shell treats
// otherwise, else in single quotes.
std::string shell_word(std::string_view word);

}  // namespace headloom
