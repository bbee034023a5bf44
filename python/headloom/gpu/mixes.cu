// CUDA kernels of composed attention's mixes, for maps of 16 bits. kernels.py has the equations and
// the names, and the kernels in Triton that take what these do not: float32, a static matrix, and
// groups of more heads than registers have room for.
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
  int chunk, chunks, b, behind;  // as in kernels.py; `chunks` are all of the batch
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
  at.behind = at.chunk % c.chunks * c.step;
  at.end = min(c.last + at.behind, c.T);
  constexpr int down = STEP / OF_WARP;  // warps one below another
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  at.g = warp % down * OF_WARP + lane / LANES;
  at.own_column = (warp / down * LANES + lane % LANES) * 4;
  at.row = at.row_tile * ROWS;
  at.t = c.first + at.behind + at.row;
  at.column = at.tile * COLUMNS;
  at.s = c.left + at.behind + at.column;
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

// -------------------------------------------------------------------------------------------------
// Forward
// -------------------------------------------------------------------------------------------------

// A warp has 2 queries at a time and all keys of the block, so that it reads long rows and needs no
// other warp. Each map is copied to shared memory, to a place of the thread's own, while the
// queries before are mixed. So the loops over heads need not be unrolled: code that is, for 32
// heads, does not fit the caches of instructions.
//
// Inner maps are summed in float32 and then rounded, as in the definition. What a head takes of
// them is added up in the maps' type, for two places at a time, which rounds as often as the
// definition does.

#ifdef TO
// Weights in shared memory have the maps' type, two in one number. No weight is rounded by that.
constexpr int NQ = RQ + GATE_Q;  // of a query and head: `down` and `up` of each rank, a gate
constexpr int OF_QUERY = (NQ + 2) / 2 * 2;  // words, with one for L

// [HEADS, WK, COLUMNS / 2]: a weight of two neighbouring keys.
__device__ __forceinline__ void load_keys(const Call& c, const Place& at, u32* to) {
  constexpr int pairs = COLUMNS / 2;
  const float* from[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int s = at.s + c.keys_before + threadIdx.x % pairs * 2 + k;
    const i64 block = i64(at.b) * c.key_blocks + s / KEYS;
    from[k] = c.of_keys + (block * c.heads + at.first_head) * WK * KEYS + s % KEYS;
  }
#pragma unroll 4
  for (int i = threadIdx.x / pairs; i < HEADS * WK; i += THREADS / pairs)
    to[i * pairs + threadIdx.x % pairs] = packed(from[0][i * KEYS], from[1][i * KEYS]);
}

// [HEADS, OF_WARP, OF_QUERY], of a warp's queries from t on.
__device__ __forceinline__ void load_queries(const Call& c, const Place& at, int first, u32* to) {
  const int lane = threadIdx.x % 32, t = first + lane % OF_WARP;
  const i64 block = i64(at.b) * c.query_blocks + t / QUERIES;
  const float* from = c.of_queries + (block * c.heads + at.first_head) * WQ * QUERIES + t % QUERIES;
  // A query behind the last sees nothing.
  const i64 of_lse = (i64(at.b) * c.heads + at.first_head) * c.T + min(t, c.T - 1);
#pragma unroll
  for (int k = 0; k < HEADS; k += 32 / OF_WARP) {
    const int h = k + lane / OF_WARP;
    if (h >= HEADS) break;
    const float* of_head = from + h * WQ * QUERIES;
    u32* place = to + (h * OF_WARP + lane % OF_WARP) * OF_QUERY;
#pragma unroll
    for (int r = 0; r < RQ; ++r)
      place[r] = packed(of_head[r * QUERIES], of_head[(RQ + r) * QUERIES]);
    if (GATE_Q) place[RQ] = packed(of_head[2 * RQ * QUERIES], of_head[2 * RQ * QUERIES]);
    if (EXP || TO == 1) place[NQ] = to_bits(LOG2E * c.lse[of_lse + i64(h) * c.T]);
  }
}

