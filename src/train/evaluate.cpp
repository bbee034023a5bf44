#include "train/evaluate.h"

#include <ATen/ATen.h>

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

}  // namespace

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
                    const std::optional<Pieces>& pieces) {
  at::NoGradGuard no_grad;
  Decoder* const decoder = pieces ? &reader(model, task) : nullptr;
  const bool training = model.is_training();
  const at::Device device = device_of(model);
  model.eval();
  const int64_t total = std::min(sequences, task.eval_sequences());
  double loss = 0, right = 0;
  Evaluation out;
  for (int64_t first = 0; first < total; first += batch) {
    const data::Batch data =
        to_device(task.eval_batch(first, std::min(batch, total - first)), device);
    const Tensor wanted = data.targets.ne(data::kIgnore);
    const Tensor hit = at::ones_like(wanted);
    const auto count = [&](const BatchLoss& result, const Tensor& targets, const Tensor& place,
                           const Tensor& hits) {
      loss += result.sum.item<double>();
      out.tokens += result.targets;
      hits.masked_scatter_(place, result.best.eq(targets.masked_select(place)));
    };
    if (decoder == nullptr) {
      count(batch_loss(model, data), data.targets, wanted, hit);
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
        count(loss_of(model, hidden, piece(data.targets)), piece(data.targets), piece(wanted),
              piece(hit));
        out.state_bytes = std::max(out.state_bytes, state.bytes() / data.inputs.size(0));
      }
    }
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
