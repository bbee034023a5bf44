#include "train/compare_checks.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace headloom {
namespace {

// The names of a task and of a size together fit into that of a folder.
constexpr size_t kLongestName = 120;

// Names become folders. `entry` counts from 1.
void check_name(const std::string& name, const char* what, size_t entry) {
  if (name.empty()) {
    usage_error("entry ", entry, " of [[", what, "]] has no 'name', by which the report calls it.");
  }
  if (name.size() > kLongestName) {
    usage_error("entry ", entry, " of [[", what, "]] has a name of ", name.size(),
                " characters, expected at most ", kLongestName, ": '", name, "'.");
  }
  bool good = name.front() != '.' && name.front() != ' ' && name.back() != ' ';
  for (char c : name) {
    good = good && (std::isalnum(static_cast<unsigned char>(c)) ||
                    std::string("_-+. ").find(c) != std::string::npos);
  }
  if (!good) {
    usage_error("entry ", entry, " of [[", what, "]] has the name '", name,
                "', expected letters from a to z, digits, spaces and any of _ - + . with no point "
                "in front and no space at either end.");
  }
}

template <typename Named>
void check_names(const std::vector<Named>& items, const char* what) {
  if (items.empty()) usage_error("the comparison has no [[", what, "]], expected at least one.");
  std::set<std::string> seen;
  for (const Named& item : items) {
    check_name(item.name, what, seen.size() + 1);
    if (!seen.insert(item.name).second) {
      usage_error("two of [[", what, "]] are named '", item.name, "', expected different names.");
    }
  }
}

// Tasks at sizes become folders by both names.
void check_names_at_sizes(const std::vector<ComparedTask>& at_sizes) {
  std::map<std::string, std::string> tasks;
  for (const ComparedTask& task : at_sizes) {
    const auto [first, is_new] = tasks.emplace(task.name, task.size_of);
    if (is_new) continue;
    usage_error("'", first->second, "' and '", task.size_of, "' of [[tasks]] are both called '",
                task.name, "' at one of [[sizes]], expected other names.");
  }
}

// Every table [train] of the comparison, with its name.
std::vector<std::pair<const char*, const Node*>> train_tables(const CompareConfig& config) {
  std::vector<std::pair<const char*, const Node*>> out = {{"train", &config.train}};
  for (const auto& model : config.models) out.emplace_back("models.train", &model.train);
  for (const auto& task : config.tasks) out.emplace_back("tasks.train", &task.train);
  for (const auto& size : config.sizes) out.emplace_back("sizes.train", &size.train);
  std::erase_if(out, [](const auto& table) { return !table.second->is_table(); });
  return out;
}

void check_seeds(const CompareConfig& config, const Sweep& sweep) {
  for (const auto& [name, train] : train_tables(config)) {
    if (train->find("seed") == nullptr) continue;
    usage_error(train->find("seed")->origin, ": [", name,
                "] has the key 'seed', but every model trains from each of 'seeds', expected the "
                "seeds there alone.");
  }
  check_different_seeds(config.seeds, "seeds");
  const std::set<int64_t> seeds(config.seeds.begin(), config.seeds.end());
  if (sweep.empty()) return;
  for (const int64_t seed : sweep.seeds) {
    if (!seeds.contains(seed)) continue;
    usage_error("'sweep.seeds' has the seed ", seed,
                ", which is one of 'seeds', expected other seeds, because what is reported is "
                "trained from seeds that nothing was chosen by.");
  }
}

// Whether the configuration lets a run end before the budget does.
bool stops_early(const CompareConfig& config) {
  const auto tables = train_tables(config);
  return std::any_of(tables.begin(), tables.end(), [](const auto& table) {
    return table.second->find("stop_accuracy") != nullptr;
  });
}

// A comparison that chooses by held-out data says which half of them a run reads.
void check_no_eval_split(const CompareConfig& config) {
  for (const auto& [name, train] : train_tables(config)) {
    const Node* const given = train->find("eval_split");
    if (given == nullptr) continue;
    usage_error(given->place(), "'train.eval_split' has no effect with [sweep] or ",
                "train.stop_accuracy, expected none: what is chosen is chosen on validation data, ",
                "and what is reported is of test data.");
  }
}

// What is swept keeps its value under the second initialisation.
void check_robustness(const RobustnessOptions& robustness, const Sweep& sweep) {
  for (const SweepKey& key : sweep.keys) {
    if (key.table != "model" || !has_below(robustness.model, key.key)) continue;
    usage_error("'robustness.model.", key.key, "' is swept by 'sweep.", key.name,
                "', expected one of the two.");
  }
}

// A key of [train] that was asked for on the command line must change something. In a file it may
// stand there for tasks that are added later.
void check_asked_for(const CompareConfig& config) {
  for (const auto& [key, value] : config.train.table()) {
    if (value.origin != "--set train." + key || value.is_table() || config.tasks.empty()) continue;
    if (!std::all_of(config.tasks.begin(), config.tasks.end(), [&, &name = key](const auto& task) {
          return task.train.find(name) != nullptr;
        })) {
      continue;
    }
    usage_error(value.origin, ": changes nothing, because every task has its own 'train.", key,
                "', expected --set ", config.sizes.empty() ? "tasks" : "sizes", ".0.train.", key,
                " and so on.");
  }
}

}  // namespace

bool asks_validation_data(const CompareConfig& config, const Sweep& sweep) {
  return !sweep.empty() || stops_early(config);
}

void check_comparison(const CompareConfig& config, const CompareConfig& at_sizes,
                      const Sweep& sweep) {
  check_names(config.models, "models");
  check_names(config.tasks, "tasks");
  check_asked_for(at_sizes);
  if (!config.sizes.empty()) check_names(config.sizes, "sizes");
  check_names_at_sizes(at_sizes.tasks);
  check_seeds(config, sweep);
  if (asks_validation_data(at_sizes, sweep)) check_no_eval_split(config);
  check_robustness(config.robustness, sweep);
}

void check_swept_keys(const CompareConfig& config, const Sweep& sweep) {
  for (const SweepKey& key : sweep.keys) {
    if (key.place() == "train.eval_every" && stops_early(config)) {
      usage_error("'sweep.", key.name,
                  "' cannot be swept with 'train.stop_accuracy', because a run ",
                  "stops at an evaluation.");
    }
    if (config.match_parameters && key.table == "channel" && key.key == "hidden") {
      usage_error("'sweep.", key.name,
                  "' cannot be swept where 'match_parameters' is true, because that width makes "
                  "the parameters equal.");
    }
  }
}

void check_no_own_steps(const std::vector<ComparedModel>& models) {
  for (const ComparedModel& m : models) {
    if (m.train.find("steps") == nullptr) continue;
    usage_error("model '", m.name,
                "' has 'train.steps', which the budget decides, expected it "
                "in [train] or in a task's train.");
  }
}

void check_robustness_not_empty(const RobustnessOptions& robustness) {
  // An empty table has an origin where somebody has written it.
  if (!robustness.empty() || robustness.model.origin.empty()) return;
  usage_error(robustness.model.place(),
              "'robustness.model' is empty, expected another initialisation, such as "
              "{equal_init = true}.");
}

}  // namespace headloom
