#include "train/gradients.h"

#include <ATen/ATen.h>

#include "mixers/dropout.h"
#include "model/row_gradients.h"
#include "train/device.h"
#include "train/evaluate.h"

namespace headloom {

// Returns the number of targets of the shares of all processes of `group`. Makes each share as long
// as the longest of its piece: some tasks pad what they give to its longest sequence, and dropout
// draws for the padding too.
static int64_t join_shares(std::vector<data::Batch>& shares, Communicator& group) {
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

StepLoss accumulate_gradients(Model& model, const data::Task& task, const TrainOptions& options,
                              int64_t step, at::Device device, GradientSum& sum) {
  Communicator& group = sum.group();
  const ContextParallel* const among = model.config().context_parallel.get();
  const int64_t with_same = among == nullptr ? 1 : among->size;
  const int64_t of_piece = group.size() / with_same, own = group.rank() / with_same;
  const int64_t pieces = options.accumulate, shares = pieces * of_piece;
  std::vector<data::Batch> batches;
  for (int64_t i = 0; i < pieces; ++i) {
    batches.push_back(
        task.train_batch(step * shares + i * of_piece + own, options.batch / shares));
  }
  // Pieces are weighted by their targets, so that cutting a batch does not change the gradient of
  // its loss. A balance loss is no sum over positions: the step's is the mean of the pieces' own.
  const auto count =
      static_cast<double>(join_shares(batches, group)) / static_cast<double>(with_same);
  if (among != nullptr) {
    for (data::Batch& batch : batches) batch = own_positions(batch, *among);
  }
  Tensor loss = at::zeros({}, at::TensorOptions(device).dtype(at::kDouble)), balance;
  AuxiliaryOutputs auxiliary;  // its load adds up over the pieces
  const PartOfBatch part(own, of_piece, among);
  std::optional<RowGradients> rows;
  if (group.size() > 1) {
    rows.emplace([&](const Tensor& table, const Tensor& places, const Tensor& own_rows) {
      return sum.take_rows(table, places, own_rows);
    });
    auxiliary.sum_counts = [&](const Tensor& counts) {
      const Tensor all = counts.cpu().clone();
      group.sum({all});
      return all.to(counts.device());
    };
  }
  for (const data::Batch& batch : batches) {
    Tensor mean;
    auxiliary.loss = Tensor();
    {
      const Autocast autocast(options.dtype, device.type());
      mean = batch_loss(model, batch, &auxiliary, options.activation_checkpointing).sum / count;
    }
    loss += mean.detach();
    if (auxiliary.loss.defined()) {
      const Tensor extra = auxiliary.loss / static_cast<double>(pieces * group.size());
      balance = balance.defined() ? balance + extra.detach() : extra.detach();
      mean = mean + extra;
    }
    // With shared parameters whole gradients do not stay until the next piece.
    const bool reduces = &batch == &batches.back() || options.shard == "parameters";
    if (reduces) sum.begin();
    mean.backward();
    if (reduces) sum.finish();
  }
  std::vector<Tensor> sums = {loss};
  if (balance.defined()) sums.push_back(balance);
  for (auto& [layer, load] : auxiliary.load) sums.push_back(load);
  group.sum(sums);
  StepLoss out{.loss = loss.item<double>(), .load = std::move(auxiliary.load)};
  if (balance.defined()) out.balance_loss = balance.item<double>();
  return out;
}

}  // namespace headloom
