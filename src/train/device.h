// The device of a run, "cpu", "cuda" or another that PyTorch has, and what depends on it: where
// models and batches are, the random generators and autocast.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>

#include "data/task.h"
#include "storage/safetensors.h"

namespace headloom {

// "cpu", "cuda" (the first), "cuda:1" or the name of another type of accelerator. Throws
// UsageError, which begins with `what`, for other names and for a device that this machine or this
// build of PyTorch does not have.
at::Device find_device(const std::string& name, const std::string& what = "'train.device'");
// The names alone: the device may be that of another machine.
void check_device_name(const std::string& name, const std::string& what = "'train.device'");
// The names that find_device() takes here: "cpu", "cuda:0", "cuda:1".
std::vector<std::string> devices_here();

data::Batch to_device(const data::Batch& batch, at::Device device);

// Seeds the random generators of the CPU and of `device`.
void seed_random(uint64_t seed, at::Device device);
// Their states, by name, and back. restore_random() takes out of `stored` what it reads. Throws
// Error naming `path` where the CPU's is not there. The state of a device that the stored run did
// not use stays as it is.
NamedTensors random_states(at::Device device);
void restore_random(StoredTensors& stored, at::Device device, const std::string& path);

// Parameters and floating-point buffers of `model` in the type that holds them where `dtype` is
// computed in: float64 for "float64", float32 for every other.
void hold_in(const std::string& dtype, torch::nn::Module& model);

// Autocast to bfloat16 while it lives, where `dtype` says so.
class Autocast {
 public:
  explicit Autocast(const std::string& dtype, at::DeviceType device = at::kCPU);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const bool on_;
  const at::DeviceType device_;
};

}  // namespace headloom
