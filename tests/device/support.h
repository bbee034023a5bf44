// What the tests on another device share. The device is testing/device/guarded_device.h, or the one
// that HEADLOOM_TEST_DEVICE names.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "../model/support.h"
#include "testing/device/guarded_device.h"
#include "train/device.h"

namespace headloom::test {

// Whether it is the guarded one, which counts waits, refuses what CUDA takes, computes as the CPU
// does, and of which there are two.
inline const bool kGuarded = on_guarded_device();

// Of the guarded ones the second, so that code which takes the first one is found.
inline const at::Device kDevice = [] {
  const at::Device named(test_device());
  return named.has_index() ? named : at::Device(named.type(), 0);
}();

// A real device multiplies float32 in float32, and the tests are skipped where it is not there.
class RealDevice : public ::testing::Environment {
 public:
  void SetUp() override {
    if (kGuarded) return;
    try {
      find_device(test_device(), "HEADLOOM_TEST_DEVICE");
    } catch (const UsageError& error) {
      GTEST_SKIP() << error.what();
    }
    at::globalContext().setAllowTF32CuDNN(false);
    // cuBLAS reads it when it starts: with it, its sums have the same order every time.
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
  }
};
inline ::testing::Environment* const kRealDevice =
    ::testing::AddGlobalTestEnvironment(new RealDevice);

// Why a test does not run on a real device.
inline constexpr const char* kOnlyGuarded = "only the guarded device shows this";

// While one lives, a real device sums in the same order every time, where it can.
class SameOrder {
 public:
  SameOrder() {
    if (!kGuarded) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  }
  ~SameOrder() { at::globalContext().setDeterministicAlgorithms(false, false); }
  SameOrder(const SameOrder&) = delete;
  SameOrder& operator=(const SameOrder&) = delete;
};

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

// How often the host waits for a device while `run` runs. A real device does not count: 0.
template <typename Run>
int64_t waits(const Run& run) {
  const int64_t before = host_reads();
  run();
  return host_reads() - before;
}

}  // namespace headloom::test
