// Checks of single arguments, and the sentence for a command line that cannot be understood.
// CLI11's own validators speak of the limits of its types; these say what is expected.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "core/fields.h"

namespace headloom::cli {

CLI::Validator whole_number(int64_t low, int64_t high = std::numeric_limits<int64_t>::max());
CLI::Validator real_number(const Range<double>& range);
CLI::Validator one_of(const std::vector<std::string>& names);
// A name of a file or folder: --out "" would stand for none.
CLI::Validator not_empty();
// A name of a file to write: whoever mistypes it does not lose a file of another kind. `why`, if
// there is one, goes on after "expected a name that ends in .model, ".
CLI::Validator ends_in(const std::string& ending, const std::string& why = "");
// A name of a page to write: .html or .htm, in letters of any case.
CLI::Validator ends_in_html();

// Lets `option` be given several times, with one value each time. Returns it. A positional argument
// may follow the value.
CLI::Option* repeatable(CLI::Option* option);

// Throws UsageError where an option of `command` that takes a value has another of its options in
// the value's place, as an empty variable of a shell leaves it. "--out=--json" is taken.
void check_values(const CLI::App& command, const std::vector<std::string>& arguments);

// What is wrong with the arguments of `command`, whose parsing ended with `error`.
std::string explain(const CLI::ParseError& error, const CLI::App& command);

}  // namespace headloom::cli
