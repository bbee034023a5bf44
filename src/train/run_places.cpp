#include "train/run_places.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "core/files.h"
#include "core/text.h"
#include "train/comparison_file.h"
#include "train/planned_run.h"
#include "train/run_folder.h"

namespace headloom {

namespace fs = std::filesystem;

bool is_comparison(const std::string& folder) {
  return read_toml(folder + "/config.toml").find("models") != nullptr;
}

CompareConfig comparison_in(const std::string& folder) {
  const std::string path = folder + "/config.toml";
  CompareConfig out;
  try {
    read_fields(read_toml(path), out);
  } catch (const UsageError& error) {
    fail(path, ": ", error.what());
  }
  return out;
}

namespace {

// COMPARISON/runs/TASK/MODEL/seed-N of the tasks, models and seeds that are configured.
std::vector<RunPlace> runs_of_comparison(const std::string& folder, size_t first_rank) {
  const CompareConfig config = comparison_in(folder);
  std::vector<RunPlace> out;
  for (const ComparedTask& task : each_size(config)) {
    for (size_t m = 0; m < config.models.size(); ++m) {
      const std::string& model = config.models[m].name;
      for (const int64_t seed : config.seeds) {
        const std::string run = str(folder, "/runs/", task.name, "/", model, "/seed-", seed);
        // A run that failed before its first evaluation has a result alone.
        if (!fs::exists(run + "/config.toml") ||
            (!fs::exists(metrics_path(run)) && !fs::exists(result_path(run)))) {
          continue;
        }
        // Not every model need have begun on every task.
        out.push_back({.folder = run,
                       .model = model,
                       .task = task.name,
                       .comparison = folder,
                       .size_of = task.size_of,
                       .rank = first_rank + m});
      }
    }
  }
  return out;
}

}  // namespace

std::vector<RunPlace> places_in(const std::vector<std::string>& folders) {
  std::vector<RunPlace> out;
  std::set<fs::path> seen;
  size_t rank = 0;
  for (const std::string& folder : folders) {
    if (!fs::is_directory(folder)) {
      fail(folder, ": is not the folder of a run or of a comparison",
           did_you_mean_folder(folder, FolderOf::either));
    }
    require(fs::exists(folder + "/config.toml"), folder,
            ": has no config.toml, expected the folder of a run or of a comparison.");
    const bool several = is_comparison(folder);
    if (!several) {
      require(fs::exists(metrics_path(folder)), folder,
              ": has no metrics.jsonl: it was not trained here, so there is nothing to report.");
    }
    const size_t first_rank = rank;
    const size_t before = out.size();
    for (RunPlace& place : several ? runs_of_comparison(folder, first_rank)
                                   : std::vector{RunPlace{.folder = folder, .rank = first_rank}}) {
      rank = std::max(rank, place.rank + 1);
      if (!seen.insert(fs::canonical(place.folder)).second) {
        usage_error(place.folder, ": the run is named twice.");
      }
      out.push_back(std::move(place));
    }
    // Of a comparison by itself its sweep is reported, too, and why it has chosen nothing.
    const auto swept = [&] {
      return !read_comparison_file(folder).sweep_runs.empty() || !begun_sweep_runs(folder).empty();
    };
    if (out.size() == before && (folders.size() > 1 || !swept())) {
      fail(folder,
           ": is a comparison of which no run has begun, or only runs of its sweep, so there is "
           "nothing to report yet.");
    }
  }
  return out;
}

std::vector<std::string> begun_runs(const std::vector<std::string>& folders) {
  std::vector<std::string> out;
  for (const RunPlace& place : places_in(folders)) out.push_back(place.folder);
  return out;
}

}  // namespace headloom
