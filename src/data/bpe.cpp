#include "data/bpe.h"

#include <queue>

#include "data/unicode.h"

namespace headloom::data {

std::vector<int32_t> BytePairs::symbols(std::string_view word) const {
  std::vector<int32_t> out;
  bool after_unknown = false;
  for (size_t at = 0; at < word.size();) {
    const std::string_view character = word.substr(at, code_point(word.substr(at)).length);
    at += character.size();
    const auto found = vocabulary.find(std::string(character));
    if (found != vocabulary.end()) {
      out.push_back(found->second);
      after_unknown = false;
      continue;
    }
    if (byte_fallback) {
      std::vector<int32_t> bytes;
      for (const char c : character) {
        constexpr const char* kDigits = "0123456789ABCDEF";
        const auto byte = static_cast<unsigned char>(c);
        const auto token =
            vocabulary.find(std::string("<0x") + kDigits[byte >> 4] + kDigits[byte & 15] + '>');
        if (token != vocabulary.end()) bytes.push_back(token->second);
      }
      if (bytes.size() == character.size()) {
        out.insert(out.end(), bytes.begin(), bytes.end());
        after_unknown = false;
        continue;
      }
    }
    if (!unknown) continue;
    if (!(fuse_unknown && after_unknown)) out.push_back(*unknown);
    after_unknown = true;
  }
  return out;
}

void BytePairs::encode(std::string_view word, std::vector<int32_t>& out) const {
  if (whole_words) {
    const auto found = vocabulary.find(std::string(word));
    if (found != vocabulary.end()) {
      out.push_back(found->second);
      return;
    }
  }
  // A list linked through indices: a merge extends the left symbol and drops the right one.
  struct Symbol {
    int32_t id = 0;
    int32_t before = 0, after = 0;  // -1: none
  };
  std::vector<Symbol> list;
  for (const int32_t id : symbols(word)) {
    const auto place = static_cast<int32_t>(list.size());
    list.push_back({id, place - 1, place + 1});
  }
  if (list.empty()) return;
  list.back().after = -1;

  struct Candidate {
    int32_t rank, left, id;
    bool operator<(const Candidate& other) const {  // the queue gives the greatest first
      return std::pair(rank, left) > std::pair(other.rank, other.left);
    }
  };
  std::priority_queue<Candidate> queue;
  const auto at = [&](int32_t i) -> Symbol& { return list[static_cast<size_t>(i)]; };
  const auto rule = [&](int32_t left) {
    const int32_t right = at(left).after;
    return right < 0 ? merges.end() : merges.find(key(at(left).id, at(right).id));
  };
  const auto consider = [&](int32_t left) {
    const auto merge = rule(left);
    if (merge != merges.end()) queue.push({merge->second.rank, left, merge->second.id});
  };
  for (int32_t i = 0; i + 1 < static_cast<int32_t>(list.size()); ++i) consider(i);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    if (at(best.left).id < 0) continue;  // was merged away
    const auto merge = rule(best.left);  // either side may have changed since
    if (merge == merges.end() || merge->second.id != best.id) continue;
    Symbol& left = at(best.left);
    Symbol& right = at(left.after);
    left.id = best.id;
    right.id = -1;
    left.after = right.after;
    if (left.after >= 0) at(left.after).before = best.left;
    if (left.before >= 0) consider(left.before);
    consider(best.left);
  }
  for (int32_t i = 0; i >= 0; i = at(i).after) out.push_back(at(i).id);
}

}  // namespace headloom::data
