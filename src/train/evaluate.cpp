#include "train/evaluate.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "train/device.h"

namespace headloom {

ModelInput model_input(const data::Batch& batch) {
  return {.tokens = batch.inputs,
          .lengths = batch.lengths,
          .documents = batch.documents,
          .segments = batch.segments,
          .source = batch.source,
          .source_lengths = batch.source_lengths,
          .images = batch.images};
}

namespace {

// Of hidden states [..., C] and their targets [...].
BatchLoss loss_of(const Model& model, Tensor hidden, Tensor targets) {
  hidden = hidden.flatten(0, -2);
  targets = targets.flatten();
  const Tensor kept = targets.ne(data::kIgnore).nonzero().squeeze(1);
  const int64_t count = kept.numel();
  if (count < targets.numel()) {
    hidden = hidden.index_select(0, kept);
    targets = targets.index_select(0, kept);
  }
  ScoreLoss loss = model.loss(hidden, targets);
  return {.sum = std::move(loss.sum), .targets = count, .best = std::move(loss.best)};
}

// Of the scores of begins and ends [2 B, T], -inf outside of the context.
Tensor best_spans(const Tensor& logits) {
  const Tensor ends = logits.unflatten(0, {-1, 2});
  const int64_t length = ends.size(2);
  const Tensor both = ends.select(1, 0).unsqueeze(2) + ends.select(1, 1).unsqueeze(1);
  const Tensor backwards = at::ones({length, length}, both.options().dtype(at::kBool)).tril(-1);
  const Tensor best =
      both.masked_fill(backwards, -std::numeric_limits<float>::infinity()).flatten(1).argmax(1);
  return at::stack({best.div(length, "floor"), best.remainder(length)}, 1).flatten();
}

// Of scores [B, T, 2] and the first and last positions of the answers [B, 2]: a cross-entropy over
// the positions of each `context` for the begin, and one for the end.
BatchLoss span_loss(const Tensor& scores, const Tensor& context, const Tensor& targets) {
  const Tensor outside = context.logical_not().unsqueeze(1);
  const Tensor logits = scores.to(at::kFloat)
                            .transpose(1, 2)
                            .masked_fill(outside, -std::numeric_limits<float>::infinity())
                            .flatten(0, 1);
  const Tensor sum = at::cross_entropy_loss(logits, targets.flatten(), {}, at::Reduction::Sum);
  const bool recorded = at::GradMode::is_enabled();
  return {.sum = sum, .targets = targets.numel(), .best = recorded ? Tensor() : best_spans(logits)};
}

// The decoder that reads `task` in pieces.
Decoder& reader(Model& model, const data::Task& task) {
  auto* decoder = dynamic_cast<Decoder*>(&model);
  if (decoder == nullptr || task.goal() != data::Goal::next_token) {
    usage_error("a model of kind \"", model.config().kind,
                "\" reads its input at once, expected a decoder where it is read in pieces.");
  }
  if (!decoder->stacks()[0]->stateful()) {
    usage_error(
        "the model has a token mixer without a decoding state, expected mixers that have "
        "one where a text is read in pieces.");
  }
  return *decoder;
}

// Losses and right answers of the sequences read so far, each with what it is divided by.
class Ratio {
 public:
  void add(double value, double count) {
    values_.push_back(value);
    counts_.push_back(count);
    value_ += value;
    count_ += count;
  }
  double mean() const { return value_ / std::max(count_, 1.0); }
  double standard_error() const {
    const double n = static_cast<double>(values_.size());
    if (n < 2 || count_ <= 0) return std::numeric_limits<double>::quiet_NaN();
    double squares = 0;
    for (size_t i = 0; i < values_.size(); ++i) {
      const double residual = values_[i] - mean() * counts_[i];
      squares += residual * residual;
    }
    return std::sqrt(n / (n - 1) * squares) / count_;
  }

