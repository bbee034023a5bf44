// How a product is cut into blocks and shared among threads.
#include "ops/product/blocked.h"

#include <memory>

#include "ops/cpu.h"
#include "ops/product/kernel.h"

namespace headloom::ops {
namespace {

using product_kernel::Args;
using product_kernel::Block;
using product_kernel::Matrix;
using product_kernel::Pieces;
using product_kernel::Sizes;

// Packed panels of B that all threads read: they stay in the caches that the cores share.
constexpr int64_t kBytesOfB = 8 << 20;
// Where the panels of A take no more than this, it is they that all threads read, once for each
// part of B. The panels of such a part stay in the cache of the thread that packs them.
constexpr int64_t kBytesOfSharedA = 2 << 20;
constexpr int64_t kBytesOfOwnB = 256 << 10;
// Bytes of a MadeFactor that are made and packed at once. They stay in the first level of cache.
constexpr int64_t kBytesMade = 16 << 10;
// Starting threads takes as long as this many multiply-adds, or as packing this many bytes.
constexpr int64_t kWorthThreads = 1 << 20;
constexpr int64_t kWorthPacking = 64 << 10;
// A product of few values of C, each a long sum, as the gradient of a weight is, has too few rows
// for all threads. Its sums are cut into at most so many parts, which are added up at the end. The
// sizes of the product alone decide, so that results do not depend on the number of threads.
constexpr int64_t kFewSums = 1 << 16;
constexpr int64_t kMostParts = 16;

// Memory that a thread keeps from call to call, because fresh pages cost more than small products.
class PanelMemory {
 public:
  void* of(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset(static_cast<char*>(::operator new(static_cast<size_t>(bytes), kAlign)));
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Release {
    void operator()(char* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<char, Release> memory_;
  int64_t size_ = 0;
};

// Of the calling thread: for panels that all threads read, and for those that it alone does.
PanelMemory& memory_of_shared() {
  thread_local PanelMemory memory;
  return memory;
}
PanelMemory& memory_of_own() {
  thread_local PanelMemory memory;
  return memory;
}

int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

Matrix matrix(const at::Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1)}; }

struct BlockedCall {
  const Args args;
  const MadeFactor* const made;  // where it is not null, there is no args.b
  const int64_t made_from;       // its row that is multiplied with the first column of args.a
  const int64_t m, n, k;
  const Sizes sizes;
  const int64_t threads;

  int64_t lines(int64_t depth) const {
    return parts(depth, sizes.kr) * sizes.kr / (sizes.pairs ? 2 : 1);
  }

  // Columns n0 ... n1 of B, of which the first begins a panel.
  void pack_panels(int64_t n0, int64_t n1, int64_t k0, int64_t k1, char* to) const {
    static product_kernel::Pack* const pack = HL_CHOOSE(product_kernel::pack_columns);
    if (made == nullptr) return pack(args, {0, 0, n0, n1, k0, k1}, to);
    alignas(64) char values[kBytesMade];
    const int64_t size = args.type == Type::kFloat ? sizeof(float) : sizeof(uint16_t);
    const int64_t most = kBytesMade / (size * sizes.nr) / MadeFactor::kStep * MadeFactor::kStep;
    for (int64_t left = n0; left < n1; left += sizes.nr, to += lines(k1 - k0) * sizes.b_line) {
      const int64_t right = std::min(left + sizes.nr, n1);
      for (int64_t top = k0; top < k1; top += most) {
        const int64_t depth = std::min(most, k1 - top);
        made->columns(left, right, made_from + top, made_from + top + depth, values);
        Args part = args;
        part.b = {values, 1, depth};
        pack(part, {0, 0, 0, right - left, 0, depth}, to + lines(top - k0) * sizes.b_line);
      }
    }
  }

  // All columns n0 ... n1 and rows of C, for k0 ... k1. All threads read one copy of B.
  void run_by_rows(int64_t n0, int64_t n1, int64_t k0, int64_t k1, bool add) const {
    static product_kernel::Run* const kernel = HL_CHOOSE(product_kernel::run);
    const int64_t depth = lines(k1 - k0), panel_bytes = depth * sizes.b_line;
    const int64_t panels = parts(n1 - n0, sizes.nr);
    char* const b = static_cast<char*>(memory_of_shared().of(panels * panel_bytes));
    const int64_t together = parts(panels, 4 * threads);
    const bool alone = threads == 1 || panels * panel_bytes < kWorthPacking;
    at::parallel_for(0, panels, alone ? panels : together, [&](int64_t first, int64_t last) {
      pack_panels(n0 + first * sizes.nr, std::min(n0 + last * sizes.nr, n1), k0, k1,
                  b + first * panel_bytes);
    });
    // Rows of C in one task, and columns where there are few rows. A task packs its rows of A. Each
    // thread has as many tasks, of the same size: a smaller last one would leave a thread idle.
    const int64_t tasks =
        std::max(parts(m, sizes.mc), std::min(4 * threads, parts(m, 2 * sizes.mr)));
    const int64_t tall = parts(m, std::min(parts(tasks, threads) * threads, m));
    const int64_t down = parts(m, tall);
    const int64_t across =
        threads == 1 ? 1 : std::min(panels, down >= 2 * threads ? 1 : parts(2 * threads, down));
    const int64_t wide = parts(panels, across) * sizes.nr;
    each_task(threads, down * across, [&](int64_t i) {
      void* const a = memory_of_own().of(parts(tall, sizes.mr) * depth * sizes.a_line);
      const int64_t top = i / across * tall, left = n0 + i % across * wide;
      if (left >= n1) return;
      kernel(args, {top, std::min(top + tall, m), left, std::min(left + wide, n1), k0, k1}, add,
             b + (left - n0) / sizes.nr * panel_bytes, a, /*shared=*/false);
    });
  }

  // Where columns n0 ... n1 of B lie in memory, if each is adjacent values there.
  Pieces place_of_columns(int64_t n0, int64_t n1, int64_t k0, int64_t k1) const {
    if (made != nullptr || args.b.row != 1 || n0 >= n1) return {};
    const int64_t size = args.b_float || args.type == Type::kFloat ? sizeof(float) : 2;
    const char* const from =
        static_cast<const char*>(args.b.data) + (n0 * args.b.column + k0) * size;
    if (args.b.column == k1 - k0) return {from, 1, (n1 - n0) * (k1 - k0) * size, 0};
    return {from, n1 - n0, (k1 - k0) * size, args.b.column * size};
  }

  // All of C, for k0 ... k1. All threads read one copy of A. Each packs the columns of B that it
  // multiplies.
  void run_by_columns(int64_t k0, int64_t k1, bool add) const {
    static product_kernel::Pack* const pack_rows = HL_CHOOSE(product_kernel::pack_rows);
    static product_kernel::Run* const kernel = HL_CHOOSE(product_kernel::run);
    const int64_t depth = lines(k1 - k0), panel_bytes = depth * sizes.a_line;
    const int64_t panels = parts(m, sizes.mr);
    char* const a = static_cast<char*>(memory_of_shared().of(panels * panel_bytes));
    const bool alone = threads == 1 || panels * panel_bytes < kWorthPacking;
    const int64_t together = alone ? panels : parts(panels, 4 * threads);
    // The last two panels have as many rows as each other, so one task has both.
    const auto row = [&](int64_t panel) {
      const int64_t first = panel * sizes.mr;
      return panel > 0 && m - first < 2 * sizes.mr ? m : first;
    };
    each_task(threads, parts(panels, together), [&](int64_t i) {
      const int64_t top = row(i * together), bottom = std::min(row((i + 1) * together), m);
      if (top < bottom) {
        pack_rows(args, {top, bottom, 0, n, k0, k1}, a + i * together * panel_bytes);
      }
    });
    // Tasks have as many panels as each other, or one less, and threads as many tasks as each
    // other. Where A has few rows, threads wait for memory, which they do not share evenly, so that
    // smaller tasks end closer together.
    const int64_t of_own = std::min(kBytesOfOwnB, panels * panel_bytes);
    const int64_t own = std::max<int64_t>(of_own / (depth * sizes.b_line), 1);
    const int64_t across = parts(n, sizes.nr);
    const int64_t wide = std::min(own, parts(across, 4 * threads));
    const int64_t tasks = std::min(parts(parts(across, wide), threads) * threads, across);
    const auto first = [&](int64_t i) { return std::min(across * i / tasks * sizes.nr, n); };
    each_task(threads, tasks, [&](int64_t i) {
      void* const b = memory_of_own().of(wide * depth * sizes.b_line);
      const int64_t left = first(i), right = first(i + 1);
      pack_panels(left, right, k0, k1, static_cast<char*>(b));
      Args fetching = args;
      if (i + 1 < tasks) fetching.next = place_of_columns(first(i + 1), first(i + 2), k0, k1);
      kernel(fetching, {0, m, left, right, k0, k1}, add, b, a, /*shared=*/true);
    });
  }

  void run(bool add) const {
    static product_kernel::ReadsRows* const reads_rows = HL_CHOOSE(product_kernel::reads_rows);
    // Columns of a matrix, as the gradient of a weight has them, need no packing.
    const bool in_place = args.a.row == 1 && reads_rows(args, {0, m, 0, n, 0, k});
    const int64_t most = in_place ? sizes.kc_adjacent : sizes.kc;
    for (int64_t k0 = 0; k0 < k; k0 += most) {
      const int64_t k1 = std::min(k0 + most, k), depth = lines(k1 - k0);
      const bool few_rows = m < n && parts(m, sizes.mr) * depth * sizes.a_line <= kBytesOfSharedA;
      if (few_rows && !in_place && parts(n, sizes.nr) >= 4 * threads) {
        run_by_columns(k0, k1, add || k0 > 0);
        continue;
      }
      const int64_t wide = std::max<int64_t>(kBytesOfB / (depth * sizes.b_line), 1) * sizes.nr;
      for (int64_t n0 = 0; n0 < n; n0 += wide) {
        run_by_rows(n0, std::min(n0 + wide, n), k0, k1, add || k0 > 0);
      }
    }
  }
};

// Values along k in each part of the sums.
int64_t length_of_part(int64_t m, int64_t n, int64_t k, const Sizes& sizes) {
  if (m * n > kFewSums || k < 4 * sizes.kc) return k;
  return parts(parts(k, kMostParts), sizes.kc) * sizes.kc;
}

// b is undefined where `made` is not null.
void run_blocked(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                 const MadeFactor* made, const at::Tensor& bias, bool add) {
  const int64_t m = a.size(0), k = a.size(1), n = out.size(1);
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (add) return;
    bias.defined() ? out.copy_(bias.expand_as(out)) : out.zero_();
    return;
  }
  static product_kernel::SizesOf* const sizes_of = HL_CHOOSE(product_kernel::sizes);
  Held held;
  const bool amx = kernel_type(a) == Type::kBFloat16 && has_amx();
  const bool b_float = made == nullptr && b.scalar_type() != a.scalar_type();
  if (b_float && !amx) return run_blocked(out, a, b.to(a.scalar_type()), made, bias, add);
  const Sizes sizes = sizes_of(kernel_type(a), amx, k);
  const int64_t length = length_of_part(m, n, k, sizes), pieces = parts(k, length);
  // A sum that is cut along k is kept in float32 between its parts.
  const bool cut = pieces > 1, wide = k > sizes.kc && out.scalar_type() != at::kFloat;
  const at::Tensor c =
      cut || wide ? at::empty({pieces, m, n}, out.options().dtype(at::kFloat)) : out.unsqueeze(0);
  const float* const scale = made == nullptr ? nullptr : held.whole<float>(made->scale);
  const void* const offset = wide ? held.floats(bias) : held.whole(bias);
  const int64_t threads =
      at::in_parallel_region() || m * n * k < kWorthThreads ? 1 : thread_count();
  const auto run = [&](int64_t piece) {
    const int64_t first = piece * length, depth = std::min(length, k - first);
    BlockedCall{.args = {.type = kernel_type(a),
                         .out_type = kernel_type(c),
                         .a = matrix(a.narrow(1, first, depth)),
                         .b = made == nullptr ? matrix(b.narrow(0, first, depth)) : Matrix{},
                         .c = c.select(0, piece).data_ptr(),
                         .c_row = c.stride(1),
                         .scale = scale,
                         .bias = piece == 0 ? offset : nullptr,
                         .amx = amx,
                         .b_float = b_float},
                .made = made,
                .made_from = first,
                .m = m,
                .n = n,
                .k = depth,
                .sizes = sizes,
                .threads = cut ? 1 : threads}
        .run(add && !cut);
  };
  if (!cut) {
    run(0);
    if (wide) out.copy_(c.select(0, 0));
    return;
  }
  each_task(threads, pieces, run);
  const at::Tensor sum = add ? out : c.select(0, 0);
  for (int64_t i = add ? 0 : 1; i < pieces; ++i) sum.add_(c.select(0, i));
  if (!add) out.copy_(sum);
}

}  // namespace

bool rounds_weights(const at::Tensor& a) {
  return a.is_cpu() && a.scalar_type() == at::kBFloat16 && has_amx();
}

void blocked_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                     const at::Tensor& bias, bool add) {
  run_blocked(out, a, b, nullptr, bias, add);
}

void blocked_product(const at::Tensor& out, const at::Tensor& a, const MadeFactor& b,
                     const at::Tensor& bias) {
  run_blocked(out, a, {}, &b, bias, /*add=*/false);
}

}  // namespace headloom::ops
