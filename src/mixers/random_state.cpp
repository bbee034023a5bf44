#include "mixers/random_state.h"

#include <ATen/Context.h>

#include <mutex>

namespace headloom {

std::vector<at::Generator> default_generators(at::Device device) {
  std::vector<at::Generator> out = {at::globalContext().defaultGenerator(at::kCPU)};
  if (!device.is_cpu()) out.push_back(at::globalContext().defaultGenerator(device));
  return out;
}

RandomState::RandomState(at::Device device) : generators_(default_generators(device)) {
  for (at::Generator& generator : generators_) {
    const std::lock_guard lock(generator.mutex());
    states_.push_back(generator.get_state());
  }
}

void RandomState::restore() {
  for (size_t i = 0; i < generators_.size(); ++i) {
    const std::lock_guard lock(generators_[i].mutex());
    generators_[i].set_state(states_[i]);
  }
}

}  // namespace headloom
