#include "cli/arguments.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/error.h"
#include "core/parse_number.h"
#include "core/range_text.h"
#include "core/shell.h"
#include "core/text.h"

namespace headloom::cli {
namespace {

// Of a check that fails: explain() puts the option's name before it.
constexpr const char* kIs = "is ";

// All of `text` as a number; not "0x10", "010" or "1_000", of which readers disagree what they
// mean.
template <typename T>
std::optional<T> number(const std::string& text) {
  const size_t digits = text.starts_with('-') ? 1 : 0;
  if (text.size() > digits + 1 && text[digits] == '0' && text.find_first_of(".eE") == text.npos) {
    return std::nullopt;
  }
  return parse_number<T>(text);
}

// Whether the text is a whole number that 64 bits cannot hold.
bool is_beyond_64_bits(const std::string& text) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc::result_out_of_range && stop == end;
}

template <typename T>
CLI::Validator checked(const Range<T>& range, const char* kind) {
  const std::string allowed = range_text(range);
  return CLI::Validator(
      [=](std::string& text) {
        const std::optional<T> value = number<T>(text);
        if (std::is_integral_v<T> && is_beyond_64_bits(text)) {
          return str(kIs, text, ", which an integer of 64 bits with a sign cannot hold, expected ",
                     allowed, ".");
        }
        if (!value || !std::isfinite(static_cast<double>(*value))) {
          return str(kIs, "'", text, "', expected ", kind, ", ", allowed, ".");
        }
        const bool inside = (range.open_low ? *value > range.low : *value >= range.low) &&
                            (range.open_high ? *value < range.high : *value <= range.high);
        return inside ? std::string() : str(kIs, text, ", expected ", allowed, ".");
      },
      allowed);
}

// An option's name and what it is for: "--out", "folder of the run".
std::string purpose(const CLI::App& command, const std::string& name) {
  const CLI::Option* option = command.get_option_no_throw(name);
  const std::string doc = option == nullptr ? "a value" : option->get_description();
  return doc.substr(0, doc.find(';'));
}

std::string shown_name(const std::string& name) {
  if (name.starts_with('-')) return name;
  std::string upper;
  for (const char c : name) upper += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return upper;
}

std::vector<std::string> flags(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

}  // namespace

CLI::Validator whole_number(int64_t low, int64_t high) {
  return checked(Range<int64_t>{.low = low, .high = high}, "a whole number");
}

CLI::Validator real_number(const Range<double>& range) { return checked(range, "a number"); }

CLI::Validator one_of(const std::vector<std::string>& names) {
  return CLI::Validator(
      [=](std::string& text) {
        if (std::find(names.begin(), names.end(), text) != names.end()) return std::string();
        return str(kIs, "'", text, "', expected one of ", join(names),
                   did_you_mean(text, names, "."));
      },
      "{" + join(names, ",") + "}");
}

CLI::Validator not_empty() {
  return CLI::Validator(
      [](std::string& text) {
        return text.empty() ? str(kIs, "empty, expected a name.") : std::string();
      },
      "");
}

CLI::Validator ends_in(const std::string& ending, const std::string& why) {
  return CLI::Validator(
      [=](std::string& text) {
        if (text.ends_with(ending) && text != ending) return std::string();
        return str(kIs, "'", text, "', expected a name that ends in ", ending,
                   why.empty() ? "" : ", ", why, ".");
      },
      "");
}

CLI::Validator ends_in_html() {
  return CLI::Validator(
      [](std::string& text) {
        const std::string small = CLI::detail::to_lower(text);
        for (const std::string_view ending : {".html", ".htm"}) {
          if (small.ends_with(ending) && small != ending) return std::string();
        }
        return str(kIs, "'", text, "', expected a name that ends in .html or .htm.");
      },
      "");
}

CLI::Option* repeatable(CLI::Option* option) {
  return option->take_all()->expected(1)->allow_extra_args(false);
}

void check_values(const CLI::App& command, const std::vector<std::string>& arguments) {
  const std::vector<std::string> known = flags(command);
  const auto is_option = [&](const std::string& argument) {
    return std::find(known.begin(), known.end(), argument.substr(0, argument.find('='))) !=
           known.end();
  };
  for (size_t i = 0; i + 1 < arguments.size() && arguments[i] != "--"; ++i) {
    const CLI::Option* option =
        arguments[i].starts_with("--") ? command.get_option_no_throw(arguments[i]) : nullptr;
    if (option == nullptr || option->get_items_expected_max() == 0) continue;
    if (is_option(arguments[++i])) {
      const std::string& name = arguments[i - 1];
      usage_error(command.get_name(), ": ", name, " has no value before ", arguments[i],
                  ", expected ", purpose(command, name), " (", name, "=", arguments[i],
                  " if that is meant).");
    }
  }
}

std::string explain(const CLI::ParseError& error, const CLI::App& command) {
  const std::string text = error.what(), who = command.get_name();
  const std::vector<std::string> unknown = command.remaining();
  for (const std::string& argument : unknown) {
    if (!argument.starts_with('-') || argument == "-" || argument == "--") continue;
    const std::string flag = argument.substr(0, argument.find('='));
    const std::vector<std::string> known = flags(command);
    const std::string near = nearest(flag, known);
    return str(
        command.get_parent() == nullptr ? "there is no option " : who + " has no option ", flag,
        near.empty() ? str("; there are ", join(known), ".") : str("; did you mean ", near, "?"));
  }
  const auto before = [&](const char* words) { return text.substr(0, text.find(words)); };
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError) && !unknown.empty()) {
    return str(who, ": '", unknown.front(), "' is one argument too many; ", program_name(), " ",
               who, " --help shows what it takes.");
  }
  if (error.get_name() == "RequiredError" && text.ends_with(" is required")) {
    const std::string name = before(" is required");
    return str(who, ": ", shown_name(name), " is missing, expected ", purpose(command, name), ".");
  }
  if (error.get_name() == "ArgumentMismatch" && text.ends_with(" missing")) {
    const std::string name = before(":");
    return str(who, ": ", name, " has no value, expected ", purpose(command, name), ".");
  }
  if (error.get_name() == "ArgumentMismatch" && text.find("At Most 1") != text.npos) {
    return str(who, ": ", before(":"), " is given several times, expected once.");
  }
  if (error.get_name() == "ExcludesError") {
    return str(who, ": ", before(" excludes "), " and ", text.substr(text.find(" excludes ") + 10),
               " cannot be given together.");
  }
  if (error.get_name() == "ValidationError") {
    const size_t colon = text.find(": ");
    if (colon != text.npos && text.compare(colon + 2, 3, kIs) == 0) {
      return str(shown_name(text.substr(0, colon)), " ", text.substr(colon + 2));
    }
  }
  return str(who, ": ", text, text.ends_with('.') ? "" : ".");
}

}  // namespace headloom::cli
