"""Triton kernels of composed attention: everything between its matrix products.

For one sequence of the batch, head h, query t and key s::

    a   [h,t,s] = scale q[t,h] . k[s,h] + bias                         scores, by a matrix product before
    a'  [h,t,s] = mix_pre(a), -inf where s is invisible to t
    p   [h,t,s] = exp(a' - L[h,t]),   L[h,t] = log sum_s exp a'        weights
    p'  [h,t,s] = mix_post(p), 0 where invisible
    out [t,h]   = sum_s p'[h,t,s] v[s,h]                               by a matrix product after

A mix takes maps x to maps y (DCMHA, Xiao et al. 2024, equation 7). All sums over h stay inside a group of heads::

    y[h'] = x[h'] or sum_h x[h] M[h,h']
          + sum_r z_r[t,s] qu[t,r,h'] + x[h'] qg[t,h'],     z_r[t,s] = sum_h x[h,t,s] qd[t,r,h]
          + sum_r w_r[t,s] ku[s,r,h'] + x[h'] kg[s,h'],     w_r[t,s] = sum_h x[h,t,s] kd[s,r,h]

z and w are the mix's *inner maps*. They need all heads of a group, and the softmax needs all keys of a row. So a program
has a few rows t and all heads of one group, and goes over the keys in tiles [heads, rows, keys]. Inner maps and weights
never leave the registers. The maps that the products exchange with these kernels are those of a *chunk* of queries
(``composed_attention.py``): their memory is proportional to S and the same for every T.

Backward, from g = dout . v and L. A mix in reverse is the same mix with ``down`` and ``up`` exchanged and M transposed::

    dp  = mix_post^T(g)        da' = p (dp - delta),   delta[h,t] = sum_s p dp
    da  = mix_pre^T(da')       dq = scale da k,   dk = scale da^T q,   dv = p'^T dout       by matrix products after

and the weights of a mix from x to y, with dz and dw the inner maps of the reversed mix of dy::

    dqd[t,r,h] = sum_s x[h] dz_r,     dqu[t,r,h] = sum_s dy[h] z_r,     dqg[t,h] = sum_s x[h] dy[h]
    dkd, dku, dkg: the same with sums over t and w                       dM[h,h'] = sum_ts x[h] dy[h']

A program writes its share of a sum over t to a place of its own, and the shares are added in a fixed order afterwards:
results do not depend on the order in which programs run. What is invisible is removed by selection and never by a product
with 0, so that a NaN there does not reach a mix. Arithmetic is in float32; maps in memory have the inputs' type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Call(NamedTuple):
    """What both kernels read of a call. H, groups and causal are constants of the compilation."""

    lengths: Any  # [B] int64 or None
    documents: Any  # [B, S] int64 or None
    mask: Any  # bytes or None, with these strides
    mask_batch: Any
    mask_row: Any
    mask_key: Any
    lse: Any  # L: [B, H, T] float32; +inf where a row sees nothing
    T: Any
    S: Any
    window: Any  # or None
    first: Any  # the chunk has the queries from `first` up to `last` ...
    last: Any
    left: Any  # ... and its maps the keys from `left` up to `right`
    right: Any
    rows: Any  # a map in memory is [rows, columns]; [B, H] of them
    columns: Any
    H: Any
    groups: Any
    causal: Any


class Mix(NamedTuple):
    """One mix. What it does not have is None or a rank of 0, constants of the compilation."""

    static: Any  # M: [groups, n, n]
    q_down: Any  # [B, T, RQ, H]
    q_up: Any
    q_gate: Any  # [B, T, 1, H]
    k_down: Any  # [B, RK, H, S]: a tile of keys is contiguous
    k_up: Any
    k_gate: Any  # [B, 1, H, S]
    RQ: Any
    RK: Any


class MixGradient(NamedTuple):
    """Where the gradients of a mix go: float32, None where the mix has no such weight."""

    static: Any  # [programs, n, n]
    q_down: Any  # as in Mix
    q_up: Any
    q_gate: Any
    k_down: Any  # [row tiles of the chunk, B, RK, H, columns]
    k_up: Any
    k_gate: Any


# ---------------------------------------------------------------------------------------------------------------------
# The place of a program, and its tiles
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def place(c, M: tl.constexpr, HP: tl.constexpr):
    """Sequence, group, heads [HP], which of them exist, and queries [M]. With a causal mask the longest rows start first."""
    b = tl.program_id(1) // c.groups
    group = tl.program_id(1) % c.groups
    inside = tl.arange(0, HP) < c.H // c.groups
    h = group * (c.H // c.groups) + tl.arange(0, HP)
    t = c.first + (tl.num_programs(0) - 1 - tl.program_id(0)) * M + tl.arange(0, M)
    return b.to(tl.int64), group, h, inside, t


@triton.jit
def key_range(c, b, t_first, t_last, N: tl.constexpr):
    """The keys of the chunk that queries from t_first up to t_last may see; the first on the boundary of a tile."""
    past = c.S - c.T
    begin = c.left
    end = c.right
    if c.causal:
        end = tl.minimum(end, t_last + past)
    if c.window is not None:
        begin = tl.maximum(begin, t_first + past - c.window + 1)
        if not c.causal:
            end = tl.minimum(end, t_last + past + c.window - 1)
    if c.lengths is not None:
        end = tl.minimum(end, tl.load(c.lengths + b).to(tl.int32))
    return c.left + (begin - c.left) // N * N, end


@triton.jit
def visible(c, b, t, s):
    """Which keys s [N] the queries t [M] see: boolean [M, N], false beyond the chunk."""
    position = t + (c.S - c.T)
    distance = position[:, None] - s[None, :]
    seen = (t < c.last)[:, None] & (s < c.right)[None, :]
    if c.causal:
        seen &= distance >= 0
    if c.window is not None:
        seen &= distance < c.window
        if not c.causal:
            seen &= -distance < c.window
    if c.lengths is not None:
        seen &= (s < tl.load(c.lengths + b))[None, :]
    if c.documents is not None:
        of_query = tl.load(c.documents + b * c.S + position, mask=(t < c.last) & (position >= 0), other=0)
        of_key = tl.load(c.documents + b * c.S + s, mask=s < c.right, other=0)
        seen &= of_query[:, None] == of_key[None, :]
    if c.mask is not None:
        row = b * c.mask_batch + t.to(tl.int64)[:, None] * c.mask_row
        seen &= tl.load(c.mask + row + s.to(tl.int64)[None, :] * c.mask_key, mask=seen, other=0) != 0
    return seen


@triton.jit
def map_tile(c, b, h, t, s):
    """Where the tile [HP, M, N] stands in the maps of the chunk."""
    row = ((b * c.H + h)[:, None] * c.rows + (t - c.first)[None, :]) * c.columns
    return row[:, :, None] + (s - c.left)[None, None, :]


@triton.jit
def load_map(maps, at, seen, inside):
    """A tile of maps, 0 where it is not seen."""
    return tl.load(maps + at, mask=inside[:, None, None] & seen[None, :, :], other=0.0).to(tl.float32)


@triton.jit
def store_map(maps, at, tile, c, t, s, inside):
    there = inside[:, None, None] & ((t < c.last)[:, None] & (s < c.right)[None, :])[None, :, :]
    tl.store(maps + at, tile.to(maps.dtype.element_ty), mask=there)


@triton.jit
def query_place(c, b, h, r, R: tl.constexpr, t):
    """Where the query-wise weights of rank r stand: [HP, M] in [B, T, R, H]."""
    return ((b * c.T + t) * R + r)[None, :] * c.H + h[:, None]


@triton.jit
def query_weight(pointer, c, b, h, inside, r, R: tl.constexpr, t):
    """The weights of rank r as a tile [HP, M, 1]."""
    there = inside[:, None] & (t < c.last)[None, :]
    return tl.load(pointer + query_place(c, b, h, r, R, t), mask=there, other=0.0).to(tl.float32)[:, :, None]


@triton.jit
def key_weight(pointer, c, b, h, inside, r, R: tl.constexpr, s):
    """The key-wise weights of rank r, from [B, R, H, S], as a tile [HP, 1, N]."""
    at = ((b * R + r) * c.H + h)[:, None] * c.S + s[None, :]
    there = inside[:, None] & (s < c.right)[None, :]
    return tl.load(pointer + at, mask=there, other=0.0).to(tl.float32)[:, None, :]


# ---------------------------------------------------------------------------------------------------------------------
# Mixes of a tile
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def inner_maps(x, c, mix, b, h, inside, t, s, REVERSE: tl.constexpr):
    """The inner maps z_0.., w_0.. of x: a tuple of RQ + RK tiles [M, N]. In reverse those of dy, with `up` for `down`."""
    maps = ()
    for r in tl.static_range(mix.RQ):
        weight = query_weight(mix.q_up if REVERSE else mix.q_down, c, b, h, inside, r, mix.RQ, t)
        maps = maps + (tl.sum(x * weight, 0),)
    for r in tl.static_range(mix.RK):
        weight = key_weight(mix.k_up if REVERSE else mix.k_down, c, b, h, inside, r, mix.RK, s)
        maps = maps + (tl.sum(x * weight, 0),)
    return maps


@triton.jit
def static_product(x, static, group, HEADS: tl.constexpr, REVERSE: tl.constexpr):
    """sum_h M[h,h'] x[h], in reverse sum_h' M[h,h'] x[h'], in the type of M."""
    HP: tl.constexpr = x.shape[0]
    i = tl.arange(0, HP)
    at = i[:, None] * HEADS + i[None, :] if REVERSE else i[None, :] * HEADS + i[:, None]
    there = (i < HEADS)[:, None] & (i < HEADS)[None, :]
    matrix = tl.load(static + group * HEADS * HEADS + at, mask=there, other=0.0)
    flat = tl.reshape(x, [HP, x.shape[1] * x.shape[2]]).to(matrix.dtype)
    return tl.reshape(tl.dot(matrix, flat, input_precision="ieee"), [HP, x.shape[1], x.shape[2]])


@triton.jit
def mixed(x, maps, c, mix, b, group, h, inside, t, s, REVERSE: tl.constexpr):
    """The mix y of x, with x's inner maps. In reverse dx of dy."""
    y = x
    if mix.static is not None:
        y = static_product(x, mix.static, group, c.H // c.groups, REVERSE)
    for r in tl.static_range(mix.RQ):
        weight = query_weight(mix.q_down if REVERSE else mix.q_up, c, b, h, inside, r, mix.RQ, t)
        y += maps[r][None, :, :] * weight
    for r in tl.static_range(mix.RK):
        weight = key_weight(mix.k_down if REVERSE else mix.k_up, c, b, h, inside, r, mix.RK, s)
        y += maps[mix.RQ + r][None, :, :] * weight
    if mix.q_gate is not None:
        y += x * query_weight(mix.q_gate, c, b, h, inside, 0, 1, t)
    if mix.k_gate is not None:
        y += x * key_weight(mix.k_gate, c, b, h, inside, 0, 1, s)
    return y


@triton.jit
def mix_tile(x, c, mix, b, group, h, inside, t, s, REVERSE: tl.constexpr):
    maps = inner_maps(x, c, mix, b, h, inside, t, s, REVERSE)
    return mixed(x, maps, c, mix, b, group, h, inside, t, s, REVERSE)


@triton.jit
def weight_tile(a, lse, c, pre, b, group, h, inside, t, s, seen):
    """p of a tile of scores."""
    mixed_scores = mix_tile(a, c, pre, b, group, h, inside, t, s, False)
    return tl.where(inside[:, None, None] & seen[None, :, :], tl.exp(mixed_scores - lse[:, :, None]), 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients of a mix's weights
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def zero_sums(mix, HP: tl.constexpr, M: tl.constexpr):
    """Sums over s: d down, d up for each rank, then d gate: [HP, M] each. After them dM [HP, HP]."""
    sums = ()
    for _ in tl.static_range(2 * mix.RQ):
        sums = sums + (tl.zeros([HP, M], tl.float32),)
    if mix.q_gate is not None:
        sums = sums + (tl.zeros([HP, M], tl.float32),)
    if mix.static is not None:
        sums = sums + (tl.zeros([HP, HP], tl.float32),)
    return sums


@triton.jit
def add_sums(sums, x, dy, maps, grad_maps, mix):
    """Adds a tile to the sums over s."""
    new = ()
    for r in tl.static_range(mix.RQ):
        new = new + (sums[2 * r] + tl.sum(x * grad_maps[r][None, :, :], 2),)
        new = new + (sums[2 * r + 1] + tl.sum(dy * maps[r][None, :, :], 2),)
    if mix.q_gate is not None:
        new = new + (sums[2 * mix.RQ] + tl.sum(x * dy, 2),)
    if mix.static is not None:
        HP: tl.constexpr = x.shape[0]
        flat: tl.constexpr = x.shape[1] * x.shape[2]
        of_x = tl.reshape(x, [HP, flat]).to(mix.static.dtype.element_ty)
        of_dy = tl.reshape(dy, [HP, flat]).to(mix.static.dtype.element_ty)
        last: tl.constexpr = 2 * mix.RQ + (0 if mix.q_gate is None else 1)
        new = new + (sums[last] + tl.dot(of_x, tl.trans(of_dy), input_precision="ieee"),)
    return new


@triton.jit
def store_sums(sums, to, c, mix, b, h, inside, t):
    there = inside[:, None] & (t < c.last)[None, :]
    for r in tl.static_range(mix.RQ):
        at = query_place(c, b, h, r, mix.RQ, t)
        tl.store(to.q_down + at, sums[2 * r], mask=there)
        tl.store(to.q_up + at, sums[2 * r + 1], mask=there)
    if mix.q_gate is not None:
        tl.store(to.q_gate + query_place(c, b, h, 0, 1, t), sums[2 * mix.RQ], mask=there)
    if mix.static is not None:
        HEADS: tl.constexpr = c.H // c.groups
        i = tl.arange(0, inside.shape[0])
        program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        at = program * (HEADS * HEADS) + i[:, None] * HEADS + i[None, :]
        last: tl.constexpr = 2 * mix.RQ + (0 if mix.q_gate is None else 1)
        tl.store(to.static + at, sums[last], mask=(i < HEADS)[:, None] & (i < HEADS)[None, :])


@triton.jit
def store_share(pointer, share, c, b, h, inside, r, R: tl.constexpr, s):
    """This program's share [HP, N] of a key-wise gradient, into [row tiles, B, R, H, columns]."""
    batch = tl.num_programs(1) // c.groups
    at = (((tl.program_id(0).to(tl.int64) * batch + b) * R + r) * c.H + h)[:, None] * c.columns + (s - c.left)[None, :]
    tl.store(pointer + at, share, mask=inside[:, None] & (s < c.right)[None, :])


@triton.jit
def store_key_shares(to, x, dy, maps, grad_maps, c, mix, b, h, inside, s):
    for r in tl.static_range(mix.RK):
        down = tl.sum(x * grad_maps[mix.RQ + r][None, :, :], 1)
        up = tl.sum(dy * maps[mix.RQ + r][None, :, :], 1)
        store_share(to.k_down, down, c, b, h, inside, r, mix.RK, s)
        store_share(to.k_up, up, c, b, h, inside, r, mix.RK, s)
    if mix.k_gate is not None:
        store_share(to.k_gate, tl.sum(x * dy, 1), c, b, h, inside, 0, 1, s)


@triton.jit
def store_no_key_shares(to, c, mix, b, h, inside, s, HP: tl.constexpr, N: tl.constexpr):
    """Zeros for keys that the program's queries do not see."""
    nothing = tl.zeros([HP, N], tl.float32)
    for r in tl.static_range(mix.RK):
        store_share(to.k_down, nothing, c, b, h, inside, r, mix.RK, s)
        store_share(to.k_up, nothing, c, b, h, inside, r, mix.RK, s)
    if mix.k_gate is not None:
        store_share(to.k_gate, nothing, c, b, h, inside, 0, 1, s)


# ---------------------------------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def forward_kernel(c, pre, post, maps, HP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Turns the scores a of a chunk into p' in place, and writes L."""
    b, group, h, inside, t = place(c, M, HP)
    t_first = tl.min(t, 0)
    begin, end = key_range(c, b, t_first, tl.minimum(t_first + M, c.last), N)

    # L, from the largest score so far and the sum of exp(a' - largest).
    largest = tl.full([HP, M], float("-inf"), tl.float32)
    total = tl.zeros([HP, M], tl.float32)
    for s_first in range(begin, end, N):
        s = s_first + tl.arange(0, N)
        seen = visible(c, b, t, s)
        a = load_map(maps, map_tile(c, b, h, t, s), seen, inside)
        a = mix_tile(a, c, pre, b, group, h, inside, t, s, False)
        a = tl.where(inside[:, None, None] & seen[None, :, :], a, float("-inf"))
        grown = tl.maximum(largest, tl.max(a, 2))
        base = tl.where(grown == float("-inf"), 0.0, grown)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(a - base[:, :, None]), 2)
        largest = grown
    # A row that sees nothing has L = +inf, so that each of its weights is exp(-inf) = 0.
    lse = tl.where(total == 0.0, float("inf"), largest + tl.log(tl.where(total == 0.0, 1.0, total)))
    tl.store(
        c.lse + (b * c.H + h)[:, None] * c.T + t[None, :], lse, mask=inside[:, None] & (t < c.last)[None, :]
    )

    # The product after reads whole rows of the chunk: 0 where no query of this program sees a key.
    for s_first in range(c.left, begin, N):
        s = s_first + tl.arange(0, N)
        store_map(maps, map_tile(c, b, h, t, s), tl.zeros([HP, M, N], tl.float32), c, t, s, inside)
    for s_first in range(begin, end, N):
        s = s_first + tl.arange(0, N)
        seen = visible(c, b, t, s)
        at = map_tile(c, b, h, t, s)
        p = weight_tile(load_map(maps, at, seen, inside), lse, c, pre, b, group, h, inside, t, s, seen)
        p = mix_tile(p, c, post, b, group, h, inside, t, s, False)
        store_map(maps, at, tl.where(seen[None, :, :], p, 0.0), c, t, s, inside)
    for s_first in range(begin + tl.cdiv(tl.maximum(end - begin, 0), N) * N, c.right, N):
        s = s_first + tl.arange(0, N)
        store_map(maps, map_tile(c, b, h, t, s), tl.zeros([HP, M, N], tl.float32), c, t, s, inside)


@triton.jit
def backward_kernel(
    c, pre, post, maps, grads, to_pre, to_post, HP: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """Turns the scores a in `maps` into da and g = dout . v in `grads` into p', in place; writes the mixes' gradients."""
    b, group, h, inside, t = place(c, M, HP)
    t_first = tl.min(t, 0)
    begin, end = key_range(c, b, t_first, tl.minimum(t_first + M, c.last), N)
    lse = tl.load(
        c.lse + (b * c.H + h)[:, None] * c.T + t[None, :], mask=inside[:, None] & (t < c.last)[None, :], other=0.0
    )

    # delta, and what else of the mix after softmax is a sum over s.
    delta = tl.zeros([HP, M], tl.float32)
    sums = zero_sums(post, HP, M)
    for s_first in range(begin, end, N):
        s = s_first + tl.arange(0, N)
        seen = visible(c, b, t, s)
        at = map_tile(c, b, h, t, s)
        p = weight_tile(load_map(maps, at, seen, inside), lse, c, pre, b, group, h, inside, t, s, seen)
        g = load_map(grads, at, seen, inside)
        grad_inner = inner_maps(g, c, post, b, h, inside, t, s, True)
        dp = mixed(g, grad_inner, c, post, b, group, h, inside, t, s, True)
        delta += tl.sum(p * dp, 2)
        sums = add_sums(sums, p, g, inner_maps(p, c, post, b, h, inside, t, s, False), grad_inner, post)
    store_sums(sums, to_post, c, post, b, h, inside, t)

    for s_first in range(c.left, begin, N):
        s = s_first + tl.arange(0, N)
        at = map_tile(c, b, h, t, s)
        store_map(maps, at, tl.zeros([HP, M, N], tl.float32), c, t, s, inside)
        store_map(grads, at, tl.zeros([HP, M, N], tl.float32), c, t, s, inside)
        store_no_key_shares(to_pre, c, pre, b, h, inside, s, HP, N)
        store_no_key_shares(to_post, c, post, b, h, inside, s, HP, N)
    sums = zero_sums(pre, HP, M)
    for s_first in range(begin, end, N):
        s = s_first + tl.arange(0, N)
        seen = visible(c, b, t, s)
        at = map_tile(c, b, h, t, s)
        a = load_map(maps, at, seen, inside)
        g = load_map(grads, at, seen, inside)
        score_inner = inner_maps(a, c, pre, b, h, inside, t, s, False)
        p = mixed(a, score_inner, c, pre, b, group, h, inside, t, s, False)
        p = tl.where(inside[:, None, None] & seen[None, :, :], tl.exp(p - lse[:, :, None]), 0.0)
        inner = inner_maps(p, c, post, b, h, inside, t, s, False)
        grad_inner = inner_maps(g, c, post, b, h, inside, t, s, True)
        store_key_shares(to_post, p, g, inner, grad_inner, c, post, b, h, inside, s)
        composed = mixed(p, inner, c, post, b, group, h, inside, t, s, False)
        store_map(grads, at, tl.where(seen[None, :, :], composed, 0.0), c, t, s, inside)
        dp = mixed(g, grad_inner, c, post, b, group, h, inside, t, s, True)
        da = tl.where(seen[None, :, :], p * (dp - delta[:, :, None]), 0.0)
        grad_inner = inner_maps(da, c, pre, b, h, inside, t, s, True)
        store_key_shares(to_pre, a, da, score_inner, grad_inner, c, pre, b, h, inside, s)
        sums = add_sums(sums, a, da, score_inner, grad_inner, pre)
        da = mixed(da, grad_inner, c, pre, b, group, h, inside, t, s, True)
        store_map(maps, at, tl.where(seen[None, :, :], da, 0.0), c, t, s, inside)
    store_sums(sums, to_pre, c, pre, b, h, inside, t)
    for s_first in range(begin + tl.cdiv(tl.maximum(end - begin, 0), N) * N, c.right, N):
        s = s_first + tl.arange(0, N)
        at = map_tile(c, b, h, t, s)
        store_map(maps, at, tl.zeros([HP, M, N], tl.float32), c, t, s, inside)
        store_map(grads, at, tl.zeros([HP, M, N], tl.float32), c, t, s, inside)
        store_no_key_shares(to_pre, c, pre, b, h, inside, s, HP, N)
        store_no_key_shares(to_post, c, post, b, h, inside, s, HP, N)
