// [sweep] of a comparison: which settings are tried, which is chosen, and which is tried next. Free
// of torch.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/config.h"
#include "report/comparison.h"

namespace headloom {

// One value for every key of a sweep, in their order.
using SweepPoint = std::vector<Node>;

struct SweepKey {
  std::string name;   // as the config has it: "lr", "mixer.post"
  std::string table;  // that it is set in: train, mixer, channel, block or model
  std::string key;    // below the table: "lr", "position.type"
  std::vector<Node> values;
  // The factor between neighbouring values of a range or of a list with (almost) equal factors; 0
  // where there is none, so that the key is never extended.
  double factor = 0;

  // Where it is set: "train.lr", "mixer.post".
  std::string place() const { return table + "." + key; }
};

// A setting, and the mean quality and loss that a model reached with it on validation data. They
// are infinite where a run has no finite loss. Lower is better. The loss decides between equal
// qualities, such as those of models that have no right answer yet.
struct Tried {
  SweepPoint point;
  double quality = 0;
  double loss = 0;
};

struct Sweep {
  std::vector<SweepKey> keys;  // none: nothing is swept
  std::vector<int64_t> seeds = {1001};
  // Values that the sweep may add to each key, model by model and task by task, while the best
  // value is at an edge.
  int64_t extensions = 4;

  // Reads the table [sweep]. A key of [train] stands alone ("lr"), others have the name of their
  // table before them ("mixer.post"). A value is a list, or {from, to, count} for values at equal
  // factors. Throws UsageError naming the key.
  static Sweep read(const Node& table);

  bool empty() const { return keys.empty(); }
  // Where the keys are set: "train.lr", "mixer.post".
  std::set<std::string> places() const;
  // Every combination of the keys' values.
  std::vector<SweepPoint> grid() const;
  report::Setting setting(const SweepPoint& point) const;
  // "lr = 0.002, mixer.post = true".
  std::string text(const SweepPoint& point) const;
  // Part of a folder's name, different for different settings: "lr=0.002,mixer.post=true".
  std::string folder(const SweepPoint& point) const;
  // The points to try next, none where the choice stands: the best one with a key's value moved on
  // by its factor, where that value is the smallest or the largest of those tried.
  std::vector<SweepPoint> extension(const std::vector<Tried>& tried) const;
  // The keys whose value in `best` is the smallest or largest number of several tried.
  std::vector<std::string> at_edge(const std::vector<Tried>& tried, const SweepPoint& best) const;
};

// Throws UsageError naming `key` where it lists no seed, or one twice.
void check_different_seeds(const std::vector<int64_t>& seeds, const char* key);

// The best of the tried settings, the first of several; nothing where none is finite.
std::optional<SweepPoint> best_of(const std::vector<Tried>& tried);

}  // namespace headloom
