// What an expression that must fail says.
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

#include "core/error.h"

namespace headloom::test {

// The message of the `Exception` that `f` ends with, "" (and a failure) where it ends otherwise.
template <typename Exception = Error, typename F>
std::string message_of(const F& f) {
  try {
    f();
  } catch (const Exception& error) {
    const std::string message = error.what();
    EXPECT_FALSE(message.empty());
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no exception";
  return "";
}

// That `run` throws a c10::Error of one sentence which begins with "op: " and has `part` in it.
template <typename F>
void expect_refused(const std::string& op, const std::string& part, const F& run) {
  try {
    run();
    ADD_FAILURE() << "accepted: " << part;
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    EXPECT_EQ(message.rfind(op + ": ", 0), 0) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_EQ(message.back(), '.') << message;
  }
}

inline ::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "'" << part << "' is not in: " << text;
}

}  // namespace headloom::test
