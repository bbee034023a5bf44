// Parameters of which each process keeps its own part (Rajbhandari et al. 2020, ZeRO).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <unordered_map>
#include <vector>

#include "distributed/communicator.h"

namespace headloom {

// The elements of `whole` that process `rank` of `size` owns, in a row: n rank / size up to
// n (rank + 1) / size.
at::Tensor owned_elements(const at::Tensor& whole, int64_t rank, int64_t size);

// Process r of N owns the elements [n r / N, n (r + 1) / N) of every parameter of n elements. Those
// are kept beside the parameter, and an optimiser updates them. The parameters of a unit get the
// values of all parts together.
//
// A released parameter has a shape but no memory: reading its elements is an error of the program.
class ParameterShards {
 public:
  // `units` are lists of parameters, all of one type. One that shares its memory with other tensors
  // gets memory of its own. With `frees` parameters are released while nobody needs them, else they
  // stay whole. `group` must outlive this.
  ParameterShards(std::vector<std::vector<at::Tensor>> units, bool frees, Communicator& group);

  Communicator& group() const { return group_; }
  size_t size() const { return units_.size(); }
  const std::vector<at::Tensor>& parameters(size_t unit) const { return units_[unit].parameters; }
  // The elements that process `rank` owns of `whole`, in a row.
  at::Tensor part_of(const at::Tensor& whole, int64_t rank) const;
  bool has(const at::Tensor& parameter) const;
  // This process's part of `parameter`. Its grad() is that part of the gradient.
  at::Tensor& own(const at::Tensor& parameter);
  // Memory for that gradient, the same at every step.
  at::Tensor gradient_memory(const at::Tensor& parameter);
  // The place of the part's first element in the parameter.
  int64_t first_of(const at::Tensor& parameter) const;

  bool frees() const { return frees_; }
  // Copies this process's parts out of the whole parameters, and releases them where this frees.
  void take();
  // Frees the memory of the unit's parameters, or of all.
  void release(size_t unit);
  void release();
  // Begins to collect the values of a unit. All processes ask for the same units in the same order.
  void request(size_t unit);
  // Gives the unit's parameters their whole values, with memory where they had none.
  void gather(size_t unit);
  bool released(size_t unit) const { return units_[unit].released; }
  // gather() of all units that are not released.
  void refresh();

 private:
  struct Unit {
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> own;  // views of `joined`
    at::Tensor joined;            // all own parts, padded to the longest of all processes
    at::Tensor gradients;         // as `joined`; undefined before the first gradient
    at::Tensor all;               // [N longest], what is coming, by process
    std::function<void()> coming;
    bool released = false;
  };
  void free(Unit& unit, bool keep);

  std::vector<Unit> units_;
  const bool frees_;
  Communicator& group_;
  // Memory of released parameters and of what has come, by size. Units of the same sizes take turns
  // with it: between activations, which stay, the allocator would find no place for it again.
  std::unordered_map<size_t, std::vector<at::DataPtr>> spare_;
  std::unordered_map<int64_t, std::vector<at::Tensor>> spare_all_;
  std::unordered_map<const at::TensorImpl*, std::pair<size_t, size_t>> places_;
};

}  // namespace headloom
