// What went wrong, for people.
#pragma once

#include <cstddef>
#include <exception>
#include <new>
#include <string>

namespace headloom {

// A std::bad_alloc that knows how much was asked for.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes) : bytes_(bytes) {}
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
};

// The sentence to show for an exception of any kind: its own text without the stack that PyTorch
// appends. An allocation that failed becomes a sentence with the size asked for and the limit.
std::string problem_of(const std::exception& error);

}  // namespace headloom
