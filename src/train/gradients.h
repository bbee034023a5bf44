// One training step up to its gradients.
#pragma once

#include <map>

#include "data/task.h"
#include "distributed/gradient_sum.h"
#include "model/model.h"
#include "train/config.h"

namespace headloom {

struct StepLoss {
  double loss = 0;                          // mean over all targets of the step
  std::optional<double> balance_loss = {};  // of layers with experts; not part of `loss`
  std::map<int64_t, at::Tensor> load = {};  // AuxiliaryOutputs::load of the whole step
};

// Adds to the parameters' gradients those of step `step` (from 0) over `options.batch` sequences,
// cut into options.accumulate pieces. Each process of sum.group() takes its share of every piece,
// as many in a row the same one as share out the positions (ModelConfig::context_parallel); the
// gradients, the loss and the load are sums over all of them.
StepLoss accumulate_gradients(Model& model, const data::Task& task, const TrainOptions& options,
                              int64_t step, at::Device device, GradientSum& sum);

}  // namespace headloom
