#include "distributed/gradient_sum.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace headloom {

// Small enough to be on its way while the backward goes on, large enough for the network.
constexpr int64_t kBucketElements = int64_t{1} << 20;

GradientSum::GradientSum(std::vector<at::Tensor> parameters, Communicator& group,
                         ParameterShards* shards)
    : group_(group), shards_(shards) {
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
    places_[parameters[i].unsafeGetTensorImpl()] = i;
    parameters_.push_back(std::move(p));
  }
  if (shards != nullptr) {
    for (size_t unit = shards->size(); unit-- > 0;) {
      add_bucket();
      for (const at::Tensor& p : shards->parameters(unit)) {
        const size_t i = places_.at(p.unsafeGetTensorImpl());
        if (unit > 0) parameters_[i].expected = 1;
        add_to_bucket(i);
      }
    }
    return;
  }
  for (size_t i = parameters_.size(); i-- > 0;) {
    const bool same_type =
        !buckets_.empty() && parameters_[buckets_.back().parameters[0]].value.scalar_type() ==
                                 parameters_[i].value.scalar_type();
    const int64_t largest = std::max(parameters_[i].value.numel(),
                                     buckets_.empty() ? 0 : buckets_.back().elements);
    if (!same_type || largest >= kBucketElements) add_bucket();
    add_to_bucket(i);
  }
}

GradientSum::~GradientSum() {
  for (const Parameter& p : parameters_) p.accumulator->del_post_hook(p.hook);
}

void GradientSum::add_to_bucket(size_t parameter) {
  Parameter& p = parameters_[parameter];
  Bucket& bucket = buckets_.back();
  p.bucket = buckets_.size() - 1;
  p.offset = bucket.elements;
  bucket.elements += p.value.numel();
  bucket.parameters.push_back(parameter);
}

void GradientSum::begin() {
  active_ = true;
  sent_ = 0;
  for (Parameter& p : parameters_) {
    p.parts = 0;
    p.present = false;
  }
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
  while (sent_ < buckets_.size() && ready(buckets_[sent_])) send_next();
}

void GradientSum::send_next() {
  if (shards_ != nullptr && sent_ > 0) receive(buckets_[sent_ - 1]);
  send(buckets_[sent_++]);
}

bool GradientSum::take_rows(const at::Tensor& table, const at::Tensor& places,
                            const at::Tensor& rows) {
  const auto found = places_.find(table.unsafeGetTensorImpl());
  if (!active_ || shards_ != nullptr || found == places_.end()) return false;
  if (places.numel() * group_.size() >= table.size(0)) return false;
  rows_.push_back({.parameter = found->second, .places = places, .rows = rows.contiguous()});
  return true;
}

void GradientSum::send(Bucket& bucket, bool late) {
  const at::NoGradGuard no_grad;
  if (bucket.idle && !late) {
    bucket.late = std::any_of(bucket.parameters.begin(), bucket.parameters.end(), [&](size_t i) {
      return parameters_[i].value.grad().defined();
    });
    return;
  }
  std::vector<at::Tensor>& spare = spare_[bucket.elements];
  if (spare.empty()) {
    const auto options = parameters_[bucket.parameters[0]].value.options();
    bucket.flat = at::empty({bucket.elements}, options.requires_grad(false));
  } else {
    bucket.flat = std::move(spare.back());
    spare.pop_back();
  }
  for (const size_t i : bucket.parameters) {
    Parameter& p = parameters_[i];
    const at::Tensor place = bucket.flat.narrow(0, p.offset, p.value.numel()).view(p.value.sizes());
    if (p.value.grad().defined()) {
      place.copy_(p.value.grad());
      p.present = true;
      p.value.mutable_grad() = at::Tensor();
    } else {
      place.zero_();
    }
  }
  bucket.wait = group_.start_sum(bucket.flat);
}

void GradientSum::receive(Bucket& bucket) {
  if (!bucket.wait) return;
  const at::NoGradGuard no_grad;
  bucket.wait();
  bucket.wait = nullptr;
  for (const size_t i : bucket.parameters) {
    Parameter& p = parameters_[i];
    at::Tensor sum = bucket.flat.narrow(0, p.offset, p.value.numel()).view(p.value.sizes());
    if (shards_ != nullptr) {
      // What came before: of an earlier backward, or of this one.
      const at::Tensor earlier = shards_->own(p.value).grad();
      const at::Tensor before = earlier.defined() ? earlier : p.sum;
      sum = shards_->part_of(sum, group_.rank());
      if (before.defined()) {
        before.add_(sum);
      } else {
        p.sum = shards_->gradient_memory(p.value).copy_(sum);
      }
    } else {
      p.sum = p.sum.defined() ? p.sum.add_(sum) : sum;
    }
  }
  if (shards_ != nullptr) spare_[bucket.elements].push_back(bucket.flat);
  bucket.flat = at::Tensor();
}

void GradientSum::finish() {
  if (parameters_.empty()) return;
  const at::NoGradGuard no_grad;
  active_ = false;
  while (sent_ < buckets_.size()) send_next();
  // Of each parameter in how many processes it has a gradient, of each bucket where it was late.
  const auto count = static_cast<int64_t>(parameters_.size());
  const at::Tensor facts = at::zeros({count + static_cast<int64_t>(buckets_.size())}, at::kLong);
  int64_t* const fact = facts.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    fact[i] = p.present || p.value.grad().defined() ? 1 : 0;
    if (shards_ == nullptr) p.expected = std::max(p.expected, p.parts);
  }
  for (size_t b = 0; b < buckets_.size(); ++b) fact[parameters_.size() + b] = buckets_[b].late;
  group_.sum({facts});
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    receive(bucket);
    if (fact[parameters_.size() + b] != 0) {
      send(bucket, /*late=*/true);
      receive(bucket);
    }
    bucket.idle = shards_ == nullptr &&
                  std::all_of(bucket.parameters.begin(), bucket.parameters.end(),
                              [&](size_t i) { return fact[i] == 0; });
  }
  for (const Rows& own : std::exchange(rows_, {})) {
    Parameter& p = parameters_[own.parameter];
    if (!p.sum.defined()) p.sum = at::zeros_like(p.value);
    const std::vector<at::Tensor> places = group_.gather(own.places);
    const std::vector<at::Tensor> rows = group_.gather(own.rows);
    for (size_t r = 0; r < rows.size(); ++r) p.sum.index_add_(0, places[r], rows[r]);
    fact[own.parameter] = 1;
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    const at::Tensor sum = std::exchange(p.sum, at::Tensor());
    if (fact[i] == 0 || !sum.defined()) continue;
    at::Tensor& target = shards_ != nullptr ? shards_->own(p.value) : p.value;
    target.mutable_grad() = sum;
  }
}

}  // namespace headloom
