"""Triton kernels of composed attention.

For one sequence of the batch, head h, query t and key s, with the letters that this file uses for tiles::

    a   [h,t,s] = scale q[t,h] . k[s,h]                                scores
    a'  [h,t,s] = mix_pre(a), -inf where s is invisible to t
    p   [h,t,s] = exp(a' - L[h,t]),   L[h,t] = log sum_s exp a'        weights
    p'  [h,t,s] = mix_post(p), 0 where invisible
    out [t,h]   = sum_s p'[h,t,s] v[s,h]

A mix takes maps x to maps y (DCMHA, Xiao et al. 2024, equation 7). All sums over h stay inside a group of n heads::

    y[h'] = x[h'] or sum_h x[h] M[h,h']
          + sum_r z_r[t,s] qu[t,r,h'] + x[h'] qg[t,h'],     z_r[t,s] = sum_h x[h,t,s] qd[t,r,h]
          + sum_r w_r[t,s] ku[s,r,h'] + x[h'] kg[s,h'],     w_r[t,s] = sum_h x[h,t,s] kd[s,r,h]

Heads meet only in z and w: 2R maps for all heads of a group, the *inner maps*. So one kernel sums inner maps over the heads
(a program has one tile of queries and keys and loops over the heads), and the next kernel goes on with one head in each program, as
flash attention does, and adds a correction of rank R to each tile. A static M has rank n; its sum over h is a product of
its own, ``static_kernel``.

The inner maps of a *chunk* of queries are in memory at a time. Their size is proportional to S and the same for every T.

Backward, from dout and L; a mix in reverse is the same mix with ``down`` and ``up`` exchanged and M transposed::

    dp' = dout . v          dp = mix_post^T(dp')       da' = p (dp - delta),  delta[h,t] = sum_s p dp
    da  = mix_pre^T(da')    dq = scale da k            dk = scale da^T q      dv = p'^T dout
    dqd[t,r,h] = sum_s x[h] dz_r,     dqu[t,r,h] = sum_s dy[h] z_r,     dqg[t,h] = sum_s x[h] dy[h]
    dkd, dku, dkg: the same with sums over t            dM[h,h'] = sum_ts x[h] dy[h']

where dz and dw, the inner maps of the reverse, are summed from dy with ``up``.

Products take the inputs' type and sum in float32; everything between products is float32; maps in memory have the inputs' type.
Each element of each result is written by one program, so results do not depend on the order in which programs run.
What is invisible is removed by selection and never by a product with 0, so that a NaN there goes nowhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Call(NamedTuple):
    """What all kernels read of a call. H, Gk, Gv, D, E and causal are constants of the compilation."""

    q: Any  # [B, T, H, D]
    k: Any  # [B, S, Gk, D]
    v: Any  # [B, S, Gv, E]
    q_batch: Any  # strides in elements; the last dimension is contiguous
    q_row: Any
    q_head: Any
    k_batch: Any
    k_row: Any
    k_head: Any
    v_batch: Any
    v_row: Any
    v_head: Any
    lengths: Any  # [B] int64 or None
    documents: Any  # [B, S] int64 or None
    lse: Any  # L: [B, H, T] float32
    T: Any
    S: Any
    scale: Any
    window: Any  # or None
    first: Any  # the chunk has the queries from `first` up to `last` ...
    last: Any
    left: Any  # ... and its maps the keys from `left` on
    rows: Any  # the size of a map in memory: [rows, columns]
    columns: Any
    H: Any
    Gk: Any
    Gv: Any
    D: Any
    E: Any
    causal: Any


class Mix(NamedTuple):
    """One mix and the maps in memory that belong to it. What a mix does not have is None, a rank 0 or False."""

    q: Any  # [B, H, 2 RQ + 1, T]: down, up, gate
    k: Any  # [B, H, 2 RK + 1, S]
    inner: Any  # [B, groups, RQ + RK, rows, columns]: z, w
    inner_grad: Any  # the same: dz, dw
    raw: Any  # [B, H, rows, columns]: x, for a static matrix
    raw_grad: Any  # the same: dy
    product: Any  # the same: sum_h x[h] M[h,h']
    product_grad: Any  # the same: sum_h' M[h,h'] dy[h']
    RQ: Any
    RK: Any
    groups: Any
    static: Any


# ---------------------------------------------------------------------------------------------------------------------
# Tiles
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def visible_tile(c, b, t, s):
    """Which keys s [N] the queries t [M] see: boolean [M, N], false beyond T and S."""
    position = t + (c.S - c.T)
    distance = position[:, None] - s[None, :]
    seen = (t < c.T)[:, None] & (s < c.S)[None, :]
    if c.causal:
        seen &= distance >= 0
    if c.window is not None:
        seen &= distance < c.window
        if not c.causal:
            seen &= -distance < c.window
    if c.lengths is not None:
        seen &= (s < tl.load(c.lengths + b))[None, :]
    if c.documents is not None:
        row = c.documents + b.to(tl.int64) * c.S
        of_query = tl.load(row + position, mask=(t < c.T) & (position >= 0), other=0)
        of_key = tl.load(row + s, mask=s < c.S, other=0)
        seen &= of_query[:, None] == of_key[None, :]
    return seen


@triton.jit
def key_range(c, b, t_first, t_last, N: tl.constexpr):
    """The keys, rounded down to a tile, that queries from t_first up to t_last may see."""
    past = c.S - c.T
    begin = 0
    end = c.S
    if c.causal:
        end = tl.minimum(end, t_last + past)
    if c.window is not None:
        begin = tl.maximum(begin, t_first + past - c.window + 1)
        if not c.causal:
            end = tl.minimum(end, t_last + past + c.window - 1)
    if c.lengths is not None:
        end = tl.minimum(end, tl.load(c.lengths + b).to(tl.int32))
    return begin // N * N, end


@triton.jit
def query_range(c, s_first, s_last, M: tl.constexpr):
    """The queries of the chunk, from a multiple of a tile on, that may see keys from s_first up to s_last."""
    past = c.S - c.T
    begin = c.first
    end = c.last
    if c.causal:
        begin = tl.maximum(begin, s_first - past)
    if c.window is not None:
        end = tl.minimum(end, s_last - past + c.window - 1)
        if not c.causal:
            begin = tl.maximum(begin, s_first - past - c.window + 1)
    return begin // M * M, end


@triton.jit
def load_rows(pointer, rows, stride, limit, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a matrix as [rows, PADDED]; 0 beyond `limit` rows and SIZE columns."""
    columns = tl.arange(0, PADDED)
    inside = (rows < limit)[:, None] & (columns < SIZE)[None, :]
    return tl.load(pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def load_q(c, b, h, t, PADDED: tl.constexpr):
    return load_rows(c.q + b.to(tl.int64) * c.q_batch + h * c.q_head, t, c.q_row, c.T, c.D, PADDED)


@triton.jit
def load_k(c, b, h, s, PADDED: tl.constexpr):
    head = h // (c.H // c.Gk)
    return load_rows(c.k + b.to(tl.int64) * c.k_batch + head * c.k_head, s, c.k_row, c.S, c.D, PADDED)


@triton.jit
def load_v(c, b, h, s, PADDED: tl.constexpr):
    head = h // (c.H // c.Gv)
    return load_rows(c.v + b.to(tl.int64) * c.v_batch + head * c.v_head, s, c.v_row, c.S, c.E, PADDED)


@triton.jit
def load_grad_out(c, grad_out, b, h, t, PADDED: tl.constexpr):
    """Rows of dout, which is contiguous [B, T, H, E]."""
    start = b.to(tl.int64) * c.T * (c.H * c.E) + h * c.E
    return load_rows(grad_out + start, t, c.H * c.E, c.T, c.E, PADDED)


@triton.jit
def product(x, y):
    """x y with float32 sums. Tensor cores make products of float32 as three of tf32."""
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def dot_rows(x, y, seen):
    """x [M, d] and y [N, d]: all scalar products, [M, N], 0 where not seen."""
    return tl.where(seen, product(x, tl.trans(y)), 0.0)


@triton.jit
def map_tile(maps, number, c, t, s):
    """Pointers to a tile of the map with this number."""
    row = (t - c.first)[:, None] * c.columns + (s - c.left)[None, :]
    return maps + number.to(tl.int64) * c.rows * c.columns + row


# ---------------------------------------------------------------------------------------------------------------------
# Mixes of a tile
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def query_weight(c, mix, b, h, index, t):
    """One of the query-wise weights of head h: [M]."""
    row = (b * c.H + h).to(tl.int64) * (2 * mix.RQ + 1) + index
    return tl.load(mix.q + row * c.T + t, mask=t < c.T, other=0.0)


@triton.jit
def key_weight(c, mix, b, h, index, s):
    """One of the key-wise weights of head h: [N]."""
    row = (b * c.H + h).to(tl.int64) * (2 * mix.RK + 1) + index
    return tl.load(mix.k + row * c.S + s, mask=s < c.S, other=0.0)


@triton.jit
def mixed(x, c, mix, b, h, t, s, seen, REVERSE: tl.constexpr):
    """The tile y[h] of a mix of x, with the inner maps in memory; in reverse, the tile dx[h] of dy. 0 where not seen."""
    if mix.static:
        if REVERSE:
            number = map_tile(mix.product_grad, b * c.H + h, c, t, s)
        else:
            number = map_tile(mix.product, b * c.H + h, c, t, s)
        y = tl.load(number, mask=seen, other=0.0).to(tl.float32)
    else:
        y = x
    inner = mix.inner_grad if REVERSE else mix.inner
    first = (b * mix.groups + h // (c.H // mix.groups)) * (mix.RQ + mix.RK)
    if mix.q is not None:
        y += x * query_weight(c, mix, b, h, 2 * mix.RQ, t)[:, None]
        for r in tl.static_range(mix.RQ):
            z = tl.load(map_tile(inner, first + r, c, t, s), mask=seen, other=0.0)
            y += z * query_weight(c, mix, b, h, r if REVERSE else mix.RQ + r, t)[:, None]
    if mix.k is not None:
        y += x * key_weight(c, mix, b, h, 2 * mix.RK, s)[None, :]
        for r in tl.static_range(mix.RK):
            w = tl.load(map_tile(inner, first + mix.RQ + r, c, t, s), mask=seen, other=0.0)
            y += w * key_weight(c, mix, b, h, r if REVERSE else mix.RK + r, s)[None, :]
    return tl.where(seen, y, 0.0)


@triton.jit
def zero_tiles(COUNT: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([M, N], tl.float32),)
    return tiles


@triton.jit
def zero_vectors(COUNT: tl.constexpr, M: tl.constexpr):
    vectors = ()
    for _ in tl.static_range(COUNT):
        vectors = vectors + (tl.zeros([M], tl.float32),)
    return vectors


@triton.jit
def add_inner(sums, x, c, mix, b, h, t, s, REVERSE: tl.constexpr):
    """Adds what head h contributes to the tiles of the inner maps: x times `down`, in reverse dy times `up`."""
    new = ()
    for r in tl.static_range(mix.RQ):
        weight = query_weight(c, mix, b, h, mix.RQ + r if REVERSE else r, t)
        new = new + (sums[r] + x * weight[:, None],)
    for r in tl.static_range(mix.RK):
        weight = key_weight(c, mix, b, h, mix.RK + r if REVERSE else r, s)
        new = new + (sums[mix.RQ + r] + x * weight[None, :],)
    return new


@triton.jit
def store_inner(sums, maps, c, mix, b, group, t, s):
    first = (b * mix.groups + group) * (mix.RQ + mix.RK)
    for r in tl.static_range(mix.RQ + mix.RK):
        tl.store(map_tile(maps, first + r, c, t, s), sums[r])


@triton.jit
def add_query_gradients(sums, x, dy, c, mix, b, h, t, s, seen):
    """Adds a tile's part to the gradients of the query-wise weights (down, up, gate) of head h: vectors [M]."""
    first = (b * mix.groups + h // (c.H // mix.groups)) * (mix.RQ + mix.RK)
    down = ()
    up = ()
    for r in tl.static_range(mix.RQ):
        z = tl.load(map_tile(mix.inner, first + r, c, t, s), mask=seen, other=0.0)
        dz = tl.load(map_tile(mix.inner_grad, first + r, c, t, s), mask=seen, other=0.0)
        down = down + (sums[r] + tl.sum(x * dz, 1),)
        up = up + (sums[mix.RQ + r] + tl.sum(dy * z, 1),)
    return down + up + (sums[2 * mix.RQ] + tl.sum(x * dy, 1),)


@triton.jit
def add_key_gradients(sums, x, dy, c, mix, b, h, t, s, seen):
    """The same of the key-wise weights: vectors [N]."""
    first = (b * mix.groups + h // (c.H // mix.groups)) * (mix.RQ + mix.RK) + mix.RQ
    down = ()
    up = ()
    for r in tl.static_range(mix.RK):
        w = tl.load(map_tile(mix.inner, first + r, c, t, s), mask=seen, other=0.0)
        dw = tl.load(map_tile(mix.inner_grad, first + r, c, t, s), mask=seen, other=0.0)
        down = down + (sums[r] + tl.sum(x * dw, 0),)
        up = up + (sums[mix.RK + r] + tl.sum(dy * w, 0),)
    return down + up + (sums[2 * mix.RK] + tl.sum(x * dy, 0),)


@triton.jit
def weights(a, c, pre, b, h, t, s, seen):
    """p: the weights after softmax of scores a, with L from memory."""
    lse = tl.load(c.lse + (b * c.H + h).to(tl.int64) * c.T + t, mask=t < c.T, other=0.0)
    return tl.where(seen, tl.exp(mixed(a, c, pre, b, h, t, s, seen, False) - lse[:, None]), 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Inner maps: a program has a tile of queries and keys and loops over the heads of a group
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def tile_of_group(c, groups, M: tl.constexpr, N: tl.constexpr):
    """The place of a program: sequence, group, queries, keys, and whether any of these keys may be visible."""
    s_first = c.left + tl.program_id(0) * N
    t_first = c.first + tl.program_id(1) * M
    b = tl.program_id(2) // groups
    begin, end = key_range(c, b, t_first, tl.minimum(t_first + M, c.T), N)
    some = (s_first + N > begin) & (s_first < end)
    return b, tl.program_id(2) % groups, t_first + tl.arange(0, M), s_first + tl.arange(0, N), some


@triton.jit
def score_maps_kernel(c, pre, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Inner maps of the mix before softmax, from the scores a."""
    b, group, t, s, some = tile_of_group(c, pre.groups, M, N)
    if some:
        seen = visible_tile(c, b, t, s)
        heads = c.H // pre.groups
        sums = zero_tiles(pre.RQ + pre.RK, M, N)
        for h in range(group * heads, group * heads + heads):
            a = dot_rows(load_q(c, b, h, t, D), load_k(c, b, h, s, D), seen) * c.scale
            if pre.static:
                tl.store(map_tile(pre.raw, b * c.H + h, c, t, s), a)
            sums = add_inner(sums, a, c, pre, b, h, t, s, False)
        store_inner(sums, pre.inner, c, pre, b, group, t, s)


@triton.jit
def weight_maps_kernel(c, pre, post, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Inner maps of the mix after softmax, from the weights p."""
    b, group, t, s, some = tile_of_group(c, post.groups, M, N)
    if some:
        seen = visible_tile(c, b, t, s)
        heads = c.H // post.groups
        sums = zero_tiles(post.RQ + post.RK, M, N)
        for h in range(group * heads, group * heads + heads):
            a = dot_rows(load_q(c, b, h, t, D), load_k(c, b, h, s, D), seen) * c.scale
            p = weights(a, c, pre, b, h, t, s, seen)
            if post.static:
                tl.store(map_tile(post.raw, b * c.H + h, c, t, s), p)
            sums = add_inner(sums, p, c, post, b, h, t, s, False)
        store_inner(sums, post.inner, c, post, b, group, t, s)


@triton.jit
def weight_grad_maps_kernel(c, post, grad_out, M: tl.constexpr, N: tl.constexpr, E: tl.constexpr):
    """Inner maps of the reversed mix after softmax, from dp' = dout . v."""
    b, group, t, s, some = tile_of_group(c, post.groups, M, N)
    if some:
        seen = visible_tile(c, b, t, s)
        heads = c.H // post.groups
        sums = zero_tiles(post.RQ + post.RK, M, N)
        for h in range(group * heads, group * heads + heads):
            dy = dot_rows(load_grad_out(c, grad_out, b, h, t, E), load_v(c, b, h, s, E), seen)
            if post.static:
                tl.store(map_tile(post.raw_grad, b * c.H + h, c, t, s), dy)
            sums = add_inner(sums, dy, c, post, b, h, t, s, True)
        store_inner(sums, post.inner_grad, c, post, b, group, t, s)


@triton.jit
def load_delta(c, delta, b, h, t):
    return tl.load(delta + (b * c.H + h).to(tl.int64) * c.T + t, mask=t < c.T, other=0.0)


@triton.jit
def score_grad_maps_kernel(
    c, pre, post, grad_out, delta, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr
):
    """Inner maps of the reversed mix before softmax, from da' = p (dp - delta)."""
    b, group, t, s, some = tile_of_group(c, pre.groups, M, N)
    if some:
        seen = visible_tile(c, b, t, s)
        heads = c.H // pre.groups
        sums = zero_tiles(pre.RQ + pre.RK, M, N)
        for h in range(group * heads, group * heads + heads):
            a = dot_rows(load_q(c, b, h, t, D), load_k(c, b, h, s, D), seen) * c.scale
            p = weights(a, c, pre, b, h, t, s, seen)
            dy = dot_rows(load_grad_out(c, grad_out, b, h, t, E), load_v(c, b, h, s, E), seen)
            dp = mixed(dy, c, post, b, h, t, s, seen, True)
            da = tl.where(seen, p * (dp - load_delta(c, delta, b, h, t)[:, None]), 0.0)
            if pre.static:
                tl.store(map_tile(pre.raw_grad, b * c.H + h, c, t, s), da)
            sums = add_inner(sums, da, c, pre, b, h, t, s, True)
        store_inner(sums, pre.inner_grad, c, pre, b, group, t, s)


# ---------------------------------------------------------------------------------------------------------------------
# Static matrices
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def head_rows(maps, c, b, h, inside, t, s):
    """Pointers to the values of maps h [n] at query t and keys s [N]: [n, N]."""
    row = (t - c.first) * c.columns + (s - c.left)
    return maps + (b * c.H + h).to(tl.int64)[:, None] * c.rows * c.columns + row[None, :]


@triton.jit
def static_kernel(c, raw, result, matrix, groups, REVERSE: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr):
    """result[h'] = sum_h raw[h] M[h,h'] (in reverse, with M transposed) for one query and a tile of keys."""
    t = c.first + tl.program_id(1)
    b = tl.program_id(2) // groups
    group = tl.program_id(2) % groups
    s_first = c.left + tl.program_id(0) * N
    begin, end = key_range(c, b, t, t + 1, N)
    if (s_first + N > begin) & (s_first < end):
        s = s_first + tl.arange(0, N)
        size = c.H // groups
        inside = tl.arange(0, HEADS)
        h = group * size + inside
        seen = (inside < size)[:, None] & visible_tile(c, b, t + tl.zeros([1], tl.int32), s)
        x = tl.load(head_rows(raw, c, b, h, inside, t, s), mask=seen, other=0.0)
        square = (inside < size)[:, None] & (inside < size)[None, :]
        at = matrix + group * size * size
        if REVERSE:
            at += inside[:, None] * size + inside[None, :]
        else:
            at += inside[None, :] * size + inside[:, None]
        m = tl.load(at, mask=square, other=0.0)
        tl.store(head_rows(result, c, b, h, inside, t, s), product(m, x), mask=(inside < size)[:, None])


@triton.jit
def static_gradient_kernel(c, raw, raw_grad, sums, groups, HEADS: tl.constexpr, N: tl.constexpr):
    """sums[b, g, t] = sum_s x[h] dy[h'] for one query t: [B, g, rows, n, n] float32."""
    row = tl.program_id(0)
    b = tl.program_id(1) // groups
    group = tl.program_id(1) % groups
    t = c.first + row
    size = c.H // groups
    inside = tl.arange(0, HEADS)
    h = group * size + inside
    begin, end = key_range(c, b, t, t + 1, N)
    total = tl.zeros([HEADS, HEADS], tl.float32)
    for s_first in range(begin, end, N):
        s = s_first + tl.arange(0, N)
        seen = (inside < size)[:, None] & visible_tile(c, b, t + tl.zeros([1], tl.int32), s)
        x = tl.load(head_rows(raw, c, b, h, inside, t, s), mask=seen, other=0.0)
        dy = tl.load(head_rows(raw_grad, c, b, h, inside, t, s), mask=seen, other=0.0)
        total += product(x, tl.trans(dy))
    to = sums + ((b * groups + group) * c.rows + row).to(tl.int64) * size * size
    square = (inside < size)[:, None] & (inside < size)[None, :]
    tl.store(to + inside[:, None] * size + inside[None, :], total, mask=square)


# ---------------------------------------------------------------------------------------------------------------------
# Rows: a program has one head and a tile of queries and goes over the keys
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def row_of_head(c, M: tl.constexpr, N: tl.constexpr):
    """The place of a program: head, sequence, queries, first and last key. The longest rows start first."""
    h = tl.program_id(0)
    b = tl.program_id(2)
    t_first = c.first + (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    begin, end = key_range(c, b, t_first, tl.minimum(t_first + M, c.T), N)
    return h, b, t_first + tl.arange(0, M), begin, end


@triton.jit
def add_exponentials(a, seen, largest, total):
    """Adds a tile to the sum of exp(a - largest), as the largest score grows: exponentials, factor of what came before."""
    a = tl.where(seen, a, float("-inf"))
    grown = tl.maximum(largest, tl.max(a, 1))
    base = tl.where(grown == float("-inf"), 0.0, grown)
    factor = tl.exp(largest - base)
    e = tl.exp(a - base[:, None])
    return e, factor, grown, total * factor + tl.sum(e, 1)


@triton.jit
def store_lse(c, b, h, t, largest, total):
    """L of the rows. A row that sees nothing has +inf, so that each of its weights is exp(-inf)."""
    lse = tl.where(total == 0.0, float("inf"), largest + tl.log(total))
    tl.store(c.lse + (b * c.H + h).to(tl.int64) * c.T + t, lse, mask=t < c.T)


@triton.jit
def lse_kernel(c, pre, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """L[h,t] = log sum_s exp a'."""
    h, b, t, begin, end = row_of_head(c, M, N)
    q = load_q(c, b, h, t, D)
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    for s_first in range(begin, end, N):
        s = s_first + tl.arange(0, N)
        seen = visible_tile(c, b, t, s)
        a = dot_rows(q, load_k(c, b, h, s, D), seen) * c.scale
        a = mixed(a, c, pre, b, h, t, s, seen, False)
        _, _, largest, total = add_exponentials(a, seen, largest, total)
    store_lse(c, b, h, t, largest, total)


@triton.jit
def store_out(out, value, c, b, h, t, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)
    row = (b.to(tl.int64) * c.T + t) * (c.H * c.E) + h * c.E
    tl.store(out + row[:, None] + columns[None, :], value, mask=(t < c.T)[:, None] & (columns < c.E)[None, :])


@triton.jit
def online_kernel(c, pre, post, out, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """out and L in one pass, where the mix after softmax has no term across heads: it commutes with the sum's factor."""
    h, b, t, begin, end = row_of_head(c, M, N)
    q = load_q(c, b, h, t, D)
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    value = tl.zeros([M, E], tl.float32)
    for s_first in range(begin, end, N):
        s = s_first + tl.arange(0, N)
        seen = visible_tile(c, b, t, s)
        a = dot_rows(q, load_k(c, b, h, s, D), seen) * c.scale
        a = mixed(a, c, pre, b, h, t, s, seen, False)
        e, factor, largest, total = add_exponentials(a, seen, largest, total)
        e = mixed(e, c, post, b, h, t, s, seen, False)
        v = load_v(c, b, h, s, E)
        value = value * factor[:, None] + product(e.to(v.dtype), v)
    value = value / tl.where(total == 0.0, 1.0, total)[:, None]
    store_out(out, value, c, b, h, t, E)
    store_lse(c, b, h, t, largest, total)


@triton.jit
def output_kernel(c, pre, post, out, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """out[t,h] = sum_s p'[h,t,s] v[s,h], with L and the inner maps of both mixes from memory."""
    h, b, t, begin, end = row_of_head(c, M, N)
    q = load_q(c, b, h, t, D)
    value = tl.zeros([M, E], tl.float32)
    for s_first in range(begin, end, N):
        s = s_first + tl.arange(0, N)
        seen = visible_tile(c, b, t, s)
        a = dot_rows(q, load_k(c, b, h, s, D), seen) * c.scale
        p = mixed(weights(a, c, pre, b, h, t, s, seen), c, post, b, h, t, s, seen, False)
        v = load_v(c, b, h, s, E)
        value += product(p.to(v.dtype), v)
    store_out(out, value, c, b, h, t, E)


@triton.jit
def store_query_gradients(to, sums, c, mix, b, h, t):
    for i in tl.static_range(2 * mix.RQ + 1):
        row = (b * c.H + h).to(tl.int64) * (2 * mix.RQ + 1) + i
        tl.store(to + row * c.T + t, sums[i], mask=t < c.T)


@triton.jit
def delta_kernel(
    c, pre, post, grad_out, delta, grad_post, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr
):
    """delta[h,t] = sum_s p dp, and the gradients of the query-wise weights after softmax, which are such sums too."""
    h, b, t, begin, end = row_of_head(c, M, N)
    q = load_q(c, b, h, t, D)
    do = load_grad_out(c, grad_out, b, h, t, E)
    total = tl.zeros([M], tl.float32)
    sums = zero_vectors(2 * post.RQ + 1, M)
    for s_first in range(begin, end, N):
        s = s_first + tl.arange(0, N)
        seen = visible_tile(c, b, t, s)
        a = dot_rows(q, load_k(c, b, h, s, D), seen) * c.scale
        p = weights(a, c, pre, b, h, t, s, seen)
        dy = dot_rows(do, load_v(c, b, h, s, E), seen)
        total += tl.sum(p * mixed(dy, c, post, b, h, t, s, seen, True), 1)
        if grad_post is not None:
            sums = add_query_gradients(sums, p, dy, c, post, b, h, t, s, seen)
    tl.store(delta + (b * c.H + h).to(tl.int64) * c.T + t, total, mask=t < c.T)
    if grad_post is not None:
        store_query_gradients(grad_post, sums, c, post, b, h, t)


@triton.jit
def grad_query_kernel(
    c, pre, post, grad_out, delta, grad_q, grad_pre, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, E: tl.constexpr
):
    """dq = scale da k, and the gradients of the query-wise weights before softmax."""
    h, b, t, begin, end = row_of_head(c, M, N)
    q = load_q(c, b, h, t, D)
    do = load_grad_out(c, grad_out, b, h, t, E)
    of_row = load_delta(c, delta, b, h, t)
    dq = tl.zeros([M, D], tl.float32)
    sums = zero_vectors(2 * pre.RQ + 1, M)
    for s_first in range(begin, end, N):
        s = s_first + tl.arange(0, N)
        seen = visible_tile(c, b, t, s)
        k = load_k(c, b, h, s, D)
        a = dot_rows(q, k, seen) * c.scale
        p = weights(a, c, pre, b, h, t, s, seen)
        dp = mixed(dot_rows(do, load_v(c, b, h, s, E), seen), c, post, b, h, t, s, seen, True)
        dy = tl.where(seen, p * (dp - of_row[:, None]), 0.0)
        if grad_pre is not None:
            sums = add_query_gradients(sums, a, dy, c, pre, b, h, t, s, seen)
        da = mixed(dy, c, pre, b, h, t, s, seen, True)
        dq += product(da.to(k.dtype), k)
    columns = tl.arange(0, D)
    to = grad_q + (b.to(tl.int64) * c.T + t)[:, None] * (c.H * c.D) + h * c.D + columns[None, :]
    tl.store(to, dq * c.scale, mask=(t < c.T)[:, None] & (columns < c.D)[None, :])
    if grad_pre is not None:
        store_query_gradients(grad_pre, sums, c, pre, b, h, t)


# ---------------------------------------------------------------------------------------------------------------------
# Columns: a program has one head and a tile of keys and goes over the queries of the chunk
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def add_key_gradients_to(to, sums, c, mix, b, h, s):
    for i in tl.static_range(2 * mix.RK + 1):
        row = (b * c.H + h).to(tl.int64) * (2 * mix.RK + 1) + i
        at = to + row * c.S + s
        tl.store(at, tl.load(at, mask=s < c.S, other=0.0) + sums[i], mask=s < c.S)


@triton.jit
def add_rows_to(to, value, c, b, h, s, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Adds to rows s of [B, H, S, SIZE] float32, which this program alone writes."""
    columns = tl.arange(0, PADDED)
    inside = (s < c.S)[:, None] & (columns < SIZE)[None, :]
    at = to + ((b * c.H + h).to(tl.int64) * c.S + s)[:, None] * SIZE + columns[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + value, mask=inside)


@triton.jit
def grad_key_kernel(
    c,
    pre,
    post,
    grad_out,
    delta,
    grad_k,
    grad_v,
    grad_pre,
    grad_post,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """dk = scale da^T q, dv = p'^T dout, and the gradients of the key-wise weights: the chunk's part is added."""
    h = tl.program_id(0)
    b = tl.program_id(2)
    s_first = c.left + tl.program_id(1) * N
    s = s_first + tl.arange(0, N)
    k = load_k(c, b, h, s, D)
    v = load_v(c, b, h, s, E)
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, E], tl.float32)
    pre_sums = zero_vectors(2 * pre.RK + 1, N)
    post_sums = zero_vectors(2 * post.RK + 1, N)
    begin, end = query_range(c, s_first, s_first + N, M)
    for t_first in range(begin, end, M):
        t = t_first + tl.arange(0, M)
        seen = visible_tile(c, b, t, s)
        q = load_q(c, b, h, t, D)
        do = load_grad_out(c, grad_out, b, h, t, E)
        a = dot_rows(q, k, seen) * c.scale
        p = weights(a, c, pre, b, h, t, s, seen)
        dv += product(tl.trans(mixed(p, c, post, b, h, t, s, seen, False).to(do.dtype)), do)
        dp = dot_rows(do, v, seen)
        if grad_post is not None:
            post_sums = add_key_gradients(post_sums, p, dp, c, post, b, h, t, s, seen)
        dp = mixed(dp, c, post, b, h, t, s, seen, True)
        dy = tl.where(seen, p * (dp - load_delta(c, delta, b, h, t)[:, None]), 0.0)
        if grad_pre is not None:
            pre_sums = add_key_gradients(pre_sums, a, dy, c, pre, b, h, t, s, seen)
        da = mixed(dy, c, pre, b, h, t, s, seen, True)
        dk += product(tl.trans(da.to(q.dtype)), q)
    add_rows_to(grad_k, dk * c.scale, c, b, h, s, c.D, D)
    add_rows_to(grad_v, dv, c, b, h, s, c.E, E)
    if grad_pre is not None:
        add_key_gradients_to(grad_pre, pre_sums, c, pre, b, h, s)
    if grad_post is not None:
        add_key_gradients_to(grad_post, post_sums, c, post, b, h, s)