// Of a query and head.
struct Query {
  u32 words[OF_QUERY];
  __device__ __forceinline__ u32 rank(int r) const { return words[r]; }
  __device__ __forceinline__ u32 gate() const { return words[RQ]; }
  __device__ __forceinline__ float lse() const { return from_bits(words[NQ]); }  // times LOG2E

  __device__ __forceinline__ explicit Query(const u32* from) {
    if (OF_QUERY % 4 == 0) {
#pragma unroll
      for (int i = 0; i < OF_QUERY / 4; ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[i];
        words[4 * i] = four.x, words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < OF_QUERY / 2; ++i) {
        const uint2 two = reinterpret_cast<const uint2*>(from)[i];
        words[2 * i] = two.x, words[2 * i + 1] = two.y;
      }
    }
  }
};

// The key-wise weights of the thread's 4 keys.
struct Keys {
  const u32* own;  // those of the first head
  __device__ __forceinline__ uint2 load(int h, int w) const {
    return *reinterpret_cast<const uint2*>(own + (h * WK + w) * (COLUMNS / 2));
  }
};

__device__ __forceinline__ uint2 multiply_add(uint2 x, u32 y, uint2 z) {
  return make_uint2(multiply_add(x.x, y, z.x), multiply_add(x.y, y, z.y));
}
__device__ __forceinline__ uint2 multiply_add(uint2 x, uint2 y, uint2 z) {
  return make_uint2(multiply_add(x.x, y.x, z.x), multiply_add(x.y, y.y, z.y));
}

// The inner maps of the thread's places, by which `mix` adds heads up.
struct Inner {
  float z[RQ + 1][4], w[RK + 1][4];

  __device__ __forceinline__ Inner() {
#pragma unroll
    for (int i = 0; i < 4 * RQ; ++i) z[i / 4][i % 4] = 0.f;
#pragma unroll
    for (int i = 0; i < 4 * RK; ++i) w[i / 4][i % 4] = 0.f;
  }

  // A head's part.
  __device__ __forceinline__ void add(const float (&x)[4], const Query& query, const Keys& keys,
                                      int h) {
#pragma unroll
    for (int r = 0; r < RQ; ++r) {
      const float weight = lower(query.rank(r));
#pragma unroll
      for (int i = 0; i < 4; ++i) z[r][i] += weight * x[i];
    }
#pragma unroll
    for (int r = 0; r < RK; ++r) {
      float weight[4];
      unpack(weight, keys.load(h, r));
#pragma unroll
      for (int i = 0; i < 4; ++i) w[r][i] += weight[i] * x[i];
    }
  }
};

// Inner maps in the maps' type.
struct Rounded {
  uint2 z[RQ + 1], w[RK + 1];

  __device__ __forceinline__ explicit Rounded(const Inner& inner) {
#pragma unroll
    for (int r = 0; r < RQ; ++r) z[r] = pack(inner.z[r]);
#pragma unroll
    for (int r = 0; r < RK; ++r) w[r] = pack(inner.w[r]);
  }

  // y of one head from its x.
  __device__ __forceinline__ uint2 mix(uint2 x, const Query& query, const Keys& keys, int h) const {
    uint2 y = x;
    if (GATE_Q) y = multiply_add(x, query.gate(), y);
    if (GATE_K) y = multiply_add(x, keys.load(h, 2 * RK), y);
#pragma unroll
    for (int r = 0; r < RQ; ++r) y = multiply_add(z[r], upper_twice(query.rank(r)), y);
#pragma unroll
    for (int r = 0; r < RK; ++r) y = multiply_add(w[r], keys.load(h, RK + r), y);
    return y;
  }
};

