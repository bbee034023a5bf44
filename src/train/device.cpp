#include "train/device.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>

#include "core/error.h"
#include "mixers/random_state.h"

namespace headloom {
namespace {

constexpr const char* kRandomState = "random_state";

// The generators that a run on `device` draws from, by the names of their states.
std::vector<std::pair<std::string, at::Generator>> generators(at::Device device) {
  std::vector<std::pair<std::string, at::Generator>> out;
  for (at::Generator& generator : default_generators(device)) {
    const bool of_cpu = generator.device().is_cpu();
    out.emplace_back(of_cpu ? kRandomState : str(kRandomState, ".", device.str()), generator);
  }
  return out;
}

// "cuda" -> CUDA; nothing for what is no accelerator.
std::optional<at::DeviceType> accelerator(const std::string& name) {
  try {
    const at::DeviceType type = at::Device(name).type();
    if (at::accelerator::isAccelerator(type)) return type;
  } catch (const c10::Error&) {
  }
  return std::nullopt;
}

// How many of a type there are; 0 where this PyTorch is built without it.
int device_count(at::DeviceType type) {
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::getDeviceGuardImpl(type)->deviceCount()
                                             : 0;
}

struct NamedDevice {
  at::DeviceType type = at::kCPU;
  int index = 0;
};

// What "cuda:1" names, on whatever machine.
NamedDevice named_device(const std::string& name, const std::string& what) {
  if (name == "cpu") return {};
  const size_t colon = name.find(':');
  const std::string number = colon == std::string::npos ? "0" : name.substr(colon + 1);
  const bool counts = !number.empty() && number.size() < 4 &&
                      number.find_first_not_of("0123456789") == std::string::npos;
  const std::optional<at::DeviceType> type = accelerator(name.substr(0, colon));
  if (!type || !counts) {
    usage_error(what, " is \"", name, "\", expected \"cpu\", \"cuda\" or \"cuda:1\".");
  }
  return {*type, std::stoi(number)};
}

}  // namespace

void check_device_name(const std::string& name, const std::string& what) {
  named_device(name, what);
}

at::Device find_device(const std::string& name, const std::string& what) {
  const auto [type, index] = named_device(name, what);
  if (type == at::kCPU) return at::kCPU;
  const int count = device_count(type);
  const std::string kind = c10::DeviceTypeName(type), lower = c10::DeviceTypeName(type, true);
  if (index >= count) {
    usage_error(what, " is \"", name, "\", but ",
                count == 0   ? str("this machine or this build of PyTorch has no ", kind, " device")
                : count == 1 ? str("there is one ", kind, " device, \"", lower, "\"")
                             : str("the ", kind, " devices are \"", lower, ":0\" to \"", lower, ":",
                                   count - 1, "\""),
                ".");
  }
  return {type, static_cast<c10::DeviceIndex>(index)};
}

std::vector<std::string> devices_here() {
  std::vector<std::string> out = {"cpu"};
  for (const at::DeviceType type : {at::kCUDA, at::kXPU, at::kMPS, at::kPrivateUse1}) {
    for (int i = 0; i < device_count(type); ++i) {
      out.push_back(at::Device(type, static_cast<c10::DeviceIndex>(i)).str());
    }
  }
  return out;
}

data::Batch to_device(const data::Batch& batch, at::Device device) {
  if (device.is_cpu()) return batch;
  data::Batch out = batch;
  for (Tensor* t : out.tensors()) {
    if (t->defined()) *t = t->to(device);
  }
  return out;
}

void seed_random(uint64_t seed, at::Device device) {
  for (at::Generator& generator : default_generators(device)) {
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

void restore_random(StoredTensors& stored, at::Device device, const std::string& path) {
  for (auto& [name, generator] : generators(device)) {
    const auto found = std::find_if(stored.begin(), stored.end(),
                                    [&](const auto& item) { return item.first == name; });
    require(found != stored.end() || name != kRandomState, path, ": has no tensor '", name, "'.");
    if (found == stored.end()) continue;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(found->second.parts[0].clone());
  }
  std::erase_if(stored, [](const auto& item) { return item.first.starts_with(kRandomState); });
}

void hold_in(const std::string& dtype, torch::nn::Module& model) {
  const at::ScalarType type = dtype == "float64" ? at::kDouble : at::kFloat;
  const auto convert = [type](Tensor& t) {
    if (t.is_floating_point() && t.scalar_type() != type) t.set_data(t.to(type));
  };
  for (Tensor& t : model.parameters()) convert(t);
  for (Tensor& t : model.buffers()) convert(t);
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
