#include "core/differences.h"

#include "core/error.h"

namespace headloom {
namespace {

void compare(const Node* before, const Node* after, const std::string& key,
             std::vector<Difference>& out) {
  if (before != nullptr && after != nullptr) {
    if (before->is_table() && after->is_table()) {
      const std::string start = key.empty() ? "" : key + ".";
      for (const auto& [name, child] : before->table()) {
        compare(&child, after->find(name), start + name, out);
      }
      for (const auto& [name, child] : after->table()) {
        if (before->find(name) == nullptr) compare(nullptr, &child, start + name, out);
      }
      return;
    }
    if (before->is_table_array() && after->is_table_array() &&
        before->array().size() == after->array().size()) {
      for (size_t i = 0; i < before->array().size(); ++i) {
        compare(&before->array()[i], &after->array()[i], str(key, ".", i), out);
      }
      return;
    }
  }
  const std::string x = before != nullptr ? inline_toml(*before) : "";
  const std::string y = after != nullptr ? inline_toml(*after) : "";
  if (x != y) out.push_back({key, x, y});
}

}  // namespace

std::string Difference::was() const {
  return before.empty() ? str("no '", key, "'") : str("'", key, "' = ", before);
}

std::string Difference::is() const { return Difference{key, after, ""}.was(); }

std::vector<Difference> differences(const Node& before, const Node& after) {
  std::vector<Difference> out;
  compare(&before, &after, "", out);
  return out;
}

}  // namespace headloom
