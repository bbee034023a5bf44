#include "train/metrics.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <set>
#include <string_view>

#include "core/error.h"
#include "core/files.h"
#include "core/json_text.h"
#include "core/parse_number.h"
#include "core/text.h"

namespace headloom {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no NaN; null stands for it.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

double real(const Json& json, const char* key) {
  return json.contains(key) && json[key].is_number() ? json[key].get<double>() : std::nan("");
}

// Empty where anything but numbers is there.
std::vector<double> reals(const Json& json, const char* key) {
  std::vector<double> out;
  if (!json.contains(key) || !json[key].is_array()) return out;
  for (const Json& value : json[key]) {
    if (!value.is_number()) return {};
    out.push_back(value.get<double>());
  }
  return out;
}

// Rounded to six places, so that lines stay short.
Json rounded(const std::vector<double>& values) {
  Json out = Json::array();
  for (const double value : values) out.push_back(number(std::round(value * 1e6) / 1e6));
  return out;
}

int64_t integer(const Json& json, const char* key, int64_t fallback) {
  return json.contains(key) && json[key].is_number_integer() ? json[key].get<int64_t>() : fallback;
}

Json to_json(const ExpertLoad& load) {
  Json json = Json::object();
  for (const auto& [layer, shares] : load) {
    json[std::to_string(layer)] = rounded(shares);
  }
  return json;
}

ExpertLoad expert_load(const Json& json) {
  ExpertLoad load;
  if (!json.contains("expert_load") || !json["expert_load"].is_object()) return load;
  for (const auto& [layer, shares] : json["expert_load"].items()) {
    const auto number = parse_number<int64_t>(layer);
    if (!shares.is_array() || !number) continue;
    for (const Json& share : shares) {
      load[*number].push_back(share.is_number() ? share.get<double>() : 0);
    }
  }
  return load;
}

std::optional<EvalPoint> evaluation(const Json& json) {
  if (!json.contains("eval_loss")) return std::nullopt;
  return EvalPoint{.step = integer(json, "step", 0),
                   .tokens = integer(json, "tokens", 0),
                   .seconds = real(json, "seconds"),
                   .loss = real(json, "eval_loss"),
                   .accuracy = real(json, "accuracy"),
                   .train_loss = real(json, "train_loss"),
                   .expert_load = expert_load(json),
                   .loss_error = real(json, "eval_loss_error"),
                   .accuracy_error = real(json, "accuracy_error"),
                   .loss_parts = reals(json, "eval_loss_parts"),
                   .accuracy_parts = reals(json, "accuracy_parts"),
                   .validation_accuracy = real(json, "validation_accuracy")};
}

std::optional<StepPoint> step_point(const Json& json) {
  if (!json.contains("step_seconds")) return std::nullopt;
  return StepPoint{.step = integer(json, "step", 0),
                   .loss = real(json, "loss"),
                   .lr = real(json, "lr"),
                   .gradient_norm = real(json, "gradient_norm"),
                   .seconds = real(json, "step_seconds"),
                   .processes = integer(json, "processes", 1)};
}

std::string lines_left_out(const std::string& path, const std::vector<int64_t>& lines) {
  constexpr size_t kNamed = 5;
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(lines.size(), kNamed); ++i) names.push_back(str(lines[i]));
  if (lines.size() > kNamed) names.push_back(str("and ", lines.size() - kNamed, " more"));
  const bool one = lines.size() == 1;
  return str(path, one ? ": line " : ": lines ", join(names), one ? " is no" : " are no",
             " JSON object", one ? " and is left out." : "s and are left out.");
}

// Whether `line` is an object of numbers as Metrics writes a step, {"step":1,"loss":5.2}. It says
// this several times as fast as a parser of JSON, and a long run has nearly nothing else.
bool is_flat_object(std::string_view line) {
  if (!line.starts_with('{')) return false;
  const char* at = line.data();
  const char* const end = at + line.size();
  do {
    if (++at == end || *at != '"') return false;
    while (++at != end && (std::islower(static_cast<unsigned char>(*at)) || *at == '_')) {
    }
    if (end - at < 3 || at[0] != '"' || at[1] != ':') return false;
    at += 2;
    if (*at != '-' && !std::isdigit(static_cast<unsigned char>(*at))) return false;
    double value = 0;
    const auto read = std::from_chars(at, end, value);
    if (read.ec != std::errc()) return false;
    at = read.ptr;
  } while (at != end && *at == ',');
  return end - at == 1 && *at == '}';
}

// Whether `line` is an object of JSON.
bool is_object_text(std::string_view line) {
  if (is_flat_object(line)) return true;
  const size_t first = line.find_first_not_of(" \t\r");
  return first != std::string_view::npos && line[first] == '{' && Json::accept(line);
}

