// Where the runs are that a report is made of.
#pragma once

#include <string>
#include <vector>

#include "train/compare.h"

namespace headloom {

// A run's folder, and what its comparison calls its model and task.
struct RunPlace {
  std::string folder, model = {}, task = {}, comparison = {};
  std::string size_of = {};  // the task that its task is a size of, there
  size_t rank = 0;           // of the model: those of the first folders come first
};

// Whether the folder of a run or of a comparison is a comparison's.
bool is_comparison(const std::string& folder);

// The configuration of the comparison in `folder`. Throws Error naming its file.
CompareConfig comparison_in(const std::string& folder);

// The runs in `folders`: each is a run's or a comparison's, which stands for all of its runs that
// have begun. Throws UsageError for a run that is named twice, and Error for a folder that is
// neither or has nothing to report.
std::vector<RunPlace> places_in(const std::vector<std::string>& folders);

// The folders of the runs that RunReport(folders) reports. Throws as that does.
std::vector<std::string> begun_runs(const std::vector<std::string>& folders);

}  // namespace headloom
