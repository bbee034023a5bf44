// What linear's CPU kernels for weights of each type share, among themselves and with moe's.
#pragma once

#include <atomic>

#include "ops/cpu.h"
#include "ops/linear/declaration.h"

namespace headloom::ops {

// Calls f(begin, end) for runs of outputs, each of which has `bytes` of weights, on as many threads
// as they are worth: below 32 KB of weights a second one costs more than it brings.
template <typename F>
void for_runs_of_outputs(int64_t outputs, int64_t bytes, const F& f) {
  constexpr int64_t kGroup = 4;  // of outputs, as kernels take them
  const int64_t groups = (outputs + kGroup - 1) / kGroup;
  const int64_t least =
      std::max<int64_t>(1, (int64_t{32} << 10) / std::max<int64_t>(kGroup * bytes, 1));
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), (groups + least - 1) / least);
  // Threads do not share the memory evenly: who is ahead takes more, in ever smaller runs.
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t begin = next.load(); begin < groups;) {
      const int64_t run = std::max(least, (groups - begin) / (2 * threads));
      const int64_t end = threads == 1 ? groups : std::min(begin + run, groups);
      if (!next.compare_exchange_weak(begin, end)) continue;
      f(kGroup * begin, std::min(kGroup * end, outputs));
      begin = next.load();
    }
  });
}

// y [M, O], M at least 1, by weights that are not of four bits. Few rows read them in the order in
// which they lie, which decoding waits for; more rows are a dense product.
void linear_product(const Linear::Arguments& a, const Tensor& y);

// y [M, O] by a dense product: in integers where a processor multiplies these fastest. Elsewhere
// weights of eight or four bits are widened to x's type where it packs them.
void dense_product(const Linear::Arguments& a, const Tensor& y);

// The rows `which` of y [M, O], by a call of their own.
void compute_rows(const Linear::Arguments& a, const std::vector<int64_t>& which, const Tensor& y);

// Few rows in integers; more by dense_product().
std::vector<Tensor> int4_forward(const Linear::Arguments& a);

}  // namespace headloom::ops
