#include "train/sweep.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <set>

#include "core/error.h"
#include "core/fields.h"
#include "core/hash.h"
#include "core/text.h"
#include "train/config.h"

namespace headloom {
namespace {

const std::vector<std::string> kSweptTables = {"train", "mixer", "channel", "block", "model"};

std::optional<double> number_in(const Node& node) {
  if (const auto* whole = std::get_if<int64_t>(&node.value)) return static_cast<double>(*whole);
  if (const auto* real = std::get_if<double>(&node.value)) return *real;
  return std::nullopt;
}

// A number with six digits, which is what a person would have written.
Node rounded(double value) {
  Node node;
  node.value = std::strtod(formatted("%.6g", value).c_str(), nullptr);
  return node;
}

// Messages name the value by the key that it was swept by: "sweep.lr = 0.004".
Node swept(const SweepKey& key, Node value) {
  value.origin = str("sweep.", key.name, " = ", inline_toml(value));
  return value;
}

struct LogRange {
  double from = 0, to = 0;
  int64_t count = 0;

  void fields(Fields& f) {
    f.field("from", from, "the smallest value", positive());
    f.field("to", to, "the largest value", positive());
    f.field("count", count, "how many values, at equal factors", between<int64_t>(2, 1000));
  }
};

bool is_range(const Node& node) {
  return node.is_table() && (node.find("from") != nullptr || node.find("to") != nullptr ||
                             node.find("count") != nullptr);
}

// Values at equal factors.
void read_range(const Node& node, SweepKey& key) {
  const std::string path = "sweep." + key.name;
  for (const char* needed : {"from", "to", "count"}) {
    if (node.find(needed) == nullptr) {
      usage_error(node.place(), "'", path, "' has no '", needed,
                  "', expected {from = ..., to = ..., count = ...}.");
    }
  }
  LogRange range;
  read_fields(node, range, path);
  if (range.from >= range.to) {
    usage_error(node.place(), "'", path, ".from' is ", range.from,
                ", expected less than 'to' = ", range.to, ".");
  }
  key.factor = std::pow(range.to / range.from, 1.0 / static_cast<double>(range.count - 1));
  for (int64_t i = 0; i < range.count; ++i) {
    key.values.push_back(rounded(range.from * std::pow(key.factor, static_cast<double>(i))));
  }
}

// The common factor between neighbours, 0 where there is none. Whole numbers, such as numbers of
// heads, have too few possible values to go on by a factor.
double factor_of(const std::vector<Node>& values) {
  std::vector<double> numbers;
  bool real = false;
  for (const Node& value : values) {
    const auto number = number_in(value);
    if (!number || *number <= 0) return 0;
    real = real || std::holds_alternative<double>(value.value);
    numbers.push_back(*number);
  }
  if (!real || numbers.size() < 2) return 0;
  std::sort(numbers.begin(), numbers.end());
  double low = numbers[1] / numbers[0], high = low;
  for (size_t i = 1; i < numbers.size(); ++i) {
    low = std::min(low, numbers[i] / numbers[i - 1]);
    high = std::max(high, numbers[i] / numbers[i - 1]);
  }
  // 1, 3, 10 counts as equal factors, and 1, 2, 3 does not.
  if (low <= 1 || high > 1.25 * low) return 0;
  return std::pow(numbers.back() / numbers.front(), 1.0 / static_cast<double>(numbers.size() - 1));
}

void check_train_key(const SweepKey& key, const Node& node) {
  TrainOptions options;
  Lister lister;
  options.fields(lister);
  std::vector<std::string> names;
  constexpr std::array kFixed = {"seed", "steps", "eval_split", "eval_sequences", "stop_accuracy"};
  if (std::find(kFixed.begin(), kFixed.end(), key.key) != kFixed.end()) {
    usage_error(node.place(), "'sweep.", key.name,
                "' cannot be swept, because settings are compared at equal budget and on the same "
                "data.");
  }
  for (const OptionInfo& option : lister.options()) {
    const bool fixed = std::find(kFixed.begin(), kFixed.end(), option.key) != kFixed.end();
    if (!fixed && option.key.find('.') == std::string::npos) names.push_back(option.key);
  }
  if (std::find(names.begin(), names.end(), key.key) == names.end()) {
    usage_error(node.place(), "[sweep] has the key '", key.name, "', which [train] does not have",
                did_you_mean(key.key, names, "; known keys are " + join(names) + "."));
  }
}

void add_key(const std::string& name, const Node& node, std::vector<SweepKey>& keys) {
  SweepKey key{.name = name, .table = "train", .key = name, .values = {}};
  if (const size_t dot = name.find('.'); dot != std::string::npos) {
    key.table = name.substr(0, dot);
    key.key = name.substr(dot + 1);
  }
  if (std::find(kSweptTables.begin(), kSweptTables.end(), key.table) == kSweptTables.end()) {
    const std::string near = nearest(key.table, kSweptTables);
    usage_error(node.place(), "[sweep] has the key '", name, "', but there is no table '",
                key.table, "' that can be swept, expected one of ", join(kSweptTables),
                near.empty() ? str(".") : str("; did you mean '", near, ".", key.key, "'?"));
  }
  if (key.table == "train") check_train_key(key, node);
  if (is_range(node)) {
    read_range(node, key);
  } else if (node.is_array() && !node.is_table_array()) {
    if (node.array().empty()) {
      usage_error(node.place(), "'sweep.", name, "' is empty, expected at least one value.");
    }
    key.values = node.array();
    key.factor = factor_of(key.values);
  } else {
    usage_error(node.place(), "'sweep.", name, "' is ", node.type_name(),
                ", expected a list of values or {from = ..., to = ..., count = ...}.");
  }
  std::set<std::string> seen;
  for (const Node& value : key.values) {
    const auto number = number_in(value);  // 1 and 1.0 are one value
    if (!seen.insert(number ? formatted("%.17g", *number) : inline_toml(value)).second) {
      usage_error(node.place(), "'sweep.", name, "' has the value ", inline_toml(value),
                  " twice, expected different ones.");
    }
  }
  for (Node& value : key.values) value = swept(key, value);
  for (const SweepKey& other : keys) {
    if (other.table == key.table && other.key == key.key) {
      usage_error(node.place(), "[sweep] has '", other.name, "' and '", name,
                  "', which are the same key, expected one of them.");
    }
  }
  keys.push_back(std::move(key));
}

// TOML reads `mixer.post = [...]` as a table within a table.
void add_below(const std::string& name, const Node& node, std::vector<SweepKey>& keys) {
  if (!node.is_table() || is_range(node)) return add_key(name, node, keys);
  for (const auto& [child, value] : node.table()) add_below(name + "." + child, value, keys);
}

// `seeds` and `extensions` are read as every table of options is.
struct SweepOptions {
  std::vector<int64_t> seeds;
  int64_t extensions;

