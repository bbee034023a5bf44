#include "model/vit.h"

namespace headloom {
namespace {

std::string size_of(at::IntArrayRef shape) {
  std::vector<std::string> sizes;
  for (int64_t n : shape) sizes.push_back(std::to_string(n));
  return join(sizes, " x ");
}

int64_t checked_length(const ModelConfig& config) {
  const ImageOptions& image = config.image;
  require(image.channels && image.height && image.width,
          "model.image is not set and no task gives it.");
  for (const auto& [key, size] :
       {std::pair("height", *image.height), std::pair("width", *image.width)}) {
    if (size % image.patch != 0) {
      usage_error("'model.image.", key, "' is ", size,
                  ", expected a multiple of the patch = ", image.patch, ".");
    }
  }
  if (config.position.type == "sinusoidal" && config.width % 4 != 0) {
    usage_error("'model.width' is ", config.width,
                ", expected a multiple of 4 for sinusoidal positions of an image.");
  }
  return config.positions(0);
}

}  // namespace

Tensor image_patches(const Tensor& images, int64_t p) {
  const c10::SymInt batch = images.sym_size(0), channels = images.sym_size(1);
  const c10::SymInt rows = images.sym_size(2) / p, columns = images.sym_size(3) / p;
  return images.reshape_symint({batch, channels, rows, p, columns, p})
      .permute({0, 2, 4, 1, 3, 5})
      .reshape_symint({batch, rows * columns, channels * p * p});
}

Tensor sinusoidal_grid(int64_t rows, int64_t columns, int64_t width,
                       const at::TensorOptions& options) {
  const auto real = options.dtype(at::kDouble);
  const int64_t quarter = width / 4;
  const double last = static_cast<double>(std::max<int64_t>(quarter - 1, 1));
  const Tensor frequency = at::pow(10000.0, at::arange(quarter, real) * (-1.0 / last));
  const auto angles = [&](int64_t count) { return at::outer(at::arange(count, real), frequency); };
  const Tensor x = angles(columns).unsqueeze(0).expand({rows, columns, quarter});
  const Tensor y = angles(rows).unsqueeze(1).expand({rows, columns, quarter});
  return at::cat({x.sin(), x.cos(), y.sin(), y.cos()}, -1).flatten(0, 1).to(options);
}

Vit::Vit(const ModelConfig& config)
    : Model(config),
      length_(checked_length(config)),
      patch_(register_module(
          "patch",
          std::make_shared<Linear>(*config.image.channels * config.image.patch * config.image.patch,
                                   config.width, true, config.init_std))),
      layers_(
          *this, config_,
          {.list = config.layers, .depth = config.depth, .max_length = length_, .causal = false}),
      label_(*this, config_) {
  stacks_ = {&layers_};
  if (config.pool == "first") {
    parameter("class_token", class_token_, normal({config.width}, config.init_std));
  }
  if (config.position.type == "learned") {
    parameter("positions", positions_, normal({length_, config.width}, config.init_std),
              {.decay = false});
  }
  if (config.embedding_norm) {
    embedding_norm_ = register_module(
        "embedding_norm", std::make_shared<Norm>(config.norm, config.width, config.norm_eps));
  }
}

Tensor Vit::hidden(const ModelInput& input) {
  const ImageOptions& image = config_.image;
  const Tensor& images = input.images;
  if (!images.defined() || images.dim() != 4 ||
      images.sym_sizes().slice(1) != c10::fromIntArrayRefSlow(image.shape())) {
    usage_error(
        "the model reads images of ", size_of(image.shape()),
        " (channels, height, width), in a tensor with a batch dimension before these, but got ",
        images.defined() ? size_of(images.sizes()) : "none", ".");
  }
  Tensor x = patch_->forward(image_patches(images.to(patch_->weight.scalar_type()), image.patch));
  if (config_.position.type == "sinusoidal") {
    x = x + sinusoidal_grid(*image.height / image.patch, *image.width / image.patch, config_.width,
                            x.options().requires_grad(false));
  }
  if (class_token_.defined()) {
    const Tensor first = class_token_.to(x.scalar_type());
    x = at::cat({first.expand_symint({x.sym_size(0), 1, config_.width}), x}, 1);
  }
  if (positions_.defined()) x = x + positions_;
  if (embedding_norm_) x = embedding_norm_->forward(x);
  if (config_.dropout > 0) x = batch_dropout(x, config_.dropout, is_training());
  return label_.pool(layers_.forward(x, input.context()), {}, is_training());
}

std::vector<Cost> Vit::own_costs(int64_t length) const {
  std::vector<Cost> out = label_.costs(length);
  const double patches = static_cast<double>(config_.image.patches());
  out.push_back({.part = "patches",
                 .formula = "2 C p p channels",
                 .parameters = patch_->weight.numel() + patch_->bias.numel(),
                 .flops_per_token = 2.0 * static_cast<double>(patch_->weight.numel()) * patches /
                                    static_cast<double>(length)});
  return out;
}

}  // namespace headloom
