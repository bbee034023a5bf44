// The forward of a mix on a GPU: `mix`. mixes.cu comes before.
//
// A warp has 2 queries at a time and all keys of the block, so that it reads long rows and needs no
// other warp. Each map is copied to shared memory, to a place of the thread's own, while the
// queries before are mixed. So the loops over heads need not be unrolled: code that is, for 32
// heads, does not fit the caches of instructions.
//
// Inner maps are summed in float32 and then rounded, as in the definition. What a head takes of
// them is added up in the maps' type, for two places at a time, which rounds as often as the
// definition does.

// Weights in shared memory have the maps' type, two in one number. No weight is rounded by that.
constexpr int NQ = RQ + GATE_Q;  // of a query and head: `down` and `up` of each rank, a gate
constexpr int OF_QUERY = (NQ + 2) / 2 * 2;  // words, with one for L

// Loads the key-wise weights as [HEADS, WK, COLUMNS / 2]: each word has one weight of two
// neighbouring keys.
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

// Loads the query-wise weights of a warp's queries, of which `first` is the first, as
// [HEADS, OF_WARP, OF_QUERY].
__device__ __forceinline__ void load_queries(const Call& c, const Place& at, int first, u32* to) {
  const int lane = threadIdx.x % 32, t = first + lane % OF_WARP;
  const i64 block = i64(at.b) * c.query_blocks + t / QUERIES;
  const float* from = c.of_queries + (block * c.heads + at.first_head) * WQ * QUERIES + t % QUERIES;
  // A query after the last sees nothing.
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

// The query-wise weights of one query for one head, and its L.
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

  // Adds the part of head h, whose map is x.
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

// Sums exp y over the keys of a row, for two heads at once. The LANES threads of the row have the y
// of 4 keys each. For each head `largest` gets m, which is LOG2E times the row's largest y, and
// `totals` gets the sum of exp2(LOG2E y - m). The first thread of the row writes those of the first
// head, and the first thread of its second half those of the second.
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
