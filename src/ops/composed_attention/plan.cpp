#include <algorithm>
#include <cmath>

#include "ops/composed_attention/kernel.h"
#include "ops/composed_attention/kernel_scratch.h"

namespace headloom::ops::composed_attention_kernel {

// Taller tiles read keys and values (backward also write their gradients) less often, lower ones
// keep the rows nearer and take less memory. Measured on two cores with 1 MiB or 512 KiB of
// second-level and 32 MiB of shared cache: the forward gains by 64 queries where packed keys and
// values take more than 12 MiB, and where a convolution needs the scores of the queries before a
// tile, which are then computed once more. The backward is held to the memory of three rows
// of 32 queries for long sequences; with convolutions it keeps more than two rows. Pairs of
// bfloat16 wait more for the sums of keys and gain by 64 queries where floats do not. Tile
// registers, which multiply 32 queries at once, gain by 64 too (measured with 2 MiB of second-level
// cache).
static int64_t tile_rows(const Args& a, const Plan& p, int64_t workers) {
  int64_t keys = a.S;
  if (a.window > 0 && 2 * a.window < keys) keys = 2 * a.window;
  int64_t rows = 32;
  if (p.by_map) {
    rows = kMapRows;
  } else if (p.amx) {
    rows = 64;
  } else if (!p.backward) {
    const int64_t packed = keys * (a.Gk * p.Dp + a.Gv * p.Ep);
    if (packed > int64_t{3} << 20 || a.pre_conv.kernel) rows = 64;
  } else if (keys > 2048 && a.H * keys <= int64_t{8} * 4096) {
    rows = 64;
  } else if (!a.pre_conv.kernel && !a.post_conv.kernel && (a.pre.present || keys <= 2048)) {
    rows = p.half ? 64 : 48;
  }
  // Every worker gets some.
  while (rows > 16 && !p.by_map && a.T < 4 * workers * rows) rows /= 2;
  return a.T < rows ? a.T : rows;
}

// Measured with 512 KiB of second-level cache: beyond, the keys and values of a head do not stay
// near, and larger products leave little beside them. Pairs of bfloat16 multiply faster than
// floats, so heads must be smaller still.
static bool computes_by_map(const Args& a, bool half) {
  const bool joined = a.pre.present || a.post.present || a.pre_conv.kernel || a.post_conv.kernel;
  return !joined && !a.bias.data && a.S <= 1024 && std::max(a.D, a.E) <= (half ? 16 : 64);
}

Plan make_plan(const Args& a, bool backward, Products products, int64_t workers) {
  const bool half = products != Products::kFloats;
  const auto padded = [](int64_t n) { return (n + kAlign - 1) / kAlign * kAlign; };
  Plan p;
  p.backward = backward;
  p.workers = workers;
  p.Dp = padded(a.D);
  p.Ep = padded(a.E);
  p.heads_padded = padded(a.H1);
  p.maps = a.H > a.H1 ? a.H : a.H1;
  if (a.H2 > p.maps) p.maps = a.H2;
  const int64_t halo = a.pre_conv.halo() + a.post_conv.halo();
  p.blocks = (a.S + kBlock - 1) / kBlock;
  p.split = !backward && !a.pre_conv.kernel && !a.post_conv.kernel && a.T <= 32 &&
            (a.T <= 16 || p.blocks >= 2 * workers);
  p.joined = p.split && !a.post.present;
  // Measured: beyond, packing a key for all queries that read it costs less than their dot
  // products.
  const bool few = !a.pre_conv.kernel && !a.post_conv.kernel &&
                   a.H / a.Gk * a.T <= (half ? kDirectQueries / 2 : kDirectQueries);
  p.direct = p.split && few && a.k_stride[3] == 1 && a.v_stride[3] == 1;
  p.by_map = !p.split && computes_by_map(a, half);
  p.half = half && !p.direct && !p.by_map;
  p.amx = p.half && products == Products::kAmx;
  // The backward takes its weights from the forward's log-sum-exp, so it must mix as that does: in
  // float where few queries read their keys in place.
  p.mixes_pairs = p.half && !p.amx && !few;
  int exponent = 0;
  if (p.half && std::frexp(a.scale, &exponent) == 0.5f) p.half_scale = a.scale;
  p.keeps_weights = !backward || !a.pre.present || a.pre_conv.kernel || a.post_conv.kernel;
  p.rows = p.split ? a.T : tile_rows(a, p, workers);
  p.height = p.rows + halo < a.T ? p.rows + halo : a.T;
  p.tiles = (a.T + p.rows - 1) / p.rows;
  p.span = p.blocks;
  if (a.window > 0) {
    const int64_t keys = p.height + (a.causal ? 1 : 2) * a.window;
    const int64_t span = keys / kBlock + 2;
    if (span < p.span) p.span = span;
  }
  // The padding keeps the rows of one map from falling into the same cache
  // sets.
  p.line = p.maps * kBlock + kAlign;
  p.chunk = p.height * p.line;
  p.packed = (p.split ? 1 : p.blocks) * packed_block(a, p, nullptr, 0).size;
  p.scratch = p.by_map ? map_scratch(a, p, nullptr).size : scratch(a, p, nullptr).size;
  if (backward) {
    p.sums = p.blocks * block_sums(a, p, nullptr, 0).size + boundary(a, nullptr).size;
  }
  return p;
}

}  // namespace headloom::ops::composed_attention_kernel
