// Key-query convolution of a tile (a correlation over queries and keys), its
// transpose and the gradient of its kernel. The keys around a block come from
// its neighbours; a padded copy of a head's rows makes every tap a plain
// unaligned load.
#pragma once

#include "ops/composed_attention/kernel_mix.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

// y[r][s] = (or +=) sum_{a < CQ, b < keys} theta[a * keys + b] * x[(r + a) * ld
// + s + b] for MT rows.
template <int CQ, int MT, bool ACC>
HL_INLINE void conv_rows(int64_t keys, const float* x, int64_t ld, const float* theta, float* y,
                         int64_t line) {
  for (int64_t s = 0; s < kBlock; s += VL) {
    vf acc[MT];
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m) acc[m] = ACC ? load(y + m * line + s) : zero();
    for (int64_t b = 0; b < keys; ++b) {
      vf w[CQ];
#pragma GCC unroll 8
      for (int a = 0; a < CQ; ++a) w[a] = bcast(theta[a * keys + b]);
#pragma GCC unroll 16
      for (int q = 0; q < MT + CQ - 1; ++q) {
        const vf e = load(x + q * ld + s + b);
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) {
          if (q - m >= 0 && q - m < CQ) acc[m] = fma(w[q - m < 0 ? 0 : q - m], e, acc[m]);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MT; ++m) store(y + m * line + s, acc[m]);
  }
}

template <int CQ, bool ACC>
void conv_head(int64_t rows, int64_t keys, const float* x, int64_t ld, const float* theta, float* y,
               int64_t line) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) {
    conv_rows<CQ, 8, ACC>(keys, x + r * ld, ld, theta, y + r * line, line);
  }
  // One row by itself waits for its own sums.
  for (; r + 4 <= rows; r += 4) {
    conv_rows<CQ, 4, ACC>(keys, x + r * ld, ld, theta, y + r * line, line);
  }
  for (; r < rows; ++r) {
    conv_rows<CQ, 1, ACC>(keys, x + r * ld, ld, theta, y + r * line, line);
  }
}

// sum[a][b] += sum over MT rows and the keys of dy[r][s] x[r + a][s + b], by
// lane, for BB taps b.
template <int CQ, int MT, int BB>
HL_INLINE void conv_grad_rows(const float* x, int64_t ld, const float* dy, int64_t line,
                              vf acc[BB][CQ]) {
  for (int64_t s = 0; s < kBlock; s += VL) {
    vf g[MT];
#pragma GCC unroll 4
    for (int m = 0; m < MT; ++m) g[m] = load(dy + m * line + s);
#pragma GCC unroll 16
    for (int q = 0; q < MT + CQ - 1; ++q) {
#pragma GCC unroll 2
      for (int b = 0; b < BB; ++b) {
        const vf e = load(x + q * ld + s + b);
#pragma GCC unroll 4
        for (int m = 0; m < MT; ++m) {
          if (q - m >= 0 && q - m < CQ) {
            acc[b][q - m < 0 ? 0 : q - m] = fma(g[m], e, acc[b][q - m < 0 ? 0 : q - m]);
          }
        }
      }
    }
  }
}

template <int CQ, int BB>
HL_INLINE void conv_grad_taps(int64_t rows, int64_t keys, const float* x, int64_t ld,
                              const float* dy, int64_t line, float* sum) {
  vf acc[BB][CQ];
#pragma GCC unroll 2
  for (int b = 0; b < BB; ++b) {
#pragma GCC unroll 8
    for (int a = 0; a < CQ; ++a) acc[b][a] = load(sum + (a * keys + b) * VL);
  }
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    conv_grad_rows<CQ, 4, BB>(x + r * ld, ld, dy + r * line, line, acc);
  }
  for (; r < rows; ++r) conv_grad_rows<CQ, 1, BB>(x + r * ld, ld, dy + r * line, line, acc);
#pragma GCC unroll 2
  for (int b = 0; b < BB; ++b) {
#pragma GCC unroll 8
    for (int a = 0; a < CQ; ++a) store(sum + (a * keys + b) * VL, acc[b][a]);
  }
}

template <int CQ>
void conv_grad_head(int64_t rows, int64_t keys, const float* x, int64_t ld, const float* dy,
                    int64_t line, float* sum) {
  int64_t b = 0;
  for (; b + 2 <= keys; b += 2) {
    conv_grad_taps<CQ, 2>(rows, keys, x + b, ld, dy, line, sum + b * VL);
  }
  if (b < keys) conv_grad_taps<CQ, 1>(rows, keys, x + b, ld, dy, line, sum + b * VL);
}