// Of a row's y of two heads in LANES threads, what log sum exp y is made of: LOG2E times a number
// that is about as large as the largest y, and the sum of exp2(LOG2E y - it). They go to places for
// two heads, from the thread that is the row's first, and the one that is the first of its second
// half.
__device__ __forceinline__ void sum_rows(const uint2 (&y)[2], float* largest, float* totals) {
  const float minus_infinity = from_bits(0xff800000u);
  // Of both heads, in one.
  const u32 first = larger(y[0].x, y[0].y), second = larger(y[1].x, y[1].y);
  u32 most = larger(lower_halves(first, second), upper_halves(first, second));
#pragma unroll
  for (int apart = 1; apart < LANES; apart *= 2) most = larger(most, shuffle_xor(most, apart));
  float base[2], total[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    base[i] = i == 0 ? lower(most) : upper(most);
    base[i] = base[i] == minus_infinity ? 0.f : base[i] * LOG2E;
    float x[4];
    unpack(x, y[i]);
    total[i] = 0.f;
#pragma unroll
    for (int k = 0; k < 4; ++k) total[i] += exp2_of(x[k] * LOG2E - base[i]);
  }
  // Each half of the threads sums one head.
  const int lane = threadIdx.x % LANES;
  const bool upper_half = lane >= LANES / 2;
  float sum = upper_half ? total[1] : total[0];
  sum += shuffle_xor(upper_half ? total[0] : total[1], LANES / 2);
#pragma unroll
  for (int apart = LANES / 4; apart > 0; apart /= 2) sum += shuffle_xor(sum, apart);
  if (lane % (LANES / 2) == 0) {
    const int i = threadIdx.x % 32 / LANES + upper_half * OF_WARP;
    largest[i] = upper_half ? base[1] : base[0];
    totals[i] = sum;
  }
}

// `out` may be `maps`: a thread stores the places that it has read. `sums` is
// [tiles of COLUMNS keys, B chunks, H, 1, rows].
//
// Shared memory: [HEADS, WK, COLUMNS / 2], and of each warp alone [HEADS, 32 threads] for maps, two
// words each, [HEADS, OF_WARP, OF_QUERY], and 2 [2 PAIRS, OF_WARP] for sums.
KERNEL mix(Call c, const char* maps, char* out, float* sums) {
  SHARED(memory);
  constexpr int sums_of_warp = TO == 0 ? 2 * PAIRS * OF_WARP : 0;
  constexpr int words = HEADS * (64 + OF_QUERY * OF_WARP) + 2 * sums_of_warp;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32* of_keys = reinterpret_cast<u32*>(memory);
  u32* own = of_keys + HEADS * WK * COLUMNS / 2 + warp * words;
  uint2* const x = reinterpret_cast<uint2*>(own) + lane;  // every 32nd is the thread's
  u32* of_queries = own + HEADS * 64;
  float* largest = reinterpret_cast<float*>(of_queries + HEADS * OF_WARP * OF_QUERY);
  float* totals = largest + sums_of_warp;
  const Place at = place(c);
  const u32 of_map = u32(c.rows) * c.columns * 2, of_step = STEP * u32(c.columns) * 2;
  const float minus_infinity = from_bits(0xff800000u);
  maps += map_place(c, at);
  out += map_place(c, at);
  // From there to the step, and to a head of it: a group's maps have less than 2^32 bytes.
  u32 place = 0u - of_step;
  load_keys(c, at, of_keys);
  wait_for_block();
  const Keys keys{of_keys + at.own_column / 2};
  const u32* const own_queries = of_queries + lane / LANES * OF_QUERY;
  const int row_of_warp = warp * OF_WARP;

  // The maps of a step are on their way during the step before, of which the first has nothing else
  // to do.
  bool some = false;
  for (int step = -STEP; step < ROWS; step += STEP, place += of_step) {
    const int t = at.t + step;
    float* const of_sums =
        sums + ((i64(at.tile) * at.chunks + at.chunk) * c.heads + at.first_head) * c.rows + at.row +
        step + row_of_warp;
    const bool next = step + STEP < ROWS && some_visible(c, at, t + STEP);
    if (!some) {
      if (step >= 0 && TO == 0) {
        for (int i = lane; i < HEADS * OF_WARP; i += 32)
          of_sums[i64(i / OF_WARP) * c.rows + i % OF_WARP] = minus_infinity;
      } else if (step >= 0) {
        for (int h = 0; h < HEADS; ++h) store_map(out + (place + h * of_map), make_uint2(0, 0));
      }
      if (next) {
#pragma unroll 4
        for (int h = 0; h < HEADS; ++h) copy(x + h * 32, maps + (place + of_step + h * of_map));
      }
      some = next;
      continue;
    }
    load_queries(c, at, t + row_of_warp, of_queries);
    in_order();
    wait_for_copies();

    Inner inner;
#pragma unroll 4
    for (int h = 0; h < HEADS; ++h) {
      const Query query(own_queries + h * OF_WARP * OF_QUERY);
      float y[4];
      unpack(y, x[h * 32]);
      if (EXP) {
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = exp2_of(y[i] * LOG2E - query.lse());
        // p is rounded, as in the definition.
        x[h * 32] = pack(y);
      }
      inner.add(y, query, keys, h);
    }
    const Rounded rounded(inner);
    const uint2 seen = seen_bits(c, at, t + at.g);
#pragma unroll 2
    for (int h = 0; h < HEADS; h += 2) {
      uint2 y[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        y[i] = make_uint2(0, 0);
        if (HEADS % 2 && h + i == HEADS) continue;
        uint2* const own_x = x + (h + i) * 32;
        const u32 of_head = place + (h + i) * of_map;
        const Query query(own_queries + (h + i) * OF_WARP * OF_QUERY);
        y[i] = rounded.mix(*own_x, query, keys, h + i);
        if (next) copy(own_x, maps + (of_head + of_step));
        if (TO == 1) {
          // Of y as the forward read it, which L was summed from.
          float p[4];
          unpack(p, y[i]);
#pragma unroll
          for (int k = 0; k < 4; ++k) p[k] = exp2_of(p[k] * LOG2E - query.lse());
          y[i] = pack(p);
        }
        y[i] = y[i] & seen;
        if (TO == 0) {
          const u32 infinite = BF16 ? 0xff80ff80u : 0xfc00fc00u;
          y[i].x |= infinite & ~seen.x;
          y[i].y |= infinite & ~seen.y;
        }
        store_map(out + of_head, y[i]);
      }
      // Sums are of what later kernels read, which is rounded.
      if (TO == 0) sum_rows(y, largest + h * OF_WARP, totals + h * OF_WARP);
    }
    some = next;
    in_order();
    if (TO == 0) {
      for (int i = lane; i < HEADS * OF_WARP; i += 32) {
        const float total = totals[i];
        of_sums[i64(i / OF_WARP) * c.rows + i % OF_WARP] =
            total == 0.f ? minus_infinity : (largest[i] + log2f(total)) / LOG2E;
      }
      in_order();
    }
  }
}
#endif