// Calls `take` for each line of metrics.jsonl, `text`. Those that it refuses are named on stderr,
// once, except for what an interrupted run leaves: a last line without its end.
void each_line(std::string_view text, const std::string& path,
               const std::function<bool(std::string_view line)>& take) {
  std::vector<int64_t> others;
  int64_t number = 1;
  for (size_t begin = 0; begin < text.size(); ++number) {
    const size_t end = text.find('\n', begin);
    const std::string_view line = text.substr(begin, end - begin);
    if (!take(line) && end != std::string_view::npos &&
        line.find_first_not_of(" \t\r") != std::string_view::npos) {
      others.push_back(number);
    }
    begin += line.size() + 1;
  }
  if (others.empty()) return;
  // A report that is watched reads them again and again.
  static std::mutex mutex;
  static std::set<std::string> told;
  const std::string sentence = lines_left_out(path, others);
  const std::lock_guard lock(mutex);
  if (told.insert(sentence).second) std::fprintf(stderr, "headloom: %s\n", sentence.c_str());
}

}  // namespace

Metrics::Metrics(std::string path, int64_t step, SummedLoad load) : path_(std::move(path)) {
  std::string present, kept;
  if (!path_.empty() && std::filesystem::exists(path_)) present = read_file(path_);
  each_line(present, path_, [&](std::string_view line) {
    const auto json = parse_json_if_whole<Json>(line);
    if (!json.is_object()) return false;
    if (integer(json, "step", step + 1) > step) return true;
    kept.append(line) += '\n';
    if (const auto point = evaluation(json)) remember(*point);
    if (const auto point = step_point(json)) remember(*point);
    return true;
  });
  load_ = std::move(load);
  if (!path_.empty() && (kept != present || kept.empty())) write_file(path_, kept);
}

void Metrics::remember(const StepPoint& point) {
  if (!first_loss_) first_loss_ = point.loss;
  losses_.push_back(point.loss);
  step_seconds_.push_back(point.seconds);
  if (point.expert_load.empty()) return;
  ++load_.steps;
  for (const auto& [layer, shares] : point.expert_load) {
    std::vector<double>& sum = load_.sum[layer];
    sum.resize(shares.size());
    for (size_t i = 0; i < shares.size(); ++i) sum[i] += shares[i];
  }
}

void Metrics::remember(const EvalPoint& point) {
  evaluations_.push_back(point);
  losses_.clear();
  load_ = {};
}

ExpertLoad Metrics::mean_load() const {
  ExpertLoad mean = load_.sum;
  for (auto& [layer, shares] : mean) {
    for (double& share : shares) share /= static_cast<double>(load_.steps);
  }
  return mean;
}

double Metrics::mean_loss() const {
  double mean = 0;
  for (double loss : losses_) mean += loss / static_cast<double>(losses_.size());
  return mean;
}

void Metrics::append(const std::string& line) {
  if (path_.empty()) return;
  std::ofstream file(path_, std::ios::app);
  file << line << "\n";
  file.flush();
  if (!file) throw CannotWrite(path_ + ": cannot be written (is the disk full?).");
}

void Metrics::sync() const {
  if (!path_.empty()) sync_file(path_);
}

void Metrics::add(const StepPoint& p) {
  remember(p);
  Json json = {{"step", p.step},
               {"loss", number(p.loss)},
               {"lr", p.lr},
               {"gradient_norm", number(p.gradient_norm)},
               {"step_seconds", p.seconds}};
  if (p.balance_loss) json["balance_loss"] = number(*p.balance_loss);
  if (p.processes > 1) json["processes"] = p.processes;
  append(json.dump());
}

void Metrics::add(const EvalPoint& p) {
  remember(p);
  Json json = {{"step", p.step},
               {"tokens", p.tokens},
               {"seconds", p.seconds},
               {"eval_loss", number(p.loss)},
               {"accuracy", number(p.accuracy)},
               {"eval_loss_error", number(p.loss_error)},
               {"accuracy_error", number(p.accuracy_error)},
               {"eval_loss_parts", rounded(p.loss_parts)},
               {"accuracy_parts", rounded(p.accuracy_parts)},
               {"train_loss", number(p.train_loss)}};
  if (std::isfinite(p.validation_accuracy)) json["validation_accuracy"] = p.validation_accuracy;
  if (!p.expert_load.empty()) json["expert_load"] = to_json(p.expert_load);
  for (const RankUse& use : p.ranks) {
    json["ranks"].push_back(
        {{"peak_memory_bytes", use.peak_memory}, {"waiting_seconds", use.waiting}});
  }
  append(json.dump());
}

RunMetrics read_metrics(const std::string& path) {
  RunMetrics out;
  if (!std::filesystem::exists(path)) return out;
  const std::string text = read_file(path);
  std::string_view last_step;
  each_line(text, path, [&](std::string_view line) {
    // Nearly all lines are steps, of which only the last is asked for: the others need no tree.
    // Before the first step there may be first_line_of_metrics().
    if (line.find("\"eval_loss\"") == std::string_view::npos) {
      if (!is_object_text(line)) return false;
      if (line.find("\"step_seconds\"") != std::string_view::npos || last_step.empty()) {
        last_step = line;
      }
      return true;
    }
    const auto json = parse_json_if_whole<Json>(line);
    if (!json.is_object()) return false;
    if (const auto point = evaluation(json)) out.evaluations.push_back(*point);
    return true;
  });
  const auto json = parse_json_if_whole<Json>(last_step);
  out.last_step = step_point(json).value_or(StepPoint{.processes = integer(json, "processes", 1)});
  return out;
}

std::string first_line_of_metrics(int64_t processes) {
  return processes > 1 ? Json({{"step", 0}, {"processes", processes}}).dump() + "\n" : "";
}

}  // namespace headloom
