#include "data/floors.h"

#include <unordered_map>

namespace headloom::data {

void add_floor(std::vector<Floor>& floors, const std::string& name, double accuracy) {
  if (accuracy > floors.front().accuracy) floors.push_back({name, accuracy});
  std::sort(floors.begin(), floors.end(),
            [](const Floor& a, const Floor& b) { return a.accuracy < b.accuracy; });
}

void add_tag_floors(std::vector<Floor>& floors, const std::vector<TaggedWord>& trained,
                    const std::vector<TaggedWord>& judged) {
  const auto tags_of = [](const std::vector<TaggedWord>& words) {
    std::vector<int64_t> tags;
    for (const TaggedWord& word : words) tags.push_back(word.tag);
    return tags;
  };
  const std::vector<TaggedWord>& known = trained.empty() ? judged : trained;
  add_floor(floors, "the most frequent tag", usual_share(tags_of(known), tags_of(judged)));
  std::unordered_map<uint64_t, std::vector<int64_t>> tags;  // of each word
  for (const TaggedWord& word : known) tags[word.word].push_back(word.tag);
  std::unordered_map<uint64_t, int64_t> own;
  for (const auto& [word, all] : tags) own[word] = most_frequent(all);
  const int64_t usual = most_frequent(tags_of(known));
  const auto right = std::count_if(judged.begin(), judged.end(), [&](const TaggedWord& word) {
    const auto found = own.find(word.word);
    return (found == own.end() ? usual : found->second) == word.tag;
  });
  add_floor(floors, "each word's most frequent tag",
            static_cast<double>(right) / static_cast<double>(std::max<size_t>(1, judged.size())));
}

}  // namespace headloom::data