// -------------------------------------------------------------------------------------------------
// Backward
// -------------------------------------------------------------------------------------------------
// A thread keeps the maps in registers. A warp has 8 queries and 16 keys, which threads share as
// tensor cores want their operands (PTX ISA, "Matrix fragments for mma.m16n8k16"): lane 4 g + j has
// query g and the keys 4 j to 4 j + 3. The gradients of the weights are sums over keys or over
// queries of a product of two maps. They are the diagonal of a matrix product of these maps, for
// which no value changes its thread first. For sums over queries `movmatrix` transposes a map.

#ifdef AFTER
constexpr int PQ = WQ + 1;  // numbers of a query in shared memory: its weights, and delta

// The compiler does not know that `nothing` is 0. Otherwise it would keep the unpacked values of
// all heads from one loop over them to the next, which takes more registers than there are.
__device__ __forceinline__ void forget(uint2& x, u32 nothing) {
  x.x += nothing;
  x.y += nothing;
}

// For PairedKeys.
__device__ __forceinline__ void load_paired_keys(const Call& c, const Place& at, float* to) {
#pragma unroll 4
  for (int i = threadIdx.x; i < HEADS * (RK + GATE_K) * COLUMNS; i += THREADS) {
    int s = at.s + c.keys_before + i % COLUMNS;
    int r = i / COLUMNS % (RK + GATE_K), h = i / (COLUMNS * (RK + GATE_K));
    i64 head = (i64(at.b) * c.key_blocks + s / KEYS) * c.heads + at.first_head + h;
    const float* from = c.of_keys + (head * WK + (r < RK ? r : 2 * RK)) * KEYS + s % KEYS;
    to[i] = r < RK ? from_bits(packed(from[0], from[RK * KEYS])) : from[0];
  }
}

