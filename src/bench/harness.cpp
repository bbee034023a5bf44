#include "bench/harness.h"

#include <ATen/ATen.h>

#include "train/device.h"

namespace headloom::bench {

void seed_all() { seed_random(1, at::kCPU); }

nlohmann::ordered_json to_json(const Spread& s) {
  return {{"low", s.low}, {"median", s.median}, {"high", s.high}};
}

std::function<void()> work(const std::function<Tensor(const std::vector<Tensor>&)>& run,
                           std::vector<Tensor> inputs, size_t differentiable, bool training) {
  if (!training) {
    return [=] {
      at::NoGradGuard no_grad;
      run(inputs);
    };
  }
  for (size_t i = 0; i < differentiable; ++i) inputs[i].requires_grad_(true);
  Tensor cotangent;
  {
    at::NoGradGuard no_grad;
    cotangent = at::randn_like(run(inputs));
  }
  return [=]() mutable {
    run(inputs).backward(cotangent);
    for (Tensor& t : inputs) t.mutable_grad() = Tensor();
  };
}

std::function<void()> step_of(const ops::OpCase& c, bool training,
                              const std::optional<std::string>& backend) {
  return work([run = c.run, backend](const std::vector<Tensor>& x) { return run(x, backend); },
              c.inputs(), c.differentiable, training);
}

std::function<void()> baseline_of(const ops::OpCase& c, bool training) {
  return work(c.baseline, c.baseline_inputs(), c.baseline_inputs().size(), training);
}

namespace {

data::Batch random_batch(int64_t vocabulary, int64_t batch, int64_t length) {
  seed_all();
  const Tensor tokens = at::randint(0, vocabulary, {batch, length + 1}, at::kLong);
  return {.inputs = tokens.narrow(1, 0, length),
          .targets = tokens.narrow(1, 1, length).contiguous()};
}

}  // namespace

StepBench::StepBench(const ModelConfig& config, int64_t batch, int64_t length,
                     const TrainOptions& options)
    : StepBench(config, random_batch(*config.vocabulary, batch, length), options) {}

StepBench::StepBench(const ModelConfig& config, data::Batch batch, const TrainOptions& options)
    : options_(options), batch_(std::move(batch)) {
  seed_all();
  model_ = build_model(config);
  hold_in(options_.dtype, *model_);
  optimizer_ = std::make_unique<AdamW>(*model_, options_);
}

void StepBench::update(const Tensor& loss) {
  loss.backward();
  optimizer_->step(1e-4);
}

void StepBench::operator()() {
  Tensor mean;
  {
    const Autocast autocast(options_.dtype);
    const BatchLoss loss = batch_loss(*model_, batch_, nullptr, options_.activation_checkpointing);
    mean = loss.sum / static_cast<double>(loss.targets);
  }
  update(mean);
}

void StepBench::step_with_all_scores() {
  const Tensor scores = model_->logits(model_->hidden(model_input(batch_)));
  update(at::cross_entropy_loss(scores.flatten(0, -2), batch_.targets.flatten()));
}

double StepBench::held_bytes() const {
  double bytes = 0;
  for (const Tensor& p : model_->parameters()) bytes += static_cast<double>(p.nbytes());
  return 3 * bytes;
}

}  // namespace headloom::bench
