#include "data/floors.h"

#include <algorithm>
#include <map>

namespace headloom::data {
namespace {

int64_t most_frequent(const std::vector<int64_t>& counts) {
  return std::max_element(counts.begin(), counts.end()) - counts.begin();
}

struct TaggedWord {
  std::vector<int64_t> tokens;
  int64_t tag;
};

std::vector<TaggedWord> tagged_words(const std::vector<Sample>& samples) {
  std::vector<TaggedWord> words;
  for (const Sample& sample : samples) {
    bool inside = false;  // what comes before the first tag, a start token, is of no word
    for (size_t i = 0; i < sample.inputs.size(); ++i) {
      if (sample.targets[i] != kIgnore) {
        words.push_back({.tokens = {}, .tag = sample.targets[i]});
        inside = true;
      }
      if (inside) words.back().tokens.push_back(sample.inputs[i]);
    }
  }
  return words;
}

// Adds `floor` in its place, where it is above what guessing any class reaches.
void add(std::vector<Floor>& floors, const Floor& floor) {
  if (floor.accuracy > floors.front().accuracy) floors.push_back(floor);
  std::sort(floors.begin(), floors.end(),
            [](const Floor& a, const Floor& b) { return a.accuracy < b.accuracy; });
}

std::vector<Floor> any_class(int64_t classes) {
  return {{"any class", 1.0 / static_cast<double>(classes)}};
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
  add(floors,
      {"the most frequent class", static_cast<double>(right) / static_cast<double>(judged.size())});
  return floors;
}

std::vector<Floor> tag_floors(int64_t classes, const std::vector<Sample>& trained,
                              const std::vector<Sample>& judged) {
  const std::vector<TaggedWord> known = tagged_words(trained.empty() ? judged : trained);
  const std::vector<TaggedWord> asked = tagged_words(judged);
  std::vector<int64_t> of_all(static_cast<size_t>(classes));
  std::map<std::vector<int64_t>, std::vector<int64_t>> of_word;
  for (const TaggedWord& word : known) {
    ++of_all[static_cast<size_t>(word.tag)];
    std::vector<int64_t>& counts = of_word[word.tokens];
    counts.resize(static_cast<size_t>(classes));
    ++counts[static_cast<size_t>(word.tag)];
  }
  const int64_t usual = most_frequent(of_all);
  int64_t right_usual = 0, right_own = 0;
  for (const TaggedWord& word : asked) {
    const auto own = of_word.find(word.tokens);
    right_usual += usual == word.tag ? 1 : 0;
    right_own += (own == of_word.end() ? usual : most_frequent(own->second)) == word.tag ? 1 : 0;
  }
  const auto share = [&](int64_t right) {
    return static_cast<double>(right) /
           static_cast<double>(std::max<int64_t>(1, std::ssize(asked)));
  };
  std::vector<Floor> floors = any_class(classes);
  add(floors, {"the most frequent tag", share(right_usual)});
  add(floors, {"each word's most frequent tag", share(right_own)});
  return floors;
}

}  // namespace headloom::data
