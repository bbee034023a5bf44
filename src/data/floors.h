// What is reached by always guessing what is most frequent: floors of tasks whose answers are not
// equally frequent.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "data/task.h"

namespace headloom::data {

// The most frequent of `keys`, the least one of several; of none, a Key that is made of nothing.
template <typename Key>
Key most_frequent(const std::vector<Key>& keys) {
  std::map<Key, int64_t> counts;
  for (const Key& key : keys) ++counts[key];
  const auto most =
      std::max_element(counts.begin(), counts.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == counts.end() ? Key() : most->first;
}

// How many of `judged` have the answer that is most frequent among `trained` or, where nothing is
// trained on, among themselves; as a share, 0 of none.
template <typename Key>
double usual_share(const std::vector<Key>& trained, const std::vector<Key>& judged) {
  if (judged.empty()) return 0;
  const Key usual = most_frequent(trained.empty() ? judged : trained);
  const auto right = std::count(judged.begin(), judged.end(), usual);
  return static_cast<double>(right) / static_cast<double>(judged.size());
}

// Puts a floor in its place, where it is above the first one, which knows no frequencies.
void add_floor(std::vector<Floor>& floors, const std::string& name, double accuracy);

struct TaggedWord {
  uint64_t word;  // a number of its own, or a hash
  int64_t tag;
};

// Adds the floors of the most frequent tag and of each word's own most frequent one, the usual
// baseline of taggers (Jurafsky and Martin, Speech and Language Processing, chapter 17). A word
// that is not among `trained` has the tag that is most frequent over all.
void add_tag_floors(std::vector<Floor>& floors, const std::vector<TaggedWord>& trained,
                    const std::vector<TaggedWord>& judged);

}  // namespace headloom::data
