#include "core/problem.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/error.h"
#include "core/memory.h"
#include "core/text.h"

namespace headloom {
namespace {

// `asked` is 0 where it is not known.
std::string out_of_memory(double asked) {
  const MemoryLimit limit = memory_limit();
  return str(
      "out of memory: an allocation", asked > 0 ? " of " + human_bytes(asked) : "", " failed",
      std::isfinite(limit.bytes) ? str(", and this process can have ", human_bytes(limit.bytes),
                                       " in all (", limit.name, ")")
                                 : "",
      "; a smaller batch, length or model needs less.");
}

}  // namespace

std::string problem_of(const std::exception& error) {
  if (const auto* known = dynamic_cast<const OutOfMemory*>(&error)) {
    return out_of_memory(static_cast<double>(known->bytes()));
  }
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return out_of_memory(0);
  std::string text = error.what();
  const std::string asked = "you tried to allocate ";  // PyTorch's allocator
  if (const size_t at = text.find(asked); at != std::string::npos) {
    return out_of_memory(std::strtod(text.c_str() + at + asked.size(), nullptr));
  }
  for (const char* stack : {"\nException raised from ", "\nframe #0: "}) {
    text.resize(std::min(text.find(stack), text.size()));
  }
  return text;
}

}  // namespace headloom
