#include "train/gradients.h"

#include <ATen/ATen.h>

#include <functional>
#include <optional>
#include <vector>

#include "mixers/dropout.h"
#include "model/row_gradients.h"
#include "train/device.h"
#include "train/evaluate.h"

namespace headloom {
namespace {

// One share of each piece of a step's batch: number `own_share` of `shares_of_piece`.
std::vector<data::Batch> read_shares(const data::Task& task, const TrainOptions& options,
                                     int64_t step, int64_t shares_of_piece, int64_t own_share) {
  const int64_t shares = options.accumulate * shares_of_piece;
  std::vector<data::Batch> out;
  for (int64_t i = 0; i < options.accumulate; ++i) {
    const int64_t index = step * shares + i * shares_of_piece + own_share;
    out.push_back(task.train_batch(index, options.batch / shares));
  }
  return out;
}

// Returns the number of targets of the shares of all processes of `group`. Makes each share as long
// as the longest of its piece: some tasks pad what they give to its longest sequence, and dropout
// draws for the padding too.
int64_t join_shares(std::vector<data::Batch>& shares, Communicator& group) {
  const auto pieces = static_cast<int64_t>(shares.size());
  const Tensor own = at::zeros({1 + pieces}, at::kLong);
  int64_t* const fact = own.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < pieces; ++i) {
    const data::Batch& share = shares[static_cast<size_t>(i)];
    fact[0] += share.targets.ne(data::kIgnore).sum().item<int64_t>();
    fact[1 + i] = share.inputs.defined() ? share.inputs.size(1) : 0;
  }
  const Tensor all = at::stack(group.gather(own));
  const Tensor longest = all.amax(0);
  for (int64_t i = 0; i < pieces; ++i) {
    data::Batch& share = shares[static_cast<size_t>(i)];
    const int64_t missing = longest[1 + i].item<int64_t>() - fact[1 + i];
    if (missing == 0) continue;
    if (!share.lengths.defined()) {
      share.lengths = at::full({share.inputs.size(0)}, share.inputs.size(1), at::kLong);
    }
    share.inputs = at::constant_pad_nd(share.inputs, {0, missing}, 0);
    share.targets = at::constant_pad_nd(share.targets, {0, missing}, data::kIgnore);
  }
  return all.select(1, 0).sum().item<int64_t>();
}

// What this process's shares of a step add up to.
struct SumsOfShares {
  Tensor loss;                      // [] float64
  Tensor balance = {};              // undefined where no layer has experts
  AuxiliaryOutputs auxiliary = {};  // whose load adds up over the shares
};

// AuxiliaryOutputs::sum_counts over the processes of `group`.
std::function<Tensor(const Tensor&)> summed_counts(Communicator& group) {
  return [&group](const Tensor& counts) {
    const Tensor all = counts.cpu().clone();
    group.sum({all});
    return all.to(counts.device());
  };
}

// What a share adds to the loss of the step, the mean over its `targets`, together with what it
// adds to the balance loss, the mean over `balance_losses` of them. Notes both in `sums`.
Tensor loss_of_share(Model& model, const data::Batch& share, const TrainOptions& options,
                     at::Device device, double targets, int64_t balance_losses,
                     SumsOfShares& sums) {
  sums.auxiliary.loss = Tensor();
  Tensor loss;
  {
    const Autocast autocast(options.dtype, device.type());
    loss =
        batch_loss(model, share, &sums.auxiliary, options.activation_checkpointing).sum / targets;
  }
  sums.loss += loss.detach();
  if (!sums.auxiliary.loss.defined()) return loss;
  const Tensor balance = sums.auxiliary.loss / static_cast<double>(balance_losses);
  sums.balance = sums.balance.defined() ? sums.balance + balance.detach() : balance.detach();
  return loss + balance;
}

// Sums over all processes of `group`.
StepLoss loss_of_step(SumsOfShares& own, Communicator& group) {
  std::vector<Tensor> sums = {own.loss};
  if (own.balance.defined()) sums.push_back(own.balance);
  for (auto& [layer, load] : own.auxiliary.load) sums.push_back(load);
  group.sum(sums);
  StepLoss out{.loss = own.loss.item<double>(), .load = std::move(own.auxiliary.load)};
  if (own.balance.defined()) out.balance_loss = own.balance.item<double>();
  return out;
}

}  // namespace

StepLoss accumulate_gradients(Model& model, const data::Task& task, const TrainOptions& options,
                              int64_t step, at::Device device, GradientSum& sum) {
  Communicator& group = sum.group();
  const ContextParallel* const among = model.config().context_parallel.get();
  const int64_t processes_per_sequence = among == nullptr ? 1 : among->size;
  const int64_t shares_of_piece = group.size() / processes_per_sequence;
  const int64_t own_share = group.rank() / processes_per_sequence;
  std::vector<data::Batch> shares = read_shares(task, options, step, shares_of_piece, own_share);
  // Pieces are weighted by their targets, so that cutting a batch does not change the gradient of
  // its loss. A balance loss is no sum over positions: the step's is the mean of the pieces' own.
  const double targets =
      static_cast<double>(join_shares(shares, group)) / static_cast<double>(processes_per_sequence);
  const int64_t balance_losses = options.accumulate * group.size();  // one of each share
  if (among != nullptr) {
    for (data::Batch& share : shares) share = own_positions(share, *among);
  }
  SumsOfShares sums{.loss = at::zeros({}, at::TensorOptions(device).dtype(at::kDouble))};
  const PartOfBatch part(own_share, shares_of_piece, among);
  std::optional<RowGradients> rows;
  if (group.size() > 1) {
    rows.emplace([&](const Tensor& table, const Tensor& places, const Tensor& own_rows) {
      return sum.take_rows(table, places, own_rows);
    });
    sums.auxiliary.sum_counts = summed_counts(group);
  }
  for (const data::Batch& share : shares) {
    const Tensor loss = loss_of_share(model, share, options, device, targets, balance_losses, sums);
    // With shared parameters whole gradients do not stay until the next piece.
    const bool reduces = &share == &shares.back() || options.shard == "parameters";
    if (reduces) sum.begin();
    loss.backward();
    if (reduces) sum.finish();
  }
  return loss_of_step(sums, group);
}

}  // namespace headloom
