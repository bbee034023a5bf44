#pragma once

namespace headloom::analysis {

// Of the page of attention maps, beside report::kStyle.
extern const char* const kMapsStyle;
extern const char* const kMapsBody;
extern const char* const kMapsScript;

}  // namespace headloom::analysis
