#include "train/gradients.h"

#include <ATen/ATen.h>

#include "train/device.h"
#include "train/evaluate.h"

namespace headloom {

StepLoss accumulate_gradients(Model& model, const data::Task& task, const TrainOptions& options,
                              int64_t step, at::Device device, Communicator& group) {
  const int64_t pieces = options.accumulate, shares = pieces * group.size();
  std::vector<data::Batch> batches;
  Tensor targets = at::zeros({}, at::kLong);
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t share = step * shares + i * group.size() + group.rank();
    batches.push_back(task.train_batch(share, options.batch / shares));
    targets += batches.back().targets.ne(data::kIgnore).sum();
  }
  group.sum({targets});
  // Pieces are weighted by their targets, so that cutting a batch does not change its gradient.
  const auto count = targets.item<double>();
  Tensor loss = at::zeros({}, at::TensorOptions(device).dtype(at::kDouble)), balance;
  AuxiliaryOutputs auxiliary;  // its load adds up over the pieces
  for (const data::Batch& batch : batches) {
    Tensor mean;
    auxiliary.loss = Tensor();
    {
      const Autocast autocast(options.dtype, device.type());
      mean = batch_loss(model, batch, &auxiliary, options.activation_checkpointing).sum / count;
    }
    loss += mean.detach();
    if (auxiliary.loss.defined()) {
      const Tensor extra = auxiliary.loss / static_cast<double>(shares);
      balance = balance.defined() ? balance + extra.detach() : extra.detach();
      mean = mean + extra;
    }
    mean.backward();
  }
  std::vector<Tensor> sums = {loss};
  if (balance.defined()) sums.push_back(balance);
  for (auto& [layer, load] : auxiliary.load) sums.push_back(load);
  for (const Tensor& p : model.parameters()) {
    if (p.grad().defined()) sums.push_back(p.grad());
  }
  group.sum(sums);
  StepLoss out{.loss = loss.item<double>(), .load = std::move(auxiliary.load)};
  if (balance.defined()) out.balance_loss = balance.item<double>();
  return out;
}

}  // namespace headloom
