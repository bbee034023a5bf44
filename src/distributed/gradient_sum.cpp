#include "distributed/gradient_sum.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace headloom {

// Small enough to be on its way while the backward goes on, large enough for the network.
constexpr int64_t kBucketElements = int64_t{1} << 20;

GradientSum::GradientSum(std::vector<at::Tensor> parameters, Communicator& group) : group_(group) {
  if (group.size() == 1) return;
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter p{.value = parameters[i],
                .accumulator = torch::autograd::impl::grad_accumulator(parameters[i])};
    p.hook = p.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [this, i](const torch::autograd::variable_list& outputs,
                  const torch::autograd::variable_list&) {
          arrived(i);
          return outputs;
        }));
    parameters_.push_back(std::move(p));
  }
  for (size_t i = parameters_.size(); i-- > 0;) {
    Parameter& p = parameters_[i];
    const bool same_type =
        !buckets_.empty() &&
        parameters_[buckets_.back().parameters[0]].value.scalar_type() == p.value.scalar_type();
    if (!same_type || buckets_.back().elements >= kBucketElements) buckets_.emplace_back();
    Bucket& bucket = buckets_.back();
    p.bucket = buckets_.size() - 1;
    p.offset = bucket.elements;
    bucket.elements += p.value.numel();
    bucket.parameters.push_back(i);
  }
}

GradientSum::~GradientSum() {
  for (const Parameter& p : parameters_) p.accumulator->del_post_hook(p.hook);
}

void GradientSum::begin() {
  active_ = true;
  sent_ = 0;
  for (Parameter& p : parameters_) p.parts = 0;
  for (Bucket& bucket : buckets_) bucket.late = false;
}

bool GradientSum::ready(const Bucket& bucket) const {
  return std::all_of(bucket.parameters.begin(), bucket.parameters.end(), [&](size_t i) {
    return parameters_[i].expected >= 0 && parameters_[i].parts >= parameters_[i].expected;
  });
}

void GradientSum::arrived(size_t parameter) {
  if (!active_) return;
  Parameter& p = parameters_[parameter];
  ++p.parts;
  if (p.bucket < sent_) buckets_[p.bucket].late = true;
  while (sent_ < buckets_.size() && ready(buckets_[sent_])) send(buckets_[sent_++]);
}

void GradientSum::send(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  const auto options = parameters_[bucket.parameters[0]].value.options();
  bucket.flat = at::empty({bucket.elements}, options.requires_grad(false));
  for (const size_t i : bucket.parameters) {
    const Parameter& p = parameters_[i];
    const at::Tensor place = bucket.flat.narrow(0, p.offset, p.value.numel()).view(p.value.sizes());
    if (p.value.grad().defined()) {
      place.copy_(p.value.grad());
    } else {
      place.zero_();
    }
  }
  bucket.wait = group_.start_sum(bucket.flat);
}

void GradientSum::finish() {
  if (parameters_.empty()) return;
  const at::NoGradGuard no_grad;
  active_ = false;
  while (sent_ < buckets_.size()) send(buckets_[sent_++]);
  // Of each parameter in how many processes it has a gradient, of each bucket where it was late.
  const auto count = static_cast<int64_t>(parameters_.size());
  const at::Tensor facts = at::zeros({count + static_cast<int64_t>(buckets_.size())}, at::kLong);
  int64_t* const fact = facts.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    fact[i] = p.value.grad().defined() ? 1 : 0;
    p.expected = std::max(p.expected, p.parts);
  }
  for (size_t b = 0; b < buckets_.size(); ++b) fact[parameters_.size() + b] = buckets_[b].late;
  group_.sum({facts});
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    bucket.wait();
    if (fact[parameters_.size() + b] > 0) {
      send(bucket);
      bucket.wait();
    }
    for (const size_t i : bucket.parameters) {
      const Parameter& p = parameters_[i];
      if (fact[i] == 0) continue;
      p.value.mutable_grad() =
          bucket.flat.narrow(0, p.offset, p.value.numel()).view(p.value.sizes());
    }
    bucket.flat = at::Tensor();
    bucket.wait = nullptr;
  }
}

}  // namespace headloom
