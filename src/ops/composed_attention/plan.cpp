#include "ops/composed_attention/kernel.h"
#include "ops/composed_attention/kernel_scratch.h"

namespace headloom::ops::fused {

Plan make_plan(const Args& a, bool backward, int64_t workers) {
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
  p.rows = halo > 0 ? 32 : 16;
  if (a.T < p.rows) p.rows = a.T;
  p.height = p.rows + halo < a.T ? p.rows + halo : a.T;
  p.tiles = (a.T + p.rows - 1) / p.rows;
  p.blocks = (a.S + kBlock - 1) / kBlock;
  p.span = p.blocks;
  if (a.window > 0) {
    const int64_t keys = p.height + (a.causal ? 1 : 2) * a.window;
    const int64_t span = keys / kBlock + 2;
    if (span < p.span) p.span = span;
  }
  // The padding keeps the rows of one map from falling into the same cache sets.
  p.line = p.maps * kBlock + kAlign;
  p.chunk = p.height * p.line;
  p.packed = p.blocks * packed_block(a, p, nullptr, 0).size;
  p.scratch = scratch(a, p, nullptr).size;
  if (backward) {
    p.sums = p.blocks * block_sums(a, p, nullptr, 0).size + boundary(a, nullptr).size;
  }
  return p;
}

}  // namespace headloom::ops::fused