  void fields(Fields& f) {
    f.field("seeds", seeds, "seeds of the runs that choose", at_least(0));
    f.field("extensions", extensions, "values added to a key at most", at_least(0));
  }
};

size_t index_of_key(const Sweep& sweep, const std::string& name) {
  size_t i = 0;
  while (sweep.keys[i].name != name) ++i;
  return i;
}

// The numbers that were tried of key `i`, in order; none where a value is no number.
std::vector<double> numbers_tried(const std::vector<Tried>& tried, size_t i) {
  std::set<double> numbers;
  for (const Tried& t : tried) {
    const auto number = number_in(t.point[i]);
    if (!number) return {};
    numbers.insert(*number);
  }
  return {numbers.begin(), numbers.end()};
}

}  // namespace

void check_different_seeds(const std::vector<int64_t>& seeds, const char* key) {
  if (seeds.empty()) usage_error("'", key, "' is empty, expected at least one seed.");
  std::set<int64_t> seen;
  for (const int64_t seed : seeds) {
    if (seen.insert(seed).second) continue;
    usage_error("'", key, "' has the seed ", seed, " twice, expected different ones.");
  }
}

Sweep Sweep::read(const Node& table) {
  Sweep sweep;
  Node options;
  for (const auto& [key, value] : table.table()) {
    if (key == "seeds" || key == "extensions") {
      options.set(key, value);
    } else {
      add_below(key, value, sweep.keys);
    }
  }
  SweepOptions read{sweep.seeds, sweep.extensions};
  read_fields(options, read, "sweep");
  sweep.seeds = read.seeds;
  sweep.extensions = read.extensions;
  if (sweep.empty() && !table.table().empty()) {
    usage_error("[sweep] names no key to sweep, expected one such as lr = [1e-3, 2e-3].");
  }
  check_different_seeds(sweep.seeds, "sweep.seeds");
  return sweep;
}

std::set<std::string> Sweep::places() const {
  std::set<std::string> out;
  for (const SweepKey& key : keys) out.insert(key.place());
  return out;
}

std::vector<SweepPoint> Sweep::grid() const {
  std::vector<SweepPoint> points = {{}};
  for (const SweepKey& key : keys) {
    std::vector<SweepPoint> longer;
    for (const SweepPoint& point : points) {
      for (const Node& value : key.values) {
        longer.push_back(point);
        longer.back().push_back(value);
      }
    }
    points = std::move(longer);
  }
  return points;
}

report::Setting Sweep::setting(const SweepPoint& point) const {
  report::Setting setting;
  for (size_t i = 0; i < point.size(); ++i) {
    setting.push_back({keys[i].name, inline_toml(point[i])});
  }
  return setting;
}

std::string Sweep::text(const SweepPoint& point) const {
  std::vector<std::string> parts;
  for (const auto& [key, value] : setting(point)) parts.push_back(str(key, " = ", value));
  return join(parts);
}

std::string Sweep::folder(const SweepPoint& point) const {
  std::vector<std::string> parts;
  for (size_t i = 0; i < point.size(); ++i) {
    const auto* text = std::get_if<std::string>(&point[i].value);
    std::string part = keys[i].name + "=";
    for (const char c : text != nullptr ? *text : inline_toml(point[i])) {
      const auto byte = static_cast<unsigned char>(c);
      if (std::isalnum(byte) || std::string("_-+.").find(c) != std::string::npos) {
        part += c;
      } else {  // by its code
        part += str("%", static_cast<int>(byte), ";");
      }
    }
    parts.push_back(part);
  }
  std::string name = join(parts, ",");
  // File systems take names of 255 bytes, of which "seed-N," and ".toml" have some.
  constexpr size_t kLongest = 200;
  if (name.size() > kLongest) {
    const std::string hash = hash_text(name);
    name = name.substr(0, kLongest - hash.size() - 1) + "~" + hash;
  }
  return name;
}

std::optional<SweepPoint> best_of(const std::vector<Tried>& tried) {
  const Tried* best = nullptr;
  for (const Tried& t : tried) {
    if (!std::isfinite(t.quality) || !std::isfinite(t.loss)) continue;
    if (best == nullptr || std::pair(t.quality, t.loss) < std::pair(best->quality, best->loss)) {
      best = &t;
    }
  }
  return best == nullptr ? std::nullopt : std::optional(best->point);
}

std::vector<SweepPoint> Sweep::extension(const std::vector<Tried>& tried) const {
  const auto best = best_of(tried);
  std::vector<SweepPoint> next;
  if (!best) return next;
  for (const std::string& name : at_edge(tried, *best)) {
    const size_t i = index_of_key(*this, name);
    const std::vector<double> numbers = numbers_tried(tried, i);
    const int64_t added = static_cast<int64_t>(numbers.size() - keys[i].values.size());
    if (keys[i].factor == 0 || added >= extensions) continue;
    const double value = *number_in((*best)[i]);
    const bool low = value == numbers.front();
    SweepPoint point = *best;
    point[i] = swept(keys[i], rounded(low ? value / keys[i].factor : value * keys[i].factor));
    next.push_back(std::move(point));
  }
  return next;
}

std::vector<std::string> Sweep::at_edge(const std::vector<Tried>& tried,
                                        const SweepPoint& best) const {
  std::vector<std::string> names;
  for (size_t i = 0; i < keys.size(); ++i) {
    const std::vector<double> numbers = numbers_tried(tried, i);
    if (numbers.size() < 2) continue;
    const double value = *number_in(best[i]);
    if (value == numbers.front() || value == numbers.back()) names.push_back(keys[i].name);
  }
  return names;
}

}  // namespace headloom
