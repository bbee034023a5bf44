// The result table of one task: the same cells serve the page and the terminal.
#pragma once

#include <string>
#include <vector>

#include "report/summary.h"

namespace headloom::report {

struct Cell {
  std::string text;
  std::string note;  // second line: a ratio to the baseline, caveats
  std::string css;   // class of the page's cell
};

struct Column {
  std::string title;
  std::string note;  // unit
  std::string css;
  std::vector<Cell> cells;  // one a row of the task
  bool cost = false;        // of speed, size or memory, and not of quality
};

// All columns but the model's own. Columns in which nothing is known are left out.
std::vector<Column> result_columns(const TaskSummary& task);

// "better", "no difference found", "ahead", ...
const char* relation_text(Relation relation);

// "2 of 3 seeds", "running", "interrupted", "" when everything planned has finished.
std::string row_state(const Row& row);

}  // namespace headloom::report
