// The processes that train one model together, each on its own share of every batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace headloom {

// This one is alone. Every function is called by all processes in the same order with tensors of
// the same shapes and types, in main memory. A function that talks to the others throws LostRank
// (group.h) where one of them does not answer.
class Communicator {
 public:
  virtual ~Communicator() = default;
  // The number of this process, from 0. The first one writes the run's folder.
  virtual int64_t rank() const { return 0; }
  virtual int64_t size() const { return 1; }
  // How many of them are on this one's machine, itself included, and in its control groups there.
  virtual int64_t on_this_machine() const { return 1; }
  virtual int64_t in_this_control_group() const { return 1; }
  // Adds up each tensor over all processes, in place. All get the same bits.
  virtual void sum(const std::vector<at::Tensor>& tensors) { (void)tensors; }
  // Begins the same for one contiguous tensor, which must not be touched until the function that
  // comes back has been called: it waits for the end.
  virtual std::function<void()> start_sum(const at::Tensor& tensor) {
    (void)tensor;
    return [] {};
  }
  // Begins to collect the elements of all processes' `own` in `all`, by rank. Neither may be
  // touched until the function that comes back has been called: it waits for the end. May be under
  // way while sums are, in any order to those.
  virtual std::function<void()> start_gather(const at::Tensor& own, const at::Tensor& all);
  // Begins to send `own`, contiguous, to the next process, and to receive the one before's in
  // `other`, of the same shape and type. The last process is before the first. Neither may be
  // touched until the function that comes back has been called: it waits for the end. Several may
  // be under way.
  virtual std::function<void()> start_shift(const at::Tensor& own, const at::Tensor& other);
  // Gives each contiguous tensor the values that it has in the first process.
  virtual void broadcast(const std::vector<at::Tensor>& tensors) { (void)tensors; }
  // The tensors of all processes, by rank.
  virtual std::vector<at::Tensor> gather(const at::Tensor& own) { return {own}; }
  // Seconds that this process has waited for the others so far, those of its parts included.
  virtual double waited() const { return 0; }
  // The processes of the numbers `ranks`, ascending and this one among them, as a communicator of
  // their own that lives as long as this one. All processes call this in the same order, each with
  // the ranks of its own part. Different parts have different names.
  virtual Communicator& part(const std::string& name, const std::vector<int64_t>& ranks);

  // Texts of any lengths, by rank.
  std::vector<std::string> gather_text(const std::string& own);
  // Whether it is so in any process.
  bool any(bool here);
};

}  // namespace headloom
