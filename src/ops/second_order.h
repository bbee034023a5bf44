// The gradient of a gradient: rare, and therefore that of an operator's definition.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/autograd.h>

#include <utility>

namespace headloom::ops {

// For the backward of an operator that runs while gradients are recorded (create_graph): the
// gradients of definition(inputs) for `inputs`, undefined where one is undefined or wants none, as
// functions of the inputs and of `grad` that are differentiable again.
template <typename Definition>
torch::autograd::variable_list definition_gradients(const Definition& definition,
                                                    torch::autograd::variable_list inputs,
                                                    const at::Tensor& grad) {
  torch::autograd::variable_list wanted;
  for (at::Tensor& t : inputs) {
    if (!t.defined() || !t.requires_grad()) continue;
    t = at::alias(t);  // apart from the others: one may have been computed from another
    wanted.push_back(t);
  }
  auto found =
      torch::autograd::grad({definition(inputs)}, wanted, {grad}, std::nullopt, true, true);
  torch::autograd::variable_list out;
  size_t next = 0;
  for (const at::Tensor& t : inputs) {
    out.push_back(t.defined() && t.requires_grad() ? std::move(found[next++]) : at::Tensor());
  }
  return out;
}

}  // namespace headloom::ops
