#include "mixers/tensor_parallel.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace headloom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// In float32, so that bfloat16 rounds once.
Tensor summed(const Tensor& own, const TensorParallel& among) {
  const auto wide = own.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor sum = own.detach().to(wide, /*non_blocking=*/false, /*copy=*/true).contiguous();
  among.sum(sum);
  return sum.to(own.scalar_type());
}

struct ReadByAll : torch::autograd::Function<ReadByAll> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const TensorParallel* among) {
    context->saved_data["among"] = reinterpret_cast<int64_t>(among);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto* among =
        reinterpret_cast<const TensorParallel*>(context->saved_data["among"].toInt());
    return {summed(gradients[0], *among), Tensor()};
  }
};

struct WrittenByAll : torch::autograd::Function<WrittenByAll> {
  static Tensor forward(AutogradContext*, const Tensor& own, const TensorParallel* among) {
    return summed(own, *among);
  }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    return {gradients[0], Tensor()};
  }
};

}  // namespace

Tensor ParameterCut::part_of(const Tensor& whole, int64_t rank, int64_t size) const {
  std::vector<Tensor> parts;
  int64_t begin = 0;  // of the segment, in the whole
  for (const int64_t segment : segments) {
    parts.push_back(whole.narrow(dim, begin + rank * segment, segment));
    begin += size * segment;
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, dim);
}

Tensor ParameterCut::joined(const std::vector<Tensor>& parts) const {
  std::vector<Tensor> out;
  int64_t begin = 0;
  for (const int64_t segment : segments) {
    for (const Tensor& part : parts) out.push_back(part.narrow(dim, begin, segment));
    begin += segment;
  }
  return at::cat(out, dim);
}

std::vector<int64_t> ParameterCut::whole_shape(at::IntArrayRef own, int64_t size) const {
  std::vector<int64_t> shape = own.vec();
  shape[static_cast<size_t>(dim)] *= size;
  return shape;
}

Tensor read_by_all(const Tensor& x, const TensorParallel* among) {
  return among == nullptr || !x.defined() ? x : ReadByAll::apply(x, among);
}

Tensor written_by_all(const Tensor& own, const TensorParallel* among) {
  return among == nullptr ? own : WrittenByAll::apply(own, among);
}

}  // namespace headloom
