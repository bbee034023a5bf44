#include "model/auto_encoder.h"

namespace headloom {
namespace {

// The perceptron begins with a norm of its own.
ModelConfig without_final_norm(ModelConfig config) {
  config.final_norm = false;
  return config;
}

}  // namespace

AutoEncoder::AutoEncoder(const ModelConfig& config)
    : Model(without_final_norm(config)),
      embedding_(*this, config_, {}, config.max_length, "model.max_length"),
      layers_(*this, config_,
              {.list = config.layers, .depth = config.depth, .max_length = config.length()}) {
  stacks_ = {&layers_};
  const auto norm = [&](const std::string& name) {
    return register_module(name,
                           std::make_shared<Norm>(config.norm, config.width, config.norm_eps));
  };
  const auto linear = [&](const std::string& name, int64_t outputs) {
    return register_module(name,
                           std::make_shared<Linear>(config.width, outputs, true, config.init_std));
  };
  for (const std::string place : {"0", "1"}) {
    steps_.push_back({norm("step_norm" + place), linear("step" + place, config.width)});
  }
  output_norm_ = norm("output_norm");
  output_ = linear("output", *config.vocabulary);
}

Tensor AutoEncoder::hidden(const ModelInput& input) {
  const Tensor all = layers_.forward(
      embedding_.forward(input.tokens, input.segments, is_training()), input.context());
  const c10::SymInt length = all.sym_size(1);
  const auto options = all.options().requires_grad(false);
  const Tensor places =
      sinusoidal(at::arange(c10::Scalar(length), options.dtype(at::kLong)), config_.width, options);
  Tensor x = all.narrow_symint(1, length - 1, 1) + places;
  for (const Step& step : steps_) {
    x = at::gelu(step.linear->forward(step.norm->forward(x)));
  }
  return output_norm_->forward(x);
}

std::vector<Cost> AutoEncoder::own_costs(int64_t) const {
  const int64_t width = config_.width, vocabulary = *config_.vocabulary;
  const auto flops = [](int64_t weights) { return 2.0 * static_cast<double>(weights); };
  return {{.part = "embedding", .formula = "-", .parameters = embedding_.table().numel()},
          {.part = "perceptron",
           .formula = "4 C C",
           .parameters = 2 * (width + 1) * width,
           .flops_per_token = flops(2 * width * width)},
          {.part = "output",
           .formula = "2 C V",
           .parameters = (width + 1) * vocabulary,
           .flops_per_token = flops(width * vocabulary)}};
}

}  // namespace headloom
