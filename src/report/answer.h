// The comparison's answer for one task, in words.
#pragma once

#include <string>

#include "report/summary.h"

namespace headloom::report {

// Rows sorted best first, with their verdicts against the baseline.
std::string answer(const TaskSummary& summary);

}  // namespace headloom::report
