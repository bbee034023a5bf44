#include "train/run_past.h"

#include <algorithm>
#include <filesystem>

#include "core/differences.h"
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

std::string hash_of_weights(const TrainState& state) {
  Fnv1a hash;
  for (const auto& [name, file] : state.files) {
    if (!name.starts_with("model")) continue;
    hash.add(name);
    hash.add(file.crc);
  }
  return str(std::hex, hash.value());
}

// What the weights of `step` of a run depend on, the seed aside: what was trained on afterwards,
// and how the run was evaluated, does not belong to it.
std::string training_until(const std::string& folder, int64_t step) {
  RunConfig now = run_config_in(folder);
  const Node stored = stored_config(now);
  std::string out = to_toml(*stored.find("model")) + to_toml(*stored.find("task"));
  if (const std::optional<Origin> origin = read_origin(folder)) out += origin->identity + "\n";
  std::string last;
  int64_t begun = 0;  // where the options below are first used
  const auto add = [&](TrainOptions options, int64_t until) {
    std::string text;
    const bool by_length = options.schedule == "cosine";  // whose rates depend on the steps
    const Node fields = write_fields(options);
    for (const auto& [key, value] : fields.table()) {
      if (is_of_no_consequence(key) && !(key == "steps" && by_length)) continue;
      if (key.starts_with("eval_") || key == "stop_accuracy") continue;
      text += str(key, " = ", inline_toml(value), "\n");
    }
    if (text != last) out += str("from ", begun, "\n", text);
    last = text;
    begun = until;
  };
  for (const EarlierConfig& earlier : earlier_configs(folder)) {
    add(read_run_config(read_toml(folder + "/" + earlier.file)).train, earlier.until);
    if (earlier.until >= step) return out;
  }
  add(now.train, step);
  return out;
}

// What steps [first, end) of a run were trained with, where it is not what `now` says.
std::string other_options(RunConfig then, RunConfig now, int64_t first, int64_t end) {
  std::vector<std::string> out;
  // Of the model only what does not belong to its weights can differ, as dropout.
  for (const Difference& d : differences(write_fields(now.model), write_fields(then.model))) {
    out.push_back(d.after.empty() ? "no " + d.key : d.key + " = " + d.after);
  }
  const std::string named = train_differences(now.train, then.train);
  if (!named.empty()) out.push_back(named);
  // With a schedule of another length the rates of the same steps are others.
  for (int64_t step = first; step < end && then.train.steps != now.train.steps; ++step) {
    TrainOptions longer = then.train;
    longer.steps = now.train.steps;
    if (longer.lr_at(step) == then.train.lr_at(step)) continue;
    out.push_back(str("steps = ", then.train.steps));
    break;
  }
  return join(out);
}

}  // namespace

Origin origin_of(const std::string& folder, const TrainState& state) {
  Origin out{.folder = fs::absolute(folder).lexically_normal().string(),
             .step = state.step,
             .weights = hash_of_weights(state)};
  if (CheckpointStore(folder).has_weights_alone(state.step)) {
    out.identity = out.weights;
  } else {
    out.identity = hash_text(str(training_until(folder, state.step), "\n", state.step));
  }
  return out;
}

std::string origin_path(const std::string& run) { return run + "/origin.json"; }

void write_origin(const std::string& run, const Origin& origin) {
  const Json json = {{"folder", origin.folder},
                     {"step", origin.step},
                     {"weights", origin.weights},
                     {"identity", origin.identity}};
  write_file(origin_path(run), json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

std::optional<Origin> read_origin(const std::string& run) {
  const std::string path = origin_path(run);
  if (!fs::exists(path)) return std::nullopt;
  const auto json = parse_json_if_whole<Json>(read_file(path));
  try {
    return Origin{.folder = json.at("folder").get<std::string>(),
                  .step = json.at("step").get<int64_t>(),
                  .weights = json.at("weights").get<std::string>(),
                  .identity = json.at("identity").get<std::string>()};
  } catch (const Json::exception&) {
    fail(path, ": is damaged, expected an object with 'folder', 'step', 'weights' and 'identity'.");
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
    const std::string other = other_options(read_run_config(toml), config, first, earlier.until);
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
  const auto has = [](const std::vector<PastEvent>& past, std::string PastEvent::* part,
                      const PastEvent& event) {
    return std::any_of(past.begin(), past.end(),
                       [&](const PastEvent& other) { return other.*part == event.*part; });
  };
  for (const PastEvent& event : run) {
    if (has(baseline, &PastEvent::key, event)) continue;
    out.push_back((has(baseline, &PastEvent::text, event) ? "other " : "") + event.text);
  }
  for (const PastEvent& event : baseline) {
    if (!has(run, &PastEvent::key, event) && !has(run, &PastEvent::text, event)) {
      out.push_back("no " + event.text);
    }
  }
  return join(out);
}

}  // namespace headloom