// Calls f.template operator()<CQ>() with CQ = queries.
template <typename F>
HL_INLINE void with_queries(int64_t queries, F&& f) {
  // NOLINTNEXTLINE(bugprone-switch-missing-default-case): the plan admits 1 to 8 queries.
  switch (queries) {
#define HL_QUERIES(n) \
  case n:             \
    return f.template operator()<n>();
    HL_QUERIES(1)
    HL_QUERIES(2)
    HL_QUERIES(3)
    HL_QUERIES(4)
    HL_QUERIES(5)
    HL_QUERIES(6)
    HL_QUERIES(7)
    HL_QUERIES(8)
#undef HL_QUERIES
  }
}

struct RowRange {
  int64_t begin, end;
};

// Which rows of a tile a convolution couples: those of `valid`, and of them only rows of one
// document with each other. documents: an id for each row of the tile, or null.
struct ConvRows {
  RowRange valid;
  const int64_t* documents;
};

// Calls f(run, own) for the runs of `rows` that lie in one document, `own` pointing to its id.
template <typename F>
HL_INLINE void by_document(const int64_t* documents, RowRange rows, F&& f) {
  if (!documents) return f(rows, static_cast<const int64_t*>(nullptr));
  for (int64_t begin = rows.begin, end; begin < rows.end; begin = end) {
    end = begin + 1;
    while (end < rows.end && documents[end] == documents[begin]) ++end;
    f(RowRange{begin, end}, documents + begin);
  }
}

// One map's rows around a block: previous, this and next block of one map row;
// null counts as 0.
struct Neighbours {
  const float* block[3];
};

constexpr int64_t kNoLimit = 2 * kBlock;

// n floats of `from`, or zeros where it is null, in whole vectors: up to VL - 1 more are read and
// written.
HL_INLINE void copy_vectors(const float* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += VL) store(to + i, from ? load(from + i) : zero());
}

// Row i of `to` [rows.end - rows.begin][ld] = keys [-left, kBlock + right) of
// row rows.begin + i; 0 for rows outside `in` or of another document than `own`, and for keys >=
// limit.
void conv_gather(const Neighbours& from, int64_t head, int64_t line, RowRange rows,
                 const ConvRows& in, const int64_t* own, int64_t left, int64_t right, int64_t limit,
                 float* to, int64_t ld) {
  for (int64_t r = rows.begin; r < rows.end; ++r, to += ld) {
    if (r < in.valid.begin || r >= in.valid.end || (own && in.documents[r] != *own)) {
      for (int64_t i = 0; i < ld; ++i) to[i] = 0;
      continue;
    }
    const int64_t at = r * line + head * kBlock;
    const float *before = from.block[0], *here = from.block[1], *after = from.block[2];
    // Each piece is written over what the one before it wrote too much; the last one's is in the
    // next row or after all rows, where the buffer has room.
    copy_vectors(before ? before + at + kBlock - left : nullptr, left, to);
    copy_vectors(here ? here + at : nullptr, kBlock, to + left);
    copy_vectors(after ? after + at : nullptr, right, to + left + kBlock);
    for (int64_t i = limit + left < 0 ? 0 : limit + left; i < left + kBlock + right; ++i) to[i] = 0;
  }
}

HL_INLINE int64_t conv_line(const Conv& c) { return (kBlock + c.keys - 1 + 15) / 16 * 16; }

