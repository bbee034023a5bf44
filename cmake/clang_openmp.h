// Included before every source that Clang compiles.
//
// PyTorch carries GCC's OpenMP runtime. Clang's -fopenmp would call Clang's own, a second one in the
// process that knows nothing of the first one's threads. Without -fopenmp at::parallel_for() uses one
// thread, unless it finds the function below, which starts GCC's threads as GCC's code does.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#define INTRA_OP_PARALLEL  // ATen/Parallel-inl.h calls invoke_parallel() then

extern "C" {
void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_threads();
int omp_get_thread_num();
}

namespace at::internal {

class ThreadIdGuard;

// Splits begin to end over the threads, at least `grain_size` for each (0: no bound), and calls
// f(begin, end) with every thread's share. Throws what one of them has thrown.
template <typename F, typename Guard = ThreadIdGuard>
void invoke_parallel(int64_t begin, int64_t end, int64_t grain_size, const F& f) {
  struct Shared {
    int64_t begin, end, grain;
    const F& f;
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    std::exception_ptr error;
  } shared{begin, end, grain_size, f, {}, {}};
  const auto run = [](void* data) {
    auto& s = *static_cast<Shared*>(data);
    const int64_t items = s.end - s.begin;
    int64_t threads = omp_get_num_threads();
    if (s.grain > 0) threads = std::min(threads, (items + s.grain - 1) / s.grain);
    const int64_t share = (items + threads - 1) / threads, thread = omp_get_thread_num();
    const int64_t first = s.begin + thread * share;
    if (first >= s.end) return;
    try {
      const Guard guard(static_cast<int>(thread));
      s.f(first, std::min(s.end, first + share));
    } catch (...) {
      if (!s.failed.test_and_set()) s.error = std::current_exception();
    }
  };
  GOMP_parallel(run, &shared, 0, 0);
  if (shared.error) std::rethrow_exception(shared.error);
}

}  // namespace at::internal
