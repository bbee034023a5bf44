#include "model/embeddings_and_heads.h"

#include "mixers/padding.h"
#include "model/row_gradients.h"
#include "ops/linear/op.h"
#include "ops/linear_cross_entropy/op.h"

namespace headloom {
namespace {

int64_t count(const torch::nn::Module& module) {
  int64_t n = 0;
  for (const Tensor& p : module.parameters()) n += p.numel();
  return n;
}

// table's rows; what is outside of it is named.
Tensor embedded(const Tensor& table, const Tensor& tokens) {
  const bool index = tokens.scalar_type() == at::kLong || tokens.scalar_type() == at::kInt;
  const Tensor rows = index ? tokens : tokens.to(at::kLong);
  try {
    return embedding_by_rows(table, rows);
  } catch (const c10::IndexError&) {
    const auto [low, high] = at::aminmax(rows);
    const int64_t first = low.item<int64_t>(), last = high.item<int64_t>();
    usage_error("tokens has the token ", first < 0 ? first : last,
                ", expected one of the vocabulary's 0 to ", table.size(0) - 1, ".");
  }
}

}  // namespace

Tensor sinusoidal(const Tensor& positions, int64_t width, const at::TensorOptions& options) {
  const auto real = options.dtype(at::kDouble);
  const Tensor frequency =
      at::pow(10000.0, at::arange(0, width, 2, real) * (-1.0 / static_cast<double>(width)));
  const Tensor angle = positions.unsqueeze(-1) * frequency;
  return at::stack({angle.sin(), angle.cos()}, -1).flatten(-2).narrow(-1, 0, width).to(options);
}

Embedding::Embedding(Module& owner, const ModelConfig& config, const Tensor& table,
                     std::optional<int64_t> max_length, const char* max_length_key)
    : config_(config), max_length_key_(max_length_key) {
  if (table.defined()) {
    owner.shared_parameter(table_, table);
  } else {
    require(config.vocabulary.has_value(), "model.vocabulary is not set and no task gives it.");
    owner.parameter("embedding", table_,
                    normal({*config.vocabulary, config.width}, config.embedding_std()));
  }
  if (config.position.type == "learned") {
    require(max_length.has_value(), max_length_key, " is not set and no task gives it.");
    owner.parameter("positions", positions_, normal({*max_length, config.width}, config.init_std));
  }
  if (config.segments.value_or(0) > 0) {
    owner.parameter("segments", segments_,
                    normal({*config.segments, config.width}, config.init_std));
  }
  if (config.embedding_norm) {
    norm_ = owner.register_module(
        "embedding_norm", std::make_shared<Norm>(config.norm, config.width, config.norm_eps));
  }
  if (config.embedding_projection) {
    projection_ = owner.register_module(
        "embedding_projection",
        std::make_shared<Linear>(config.width, config.width, true, config.init_std));
  }
}

Tensor Embedding::forward(const Tensor& tokens, const Tensor& segments, bool training,
                          const Positions& seen) const {
  Tensor x = embedded(table_, tokens);
  if (config_.embedding_scale) x = x * std::sqrt(static_cast<double>(config_.width));
  const c10::SymInt length = tokens.sym_size(1), end = seen.longest + length;
  if (positions_.defined()) {
    if (end > positions_.size(0)) {
      usage_error("the model has ", positions_.size(0), " learned positions (", max_length_key_,
                  "), but the sequence has ", end, " tokens.");
    }
    x = x + (seen.left_padding.defined()
                 ? at::embedding(positions_, seen.position_ids(length, x.device()))
                 : positions_.narrow_symint(0, seen.longest, length));
  } else if (config_.position.type == "sinusoidal") {
    x = x + sinusoidal(seen.position_ids(length, x.device()), config_.width,
                       x.options().requires_grad(false));
  }
  if (segments.defined() && !segments_.defined()) {
    usage_error(
        "the input has segments, but the model has no embeddings for them (model.segments = 0).");
  }
  if (segments_.defined()) {
    x = x + (segments.defined() ? at::embedding(segments_, segments) : segments_.select(0, 0));
  }
  if (norm_) x = norm_->forward(x);
  if (projection_) x = projection_->forward(x);
  return config_.dropout > 0 ? batch_dropout(x, config_.dropout, training) : x;
}

TokenHead::TokenHead(Module& owner, const ModelConfig& config, const Tensor& table)
    : config_(config) {
  if (config.transform) {
    transform_ = owner.register_module(
        "transform", std::make_shared<Linear>(config.width, config.width, true, config.init_std));
    transform_norm_ = owner.register_module(
        "transform_norm", std::make_shared<Norm>(config.norm, config.width, config.norm_eps));
  }
  if (!config.tied) {
    output_ = owner.register_module(
        "head", std::make_shared<Linear>(config.width, *config.vocabulary, config.output_bias,
                                         config.init_std));
    return;
  }
  owner.shared_parameter(table_, table);
  owner.unregistered(scale_);
  if (config.output_bias) {
    owner.parameter("output_bias", bias_, at::zeros({*config.vocabulary}));
  }
}

ScoreLoss loss_of_scores(const Tensor& scores, const Tensor& targets) {
  const Tensor wide = scores.to(at::promote_types(scores.scalar_type(), at::kFloat));
  return {.sum = at::cross_entropy_loss(wide, targets, {}, at::Reduction::Sum, ops::kIgnoredTarget),
          .best = wide.detach().argmax(-1)};
}

Tensor TokenHead::transformed(const Tensor& hidden) const {
  if (!transform_) return hidden;
  const char* form = config_.transform_activation == "gelu_tanh" ? "tanh" : "none";
  return transform_norm_->forward(at::gelu(transform_->forward(hidden), form));
}

Tensor TokenHead::forward(const Tensor& hidden) const {
  const Tensor x = transformed(hidden);
  return output_ ? output_->forward(x) : ops::linear(x, table_, scale_, bias_);
}

ScoreLoss TokenHead::loss(const Tensor& hidden, const Tensor& targets) const {
  const Tensor weight = output_ ? output_->weight : table_for_scores(table_);
  // Quantized weights have no gradient, and a product of their own.
  if (!weight.is_floating_point()) return loss_of_scores(forward(hidden), targets);
  auto [sum, best] = ops::linear_cross_entropy(transformed(hidden), weight, targets,
                                               output_ ? output_->bias : bias_);
  return {.sum = std::move(sum), .best = std::move(best)};
}

void TokenHead::convert(at::ScalarType type) {
  if (transform_) transform_->convert(type);
  if (output_) {
    output_->convert(type);
  } else if (!scale_.defined() && table_.scalar_type() != type) {
    std::tie(table_, scale_) = converted(table_, type);
  }
}

std::vector<Cost> TokenHead::costs() const {
  std::vector<Cost> out;
  const int64_t table = *config_.vocabulary * config_.width;
  if (transform_) {
    out.push_back({.part = "transform",
                   .formula = "2 C C",
                   .parameters = count(*transform_),
                   .flops_per_token = 2.0 * static_cast<double>(transform_->weight.numel())});
  }
  const int64_t bias = config_.output_bias ? *config_.vocabulary : 0;
  out.push_back({.part = output_ ? "embedding and output" : "output (tied to the embedding)",
                 .formula = "2 C V",
                 .parameters = (output_ ? 2 * table : table) + bias,
                 .flops_per_token = 2.0 * static_cast<double>(table)});
  return out;
}

PositionHead::PositionHead(Module& owner, const ModelConfig& config)
    : span_(config.head == "span"), dropout_(span_ ? 0 : config.dropout) {
  require(span_ || config.classes, "model.classes is not set and no task gives it.");
  linear_ = owner.register_module(
      span_ ? "span" : "classifier",
      std::make_shared<Linear>(config.width, span_ ? 2 : *config.classes, true, config.init_std));
}

Cost PositionHead::cost() const {
  return {.part = span_ ? "span" : "classifier",
          .formula = span_ ? "2 C 2" : "2 C classes",
          .parameters = count(*linear_),
          .flops_per_token = 2.0 * static_cast<double>(linear_->weight.numel())};
}

LabelHead::LabelHead(Module& owner, const ModelConfig& config) : config_(config) {
  require(config.classes.has_value(), "model.classes is not set and no task gives it.");
  if (config.pooler) {
    pooler_ = owner.register_module(
        "pooler", std::make_shared<Linear>(config.width, config.width, true, config.init_std));
  }
  classifier_ = owner.register_module(
      "classifier", std::make_shared<Linear>(config.width, *config.classes, true, config.init_std));
}

Tensor LabelHead::pool(const Tensor& x, const Tensor& lengths, bool training) const {
  Tensor y;
  if (config_.pool == "first") {
    y = x.select(1, 0);
  } else if (lengths.defined()) {
    const Tensor real = real_positions(lengths, x.sym_size(1));
    // Padding may hold anything, so it is left out rather than multiplied by 0.
    y = at::where(real.unsqueeze(-1), x, at::zeros({}, x.options())).sum(1) /
        lengths.clamp_min(1).unsqueeze(1).to(x.scalar_type());
  } else {
    y = x.mean(1);
  }
  if (pooler_) y = at::tanh(pooler_->forward(y));
  return config_.dropout > 0 ? batch_dropout(y, config_.dropout, training) : y;
}

std::vector<Cost> LabelHead::costs(int64_t length) const {
  const auto once = [&](const char* part, const char* formula, const Linear& linear) {
    return Cost{.part = part,
                .formula = formula,
                .parameters = count(linear),
                .flops_per_token =
                    2.0 * static_cast<double>(linear.weight.numel()) / static_cast<double>(length)};
  };
  std::vector<Cost> out;
  if (pooler_) out.push_back(once("pooler", "2 C C / T", *pooler_));
  out.push_back(once("classifier", "2 C classes / T", *classifier_));
  return out;
}

}  // namespace headloom