// y rows `out` of all maps = Conv(x), x having the rows `in`. transposed: the gradient with respect
// to x from that of y. buffer: c.heads * (rows + c.queries) * conv_line floats.
void conv_apply(const Conv& c, bool transposed, int64_t maps, int64_t line, const Neighbours& x,
                const ConvRows& in, RowRange out, int64_t limit, float* y, float* buffer) {
  float theta[kMaxConvQueries * kMaxConvKeys];
  const int64_t left = transposed ? c.keys - 1 - c.left : c.left;
  const int64_t right = c.keys - 1 - left;
  const int64_t ld = conv_line(c), taps = c.queries * c.keys;
  by_document(in.documents, out, [&](RowRange run, const int64_t* own) {
    const int64_t n = run.end - run.begin;
    const int64_t first = run.begin - (transposed ? 0 : c.queries - 1);
    const int64_t piece = (n + c.queries - 1) * ld;
    for (int64_t g = 0; g < maps; g += c.heads) {
      for (int64_t i = 0; i < c.heads; ++i) {
        conv_gather(x, g + i, line, {first, first + n + c.queries - 1}, in, own, left, right, limit,
                    buffer + i * piece, ld);
      }
      for (int64_t o = 0; o < c.heads; ++o) {
        float* to = y + run.begin * line + (g + o) * kBlock;
        for (int64_t i = 0; i < c.heads; ++i) {
          const float* kernel =
              c.kernel + (transposed ? (g + i) * c.heads + o : (g + o) * c.heads + i) * taps;
          for (int64_t j = 0; j < taps; ++j) theta[j] = kernel[transposed ? taps - 1 - j : j];
          const float* from = buffer + i * piece;
          with_queries(c.queries, [&]<int CQ>() {
            if (i == 0) {
              conv_head<CQ, false>(n, c.keys, from, ld, theta, to, line);
            } else {
              conv_head<CQ, true>(n, c.keys, from, ld, theta, to, line);
            }
          });
        }
      }
    }
  });
}

// sum[h'][c][a][b] (VL lanes each) += sum over the rows `out` of dy and the
// block's keys of dy x.
void conv_grad(const Conv& c, int64_t maps, int64_t line, const Neighbours& x, const ConvRows& in,
               RowRange out, int64_t limit, const float* dy, float* sum, float* buffer) {
  const int64_t ld = conv_line(c), taps = c.queries * c.keys;
  by_document(in.documents, out, [&](RowRange run, const int64_t* own) {
    const int64_t n = run.end - run.begin, first = run.begin - (c.queries - 1);
    for (int64_t h = 0; h < maps; ++h) {
      const int64_t g = h / c.heads * c.heads;
      conv_gather(x, h, line, {first, first + n + c.queries - 1}, in, own, c.left,
                  c.keys - 1 - c.left, limit, buffer, ld);
      for (int64_t o = g; o < g + c.heads; ++o) {
        float* to = sum + (o * c.heads + h - g) * taps * VL;
        with_queries(c.queries, [&]<int CQ>() {
          conv_grad_head<CQ>(n, c.keys, buffer, ld, dy + run.begin * line + o * kBlock, line, to);
        });
      }
    }
  });
}

// The exact mask: row r of the output counts input keys < limit(r) = limit + r
// - out.begin only. Rows are done one at a time; only blocks on the diagonal
// need this.
void conv_apply_exact(const Conv& c, int64_t maps, int64_t line, const Neighbours& x,
                      const ConvRows& in, RowRange out, int64_t limit, float* y, float* buffer) {
  for (int64_t r = out.begin; r < out.end; ++r) {
    conv_apply(c, false, maps, line, x, in, {r, r + 1}, limit + r - out.begin, y, buffer);
  }
}

// Its transpose: adds to rows `in` of dx; `partial` is a tile to work in. limit
// belongs to row out.valid.begin.
void conv_transpose_exact(const Conv& c, int64_t maps, int64_t line, const Neighbours& dy,
                          const ConvRows& out, RowRange in, int64_t limit, float* dx,
                          float* partial, float* buffer) {
  for (int64_t r = in.begin; r < in.end; ++r) {
    for (int64_t i = 0; i < maps * kBlock; ++i) dx[r * line + i] = 0;
  }
  for (int64_t r = out.valid.begin; r < out.valid.end; ++r) {
    const RowRange reach{r - c.queries + 1 > in.begin ? r - c.queries + 1 : in.begin, r + 1};
    conv_apply(c, true, maps, line, dy, {{r, r + 1}, out.documents}, reach, kNoLimit, partial,
               buffer);
    int64_t keys = limit + r - out.valid.begin;
    keys = keys < 0 ? 0 : keys > kBlock ? kBlock : keys;
    for (int64_t i = reach.begin; i < reach.end; ++i) {
      for (int64_t h = 0; h < maps; ++h) {
        const int64_t at = i * line + h * kBlock;
        for (int64_t s = 0; s < keys; ++s) dx[at + s] += partial[at + s];
      }
    }
  }
}

void conv_grad_exact(const Conv& c, int64_t maps, int64_t line, const Neighbours& x,
                     const ConvRows& in, RowRange out, int64_t limit, const float* dy, float* sum,
                     float* buffer) {
  for (int64_t r = out.begin; r < out.end; ++r) {
    conv_grad(c, maps, line, x, in, {r, r + 1}, limit + r - out.begin, dy, sum, buffer);
  }
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel
