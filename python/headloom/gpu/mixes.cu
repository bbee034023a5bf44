// What the CUDA kernels of composed attention's mixes share, for maps of 16 bits. It is compiled
// with mixes_forward.cu or mixes_backward.cu after it. kernels.py has the equations and the names,
// and the kernels in Triton that take what these do not: float32, a static matrix, and in the
// backward groups of more heads than registers have room for.
//
// Compiled for each kind of call, with these constants:
//   HEADS           of a group
//   RQ, RK          ranks of the query-wise and of the key-wise part
//   GATE_Q, GATE_K  whether there are gates: 0 or 1
//   BF16            1 for bfloat16, 0 for float16
//   TO              what `mix` makes: 0 scores, 1 weights, 2 composed weights
//   EXP             1 where composed weights are made from p = exp(maps - L), 0 where from maps
//   AFTER           1 for the backward of the mix after softmax, 0 for that of the mix before
//   CAUSAL, WINDOW, LENGTHS, DOCUMENTS, MASK   whether these hide keys: 0 or 1
//   WARPS, BLOCKS   warps of a block, and blocks that should fit a multiprocessor
//
// A block has 64 queries, of which it takes some at a time, and a number of keys. Of these a thread
// has one query and 4 keys, for all heads of the group, two places in one number. So sums over
// heads stay in a thread, and each map is read once from the GPU's memory.

typedef unsigned int u32;
typedef long long i64;

constexpr int WQ = 2 * RQ + GATE_Q;
constexpr int WK = 2 * RK + GATE_K;
#ifdef TO
constexpr int COLUMNS = 64;      // keys of a block
constexpr int STEP = 2 * WARPS;  // queries that a block takes at a time
constexpr int LANES = 16;        // threads of a warp along a row
#else
constexpr int COLUMNS = 16 * WARPS;
constexpr int STEP = 8;
constexpr int LANES = 4;
#endif
constexpr int ROWS = 64;  // queries of a block
constexpr int THREADS = 32 * WARPS;
constexpr int OF_WARP = 32 / LANES;  // queries of a warp at a time
constexpr int QUERIES = 16;          // of a block of a mix's weights, as in kernels.py
constexpr int KEYS = 128;
constexpr int PAIRS = (HEADS + 1) / 2;
constexpr float LOG2E = 1.4426950408889634f;

// As class Call of kernels.py, without its constants.
struct Call {
  const i64* lengths;
  const i64* documents;
  const unsigned char* mask;
  i64 mask_batch, mask_row, mask_key;
  const float* lse;
  const float* of_queries;  // the mix's weights
  const float* of_keys;
  int T, S, window, first, last, left, right, chunks, step, rows, columns;
  int query_blocks, key_blocks, keys_before, heads, groups;
};

// -------------------------------------------------------------------------------------------------
// Instructions. tests/testing/cuda has them for a machine without a GPU.
// -------------------------------------------------------------------------------------------------

#ifndef HEADLOOM_EMULATED
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
#define SHARED(name) extern __shared__ __align__(16) float name[]
// Into shared memory, past the registers.
template <class T>
__device__ __forceinline__ void copy(T* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(u32(__cvta_generic_to_shared(to))),
               "l"(from), "n"(sizeof(T))
               : "memory");
}
// For the thread's own.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// Also for the copies of all of its threads.
__device__ __forceinline__ void wait_for_block() {
  wait_for_copies();
  __syncthreads();
}
__device__ __forceinline__ float shuffle_xor(float x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
__device__ __forceinline__ u32 shuffle_xor(u32 x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
__device__ __forceinline__ u32 shuffle(u32 x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
// The block's place in the grid. It is asked for anew each time, so that what follows from it need
// not stay in registers.
__device__ __forceinline__ uint3 block_place() {
  uint3 at;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(at.x));
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(at.y));
  asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(at.z));
  return at;
}
__device__ __forceinline__ float from_bits(u32 x) { return __uint_as_float(x); }
__device__ __forceinline__ u32 to_bits(float x) { return __float_as_uint(x); }

// 2^x; subnormal numbers are 0.
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The lower and the upper of two values of 16 bits.
__device__ __forceinline__ float lower(u32 x) {
#if BF16
  return __uint_as_float(x << 16);
#else
  float y;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(y) : "r"(x));
  return y;
#endif
}
__device__ __forceinline__ float upper(u32 x) {
#if BF16
  return __uint_as_float(x & 0xffff0000u);
#else
  float y;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(y) : "r"(x));
  return y;
#endif
}
__device__ __forceinline__ u32 packed(float lower, float upper) {
  u32 x;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(upper), "f"(lower));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(upper), "f"(lower));
#endif
  return x;
}

// Each map is read once, and the first-level cache is for weights.
__device__ __forceinline__ uint2 load_map(const void* from) {
  uint2 x;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y)
               : "l"(from));
  return x;
}
__device__ __forceinline__ void store_map(void* to, uint2 x) { *static_cast<uint2*>(to) = x; }