// [HEADS, PQ, STEP], of the queries from t on. `last` is one number for each head and query in
// [B, H, T], or null.
__device__ __forceinline__ void load_queries(const Call& c, const Place& at, int first,
                                             const float* last, float* to) {
#pragma unroll 1
  for (int i = threadIdx.x; i < HEADS * WQ * STEP; i += THREADS) {
    int t = first + i % STEP, w = i / STEP % WQ, h = i / (STEP * WQ);
    int weight = (at.first_head + h) * WQ + w;
    copy(to + (h * PQ + w) * STEP + i % STEP,
         c.of_queries +
             ((i64(at.b) * c.query_blocks + t / QUERIES) * c.heads * WQ + weight) * QUERIES +
             t % QUERIES);
  }
  if (last == nullptr) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < HEADS * STEP; i += THREADS) {
    // A query behind the last sees nothing.
    int t = min(first + i % STEP, c.T - 1), h = i / STEP;
    copy(to + (h * PQ + WQ) * STEP + i % STEP,
         last + (i64(at.b) * c.heads + at.first_head + h) * c.T + t);
  }
}

// The numbers of a head for the thread's query: its weights and the last.
struct OfQuery {
  float w[PQ];
  __device__ __forceinline__ OfQuery(const float* shared, int h, int g) {
#pragma unroll
    for (int i = 0; i < PQ; ++i) w[i] = shared[(h * PQ + i) * STEP + g];
  }
};

// In the backward, which needs `down` and `up` together: [HEADS, RK + GATE_K, COLUMNS], of which
// the first RK are both of them in 16 bits. Then they take half of the shared memory, which is
// taken from the first-level cache, and half as many turns to read. Weights have the maps' type, so
// none is rounded.
struct PairedKeys {
  const float* shared;
  int column;
  __device__ __forceinline__ uint4 load(int h, int w) const {
    return *reinterpret_cast<const uint4*>(shared + (h * (RK + GATE_K) + w) * COLUMNS + column);
  }
  template <bool UP>
  __device__ __forceinline__ void of_rank(float (&to)[4], int h, int r) const {
    const uint4 x = load(h, r);
    to[0] = UP ? upper(x.x) : lower(x.x);
    to[1] = UP ? upper(x.y) : lower(x.y);
    to[2] = UP ? upper(x.z) : lower(x.z);
    to[3] = UP ? upper(x.w) : lower(x.w);
  }
  __device__ __forceinline__ void gate(float (&to)[4], int h) const {
    const uint4 x = load(h, RK);
    to[0] = from_bits(x.x), to[1] = from_bits(x.y), to[2] = from_bits(x.z), to[3] = from_bits(x.w);
  }
};

// A head's part of the inner maps: of x by `down`, or in reverse of dy by `up`.
template <bool REVERSE, class K>
__device__ __forceinline__ void add_inner(float (&z)[RQ + 1][4], float (&w)[RK + 1][4],
                                          const float (&x)[4], const OfQuery& query, const K& keys,
                                          int h) {
#pragma unroll
  for (int r = 0; r < RQ; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) z[r][i] += query.w[REVERSE ? RQ + r : r] * x[i];
#pragma unroll
  for (int r = 0; r < RK; ++r) {
    float weight[4];
    keys.template of_rank<REVERSE>(weight, h, r);
#pragma unroll
    for (int i = 0; i < 4; ++i) w[r][i] += weight[i] * x[i];
  }
}

// x becomes y of one head; in reverse, dy becomes dx. gate[i] is 1 and the gates of the place.
template <bool REVERSE, class K>
__device__ __forceinline__ void mixed(float (&x)[4], const float (&z)[RQ + 1][4],
                                      const float (&w)[RK + 1][4], const OfQuery& query,
                                      const float (&gate)[4], const K& keys, int h) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] *= gate[i];