 private:
  std::vector<double> values_, counts_;
  double value_ = 0, count_ = 0;
};

// Held-out sequences [first, first + count) of `split`.
data::Batch split_batch(const data::Task& task, Split split, int64_t first, int64_t count) {
  if (split == Split::all) return task.eval_batch(first, count);
  // The sequences between them are read and dropped. A task reads consecutive ones only.
  const int64_t offset = split == Split::test ? 1 : 0;
  data::Batch batch = task.eval_batch(2 * first + offset, 2 * count - 1);
  for (Tensor* t :
       {&batch.inputs, &batch.targets, &batch.documents, &batch.lengths, &batch.segments,
        &batch.context, &batch.source, &batch.source_lengths, &batch.images}) {
    if (t->defined()) *t = t->slice(0, 0, c10::nullopt, 2).contiguous();
  }
  return batch;
}

}  // namespace

Split split_named(const std::string& name) {
  if (name == "validation") return Split::validation;
  return name == "test" ? Split::test : Split::all;
}

int64_t sequences_in(const data::Task& task, Split split) {
  const int64_t all = task.eval_sequences();
  if (split == Split::all) return all;
  return split == Split::validation ? (all + 1) / 2 : all / 2;
}

void check_split(const data::Task& task, Split split) {
  const int64_t all = task.eval_sequences();
  if (split == Split::all || all >= 2) return;
  usage_error("the task has ", all,
              " held-out sequence, expected at least 2 where validation and test data are kept "
              "apart.");
}

BatchLoss batch_loss(Model& model, const data::Batch& batch, AuxiliaryOutputs* auxiliary,
                     bool checkpoint) {
  ModelInput input = model_input(batch);
  input.auxiliary = auxiliary;
  input.checkpoint = checkpoint;
  const Tensor hidden = model.hidden(input);
  if (batch.context.defined()) {
    return span_loss(model.logits(hidden), batch.context, batch.targets);
  }
  return loss_of(model, hidden, batch.targets);
}

Evaluation evaluate(Model& model, const data::Task& task, int64_t sequences, int64_t batch,
                    const std::optional<Pieces>& pieces, Split split) {
  at::NoGradGuard no_grad;
  Decoder* const decoder = pieces ? &reader(model, task) : nullptr;
  const bool training = model.is_training();
  const at::Device device = device_of(model);
  check_split(task, split);
  model.eval();
  const int64_t total = std::min(sequences, sequences_in(task, split));
  Ratio losses, answers;
  Evaluation out;
  for (int64_t first = 0; first < total; first += batch) {
    const data::Batch data =
        to_device(split_batch(task, split, first, std::min(batch, total - first)), device);
    const int64_t count = data.targets.size(0);
    const Tensor wanted = data.targets.ne(data::kIgnore);
    const Tensor hit = at::ones_like(wanted);
    std::vector<double> loss(static_cast<size_t>(count)), targets(static_cast<size_t>(count));
    // Sequence `row` of the batch: its loss or, of a piece of it, a part of that.
    const auto add = [&](int64_t row, const BatchLoss& result, const Tensor& target,
                         const Tensor& place, const Tensor& hits) {
      loss[static_cast<size_t>(row)] += result.sum.item<double>();
      targets[static_cast<size_t>(row)] += static_cast<double>(result.targets);
      hits.masked_scatter_(place, result.best.eq(target.masked_select(place)));
    };
    if (decoder == nullptr) {
      const Tensor hidden = model.hidden(model_input(data));
      const Tensor scores = data.context.defined() ? model.logits(hidden) : Tensor();
      for (int64_t row = 0; row < count; ++row) {
        const auto one = [&](const Tensor& t) { return t.narrow(0, row, 1); };
        add(row,
            scores.defined() ? span_loss(one(scores), one(data.context), one(data.targets))
                             : loss_of(model, one(hidden), one(data.targets)),
            one(data.targets), one(wanted), one(hit));
      }
    } else {
      if (data.documents.defined()) {
        usage_error(
            "the task keeps documents apart within a sequence, which a decoding state cannot, "
            "expected task.separate_documents = false where a text is read in pieces.");
      }
      DecoderState state = decoder->initial_state(pieces->cache);
      const int64_t length = data.inputs.size(1);
      state.reserve(length);
      for (int64_t at = 0; at < length; at += pieces->length) {
        const auto piece = [&](const Tensor& t) {
          return t.narrow(1, at, std::min(pieces->length, length - at));
        };
        const Tensor hidden = decoder->extend(piece(data.inputs), state);
        for (int64_t row = 0; row < count; ++row) {
          const auto one = [&](const Tensor& t) { return piece(t).narrow(0, row, 1); };
          add(row, loss_of(model, hidden.narrow(0, row, 1), one(data.targets)), one(data.targets),
              one(wanted), one(hit));
        }
        out.state_bytes = std::max(out.state_bytes, state.bytes() / count);
      }
    }
    const Tensor right = task.exact_match() ? hit.flatten(1).all(1)
                                            : hit.logical_and(wanted).reshape({count, -1}).sum(1);
    const Tensor per_sequence = right.to(at::kDouble).cpu();
    for (int64_t row = 0; row < count; ++row) {
      const double n = targets[static_cast<size_t>(row)];
      losses.add(loss[static_cast<size_t>(row)], n);
      answers.add(per_sequence.const_data_ptr<double>()[row], task.exact_match() ? 1 : n);
      out.tokens += static_cast<int64_t>(n);
    }
    out.sequences += count;
  }
  out.loss = losses.mean();
  out.accuracy = answers.mean();
  out.loss_error = losses.standard_error();
  out.accuracy_error = answers.standard_error();
  model.train(training);
  return out;
}

}  // namespace headloom
