// Loss and accuracy on held-out data.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "data/task.h"
#include "distributed/communicator.h"
#include "model/decoder.h"

namespace headloom {

struct Evaluation {
  double loss = 0;      // nats a target
  double accuracy = 0;  // of targets or whole sequences, as the task says
  // The standard errors of the two, with sequences as the sampling unit: other sequences of the
  // same kind would give a loss and an accuracy that scatter so. Both are ratios of sums over
  // sequences (Cochran 1977, Sampling Techniques, equation 6.9). NaN for fewer than two sequences.
  double loss_error = std::numeric_limits<double>::quiet_NaN();
  double accuracy_error = std::numeric_limits<double>::quiet_NaN();
  // Loss and accuracy of parts of the sequences, into which they are dealt in turn. Two models that
  // were evaluated on the same sequences are compared part by part, so that what makes a sequence
  // hard for both cancels. There are fewer parts where there are fewer sequences.
  static constexpr size_t kParts = 32;
  std::vector<double> loss_parts, accuracy_parts;
  int64_t tokens = 0;  // targets
  int64_t sequences = 0;
  int64_t state_bytes = 0;  // the largest decoding state of a sequence, where it was read in pieces
};

// Which of a task's held-out sequences are read. Of each pair 2 i, 2 i + 1 one is validation data
// and the other test data: the one whose number has an even number of ones in binary is validation
// data. Simply taking even numbers would cut a text in two halves, because the number of a sequence
// is its place with the bits reversed (PackedText). The last one of an odd number belongs to
// neither.
enum class Split { all, validation, test };
// Of "all", "validation" or "test".
Split split_named(const std::string& name);
// The number of the sequence that is `place` of `split`, from 0.
int64_t sequence_number(Split split, int64_t place);
// Held-out sequences [first, first + count) of `split`.
data::Batch split_batch(const data::Task& task, Split split, int64_t first, int64_t count);
// How many held-out sequences of the task belong to `split`.
int64_t sequences_in(const data::Task& task, Split split);
// How many of them an evaluation of at most `most` reads: whole groups of those of several kinds
// (Task::eval_group()), where there is one.
int64_t sequences_read(const data::Task& task, Split split, int64_t most);
// Their numbers.
std::vector<int64_t> sequence_numbers(const data::Task& task, Split split, int64_t most);
// Throws UsageError where the task has too few held-out sequences for `split` and its counterpart.
void check_split(const data::Task& task, Split split, int64_t most);

// Reading sequences piece by piece with a decoding state: memory grows with the length, not with
// its square, or not at all under a policy.
struct Pieces {
  int64_t length = 512;  // positions a piece
  CachePolicy cache = {};
};

struct BatchLoss {
  Tensor sum;       // scalar, float32: summed cross-entropy of the targets
  int64_t targets;  // how many
  // [targets] int64: the likeliest of each; of spans their likeliest first and last positions [2
  // B], the last not before the first, and undefined while gradients are recorded.
  Tensor best;
};

ModelInput model_input(const data::Batch& batch);

// The positions of a decoder's batch that are this process's, as rows (ContextParallel::rows_of).
// Throws UsageError where its sequences cannot be shared out.
data::Batch own_positions(const data::Batch& batch, const ContextParallel& among);

// The batch is as a task gives it, on the CPU, or where the model is. Scores are computed only
// where there is a target. Layers leave their auxiliary losses in `auxiliary`, where it is given;
// `sum` does not include them.
BatchLoss batch_loss(Model& model, const data::Batch& batch, AuxiliaryOutputs* auxiliary = nullptr,
                     bool activation_checkpointing = false);

// Throws UsageError where the model cannot read sequences in pieces.
void check_reads_in_pieces(Model& model);

// The logits [B, ..., classes] of a batch that is where the model is. Throws UsageError where it
// cannot be read in `pieces`.
Tensor batch_logits(Model& model, const data::Batch& batch, const std::optional<Pieces>& pieces);

// At most `sequences` held-out sequences of `split` in batches of `batch`; with `pieces` the loss
// is the same to rounding unless the cache forgets. Leaves the model in its mode. Throws UsageError
// where the model or the data cannot be read in pieces, and where the data cannot be split. The
// processes of `group`, where it is given, take the batches in turn, those that share out positions
// (ModelConfig::context_parallel) the same; all get the whole result.
Evaluation evaluate(Model& model, const data::Task& task, int64_t sequences, int64_t batch,
                    const std::optional<Pieces>& pieces = {}, Split split = Split::all,
                    Communicator* group = nullptr);

}  // namespace headloom
