// Memory that a kernel fails to write shows as NaN.
#pragma once

#include <ATen/Context.h>

namespace headloom::test {

// Fills what ATen allocates with NaN until it goes out of scope.
struct Poison {
  Poison() { set(true); }
  ~Poison() { set(false); }
  static void set(bool on) {
    at::globalContext().setDeterministicAlgorithms(on, false);
    at::globalContext().setDeterministicFillUninitializedMemory(on);
  }
};

}  // namespace headloom::test