#if BF16
#define TYPE "bf16"
#else
#define TYPE "f16"
#endif
// Of two numbers in one: x y + z, rounded once.
__device__ __forceinline__ u32 multiply_add(u32 x, u32 y, u32 z) {
  u32 d;
  asm("fma.rn." TYPE "x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(y), "r"(z));
  return d;
}
// The upper number twice.
__device__ __forceinline__ u32 upper_twice(u32 x) { return __byte_perm(x, x, 0x3232); }
// The lower numbers of two, and the upper ones.
__device__ __forceinline__ u32 lower_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x5410); }
__device__ __forceinline__ u32 upper_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x7632); }
// The larger ones of two numbers in one; a NaN is none.
__device__ __forceinline__ u32 larger(u32 x, u32 y) {
  u32 d;
  asm("max." TYPE "x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
  return d;
}
// d = a b for a [16, 16] and b [16, 8].
__device__ __forceinline__ void product(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                        u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}
// d = a b for a [16, 8] and b [8, 8].
__device__ __forceinline__ void product(float (&d)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32." TYPE "." TYPE
      ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0), "f"(0.f));
}
// The compiler takes what is before it first. Otherwise it would unpack the maps of all heads
// together, for which registers do not suffice.
__device__ __forceinline__ void in_order() { __syncwarp(); }
// The transposed matrix, [8, 8] values of 16 bits.
__device__ __forceinline__ u32 transposed(u32 x) {
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
#endif

// -------------------------------------------------------------------------------------------------
// The place of a thread, and what it sees
// -------------------------------------------------------------------------------------------------

struct Place {
  int tile, row_tile;            // of the block
  int chunk, chunks, b, offset;  // as in kernels.py; `chunks` are all of the batch
  int first_head, end;
  int g, own_column;  // the thread's first query of a step, and first key, from the block's first
  int row, t;         // the block's first query
  int column, s;      // the block's first key
};

__device__ __forceinline__ Place place(const Call& c) {
  const uint3 block = block_place();
  Place at;
  at.tile = block.x;
  at.row_tile = block.y;
  at.chunk = block.z / c.groups;
  at.chunks = gridDim.z / c.groups;
  at.first_head = block.z % c.groups * HEADS;
  at.b = at.chunk / c.chunks;
  at.offset = at.chunk % c.chunks * c.step;
  at.end = min(c.last + at.offset, c.T);
  constexpr int down = STEP / OF_WARP;  // warps one below another
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  at.g = warp % down * OF_WARP + lane / LANES;
  at.own_column = (warp / down * LANES + lane % LANES) * 4;
  at.row = at.row_tile * ROWS;
  at.t = c.first + at.offset + at.row;
  at.column = at.tile * COLUMNS;
  at.s = c.left + at.offset + at.column;
  return at;
}

// False where positions alone tell that none of the STEP queries from t on sees a key of the block.
__device__ __forceinline__ bool some_visible(const Call& c, const Place& at, int t) {
  int past = c.S - c.T;
  int t_last = min(t + STEP, at.end) - 1;
  int s_last = min(at.s + COLUMNS, c.S) - 1;
  int s_first = max(at.s, 0);
  bool some = s_first <= s_last && t <= t_last;
  if (CAUSAL) some = some && s_first <= t_last + past;
  if (WINDOW) some = some && s_last > t + past - c.window;
  if (WINDOW && !CAUSAL) some = some && s_first < t_last + past + c.window;
  if (LENGTHS) some = some && s_first < c.lengths[at.b];
  return some;
}

__device__ __forceinline__ bool visible(const Call& c, const Place& at, int t, int s) {
  int distance = t + c.S - c.T - s;
  bool seen = t < at.end && s >= 0 && s < c.S;
  if (CAUSAL) seen = seen && distance >= 0;
  if (WINDOW) seen = seen && distance < c.window;
  if (WINDOW && !CAUSAL) seen = seen && -distance < c.window;
  if (LENGTHS) seen = seen && s < c.lengths[at.b];
  // A query before the first key is of document 0.
  if (DOCUMENTS && seen) {
    const i64* documents = c.documents + i64(at.b) * c.S;
    seen = (distance + s >= 0 ? documents[distance + s] : 0) == documents[s];
  }
  if (MASK && seen) seen = c.mask[at.b * c.mask_batch + t * c.mask_row + s * c.mask_key] != 0;
  return seen;
}

// All bits of the places that query t sees, of the thread's keys.
__device__ __forceinline__ uint2 seen_bits(const Call& c, const Place& at, int t) {
  int s = at.s + at.own_column;
  u32 bits[4];
  for (int i = 0; i < 4; ++i) bits[i] = visible(c, at, t, s + i) ? 0xffffu : 0u;
  return make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
}

__device__ __forceinline__ uint2 operator&(uint2 x, uint2 bits) {
  return make_uint2(x.x & bits.x, x.y & bits.y);
}

__device__ __forceinline__ void unpack(float (&y)[4], uint2 x) {
  y[0] = lower(x.x);
  y[1] = upper(x.x);
  y[2] = lower(x.y);
  y[3] = upper(x.y);
}
__device__ __forceinline__ uint2 pack(const float (&y)[4]) {
  return make_uint2(packed(y[0], y[1]), packed(y[2], y[3]));
}

// Bytes from the maps' beginning to the thread's places of the block's first query and head.
__device__ __forceinline__ i64 map_place(const Call& c, const Place& at) {
  i64 map = i64(at.chunk) * c.heads + at.first_head;
  return 2 * ((map * c.rows + at.row + at.g) * c.columns + at.column + at.own_column);
}
