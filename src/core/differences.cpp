#include "core/differences.h"

#include <string_view>

#include "core/error.h"

namespace headloom {
namespace {

// A value on one line, as TOML has it.
std::string inline_toml(const Node& value) {
  Node inner, outer, root;
  inner.value = Array{value};
  outer.value = Array{inner};  // in lists of lists tables are on one line too
  root.set("x", outer);
  const std::string text = to_toml(root);
  constexpr size_t kBefore = std::string_view("x = [[").size();
  constexpr size_t kAround = kBefore + std::string_view("]]\n").size();
  return text.substr(kBefore, text.size() - kAround);
}

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
