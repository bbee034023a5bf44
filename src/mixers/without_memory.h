// Modules built for their sizes alone.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include "mixers/nn.h"

namespace headloom {

// While one lives on this thread, every tensor that is made is on PyTorch's meta device: it has a
// shape and a type, but no memory and no values. What is built then can be counted, whatever its
// size, and never runs.
class WithoutMemory {
 public:
  WithoutMemory();
  ~WithoutMemory();
  WithoutMemory(const WithoutMemory&) = delete;
  WithoutMemory& operator=(const WithoutMemory&) = delete;
  // Whether one lives on this thread.
  static bool on();

 private:
  // Restores the thread's keys when all is over: in PyTorch 2.11 the guard of the meta device
  // leaves a part of its key behind.
  const c10::impl::ForceDispatchKeyGuard before_;
  // The meta device's kernels come before every other's, and BackendSelect, which would choose by
  // the device that is asked for alone, is left out.
  const c10::impl::IncludeDispatchKeyGuard meta_{c10::DispatchKeySet(c10::DispatchKey::Meta)};
  const c10::impl::ExcludeDispatchKeyGuard select_{c10::DispatchKey::BackendSelect};
};

double parameter_count(const torch::nn::Module& module);

// Beyond it, sums of sizes might overflow.
constexpr double kMostParameters = 1e18;

// Throws UsageError for a module of more parameters than kMostParameters.
void check_countable(const torch::nn::Module& module);
// The same error where `error` says that the size of one tensor overflowed; otherwise returns.
void check_overflow(const c10::Error& error);

// What `build` makes, without memory. Throws UsageError where one of its tensors is larger than any
// memory can be.
template <typename Build>
auto built_without_memory(const Build& build) {
  const WithoutMemory guard;
  try {
    return build();
  } catch (const c10::Error& error) {
    check_overflow(error);
    throw;
  }
}

// Throws UsageError where the weights of this module, which was built without memory, do not fit
// this process. `what` is for the message: "the model".
void check_weights_fit(const torch::nn::Module& module, const char* what);

}  // namespace headloom
