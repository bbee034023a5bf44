// linear on its CPU kernels.
#include <atomic>

#include "ops/cpu.h"
#include "ops/linear/declaration.h"
#include "ops/linear/kernel.h"

namespace headloom::ops {
namespace {

const char* unsupported(const Linear::Arguments& a) {
  const bool few = a.x.sym_numel() <= a.weight.sym_size(1) * kStreamedRows;
  return few ? nullptr : "there are more than 16 rows";
}

std::vector<Tensor> forward(const Linear::Arguments& a, bool training) {
  static linear_kernel::Run* const kernel = HL_CHOOSE(linear_kernel::run);
  Held held;
  std::vector<Tensor> y = Linear::outputs(a, training);
  const int64_t in = a.weight.size(1), out = a.weight.size(0);
  const linear_kernel::Args args{.rows = out > 0 ? y[0].numel() / out : 0,
                                          .in = in,
                                          .type = kernel_type(a.x),
                                          .weight_type = kernel_type(a.weight),
                                          .x = held.whole(a.x),
                                          .weight = held.whole(a.weight),
                                          .scale = held.whole<float>(a.scale),
                                          .bias = held.whole(a.bias),
                                          .out = out,
                                          .y = y[0].data_ptr()};
  // Groups of four outputs; below 32 KB of weights a second thread costs more than it brings.
  constexpr int64_t kGroup = 4;
  const int64_t bytes = kGroup * in * a.weight.element_size(), groups = (out + kGroup - 1) / kGroup;
  const int64_t least = std::max<int64_t>(1, (int64_t{32} << 10) / std::max<int64_t>(bytes, 1));
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), (groups + least - 1) / least);
  // Threads do not share the memory evenly: who is ahead takes more, in ever smaller runs.
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t begin = next.load(); begin < groups;) {
      const int64_t run = std::max(least, (groups - begin) / (2 * threads));
      const int64_t end = threads == 1 ? groups : std::min(begin + run, groups);
      if (!next.compare_exchange_weak(begin, end)) continue;
      kernel(args, kGroup * begin, std::min(kGroup * end, out));
      begin = next.load();
    }
  });
  return y;
}

const Kernels<Linear> linear_cpu(
    {.limits = c10::str("int8 weights too, up to ", kStreamedRows,
                        " rows, where no gradient is wanted"),
     .unsupported = unsupported,
     .forward = forward});

}  // namespace
}  // namespace headloom::ops