#pragma unroll
  for (int r = 0; r < RQ; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] += query.w[REVERSE ? r : RQ + r] * z[r][i];
#pragma unroll
  for (int r = 0; r < RK; ++r) {
    float weight[4];
    keys.template of_rank<!REVERSE>(weight, h, r);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] += weight[i] * w[r][i];
  }
}

template <class K>
__device__ __forceinline__ void gates(float (&gate)[4], const OfQuery& query, const K& keys,
                                      int h) {
  float weight[4] = {0.f, 0.f, 0.f, 0.f};
  if (GATE_K) keys.gate(weight, h);
#pragma unroll
  for (int i = 0; i < 4; ++i) gate[i] = (GATE_Q ? 1.f + query.w[2 * RQ] : 1.f) + weight[i];
}

__device__ __forceinline__ void clear(float (&z)[RQ + 1][4], float (&w)[RK + 1][4]) {
#pragma unroll
  for (int i = 0; i < 4 * RQ; ++i) z[i / 4][i % 4] = 0.f;
#pragma unroll
  for (int i = 0; i < 4 * RK; ++i) w[i / 4][i % 4] = 0.f;
}

constexpr int SUMS = WQ + AFTER;  // of a query and head; after softmax also sum_s x dx
constexpr int SUMS_OF_WARP = HEADS * SUMS * STEP;

__device__ __forceinline__ float either(bool second, float x, float y) { return second ? y : x; }

// Of products d of kinds 0 to 3, the thread's element of a diagonal, that of `kind`. `half` is 0
// for the first head and 2 for the second.
__device__ __forceinline__ float picked(const float (&d)[4][4], int kind, bool odd, int half) {
  float e[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) e[i] = either(odd, d[i][half], d[i][half + 1]);
  return either(kind & 2, either(kind & 1, e[0], e[1]), either(kind & 1, e[2], e[3]));
}

// Adds up the warps' sums of a step, or writes zeros without them.
__device__ __forceinline__ void write_query_sums(const Call& c, int step, const float* of_warps,
                                                 float* sums, float* query_shares) {
  const Place at = place(c);
  const i64 of_block = (i64(at.tile) * at.chunks + at.chunk) * c.heads + at.first_head;
#pragma unroll 1
  for (int i = threadIdx.x; i < SUMS_OF_WARP; i += THREADS) {
    float sum = 0.f;
    for (int k = 0; k < WARPS && of_warps != nullptr; ++k) sum += of_warps[k * SUMS_OF_WARP + i];
    const int row = at.row + step + i % STEP, k = i / STEP % SUMS, h = i / (STEP * SUMS);
    if (k < WQ)
      query_shares[((of_block + h) * WQ + k) * c.rows + row] = sum;
    else
      sums[(of_block + h) * c.rows + row] = sum;
  }
}

