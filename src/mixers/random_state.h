// The random generators that a computation on a device draws from.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <vector>

namespace headloom {

// PyTorch's default generators of the CPU and, where `device` is another, of `device`.
std::vector<at::Generator> default_generators(at::Device device);

// The states that they have where this is made.
class RandomState {
 public:
  explicit RandomState(at::Device device);
  void restore();

 private:
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
};

}  // namespace headloom
