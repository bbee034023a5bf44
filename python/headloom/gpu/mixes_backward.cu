// The backward of a mix on a GPU: `mix_backward`. mixes.cu comes before.
//
// A thread keeps the maps in registers. A warp has 8 queries and 16 keys, which threads share as
// tensor cores want their operands (PTX ISA, "Matrix fragments for mma.m16n8k16"): lane 4 g + j has
// query g and the keys 4 j to 4 j + 3. The gradients of the weights are sums over keys or over
// queries of a product of two maps. They are the diagonal of a matrix product of these maps, for
// which no value changes its thread first. For sums over queries `movmatrix` transposes a map.

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
    // A query after the last sees nothing.
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

// The key-wise weights of the thread's 4 keys: [HEADS, RK + GATE_K, COLUMNS]. Of each rank `down`
// and `up` are together in one word of 16 bits each. Then they take half of the shared memory,
// which is taken from the first-level cache, and half as many turns to read. Weights have the maps'
// type, so none is rounded.
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
template <bool REVERSE>
__device__ __forceinline__ void add_inner(float (&z)[RQ + 1][4], float (&w)[RK + 1][4],
                                          const float (&x)[4], const OfQuery& query,
                                          const PairedKeys& keys, int h) {
#pragma unroll
  for (int r = 0; r < RQ; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) z[r][i] += query.w[REVERSE ? RQ + r : r] * x[i];
#pragma unroll
  for (int r = 0; r < RK; ++r) {
    float weight[4];
    keys.of_rank<REVERSE>(weight, h, r);
#pragma unroll
    for (int i = 0; i < 4; ++i) w[r][i] += weight[i] * x[i];
  }
}

// x becomes y of one head; in reverse, dy becomes dx. gate[i] is 1 and the gates of the place.
template <bool REVERSE>
__device__ __forceinline__ void mixed(float (&x)[4], const float (&z)[RQ + 1][4],
                                      const float (&w)[RK + 1][4], const OfQuery& query,
                                      const float (&gate)[4], const PairedKeys& keys, int h) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] *= gate[i];
#pragma unroll
  for (int r = 0; r < RQ; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] += query.w[REVERSE ? r : RQ + r] * z[r][i];
#pragma unroll
  for (int r = 0; r < RK; ++r) {
    float weight[4];
    keys.of_rank<!REVERSE>(weight, h, r);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] += weight[i] * w[r][i];
  }
}

__device__ __forceinline__ void gates(float (&gate)[4], const OfQuery& query,
                                      const PairedKeys& keys, int h) {
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
