// What a range allows, in words: "at least 0", "above 0 and at most 1", "a finite number".
#pragma once

#include <string>

#include "core/fields.h"

namespace headloom {

std::string range_text(const Range<int64_t>& range);
std::string range_text(const Range<double>& range);

}  // namespace headloom
