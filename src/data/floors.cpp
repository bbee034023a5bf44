#include "data/floors.h"

#include <algorithm>
#include <unordered_map>

namespace headloom::data {
namespace {

int64_t most_frequent(const std::vector<int64_t>& counts) {
  return std::max_element(counts.begin(), counts.end()) - counts.begin();
}

double share(int64_t right, size_t asked) {
  return asked == 0 ? 0 : static_cast<double>(right) / static_cast<double>(asked);
}

std::vector<Floor> any_class(int64_t classes) {
  return {{"any class", 1.0 / static_cast<double>(classes)}};
}

// Adds `floor` in its place, where it is above what guessing any class reaches.
void add(std::vector<Floor>& floors, const Floor& floor) {
  if (floor.accuracy > floors.front().accuracy) floors.push_back(floor);
  std::sort(floors.begin(), floors.end(),
            [](const Floor& a, const Floor& b) { return a.accuracy < b.accuracy; });
}

}  // namespace

std::vector<Floor> class_floors(int64_t classes, const std::vector<int64_t>& trained,
                                const std::vector<int64_t>& judged) {
  std::vector<int64_t> counts(static_cast<size_t>(classes));
  for (const int64_t label : trained.empty() ? judged : trained) {
    ++counts[static_cast<size_t>(label)];
  }
  const auto right = std::count(judged.begin(), judged.end(), most_frequent(counts));
  std::vector<Floor> floors = any_class(classes);
  add(floors, {"the most frequent class", share(right, judged.size())});
  return floors;
}

std::vector<Floor> tag_floors(int64_t classes, const std::vector<TaggedWord>& trained,
                              const std::vector<TaggedWord>& judged) {
  std::vector<int64_t> of_all(static_cast<size_t>(classes));
  std::unordered_map<uint64_t, std::vector<int64_t>> of_word;
  for (const TaggedWord& word : trained.empty() ? judged : trained) {
    ++of_all[static_cast<size_t>(word.tag)];
    std::vector<int64_t>& counts = of_word[word.word];
    counts.resize(static_cast<size_t>(classes));
    ++counts[static_cast<size_t>(word.tag)];
  }
  const int64_t usual = most_frequent(of_all);
  int64_t right_usual = 0, right_own = 0;
  for (const TaggedWord& word : judged) {
    const auto own = of_word.find(word.word);
    right_usual += usual == word.tag ? 1 : 0;
    right_own += (own == of_word.end() ? usual : most_frequent(own->second)) == word.tag ? 1 : 0;
  }
  std::vector<Floor> floors = any_class(classes);
  add(floors, {"the most frequent tag", share(right_usual, judged.size())});
  add(floors, {"each word's most frequent tag", share(right_own, judged.size())});
  return floors;
}

}  // namespace headloom::data
