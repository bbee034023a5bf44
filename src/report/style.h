#pragma once

namespace headloom::report {

// The page's style sheet: light by default, dark where the reader prefers it, plain in print.
extern const char* const kStyle;

}  // namespace headloom::report
