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

data::Batch own_positions(const data::Batch& batch, const ContextParallel& among) {
  const int64_t length = batch.inputs.size(1);
  if (length % (2 * among.size) != 0) {
    usage_error("'train.context_parallel' is ", among.size, ", but the sequences have ", length,
                " positions, expected a multiple of ", 2 * among.size,
                ": each process has two equal parts.");
  }
  if (batch.documents.defined()) {
    usage_error("'train.context_parallel' is ", among.size,
                ", but the task keeps documents apart within a sequence, expected "
                "task.separate_documents = false.");
  }
  data::Batch own{.inputs = among.rows_of(batch.inputs), .targets = among.rows_of(batch.targets)};
  if (batch.lengths.defined()) {
    const int64_t rows = own.inputs.size(1);
    const auto in_chunk = [&](int64_t chunk) {
      return (batch.lengths - chunk * rows).clamp(0, rows);
    };
    own.lengths = at::cat({in_chunk(among.early_chunk()), in_chunk(among.late_chunk())});
  }
  return own;
}

namespace {

// Of hidden states [..., C] and their targets [...], which may be on the CPU: it chooses among them
// then, without waiting for the device.
BatchLoss loss_of(const Model& model, Tensor hidden, Tensor targets) {
  hidden = hidden.flatten(0, -2);
  targets = targets.flatten();
  const Tensor kept = targets.ne(data::kIgnore).nonzero().squeeze(1);
  const int64_t count = kept.numel();
  if (count < targets.numel()) {
    hidden = hidden.index_select(0, kept.to(hidden.device()));
    targets = targets.index_select(0, kept);
  }
  ScoreLoss loss = model.loss(hidden, targets.to(hidden.device()));
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

// Scores [B, T, 2] as those of two choices a sequence among the positions of its `context`: [2 B,
// T], of the begin and of the end.
Tensor span_scores(const Tensor& scores, const Tensor& context) {
  const Tensor outside = context.logical_not().unsqueeze(1);
  return scores.to(at::promote_types(scores.scalar_type(), at::kFloat))
      .transpose(1, 2)
      .masked_fill(outside, -std::numeric_limits<float>::infinity())
      .flatten(0, 1);
}

// Of scores [B, T, 2] and the first and last positions of the answers [B, 2].
BatchLoss span_loss(const Tensor& scores, const Tensor& context, const Tensor& targets) {
  const Tensor logits = span_scores(scores, context);
  const Tensor sum = at::cross_entropy_loss(logits, targets.flatten(), {}, at::Reduction::Sum);
  const bool recorded = at::GradMode::is_enabled();
  return {.sum = sum, .targets = targets.numel(), .best = recorded ? Tensor() : best_spans(logits)};
}

// Scores in memory at once while a model is evaluated.
constexpr int64_t kMostScores = int64_t{1} << 25;

// What is right about each sequence of a batch, or about a piece of it.
struct SequenceScores {
  Tensor loss;  // [B] float64: summed cross-entropy of its targets
  Tensor hit;   // as the targets, bool: the likeliest class is right, or there is no target
};

// Of hidden states [B, ..., C] and their targets [B, ...]. Some positions are scored at a time, so
// that the scores of a large vocabulary are never all in memory.
SequenceScores sequence_scores(const Model& model, const Tensor& hidden, const Tensor& targets) {
  const Tensor flat = hidden.flatten(0, -2), wanted = targets.flatten();
  const Tensor places = wanted.ne(data::kIgnore).nonzero().squeeze(1);
  const int64_t of_sequence = targets.numel() / std::max<int64_t>(targets.size(0), 1);
  SequenceScores out{.loss = at::zeros({targets.size(0)}, hidden.options().dtype(at::kDouble)),
                     .hit = at::ones_like(wanted, at::kBool)};
  const ModelConfig& config = model.config();
  const int64_t classes = std::max(config.vocabulary.value_or(1), config.classes.value_or(1));
  const int64_t at_once = std::max<int64_t>(kMostScores / classes, 1);
  for (int64_t first = 0; first < places.numel(); first += at_once) {
    const Tensor place = places.narrow(0, first, std::min(at_once, places.numel() - first));
    const Tensor scores = model.logits(flat.index_select(0, place));
    const Tensor target = wanted.index_select(0, place);
    const Tensor loss =
        at::cross_entropy_loss(scores.to(at::promote_types(scores.scalar_type(), at::kFloat)),
                               target, {}, at::Reduction::None);
    out.loss.index_add_(0, place.div(of_sequence, "floor"), loss.to(at::kDouble));
    out.hit.index_copy_(0, place, scores.argmax(-1).eq(target));
  }
  out.hit = out.hit.view_as(targets);
  return out;
}

// The same of scores of spans, each of which is one answer.
SequenceScores span_sequence_scores(const Tensor& scores, const data::Batch& data) {
  const Tensor logits = span_scores(scores, data.context), target = data.targets.flatten();
  const Tensor loss = at::cross_entropy_loss(logits, target, {}, at::Reduction::None);
  return {.loss = loss.to(at::kDouble).view({-1, 2}).sum(1),
          .hit = best_spans(logits).eq(target).view_as(data.targets)};
}

// The decoder that reads sequences in pieces.
Decoder& reader(Model& model) {
  auto* decoder = dynamic_cast<Decoder*>(&model);
  if (decoder == nullptr) {
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

// Reads sequences piece by piece from an empty state. Calls `use` with the hidden states of each
// piece and a function that takes the piece's positions out of a tensor [B, T]. Returns the bytes
// of the largest state of a sequence.
template <typename Use>
int64_t read_in_pieces(Decoder& decoder, const data::Batch& data, const Pieces& pieces, Use use) {
  if (data.documents.defined()) {
    usage_error(
        "the task keeps documents apart within a sequence, which a decoding state cannot, "
        "expected task.separate_documents = false where a text is read in pieces.");
  }
  DecoderState state = decoder.initial_state(pieces.cache);
  const int64_t count = data.inputs.size(0), length = data.inputs.size(1);
  state.reserve(length);
  int64_t bytes = 0;
  for (int64_t at = 0; at < length; at += pieces.length) {
    const auto piece = [&](const Tensor& t) {
      return t.narrow(1, at, std::min(pieces.length, length - at));
    };
    use(decoder.extend(piece(data.inputs), state), piece);
    bytes = std::max(bytes, state.bytes() / count);
  }
  return bytes;
}

// sequence_scores() of sequences that are read so. Raises `state_bytes` to the largest state.
SequenceScores scores_in_pieces(Decoder& decoder, const data::Batch& data, const Pieces& pieces,
                                int64_t& state_bytes) {
  SequenceScores out;
  std::vector<Tensor> hits;
  const auto score = [&](const Tensor& hidden, const auto& piece) {
    const SequenceScores part = sequence_scores(decoder, hidden, piece(data.targets));
    out.loss = hits.empty() ? part.loss : out.loss + part.loss;
    hits.push_back(part.hit);
  };
  state_bytes = std::max(state_bytes, read_in_pieces(decoder, data, pieces, score));
  out.hit = at::cat(hits, 1);
  return out;
}

// Losses and right answers of the sequences read so far, each with what it is divided by.
class Ratio {
 public:
  // `fraction`: values are counts among `count`, so that the mean is between 0 and 1.
  explicit Ratio(bool fraction) : fraction_(fraction) {}
  void add(double value, double count) {
    values_.push_back(value);
    counts_.push_back(count);
    value_ += value;
    count_ += count;
  }
  double mean() const { return value_ / std::max(count_, 1.0); }
  // The mean of every part of the sequences. They are dealt to the parts in turn, and every round
  // begins one part later: a task may take its sequences from several kinds in turn, too, and every
  // part shall have some of each.
  std::vector<double> part_means(size_t parts) const {
    std::vector<double> values(std::min(parts, values_.size())), counts(values.size());
    for (size_t i = 0; i < values_.size(); ++i) {
      const size_t part = (i + i / values.size()) % values.size();
      values[part] += values_[i];
      counts[part] += counts_[i];
    }
    for (size_t i = 0; i < values.size(); ++i) values[i] /= std::max(counts[i], 1.0);
    return values;
  }
  // Of the mean, with the sequences as the sample.
  double standard_error() const {
    const double n = static_cast<double>(values_.size());
    if (n < 2 || count_ <= 0) return std::numeric_limits<double>::quiet_NaN();
    double squares = 0;
    for (size_t i = 0; i < values_.size(); ++i) {
      const double residual = values_[i] - mean() * counts_[i];
      squares += residual * residual;
    }
    // Where all answers are wrong, or all right, other data may still have another one: the error
    // is then that of one more right and one more wrong sequence (Agresti and Coull 1998).
    if (fraction_ && (value_ == 0 || value_ == count_)) {
      const double p = 1 / (n + 2);
      return std::sqrt(p * (1 - p) / (n + 2));
    }
    return std::sqrt(n / (n - 1) * squares) / count_;
  }

 private:
  const bool fraction_;
  std::vector<double> values_, counts_;
  double value_ = 0, count_ = 0;
};

// What `found` says: loss, targets and wrong answers of each sequence, [n, 3] float64.
Evaluation summarised(const Tensor& found, const data::Task& task) {
  Evaluation out;
  out.sequences = found.size(0);
  Ratio losses(/*fraction=*/false), answers(/*fraction=*/true);
  const bool alike = task.accuracy() == data::Accuracy::share, exact = task.exact_match();
  for (int64_t row = 0; row < out.sequences; ++row) {
    const double* const of = found.const_data_ptr<double>() + 3 * row;
    losses.add(of[0], of[1]);
    const double right = exact ? (of[2] == 0 ? 1 : 0) : of[1] - of[2];
    answers.add(alike ? right / of[1] : right, alike || exact ? 1 : of[1]);
    out.tokens += static_cast<int64_t>(of[1]);
  }
  out.loss = losses.mean();
  out.accuracy = answers.mean();
  out.loss_error = losses.standard_error();
  out.accuracy_error = answers.standard_error();
  out.loss_parts = losses.part_means(Evaluation::kParts);
  out.accuracy_parts = answers.part_means(Evaluation::kParts);
  return out;
}

}  // namespace

Split split_named(const std::string& name) {
  if (name == "validation") return Split::validation;
  return name == "test" ? Split::test : Split::all;
}

int64_t sequence_number(Split split, int64_t place) {
  if (split == Split::all) return place;
  return 2 * place + (data::is_test(2 * place) == (split == Split::test) ? 0 : 1);
}

data::Batch split_batch(const data::Task& task, Split split, int64_t first, int64_t count) {
  if (split == Split::all) return task.eval_batch(first, count);
  // A task reads consecutive sequences only: those of the other split are read and dropped.
  data::Batch batch = task.eval_batch(2 * first, 2 * count);
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < count; ++i) rows.push_back(sequence_number(split, first + i) - 2 * first);
  const Tensor kept = at::tensor(rows, at::kLong);
  for (Tensor* t : batch.tensors()) {
    if (t->defined()) *t = t->index_select(0, kept);
  }
  return batch;
}

int64_t sequences_in(const data::Task& task, Split split) {
  const int64_t all = task.eval_sequences();
  return split == Split::all ? all : all / 2;
}

int64_t sequences_read(const data::Task& task, Split split, int64_t most) {
  const int64_t count = std::min(most, sequences_in(task, split));
  const int64_t of_all = task.eval_group();
  const int64_t group = split == Split::all ? of_all : std::max<int64_t>(of_all / 2, 1);
  return count < group ? count : count - count % group;
}

std::vector<int64_t> sequence_numbers(const data::Task& task, Split split, int64_t most) {
  std::vector<int64_t> numbers(static_cast<size_t>(sequences_read(task, split, most)));
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = sequence_number(split, static_cast<int64_t>(i));
  }
  return numbers;
}

void check_split(const data::Task& task, Split split, int64_t most) {
  const int64_t all = task.eval_sequences();
  if (split == Split::all) return;
  if (all < 2) {
    usage_error(
        "the task has ", counted(all, "held-out sequence"),
        ", expected at least 2 where validation and test data are kept apart; give it more "
        "data, or hold more of them out, and of a text shorter sequences (task.length) do too.");
  }
  // Of each two numbers one is in each half.
  if (!task.halves_are_apart(std::min(all, 2 * sequences_read(task, split, most)))) {
    usage_error("the options of this task (", task.describe(),
                ") allow too few different sequences to keep validation and test data apart; make "
                "it larger.");
  }
}

BatchLoss batch_loss(Model& model, const data::Batch& batch, AuxiliaryOutputs* auxiliary,
                     bool activation_checkpointing) {
  const data::Batch there = to_device(batch, model.device());
  ModelInput input = model_input(there);
  input.auxiliary = auxiliary;
  input.activation_checkpointing = activation_checkpointing;
  return model.loss_of_input(input, [&](const Tensor& hidden) {
    return there.context.defined() ? span_loss(model.logits(hidden), there.context, there.targets)
                                   : loss_of(model, hidden, batch.targets);
  });
}

void check_reads_in_pieces(Model& model) { reader(model); }

Tensor batch_logits(Model& model, const data::Batch& batch, const std::optional<Pieces>& pieces) {
  if (!pieces) return model.forward(model_input(batch));
  Decoder& decoder = reader(model);
  std::vector<Tensor> logits;
  read_in_pieces(decoder, batch, *pieces, [&](const Tensor& hidden, const auto&) {
    logits.push_back(decoder.logits(hidden));
  });
  return at::cat(logits, 1);
}

Evaluation evaluate(Model& model, const data::Task& task, int64_t sequences, int64_t batch,
                    const std::optional<Pieces>& pieces, Split split, Communicator* group) {
  at::NoGradGuard no_grad;
  Decoder* const decoder = pieces ? &reader(model) : nullptr;
  const bool training = model.is_training();
  const at::Device device = model.device();
  check_split(task, split, sequences);
  model.eval();
  const int64_t total = sequences_read(task, split, sequences);
  const ContextParallel* const among = model.config().context_parallel.get();
  const int64_t processes_per_sequence = among == nullptr ? 1 : among->size;
  const int64_t shares = group == nullptr ? 1 : group->size() / processes_per_sequence;
  const int64_t own_share = group == nullptr ? 0 : group->rank() / processes_per_sequence;
  const Tensor found = at::zeros({total, 3}, at::kDouble);  // as summarised() reads it
  int64_t state_bytes = 0;
  for (int64_t next = 0; next < total; next += shares * batch) {
    const int64_t own = next + own_share * batch;
    // Processes that share out the parameters compute as many batches as each other. Where one has
    // none left, it computes the first one again, for nothing.
    const int64_t first = own < total ? own : 0;
    const int64_t count = std::min(batch, total - first);
    data::Batch data = to_device(split_batch(task, split, first, count), device);
    if (among != nullptr) data = own_positions(data, *among);
    const Tensor wanted = data.targets.ne(data::kIgnore);
    SequenceScores scored;
    if (decoder != nullptr) {
      scored = scores_in_pieces(*decoder, data, *pieces, state_bytes);
    } else {
      const Tensor hidden = model.hidden(model_input(data));
      scored = data.context.defined() ? span_sequence_scores(model.logits(hidden), data)
                                      : sequence_scores(model, hidden, data.targets);
    }
    if (own >= total) continue;
    // A sequence that is shared out has two rows here, `count` apart.
    const auto of_sequences = [&](const Tensor& of_rows) {
      return of_rows.to(at::kDouble).view({-1, count}).sum(0);
    };
    const auto number = [&](const Tensor& t) {
      return of_sequences(t.reshape({t.size(0), -1}).sum(1));
    };
    const Tensor wrong = wanted.logical_and(scored.hit.logical_not());
    found.narrow(0, first, count)
        .copy_(at::stack({of_sequences(scored.loss), number(wanted), number(wrong)}, 1));
  }
  if (group != nullptr) group->sum({found});
  Evaluation out = summarised(found, task);
  out.state_bytes = state_bytes;
  model.train(training);
  return out;
}

}  // namespace headloom
