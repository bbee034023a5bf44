#include "train/run_past.h"

#include <algorithm>
#include <filesystem>

#include "core/files.h"
#include "core/hash.h"
#include "core/json_text.h"
#include "core/text.h"
#include "train/checkpoint.h"
#include "train/reported.h"
#include "train/run_folder.h"

namespace headloom {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::string keys_of(const std::vector<PastEvent>& past) {
  std::vector<std::string> keys;
  keys.reserve(past.size());
  for (const PastEvent& event : past) keys.push_back(event.key);
  return join(keys, "\n");
}

// What steps [first, end) of a run were trained with, where it is not what `now` says.
std::string other_options(TrainOptions then, const TrainOptions& now, int64_t first, int64_t end) {
  std::vector<std::string> out;
  const std::string named = train_differences(now, then);
  if (!named.empty()) out.push_back(named);
  // With a schedule of another length the rates of the same steps are others.
  for (int64_t step = first; step < end && then.steps != now.steps; ++step) {
    TrainOptions longer = then;
    longer.steps = now.steps;
    if (longer.lr_at(step) == then.lr_at(step)) continue;
    out.push_back(str("steps = ", then.steps));
    break;
  }
  return join(out);
}

}  // namespace

Origin origin_of(const std::string& folder, int64_t step) {
  Origin out{.folder = fs::absolute(folder).lexically_normal().string(), .step = step};
  if (CheckpointStore(folder).has_weights_alone(step)) {
    out.identity = hash_text(out.folder);
  } else {
    const RunConfig config = run_config_in(folder);
    out.identity = hash_text(
        str(config_of_all_seeds(config), "\n", keys_of(past_of(folder, config)), "\n", step));
  }
  return out;
}

std::string origin_path(const std::string& run) { return run + "/origin.json"; }

void write_origin(const std::string& run, const Origin& origin) {
  write_file(
      origin_path(run),
      Json{{"folder", origin.folder}, {"step", origin.step}, {"identity", origin.identity}}.dump(
          1, ' ', false, Json::error_handler_t::replace) +
          "\n");
}

std::optional<Origin> read_origin(const std::string& run) {
  const std::string path = origin_path(run);
  if (!fs::exists(path)) return std::nullopt;
  const auto json = parse_json_if_whole<Json>(read_file(path));
  try {
    return Origin{.folder = json.at("folder").get<std::string>(),
                  .step = json.at("step").get<int64_t>(),
                  .identity = json.at("identity").get<std::string>()};
  } catch (const Json::exception&) {
    fail(path, ": is damaged, expected an object with 'folder', 'step' and 'identity'.");
  }
}

std::string config_of_all_seeds(RunConfig config) {
  config.train.seed = 0;
  return to_toml(stored_config(config));
}

std::vector<PastEvent> past_of(const std::string& run, const RunConfig& config) {
  std::vector<PastEvent> out;
  if (const std::optional<Origin> origin = read_origin(run)) {
    out.push_back({str("weights ", origin->identity),
                   str("weights of `", fs::path(origin->folder).filename().string(), "` (step ",
                       origin->step, ") at the start")});
  }
  int64_t first = 0;
  for (const EarlierConfig& earlier : earlier_configs(run)) {
    const Node toml = read_toml(run + "/" + earlier.file);
    const std::string other =
        other_options(read_run_config(toml).train, config.train, first, earlier.until);
    if (!other.empty() && first < earlier.until) {
      const std::string text = str("other options until step ", earlier.until, " (", other, ")");
      out.push_back({text, text});
    }
    first = earlier.until;
  }
  return out;
}

std::string past_differences(const std::vector<PastEvent>& baseline,
                             const std::vector<PastEvent>& run) {
  std::vector<std::string> out;
  const auto lacks = [](const std::vector<PastEvent>& past, const PastEvent& event) {
    return std::none_of(past.begin(), past.end(),
                        [&](const PastEvent& other) { return other.key == event.key; });
  };
  for (const PastEvent& event : run) {
    if (lacks(baseline, event)) out.push_back(event.text);
  }
  for (const PastEvent& event : baseline) {
    if (lacks(run, event)) out.push_back("no " + event.text);
  }
  return join(out);
}

}  // namespace headloom
