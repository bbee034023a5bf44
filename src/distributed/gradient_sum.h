// Sums of gradients over all processes, begun while the backward goes on.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <unordered_map>
#include <vector>

#include "distributed/parameter_shards.h"

namespace headloom {

// Parameters are dealt to buckets of about 4 MB in the reverse of their order, in which gradients
// become ready. A bucket is sent when the gradients of all its parameters are there; buckets leave
// in the same order in every process, whatever becomes ready first (Li et al. 2020, PyTorch
// Distributed, section 3.2.3).
//
// A parameter's gradient may come in several parts, as where layers that share it are computed
// again. How many parts there are is learned in the first backward, which sends everything at its
// end. What comes after a bucket has left is summed in a second turn.
//
// The last gradient of a backward is the embedding's, whose table is often the largest parameter:
// nothing would be left to compute while it is summed. So what the tokens of the processes add to
// it is exchanged as rows, where those are fewer than the table's. A table whose output weights are
// others has no other gradient, and its bucket is not sent.
//
// With ParameterShards a unit is a bucket, and each process keeps its own part of the sum. The
// first unit leaves last; another one is sent when each of its parameters has had a gradient. No
// more than two units' whole gradients are there at a time, and the first one's.
class GradientSum {
 public:
  // `group` and `shards` must outlive it. Does nothing where one process is alone.
  GradientSum(std::vector<at::Tensor> parameters, Communicator& group,
              ParameterShards* shards = nullptr);
  ~GradientSum();
  GradientSum(const GradientSum&) = delete;
  GradientSum& operator=(const GradientSum&) = delete;

  // The next backward is the last one before finish().
  void begin();
  // Takes `rows` [n, C] of the gradient of `table`, for its rows `places` [n] int64, n being the
  // same in all processes; finish() adds those of all. Returns false where the gradient had better
  // be whole.
  bool take_rows(const at::Tensor& table, const at::Tensor& places, const at::Tensor& rows);
  // Sends what is left, waits, and gives the parameters the sums as gradients. With shards their
  // parts are added to the gradients of shards->own(). A parameter without a gradient in any
  // process has none afterwards.
  void finish();
  Communicator& group() const { return group_; }

 private:
  struct Parameter {
    at::Tensor value;
    // Kept: the tensor itself only points to it. Its type differs between releases of PyTorch.
    decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
    uintptr_t hook = 0;
    size_t bucket = 0;
    int64_t offset = 0;                // in its bucket
    int64_t parts = 0, expected = -1;  // of its gradient; -1: not yet known
    bool present = false;              // whether a gradient was sent
    at::Tensor sum = {};               // or this process's part of it
  };
  struct Rows {
    size_t parameter;
    at::Tensor places, rows;
  };
  struct Bucket {
    std::vector<size_t> parameters;
    int64_t elements = 0;
    at::Tensor flat;
    std::function<void()> wait;
    bool late = false;  // a part of a gradient came after it had left, or though it was idle
    bool idle = false;  // no process had a gradient to send the last time
  };
  void add_bucket() { buckets_.emplace_back(); }
  void add_to_bucket(size_t parameter);
  void arrived(size_t parameter);
  bool ready(const Bucket& bucket) const;
  void send_next();
  // Sends nothing of an idle one, unless it is `late`.
  void send(Bucket& bucket, bool late = false);
  // Waits for the bucket's sum and adds it to those of its parameters.
  void receive(Bucket& bucket);

  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  std::unordered_map<const at::TensorImpl*, size_t> places_;  // of parameters
  std::vector<Rows> rows_;
  // Memory of buckets that have come back, by size: between the gradients that stay, the allocator
  // would find no place for it again.
  std::unordered_map<int64_t, std::vector<at::Tensor>> spare_;
  Communicator& group_;
  ParameterShards* const shards_;
  bool active_ = false;
  size_t sent_ = 0;  // buckets
};

}  // namespace headloom
