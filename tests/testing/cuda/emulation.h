// What python/headloom/gpu/mixes*.cu need of CUDA, for a processor without a GPU.
//
// Blocks run one after the other, and a block's threads are fibers of the caller's thread. A fiber
// runs until it comes to an instruction by which threads exchange values, and goes on when all
// threads of its warp, or of its block, are there. Mistakes that a GPU keeps to itself are
// reported: threads that wait for different instructions or that end while others wait, and writes
// after the shared memory. Results must not depend on the order in which warps and threads run,
// which the caller chooses. Shared memory starts as NaN, and what a thread copies into it is NaN
// until it waits for its copies.
#pragma once

#undef _FORTIFY_SOURCE  // whose longjmp takes another stack for a mistake
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#define HEADLOOM_EMULATED
#define __device__
#define __forceinline__ inline
#define KERNEL static void
#define SHARED(name) float* const name = emulation::now->shared
#define threadIdx (emulation::now->threads[emulation::now->running].index)
#define blockIdx (emulation::now->place)
#define gridDim (emulation::now->grid)

using std::max;
using std::min;

// Numbers of arrays are also read as these.
struct __attribute__((may_alias)) uint2 {
  unsigned x, y;
};
struct __attribute__((may_alias)) uint4 {
  unsigned x, y, z, w;
};
struct uint3 {
  unsigned x, y, z;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

namespace emulation {

enum class Wait { no, ended, block, order, shuffle, transposed, product_16, product_8 };

inline const char* name(Wait wait) {
  switch (wait) {
    case Wait::no:
      return "nothing";
    case Wait::ended:
      return "nothing more";
    case Wait::block:
      return "the block";
    case Wait::order:
      return "its warp";
    case Wait::shuffle:
      return "a shuffle";
    case Wait::transposed:
      return "a transposed matrix";
    case Wait::product_16:
      return "a product m16n8k16";
    case Wait::product_8:
      return "a product m16n8k8";
  }
  return "";
}

constexpr int LANES = 32;
constexpr int VALUES = 12;    // that a thread gives to an exchange, at most
constexpr int GUARD = 1024;   // numbers after the shared memory that must stay as they are
constexpr size_t STACK = size_t(256) << 10;  // of a thread; what it does not touch takes no memory

struct Copy {
  void* to;
  size_t size;
  unsigned char bytes[8];
};

struct Thread {
  uint3 index;
  std::vector<Copy> copies;
  Wait waits = Wait::no;
  int turn = 0;  // of the two places for values of an exchange
  bool started = false;
  jmp_buf place;
};

// Those of one exchange and of the next: no thread gives values for the one after before all have
// read these.
union Values {
  float f[2][LANES][VALUES];
  unsigned u[2][LANES][VALUES];
};

class Block {
 public:
  Block(int threads, size_t shared_bytes, uint3 grid, unsigned order)
      : grid(grid), threads(threads), values(threads / LANES), order_(order) {
    size_t count = shared_bytes / sizeof(float) + 4;
    memory_.resize(count + GUARD);
    shared = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory_.data()) + 15) / 16 * 16);
    shared_count_ = shared_bytes / sizeof(float);
    stacks_ = static_cast<char*>(mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks_ == MAP_FAILED) error = "There is no memory for the stacks of a block's threads.";
  }
  ~Block() {
    if (stacks_ != MAP_FAILED) munmap(stacks_, threads.size() * STACK);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Runs one block. What went wrong is in `error`, and the object then takes no other.
  template <class Kernel>
  void run(uint3 at, const Kernel& kernel) {
    place = at;
    body_ = &kernel;
    call_ = [](const void* body) { (*static_cast<const Kernel*>(body))(); };
    memset(memory_.data(), 0xff, memory_.size() * sizeof(float));
    for (size_t i = 0; i < threads.size(); ++i) {
      Thread& t = threads[i];
      t.index = {unsigned(i), 0, 0};
      t.waits = Wait::no;
      t.turn = 0;
      t.copies.clear();
    }
    while (error.empty() && rounds()) {
    }
    for (int i = 0; i < GUARD && error.empty(); ++i) {
      unsigned bits;
      memcpy(&bits, shared + shared_count_ + i, sizeof(bits));
      if (bits != 0xffffffffu) error = "A block writes past its shared memory.";
    }
    if (!error.empty()) {
      error += " (block " + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
               std::to_string(at.z) + ")";
    }
  }

  // Of a thread: returns when the others that it waits for are there.
  __attribute__((noinline)) void wait(Wait reason) {
    Thread& t = threads[running];
    t.waits = reason;
    if (_setjmp(t.place) == 0) _longjmp(scheduler_, 1);
  }

  // Into shared memory, where the value is when the thread waits for it.
  void copy(void* to, const void* from, size_t size) {
    const char* begin = reinterpret_cast<char*>(shared);
    const char* place = static_cast<char*>(to);
    Copy made{to, size, {}};
    if (place < begin || place + size > begin + shared_count_ * sizeof(float) ||
        size > sizeof(made.bytes)) {
      error = "A thread copies to a place outside of the shared memory.";
      return;
    }
    memcpy(made.bytes, from, size);
    threads[running].copies.push_back(made);
    memset(to, 0xff, size);
  }
  void finish_copies() {
    for (const Copy& made : threads[running].copies) memcpy(made.to, made.bytes, made.size);
    threads[running].copies.clear();
  }

  uint3 grid, place{};
  std::vector<Thread> threads;
  std::vector<Values> values;  // of each warp
  float* shared = nullptr;
  int running = 0;
  std::string error;

 private:
  // Runs all warps until they wait for the block. False when they have ended.
  bool rounds() {
    const int warps = int(values.size());
    const unsigned round = round_;
    for (int i = 0; i < warps && error.empty(); ++i) run_warp(turned(i, warps, round));
    if (!error.empty()) return false;
    int ended = 0;
    for (const Thread& t : threads) ended += t.waits == Wait::ended;
    if (ended == int(threads.size())) return false;
    if (ended > 0) {
      error = "Threads of a block end while others of it wait for the block.";
      return false;
    }
    for (Thread& t : threads) t.waits = Wait::no;
    ++round_;
    return true;
  }

  void run_warp(int warp) {
    Thread* own = threads.data() + warp * LANES;
    while (error.empty()) {
      for (int i = 0; i < LANES && error.empty(); ++i)
        resume(warp * LANES + turned(i, LANES, round_));
      for (int i = 1; i < LANES && error.empty(); ++i) {
        if (own[i].waits != own[0].waits) {
          error = std::string("Thread ") + std::to_string(warp * LANES) + " waits for " +
                  name(own[0].waits) + " and thread " + std::to_string(warp * LANES + i) +
                  " of the same warp for " + name(own[i].waits) + ".";
        }
      }
      if (own[0].waits == Wait::block || own[0].waits == Wait::ended) return;
      for (int i = 0; i < LANES; ++i) own[i].waits = Wait::no;
      ++round_;
    }
  }

  // The i-th of `count`: forwards, backwards, or from some place on in a direction that changes
  // with time.
  int turned(int i, int count, unsigned round) const {
    if (order_ == 0) return i;
    if (order_ == 1) return count - 1 - i;
    unsigned mixed = (order_ + round) * 2654435761u;
    int from = int((mixed >> 8) % unsigned(count));
    return (mixed >> 24 & 1 ? from + i : from + count - i) % count;
  }

  __attribute__((noinline)) void resume(int i) {
    Thread& t = threads[i];
    if (t.waits == Wait::ended) return;
    running = i;
    if (_setjmp(scheduler_) != 0) return;
    if (t.started) _longjmp(t.place, 1);
    start(i);
  }

  void start(int i) {
    threads[i].started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks_ + i * STACK;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, &Block::fiber, 0);
    setcontext(&context);
  }

  // Runs the kernel for one block after the other.
  static void fiber();

  std::vector<float> memory_;
  size_t shared_count_ = 0;
  char* stacks_;
  jmp_buf scheduler_;
  const void* body_ = nullptr;
  void (*call_)(const void*) = nullptr;
  unsigned order_, round_ = 0;
};

