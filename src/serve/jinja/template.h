// Jinja templates as chat models bring them along: a subset of the language, interpreted. What is
// not supported is an error that names it. Free of torch.
#pragma once

#include <memory>
#include <string>

#include "serve/jinja/value.h"

namespace headloom::jinja {

// There are: {{ }}, {# #}, if, for (with loop, else, a condition, break and continue), set (also of
// a namespace's attributes, and as a block), macro, filter, raw, generation; Python's literals,
// operators, slices and the common methods of its texts, lists and dictionaries; Jinja's common
// filters and tests; range(), dict() and namespace(). White space is treated as transformers sets
// it: trim_blocks and lstrip_blocks.
class Template {
 public:
  // Throws TemplateError naming the line and what stands there.
  explicit Template(const std::string& source);
  ~Template();
  Template(Template&&) noexcept;

  // With `names` beside the functions above. Throws TemplateError naming the line; Raised comes
  // through as it is. Work and memory are bounded (Budget). Safe to call from several threads.
  std::string render(const Dict& names) const;

 private:
  struct Tree;
  std::unique_ptr<const Tree> tree_;
};

}  // namespace headloom::jinja
