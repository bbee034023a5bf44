#include "model/branches.h"

#include <utility>

#include "core/memory.h"
#include "mixers/random_state.h"
#include "mixers/without_memory.h"
#include "model/describe.h"

namespace headloom {
namespace {

// Seeds the default generator, from which weights and inputs are drawn, and restores it.
class SeededGenerator {
 public:
  explicit SeededGenerator(uint64_t seed) {
    at::Generator generator = default_generators(at::kCPU)[0];
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
  ~SeededGenerator() { before_.restore(); }
  SeededGenerator(const SeededGenerator&) = delete;
  SeededGenerator& operator=(const SeededGenerator&) = delete;

 private:
  RandomState before_{at::kCPU};
};

// Random inputs for a model of any kind.
ModelInput random_input(const ModelConfig& config, int64_t length) {
  if (config.kind == "vit") {
    const auto [channels, height, width] = config.image.shape();
    return {.images = at::randn({kBranchSequences, channels, height, width})};
  }
  const auto tokens = [&](int64_t positions) {
    return at::randint(*config.vocabulary, {kBranchSequences, positions}, at::kLong);
  };
  ModelInput input{.tokens = tokens(std::min(length, config.length()))};
  if (config.kind == "encoder_decoder") {
    input.source = tokens(std::min(length, config.source_length()));
  }
  return input;
}

}  // namespace

std::optional<std::vector<BranchScale>> measured_branches(const ModelConfig& config,
                                                          int64_t length) {
  const double parameters = parameter_count(*build_without_memory(config));
  if (parameters > static_cast<double>(kMostBranchParameters) ||
      4.0 * parameters > memory_limit().bytes) {
    return {};
  }
  const SeededGenerator seeded(0);
  const at::NoGradGuard no_grad;
  const std::shared_ptr<Model> model = build_model(config);
  model->eval();
  AuxiliaryOutputs measured;
  measured.measures_branches = true;
  ModelInput input = random_input(config, std::min(length, kBranchPositions));
  input.auxiliary = &measured;
  model->hidden(input);
  std::vector<BranchScale> out;
  for (const Layers* layers : model->stacks()) {
    for (size_t i = 0; i < layers->all().size(); ++i) {
      const auto place = static_cast<int64_t>(i);
      const AuxiliaryOutputs::Branch& branch = measured.branches.at(layers->first() + place);
      out.push_back({.part = layers->part(),
                     .layer = place,
                     .mixer = layers->all()[i].mixer->type(),
                     .output = branch.output,
                     .residual = branch.residual});
    }
  }
  return out;
}

void equalize(TokenMixer& mixer, const LayerShape& shape, const std::string& place) {
  const std::shared_ptr<Linear> output = mixer.output_projection();
  if (output == nullptr) {
    usage_error(place, " (", mixer.type(),
                ") has no output projection, which model.equal_init = true would scale, expected "
                "equal_init = false.");
  }
  if (WithoutValues::on() || WithoutMemory::on()) return;
  const at::NoGradGuard no_grad;
  const auto plain = make_spec(token_mixers(), "token mixer", "mha");
  read_fields(parse_toml("heads = 1", "equal_init"), *plain);
  LayerShape of_plain = shape;
  of_plain.position = {.type = "none"};
  const int64_t length = std::min(shape.max_length, kBranchPositions);
  // All processes measure the same whole sequences.
  of_plain.context_parallel = nullptr;
  const auto positions = std::exchange(mixer.context_parallel_, nullptr);
  const Tensor x = at::randn({kBranchSequences, length, shape.width});
  const double target = root_mean_square(plain->build(of_plain)->forward(x, {}));
  const double present = root_mean_square(mixer.forward(x, {}));
  mixer.context_parallel_ = positions;
  if (present > 0) output->weight.mul_(target / present);
}

}  // namespace headloom