inline Block* now = nullptr;

inline void Block::fiber() {
  for (;;) {
    now->call_(now->body_);
    now->wait(Wait::ended);
  }
}

// Gives values to an exchange of the warp and returns those of all of its threads.
template <class T, size_t N, class Of>
T (*exchange(Wait reason, const T (&given)[N], Of of_turn))
[VALUES] {
  static_assert(N <= VALUES, "A thread has room for so many values.");
  Block& block = *now;
  Thread& t = block.threads[block.running];
  T(*all)[VALUES] = of_turn(block.values[block.running / LANES], t.turn);
  t.turn ^= 1;
  memcpy(all[block.running % LANES], given, sizeof(given));
  block.wait(reason);
  return all;
} template <size_t N>
float (*exchange(Wait reason, const float (&given)[N]))
    [VALUES] {
      return exchange(reason, given, [](Values& v, int turn) { return v.f[turn]; });
    } template <size_t N>
    unsigned (*exchange(Wait reason, const unsigned (&given)[N]))
        [VALUES] { return exchange(reason, given, [](Values& v, int turn) { return v.u[turn]; }); }

inline int lane() {
  return now->running % LANES;
}

inline unsigned bits_of(float x) {
  unsigned y;
  memcpy(&y, &x, sizeof(y));
  return y;
}
inline float of_bits(unsigned x) {
  float y;
  memcpy(&y, &x, sizeof(y));
  return y;
}

inline float of_float16(unsigned x) {
  unsigned sign = (x & 0x8000u) << 16, exponent = x >> 10 & 31, fraction = x & 0x3ff;
  if (exponent == 31) return of_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  float y = float(fraction) * 0x1p-24f;
  return sign ? -y : y;
}
// Rounds to the nearest number, of two to the even one.
inline unsigned float16_of(float x) {
  unsigned bits = bits_of(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fffu;
  if (size >= 0x477ff000u) return sign | 0x7c00u;
  if (size < 0x38800000u)
    return sign | unsigned(std::nearbyintf(of_bits(size) * 0x1p24f));  // subnormal
  size += 0xfffu + (size >> 13 & 1);
  return sign | (size - 0x38000000u) >> 13;
}
inline float of_bfloat16(unsigned x) { return of_bits(x << 16); }
inline unsigned bfloat16_of(float x) {
  unsigned bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

// Runs the kernel for all blocks of a grid, one after the other. Returns what went wrong.
template <class Kernel>
std::string run(int threads, uint3 grid, size_t shared_bytes, unsigned order,
                const Kernel& kernel) {
  const unsigned count = grid.x * grid.y * grid.z;
  Block block(threads, shared_bytes, grid, order);
  now = &block;
  for (unsigned i = 0; i < count && block.error.empty(); ++i) {
    const unsigned at = order == 1 ? count - 1 - i : i;
    block.run({at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y}, kernel);
  }
  now = nullptr;
  return block.error;
}

}  // namespace emulation
