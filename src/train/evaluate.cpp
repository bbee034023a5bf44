#include "train/evaluate.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

namespace headloom {

Autocast::Autocast(const std::string& dtype) : on_(dtype == "bfloat16") {
  if (!on_) return;
  at::autocast::increment_nesting();
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, true);
}

Autocast::~Autocast() {
  if (!on_) return;
  at::autocast::set_autocast_enabled(at::kCPU, false);
  // The cast copies of the weights are stale once the optimiser has stepped.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

ModelInput model_input(const data::Batch& batch) {
  return {.tokens = batch.inputs,
          .lengths = batch.lengths,
          .documents = batch.documents,
          .source = batch.source,
          .source_lengths = batch.source_lengths,
          .images = batch.images};
}

BatchLoss batch_loss(Model& model, const data::Batch& batch, Observed* observed) {
  ModelInput input = model_input(batch);
  input.observed = observed;
  Tensor hidden = model.hidden(input).flatten(0, -2);
  Tensor targets = batch.targets.flatten();
  const Tensor kept = targets.ne(data::kIgnore).nonzero().squeeze(1);
  const int64_t count = kept.numel();
  if (count < targets.numel()) {
    hidden = hidden.index_select(0, kept);
    targets = targets.index_select(0, kept);
  }
  const Tensor logits = model.logits(hidden).to(at::kFloat);
  const Tensor sum = at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum);
  return {.sum = sum, .targets = count, .logits = logits};
}

Evaluation evaluate(Model& model, const data::Task& task, int64_t sequences, int64_t batch) {
  at::NoGradGuard no_grad;
  const bool training = model.is_training();
  model.eval();
  const int64_t total = std::min(sequences, task.eval_sequences());
  double loss = 0, right = 0;
  Evaluation out;
  for (int64_t first = 0; first < total; first += batch) {
    const data::Batch data = task.eval_batch(first, std::min(batch, total - first));
    const BatchLoss result = batch_loss(model, data);
    loss += result.sum.item<double>();
    out.tokens += result.targets;
    const Tensor wanted = data.targets.ne(data::kIgnore);
    const Tensor hit = at::ones_like(wanted);
    hit.masked_scatter_(wanted, result.logits.argmax(-1).eq(data.targets.masked_select(wanted)));
    right += task.exact_match() ? hit.flatten(1).all(1).sum().item<double>()
                                : hit.logical_and(wanted).sum().item<double>();
    out.sequences += data.targets.size(0);
  }
  out.loss = loss / static_cast<double>(std::max<int64_t>(out.tokens, 1));
  out.accuracy = right / static_cast<double>(
                             std::max<int64_t>(task.exact_match() ? out.sequences : out.tokens, 1));
  model.train(training);
  return out;
}

}  // namespace headloom
