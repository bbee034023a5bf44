// Where two configurations differ.
#pragma once

#include <string>
#include <vector>

#include "core/config.h"

namespace headloom {

// A key of a configuration that two of them have with different values, "a.b" or "a.0.b", and the
// values as TOML, "" where one lacks the key.
struct Difference {
  std::string key, before, after;

  // "'a.b' = 1", or "no 'a.b'".
  std::string was() const;
  std::string is() const;
};
// In the order of `before`, then what `after` alone has. Both must be tables.
std::vector<Difference> differences(const Node& before, const Node& after);

}  // namespace headloom