// From x in `maps` and dy in `grads`: dx in place of dy, and the shares of the gradients of the
// mix's weights, for queries [tiles of COLUMNS keys, B chunks, H, WQ, rows] and for keys
// [tiles of ROWS queries, B chunks, H, WK, columns]. After softmax also y in `out`, and in `sums`
// sum_s x dx. Before softmax `grads` has dp, and dy is p (dp - delta) with p in `weights`.
//
// Shared memory: [HEADS, RK + GATE_K, COLUMNS], [HEADS, WK, COLUMNS], [HEADS, PQ, STEP] and
// [WARPS, HEADS, SUMS, STEP].
KERNEL mix_backward(Call c, const char* maps, char* out, const char* weights, const float* delta,
                    char* grads, float* sums, float* query_shares, float* key_shares) {
  SHARED(memory);
  // [HEADS, WARPS, 2 halves, WK, 8 keys], so that sums of 4 weights lie in different banks.
  float* key_sums = memory + HEADS * (RK + GATE_K) * COLUMNS;
  float* queries = key_sums + HEADS * WK * COLUMNS;
  float* query_sums = queries + HEADS * PQ * STEP;
  const int j = threadIdx.x % 4, warp = threadIdx.x / 32;
  const u32 of_map = u32(c.rows) * c.columns * 2;
  const i64 begin = map_place(c, place(c));
  const int own_column = place(c).own_column, g = place(c).g;
  const PairedKeys keys{memory, own_column};
  load_paired_keys(c, place(c), memory);
  for (int i = threadIdx.x; i < HEADS * WK * COLUMNS; i += THREADS) key_sums[i] = 0.f;
  // The products of kind i are turned by 2 i columns, so that their diagonals lie in different
  // threads.
  const int kind = (j - g / 2) & 3;
  const bool odd = g & 1, diagonal = kind == 0;
  float* own_key_sums = key_sums + warp * 16 * WK + g;
  float* own_query_sums = query_sums + warp * SUMS_OF_WARP + g;

  for (int step = 0; step < ROWS; step += STEP) {
    const Place at = place(c);
    const int t = at.t + step;
    i64 place = begin + i64(step) * c.columns * 2;
    if (!some_visible(c, at, t)) {
      for (int h = 0; h < HEADS; ++h) {
        store_map(grads + place + i64(h) * of_map, make_uint2(0, 0));
        if (AFTER) store_map(out + place + i64(h) * of_map, make_uint2(0, 0));
      }
      write_query_sums(c, step, nullptr, sums, query_shares);
      continue;
    }
    uint2 x[2 * PAIRS], dy[2 * PAIRS];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      x[h] = load_map(maps + place + i64(h) * of_map);
      dy[h] = load_map(grads + place + i64(h) * of_map);
    }
    if (HEADS % 2) x[HEADS] = dy[HEADS] = make_uint2(0, 0);
    load_queries(c, at, t, AFTER ? nullptr : delta, queries);
    const uint2 seen = seen_bits(c, at, t + g);
    wait_for_block();

    float z[RQ + 1][4], w[RK + 1][4], dz[RQ + 1][4], dw[RK + 1][4];
    clear(z, w);
    clear(dz, dw);
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const OfQuery query(queries, h, g);
      float y[4];
      x[h] = x[h] & seen;
      unpack(y, x[h]);
      add_inner<false>(z, w, y, query, keys, h);
      unpack(y, dy[h]);
      if (!AFTER) {
        float p[4];
        unpack(p, load_map(weights + place + i64(h) * of_map));
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = p[i] * (y[i] - query.w[WQ]);
        dy[h] = pack(y);
      }
      dy[h] = dy[h] & seen;
      unpack(y, dy[h]);
      add_inner<true>(dz, dw, y, query, keys, h);
      if (h % 4 == 3) in_order();
    }
    const u32 nothing = u32(c.heads) >> 31;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      forget(x[h], nothing);
      forget(dy[h], nothing);
    }
    // The inner maps as operands, turned.
    uint2 by_key[2 * RQ + 4];
    u32 by_query[2][2 * RK + 4];
#pragma unroll
    for (int k = 0; k < 2 * RQ; ++k) {
      const int from = ((g - 2 * (k % 4)) & 7) * 4 + j;
      const uint2 inner = k < RQ ? pack(dz[k]) : pack(z[k - RQ]);
      by_key[k] = make_uint2(shuffle(inner.x, from), shuffle(inner.y, from));
    }
#pragma unroll
    for (int k = 0; k < 2 * RK; ++k) {
      const int from = ((g - 2 * (k % 4)) & 7) * 4 + j;
      const uint2 inner = k < RK ? pack(dw[k]) : pack(w[k - RK]);
      by_query[0][k] = shuffle(transposed(inner.x), from);
      by_query[1][k] = shuffle(transposed(inner.y), from);
    }
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const int h = 2 * pair;
      uint2 dx[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (h + i == HEADS) {
          dx[i] = make_uint2(0, 0);
          continue;
        }
        const OfQuery query(queries, h + i, g);
        float y[4], gate[4];
        gates(gate, query, keys, h + i);
        unpack(y, dy[h + i]);
        mixed<true>(y, dz, dw, query, gate, keys, h + i);
        dx[i] = pack(y) & seen;
        store_map(grads + place, dx[i]);
        if (AFTER) {
          unpack(y, x[h + i]);
          mixed<false>(y, z, w, query, gate, keys, h + i);
          store_map(out + place, pack(y) & seen);
        }
        place += of_map;
      }
      in_order();
      // Sums over keys, for the query g.
