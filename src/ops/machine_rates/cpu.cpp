#include "ops/cpu.h"
#include "ops/machine_rates/kernel.h"
#include "ops/machine_rates/machine_rates.h"

namespace headloom::ops {
namespace {

// 16 KB of x and of y.
constexpr int64_t kShare = 1 << 12;
// Shares of what is read: long enough that the hardware fetches ahead, and so many that no thread
// waits long for another.
constexpr int64_t kRead = 1 << 18;

}  // namespace

void repeated_exponentials(const at::Tensor& x, const at::Tensor& y, int64_t repeats) {
  static auto* const kernel = HL_CHOOSE(machine_rates_kernel::exponentials);
  TORCH_CHECK_VALUE(x.numel() % kShare == 0, "x has ", x.numel(),
                    " values, expected a multiple of ", kShare, ".");
  const float* const from = x.const_data_ptr<float>();
  float* const to = y.data_ptr<float>();
  at::parallel_for(0, x.numel() / kShare, 1, [&](int64_t begin, int64_t end) {
    for (int64_t share = begin; share < end; ++share) {
      for (int64_t i = 0; i < repeats; ++i) {
        kernel(from + share * kShare, to + share * kShare, kShare);
      }
    }
  });
}

double read_all(const at::Tensor& x, Reading how) {
  static auto* const kernel = HL_CHOOSE(machine_rates_kernel::sum);
  TORCH_CHECK_VALUE(x.numel() % kRead == 0, "x has ", x.numel(), " values, expected a multiple of ",
                    kRead, ".");
  const float* const from = x.const_data_ptr<float>();
  const int64_t shares = x.numel() / kRead;
  std::vector<double> sums(static_cast<size_t>(shares));
  each_task(thread_count(), shares, [&](int64_t i) {
    sums[static_cast<size_t>(i)] = kernel(from + i * kRead, kRead, how);
  });
  double sum = 0;
  for (const double one : sums) sum += one;
  return sum;
}

}  // namespace headloom::ops
