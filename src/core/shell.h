// Commands that a user can paste.
#pragma once

#include <string>
#include <string_view>

namespace headloom {

// A word as a POSIX shell reads it back: as it is where it holds nothing that a shell treats
// otherwise, else in single quotes.
std::string shell_word(std::string_view word);

// This program as its user has called it, "build/bin/headloom": the first word of every command
// that is printed to be pasted. "headloom" until it is set, as in Python.
std::string program_name();
// The same unquoted, as argv[0].
const std::string& called_as();
void set_program_name(std::string_view called);

}  // namespace headloom