#pragma unroll
      for (int first = 0; first < 2 * RQ; first += 4) {
        float d[4][4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint2* a = (first + k < RQ ? x : dy) + h;
          if (first + k < 2 * RQ)
            product(d[k], a[0].x, a[1].x, a[0].y, a[1].y, by_key[first + k].x, by_key[first + k].y);
          else
            d[k][0] = d[k][1] = d[k][2] = d[k][3] = 0.f;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float sum = picked(d, kind, odd, 2 * i);
          if (h + i < HEADS && first + kind < 2 * RQ)
            own_query_sums[((h + i) * SUMS + first + kind) * STEP] = sum;
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float d[4];
        if (GATE_Q) {
          product(d, x[h].x, x[h + 1].x, x[h].y, x[h + 1].y, dy[h + i].x, dy[h + i].y);
          if (h + i < HEADS && diagonal)
            own_query_sums[((h + i) * SUMS + 2 * RQ) * STEP] = either(odd, d[2 * i], d[2 * i + 1]);
        }
        if (AFTER) {
          // Of dx as the next kernel reads it, so that the gradients of a row's scores add up to 0.
          product(d, x[h].x, x[h + 1].x, x[h].y, x[h + 1].y, dx[i].x, dx[i].y);
          if (h + i < HEADS && diagonal)
            own_query_sums[((h + i) * SUMS + WQ) * STEP] = either(odd, d[2 * i], d[2 * i + 1]);
        }
      }
      // Sums over queries. The keys are in two halves of 8: 4 i + 2 half and 4 i + 2 half + 1.
#pragma unroll
      for (int half = 0; half < (WK > 0 ? 2 : 0); ++half) {
        u32 xt[2], dyt[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          xt[i] = transposed(half ? x[h + i].y : x[h + i].x);
          dyt[i] = transposed(half ? dy[h + i].y : dy[h + i].x);
        }
#pragma unroll
        for (int first = 0; first < 2 * RK; first += 4) {
          float d[4][4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const u32* a = first + k < RK ? xt : dyt;
            if (first + k < 2 * RK)
              product(d[k], a[0], a[1], by_query[half][first + k]);
            else
              d[k][0] = d[k][1] = d[k][2] = d[k][3] = 0.f;
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float sum = picked(d, kind, odd, 2 * i);
            if (h + i < HEADS && first + kind < 2 * RK)
              own_key_sums[(h + i) * WK * COLUMNS + (half * WK + first + kind) * 8] += sum;
          }
        }
        if (GATE_K) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float d[4];
            product(d, xt[0], xt[1], dyt[i]);
            if (h + i < HEADS && diagonal)
              own_key_sums[(h + i) * WK * COLUMNS + (half * WK + 2 * RK) * 8] +=
                  either(odd, d[2 * i], d[2 * i + 1]);
          }
        }
      }
    }
    wait_for_block();
    write_query_sums(c, step, query_sums, sums, query_shares);
  }
  wait_for_block();
  const Place at = place(c);
  for (int i = threadIdx.x; i < HEADS * WK * COLUMNS; i += THREADS) {
    const int column = i % COLUMNS, w = i / COLUMNS % WK, h = i / (COLUMNS * WK);
    // Half h has the keys 4 i + 2 h and 4 i + 2 h + 1 of a warp's 16.
    const int half = column / 2 % 2, key = column % 16 / 4 * 2 + column % 2;
    const float sum =
        key_sums[h * WK * COLUMNS + column / 16 * 16 * WK + (half * WK + w) * 8 + key];
    const i64 of_block = (i64(at.row_tile) * at.chunks + at.chunk) * c.heads + at.first_head;
    key_shares[(of_block * WK + i / COLUMNS) * c.columns + at.column + column] = sum;
  }
}
#endif
