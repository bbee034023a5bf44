// result.json: how a run ended, where it has finished or failed. Free of torch.
#pragma once

#include <optional>
#include <string>

namespace headloom {

struct RunResult {
  std::string problem;       // "" when the run finished
  std::string warning = {};  // of a run that finished but has diverged
  double tokens_per_second = 0;  // or images; median over steps, evaluations left out
  int64_t peak_memory = -1;      // bytes above what the process held before; -1: not measured
};

void write_result(const std::string& path, const RunResult& result);
// Nothing where the file is absent or not whole: the run is then repeated.
std::optional<RunResult> read_result(const std::string& path);

}  // namespace headloom
