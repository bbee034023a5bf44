// Who does what when: the phases of forward and backward over batch elements, tiles, key blocks and
// threads. No torch, so that a race detector can drive it with threads that it understands
// (tools/races.cpp).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "ops/composed_attention/kernel.h"

namespace headloom::ops::composed_attention_kernel {

// Batch elements: as many as a multiple of the threads are done whole by one thread each, the tiles
// of the rest are shared by all threads.
inline int64_t whole_elements(const Args& a, int64_t workers) { return a.B / workers * workers; }

// What is fetched of the batch element that comes next must not drive this one's out of the
// second-level cache.
inline bool fits_beside(const Args& a) {
  constexpr int64_t kNumbers = 1 << 16;
  return a.T * a.H * (a.D + a.E) + a.S * (a.Gk * a.D + a.Gv * a.E) <= kNumbers;
}

// Tiles begin .. end - 1.
struct TileRun {
  int64_t begin, end;
};

// Which tiles of one batch element each worker does in the backward, so that every worker has about
// as many key blocks; the same for a given number of workers.
inline std::vector<std::vector<TileRun>> balanced(const Args& a, const Plan& plan) {
  std::vector<int64_t> cost(plan.tiles);
  for (int64_t i = 0; i < plan.tiles; ++i) {
    const int64_t last = std::min((i + 1) * plan.rows, a.T) - 1 + a.S - a.T;
    int64_t keys = a.causal ? std::clamp<int64_t>(last + 1, 0, a.S) : a.S;
    if (a.window > 0) keys = std::min(keys, a.window + plan.rows);
    cost[i] = (keys + kBlock - 1) / kBlock + 1;
  }
  std::vector<std::vector<TileRun>> shares(plan.workers);
  if (a.pre_conv.halo() + a.post_conv.halo() == 0) {
    // The longest ones first, each to who has least.
    std::vector<int64_t> load(plan.workers, 0);
    for (int64_t i = plan.tiles; i-- > 0;) {
      const auto least = std::min_element(load.begin(), load.end());
      *least += cost[i];
      shares[least - load.begin()].push_back({i, i + 1});
    }
    return shares;
  }
  // Tiles owe something to the one before them, so a worker's are neighbours.
  const int64_t all = std::accumulate(cost.begin(), cost.end(), int64_t{0});
  int64_t done = 0, next = 0;
  for (int64_t w = 0; w < plan.workers; ++w) {
    const auto off = [&](int64_t sum) { return std::abs(sum * plan.workers - all * (w + 1)); };
    const int64_t begin = next;
    while (next < plan.tiles && (w + 1 == plan.workers || off(done + cost[next]) < off(done))) {
      done += cost[next++];
    }
    if (begin < next) shares[w].push_back({begin, next});
  }
  return shares;
}

// Where the packed keys, the scratch and the gradient sums of each worker are.
struct Memory {
  float *packed, *scratch, *sums;
};

inline int64_t packed_copies(const Args& a, const Plan& plan) {
  return plan.split || whole_elements(a, plan.workers) > 0 ? plan.workers : 1;
}
inline int64_t memory_floats(const Args& a, const Plan& plan) {
  return packed_copies(a, plan) * plan.packed + plan.workers * (plan.scratch + plan.sums);
}

// Runs one batch element on one worker.
inline void run_alone(const Args& a, const Plan& plan, Run* run, Task task, bool backward) {
  const auto step = [&](Phase phase, int64_t count) {
    task.phase = phase;
    task.begin = 0;
    task.end = count;
    run(a, plan, task);
  };
  if (plan.split) {
    step(Phase::kSplitScores, 1);
    if (!plan.joined) step(Phase::kSplitValues, 1);
    return step(Phase::kSplitOutput, 1);
  }
  step(Phase::kPack, plan.blocks);
  step(backward ? Phase::kBackward : Phase::kForward, plan.tiles);
  if (backward) step(Phase::kReduce, plan.blocks);
}

// Runs the whole forward or backward (as the plan says) in `memory`, memory_floats() long.
// parallel(n, f) calls f(0) .. f(n - 1), side by side where it can, and returns when all are done.
template <typename Parallel>
void run_all(const Args& a, const Plan& plan, Run* run, float* memory, const Parallel& parallel) {
  const int64_t workers = plan.workers, whole = whole_elements(a, workers);
  const int64_t copies = packed_copies(a, plan);
  const Memory base{memory, memory + copies * plan.packed,
                    memory + copies * plan.packed + workers * plan.scratch};
  // Item 0, unless begin and end are set.
  const auto task_of = [&](Phase phase, int64_t batch, int64_t w) {
    return Task{phase,
                batch,
                w,
                0,
                1,
                base.packed + (copies > 1 ? w : 0) * plan.packed,
                base.scratch + w * plan.scratch,
                base.sums + w * plan.sums};
  };
  const auto clear = [&](int64_t w) {
    std::fill(base.sums + w * plan.sums, base.sums + (w + 1) * plan.sums, 0.0f);
  };
  if (whole > 0) {
    Plan alone = plan;  // one worker: its sums are the whole
    alone.workers = 1;
    const int64_t foreseen = fits_beside(a) ? whole : 0;
    parallel(workers, [&](int64_t w) {
      clear(w);
      // Neighbours, as threads have them in the linear maps before and after: cores that share no
      // cache read each other's rows slowly.
      const int64_t end = whole * (w + 1) / workers;
      for (int64_t batch = whole * w / workers; batch < end; ++batch) {
        Task task = task_of(Phase::kPack, batch, w);
        if (batch + 1 < std::min(end, foreseen)) task.next = batch + 1;
        run_alone(a, alone, run, task, plan.backward);
      }
    });
  }
  std::vector<std::vector<TileRun>> shares;
  if (plan.backward && whole < a.B) shares = balanced(a, plan);
  for (int64_t batch = whole; batch < a.B; ++batch) {
    // A share of a phase for each worker, all with the same packed keys.
    const auto share = [&](Phase phase, auto begin) {
      parallel(workers, [&](int64_t w) {
        if (phase == Phase::kPack && batch == 0) clear(w);
        Task task = task_of(phase, batch, w);
        if (!plan.split) task.packed = base.packed;
        if (phase == Phase::kReduce) task.sums = base.sums;
        task.begin = begin(w);
        task.end = begin(w + 1);
        if (task.begin < task.end) run(a, plan, task);
      });
    };
    const auto one = [](int64_t w) { return w; };
    const auto blocks = [&](int64_t w) { return plan.blocks * w / workers; };
    if (plan.split) {
      share(Phase::kSplitScores, one);
      if (!plan.joined) share(Phase::kSplitValues, one);
      run(a, plan, task_of(Phase::kSplitOutput, batch, 0));
      continue;
    }
    share(Phase::kPack, blocks);
    if (plan.backward) {
      parallel(workers, [&](int64_t w) {
        Task task = task_of(Phase::kBackward, batch, w);
        task.packed = base.packed;
        for (const TileRun& tiles : shares[w]) {
          task.begin = tiles.begin;
          task.end = tiles.end;
          run(a, plan, task);
        }
      });
      run(a, plan, task_of(Phase::kBoundary, batch, 0));
      share(Phase::kReduce, blocks);
      continue;
    }
    // Tiles are independent: workers take the next one, longest first.
    std::atomic<int64_t> next{plan.tiles};
    parallel(workers, [&](int64_t w) {
      Task task = task_of(Phase::kForward, batch, w);
      task.packed = base.packed;
      for (int64_t tile = --next; tile >= 0; tile = --next) {
        task.begin = tile;
        task.end = tile + 1;
        run(a, plan, task);
      }
    });
  }
}

}  // namespace headloom::ops::composed_attention_kernel
