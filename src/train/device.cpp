#include "train/device.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>

#include "core/error.h"

namespace headloom {
namespace {

constexpr const char* kRandomState = "random_state";

// The generators that a run on `device` draws from, by the names of their states.
std::vector<std::pair<std::string, at::Generator>> generators(at::Device device) {
  std::vector<std::pair<std::string, at::Generator>> out;
  out.emplace_back(kRandomState, at::globalContext().defaultGenerator(at::kCPU));
  if (!device.is_cpu()) {
    out.emplace_back(str(kRandomState, ".", device.str()),
                     at::globalContext().defaultGenerator(device));
  }
  return out;
}

}  // namespace

at::Device find_device(const std::string& name, const std::string& what) {
  const bool cuda = name == "cuda" || name.starts_with("cuda:");
  const std::string number = name.starts_with("cuda:") ? name.substr(5) : "0";
  const bool counts = !number.empty() && number.size() < 4 &&
                      number.find_first_not_of("0123456789") == std::string::npos;
  if (name != "cpu" && !(cuda && counts)) {
    usage_error(what, " is \"", name, "\", expected \"cpu\", \"cuda\" or \"cuda:1\".");
  }
  if (name == "cpu") return at::kCPU;
  const int count = c10::impl::hasDeviceGuardImpl(at::kCUDA) && at::globalContext().hasCUDA()
                        ? c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount()
                        : 0;
  const int index = std::stoi(number);
  if (index >= count) {
    usage_error(what, " is \"", name, "\", but ",
                count == 0 ? std::string("this machine or this build of PyTorch has no CUDA device")
                : count == 1 ? std::string("there is one CUDA device, \"cuda\"")
                             : str("the CUDA devices are \"cuda:0\" to \"cuda:", count - 1, "\""),
                ".");
  }
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

at::Device device_of(const torch::nn::Module& model) { return model.parameters()[0].device(); }

data::Batch to_device(const data::Batch& batch, at::Device device) {
  if (device.is_cpu()) return batch;
  data::Batch out = batch;
  for (Tensor* t : {&out.inputs, &out.targets, &out.documents, &out.lengths, &out.segments,
                    &out.context, &out.source, &out.source_lengths, &out.images}) {
    if (t->defined()) *t = t->to(device);
  }
  return out;
}

void seed_random(uint64_t seed, at::Device device) {
  for (auto& [name, generator] : generators(device)) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

NamedTensors random_states(at::Device device) {
  NamedTensors out;
  for (auto& [name, generator] : generators(device)) {
    const std::lock_guard lock(generator.mutex());
    out.emplace_back(name, generator.get_state());
  }
  return out;
}

void restore_random(NamedTensors& stored, at::Device device, const std::string& path) {
  for (auto& [name, generator] : generators(device)) {
    const auto found = std::find_if(stored.begin(), stored.end(),
                                    [&](const auto& item) { return item.first == name; });
    require(found != stored.end() || name != kRandomState, path, ": has no tensor '", name, "'.");
    if (found == stored.end()) continue;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(found->second.clone());
  }
  std::erase_if(stored, [](const auto& item) { return item.first.starts_with(kRandomState); });
}

Autocast::Autocast(const std::string& dtype, at::DeviceType device)
    : on_(dtype == "bfloat16"), device_(device) {
  if (!on_) return;
  at::autocast::increment_nesting();
  at::autocast::set_autocast_dtype(device_, at::kBFloat16);
  at::autocast::set_autocast_enabled(device_, true);
}

Autocast::~Autocast() {
  if (!on_) return;
  at::autocast::set_autocast_enabled(device_, false);
  // The cast copies of the weights are stale once the optimiser has stepped.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

}  // namespace headloom
