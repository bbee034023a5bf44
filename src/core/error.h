// Errors that a user can act on. Every message is one sentence that names the file, key, tensor or
// argument, what was found and what was expected.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace headloom {

// The work failed: exit code 1 of the command line.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The request itself is wrong (bad flag, bad config key or value): exit code 2 of the command line.
class UsageError : public Error {
 public:
  using Error::Error;
};

// Something is in the way that says nothing of the model that is trained: a place that cannot be
// written, a folder that another process holds, data that are not there.
class Obstacle : public Error {
 public:
  using Error::Error;
};

// Concatenates its arguments with operator<<.
template <typename... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

template <typename... Args>
[[noreturn]] void fail(const Args&... args) {
  throw Error(headloom::str(args...));
}

template <typename... Args>
[[noreturn]] void usage_error(const Args&... args) {
  throw UsageError(headloom::str(args...));
}

template <typename... Args>
void require(bool condition, const Args&... args) {
  if (!condition) throw Error(headloom::str(args...));
}

}  // namespace headloom
