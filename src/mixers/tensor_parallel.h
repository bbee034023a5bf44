// Tensor parallelism (Shoeybi et al. 2019, Megatron-LM, section 3): processes share out the heads
// of every token mixer and the hidden units of every channel mixer.
//
// Each process builds its mixers with its own heads and hidden units alone. They read all of x, and
// what they write is added up over the processes: one sum a mixer in the forward and one in the
// backward. A parameter that is not cut is the same in all processes, and its gradient is the sum
// of theirs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace headloom {

using at::Tensor;

// This process's place among those that share a model's layers.
struct TensorParallel {
  int64_t size = 1;
  int64_t rank = 0;
  // Adds up a contiguous float tensor over the processes, in place.
  std::function<void(const Tensor&)> sum;
};

// How a parameter is cut. Its dimension `dim` consists of segments, and every process has an equal
// part of each: `segments` are the sizes of these parts.
struct ParameterCut {
  int64_t dim = 0;
  std::vector<int64_t> segments;

  // Process `rank`'s part, of `size`, of a whole parameter.
  Tensor part_of(const Tensor& whole, int64_t rank, int64_t size) const;
  // The whole of all processes' parts.
  Tensor joined(const std::vector<Tensor>& parts) const;
  // The whole parameter's shape.
  std::vector<int64_t> whole_shape(at::IntArrayRef own, int64_t size) const;
};

// x as the processes read it: its gradient is the sum of theirs. x itself where `among` is null.
Tensor read_by_all(const Tensor& x, const TensorParallel* among);
// The sum of what the processes wrote. Its gradient goes to each of them.
Tensor written_by_all(const Tensor& own, const TensorParallel* among);

}  // namespace headloom
