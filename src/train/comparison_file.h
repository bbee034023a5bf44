// What comparison.json in a comparison's folder says of it that its runs do not. Free of torch.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "report/comparison.h"

namespace headloom {

struct WrittenComparison {
  std::string budget;
  std::vector<std::pair<std::string, std::string>> machine;  // that speeds were measured on
  std::string config;  // with the paths as they were given, which config.toml has absolute
  int sweep_planned = 0;
  bool by_commands = false;
  std::vector<report::TaskInfo> tasks;  // without their size_of
  std::vector<report::Build> builds;
  std::vector<report::Choice> choices;
  std::vector<report::Run> sweep_runs;
  // There may be no result of them on disk.
  std::vector<report::Run> failed, failed_again;  // the latter of the second initialisation
};

// As the folder has it now; empty where the file is missing or damaged. A key that is missing, as
// in the file of an earlier version, is left at its default.
WrittenComparison read_comparison_file(const std::string& folder);

}  // namespace headloom
