// What the tests on another device share. The device is testing/device/guarded_device.h.
#pragma once

#include <gtest/gtest.h>

#include "../model/support.h"
#include "testing/device/guarded_device.h"

namespace headloom::test {

// The second of two, so that code which takes the first one is found.
inline const at::Device kDevice(at::kPrivateUse1, 1);

inline Tensor there(const Tensor& t) { return t.defined() ? t.to(kDevice) : t; }

// Two models with the same weights, the second one on the device. What starts as zero or the
// identity is moved away, so that every part works.
template <typename Kind>
struct Pair {
  std::shared_ptr<Kind> here, away;
};
inline Pair<Model> pair_of(const ModelConfig& config) {
  Pair<Model> out;
  for (auto* model : {&out.here, &out.away}) {
    at::manual_seed(3);
    *model = build_model(config);
    (*model)->eval();
    at::NoGradGuard no_grad;
    for (Tensor p : (*model)->parameters()) p.add_(at::randn_like(p) * 0.05);
  }
  out.away->to(kDevice);
  return out;
}
inline Pair<AutoregressiveModel> writers_of(const std::string& toml) {
  const Pair<Model> both = pair_of(model_of(toml));
  return {std::dynamic_pointer_cast<AutoregressiveModel>(both.here),
          std::dynamic_pointer_cast<AutoregressiveModel>(both.away)};
}

// How often the host waits for a device while `run` runs.
template <typename Run>
int64_t waits(const Run& run) {
  const int64_t before = host_reads();
  run();
  return host_reads() - before;
}

}  // namespace headloom::test
