// The processes that train one model together, each on its own share of every batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace headloom {

// This one is alone. Every function is called by all processes in the same order.
class Communicator {
 public:
  virtual ~Communicator() = default;
  // The number of this process, from 0. The first one writes the run's folder.
  virtual int64_t rank() const { return 0; }
  virtual int64_t size() const { return 1; }
  // Adds up each tensor over all processes, in place.
  virtual void sum(const std::vector<at::Tensor>& tensors) { (void)tensors; }
  // Whether it is so in any process.
  virtual bool any(bool here) { return here; }
};

}  // namespace headloom
