"""Triton kernels of composed attention: the mixes of maps, between its matrix products.

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

z and w are the mix's *inner maps*. A mix never joins two places (t, s). So a program has a tile of queries and keys. It goes
over the heads of its group twice: once to sum the inner maps, which stay in registers, and once to make y. The second
time a tile of x comes from a cache. Heads are a loop, so each thread has the same places of all heads, and sums over
heads need no exchange between threads. Products with M are matrix products of whole maps, before the kernel.

Backward, from g = dout . v and L. A mix in reverse is the same mix with ``down`` and ``up`` exchanged and M transposed::

    dp  = mix_post^T(g)        da' = p (dp - delta),   delta[h,t] = sum_s p dp
    da  = mix_pre^T(da')       dq = scale da k,   dk = scale da^T q,   dv = p'^T dout       by matrix products after

and the weights of a mix from x to y, with dz and dw the inner maps of the reversed mix of dy::

    dqd[t,r,h] = sum_s x[h] dz_r,     dqu[t,r,h] = sum_s dy[h] z_r,     dqg[t,h] = sum_s x[h] dy[h]
    dkd, dku, dkg: the same with sums over t and w                       dM[h,h'] = sum_ts x[h] dy[h']

A program writes its *share* of a sum to a place of its own, and the shares are added in a fixed order afterwards: results
do not depend on the order in which programs run. What is invisible is removed by selection and never by a product with 0, so
that a NaN there goes no further. Arithmetic is in float32; maps in memory have the inputs' type.
"""

# What is under @triton.jit is Triton's language, not Python.
# mypy: ignore-errors
from __future__ import annotations

import os
from typing import Any, NamedTuple

import triton
import triton.language as tl

# Whether kernels run in Triton's interpreter, which knows no machine code.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
QUERIES = tl.constexpr(16)  # of a block of a mix's weights
KEYS = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)


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
    first: Any  # the first chunk has the queries from `first` up to `last` ...
    last: Any
    left: Any  # ... and its maps the keys from `left` up to `right`
    right: Any
    chunks: Any  # so many, each `step` queries and keys after the one before; some of theirs may lie beyond the sequence
    step: Any
    rows: Any  # a map in memory is [rows, columns], whole tiles; [B, chunks, H] of them
    columns: Any
    query_blocks: Any  # of the weights of a mix
    key_blocks: Any
    keys_before: Any  # the first of which are for keys before the sequence: a multiple of KEYS
    H: Any
    groups: Any
    causal: Any
    ahead: Any  # with causal: keys after its own that a query sees
    pairs: Any  # whether two values become 16 bits wide by one instruction: from Ampere on


class Place(NamedTuple):
    """The tile of a program: queries t [M] and keys s [N], which are rows and columns of the maps of a chunk."""

    b: Any  # sequence
    chunk: Any  # of all chunks of the batch
    offset: Any  # of its first query from that of the sequence's first chunk
    t: Any
    s: Any
    row: Any
    column: Any
    end: Any  # after the last query of the chunk


class Mix(NamedTuple):
    """One mix. What it does not have is None, a rank of 0 or False, constants of the compilation.

    The weights of a head stand together in blocks of queries or keys, so that a program finds them at constant distances:
    float32 [B, blocks, H, down of each rank, up of each rank and gate, QUERIES or KEYS].
    """

    static: Any  # M: [n, n] or [groups, n, n]; the kernels get the product with it
    of_queries: Any
    of_keys: Any
    RQ: Any
    RK: Any
    q_gate: Any
    k_gate: Any


class Shares(NamedTuple):
    """Where the shares of the gradients of a mix's weights go: float32, None where the mix has none."""

    of_queries: Any  # [key tiles, B chunks, H, weights as in Mix, rows]
    of_keys: Any  # [row tiles, B chunks, H, weights as in Mix, columns]


class Side(NamedTuple):
    """Query-wise or key-wise weights of a mix as the operator has them, or their gradients; of the three that are there."""

    down: Any  # [B, L, R, H] with these strides
    up: Any
    gate: Any  # [B, L, H]
    of_down: Any
    of_up: Any
    of_gate: Any
    L: Any
    R: Any


class Blocks(NamedTuple):
    """Where the weights of a side stand in a ``Mix``."""

    out: Any
    number: Any  # of blocks
    before: Any  # so many places of 0 come first
    SIZE: Any  # of a block


class Cut(NamedTuple):
    """A tensor whose places are cut into chunks, which may overlap. It is 0 before its first place and after its last."""

    x: Any  # [B, L, H, W] with these strides
    of_x: Any
    out: Any  # [B chunks, H, places, W]
    L: Any
    H: Any
    W: Any
    places: Any
    first: Any  # of the first chunk
    chunks: Any  # of a sequence, each `step` places after the one before
    step: Any
    N: Any  # places of a program
    WIDTH: Any  # a power of 2, at least W


class Sum(NamedTuple):
    """What is added up for the places of a total: the parts of each chunk that has a place, one after the other."""

    parts: Any  # [tiles, B chunks, H, W, size] with these strides
    of_parts: Any
    total: Any  # [B, places, H, W] with these strides
    of_total: Any
    tiles: Any
    H: Any
    W: Any
    size: Any  # of a chunk
    chunks: Any  # of a sequence, each `step` places after the one before
    step: Any
    first: Any  # the total's place of the first chunk's first ...
    places: Any  # ... and how many there are from it on
    N: Any  # places of a program
    WIDTH: Any  # a power of 2, at least W
    ADD: Any  # to what is there, which otherwise is replaced


# ---------------------------------------------------------------------------------------------------------------------
# The place of a program, and its tiles
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def place(c, M: tl.constexpr, N: tl.constexpr):
    """The place of the program, and the first and the last head of its group."""
    chunk = (tl.program_id(2) // c.groups).to(tl.int64)
    heads = c.H // c.groups
    first = tl.program_id(2) % c.groups * heads
    offset = (chunk % c.chunks).to(tl.int32) * c.step
    row = tl.program_id(1) * M + tl.arange(0, M)
    column = tl.program_id(0) * N + tl.arange(0, N)
    end = tl.minimum(c.last + offset, c.T)
    at = Place(chunk // c.chunks, chunk, offset, c.first + offset + row, c.left + offset + column, row, column, end)
    return at, first, first + heads


@triton.jit
def corner(c, at, M: tl.constexpr, N: tl.constexpr):
    """The first query and key of the tile."""
    return c.first + at.offset + tl.program_id(1) * M, c.left + at.offset + tl.program_id(0) * N


@triton.jit
def some_visible(c, at, M: tl.constexpr, N: tl.constexpr):
    """False where positions alone tell that no query of the tile sees a key of it."""
    past = c.S - c.T
    t_first, s_first = corner(c, at, M, N)
    t_last = tl.minimum(t_first + M, at.end) - 1
    s_last = tl.minimum(s_first + N, c.S) - 1
    s_first = tl.maximum(s_first, 0)
    some = (s_first <= s_last) & (t_first <= t_last)
    if c.causal:
        some &= s_first <= t_last + past + c.ahead
    if c.window is not None:
        some &= s_last > t_first + past - c.window
        if not c.causal:
            some &= s_first < t_last + past + c.window
    if c.lengths is not None:
        some &= s_first < tl.load(c.lengths + at.b)
    return some


@triton.jit
def visible(c, at):
    """Which keys the queries see: boolean [M, N], false beyond the chunk's queries and the sequence."""
    position = at.t + (c.S - c.T)
    distance = position[:, None] - at.s[None, :]
    seen = (at.t < at.end)[:, None] & ((at.s >= 0) & (at.s < c.S))[None, :]
    if c.causal:
        seen &= distance >= -c.ahead
    if c.window is not None:
        seen &= distance < c.window
        if not c.causal:
            seen &= -distance < c.window
    if c.lengths is not None:
        seen &= (at.s < tl.load(c.lengths + at.b))[None, :]
    if c.documents is not None:
        of_query = tl.load(c.documents + at.b * c.S + position, mask=(at.t < at.end) & (position >= 0), other=0)
        of_key = tl.load(c.documents + at.b * c.S + at.s, mask=(at.s >= 0) & (at.s < c.S), other=0)
        seen &= of_query[:, None] == of_key[None, :]
    if c.mask is not None:
        row = at.b * c.mask_batch + at.t.to(tl.int64)[:, None] * c.mask_row
        seen &= tl.load(c.mask + row + at.s.to(tl.int64)[None, :] * c.mask_key, mask=seen, other=0) != 0
    return seen


@triton.jit
def all_visible(c, at, M: tl.constexpr, N: tl.constexpr):
    """True where positions alone tell that each query of the tile sees all of its keys."""
    t, s = corner(c, at, M, N)
    first = t + (c.S - c.T)  # the first query's position
    whole = (t + M <= at.end) & (s >= 0) & (s + N <= c.S)
    if c.causal:
        whole &= s + N - 1 <= first + c.ahead
    if c.window is not None:
        whole &= first + M - 1 - s < c.window
        if not c.causal:
            whole &= s + N - 1 - first < c.window
    if c.lengths is not None:
        whole &= s + N <= tl.load(c.lengths + at.b)
    if c.documents is not None or c.mask is not None:
        whole = whole & False
    return whole


@triton.jit
def shown(x, seen, other):
    """x where a query sees a key; all of it where `seen` is None."""
    return x if seen is None else tl.where(seen, x, other)


@triton.jit
def map_place(maps, c, at, h):
    """Pointers to the tile [M, N] of head h. Maps consist of whole tiles, so that nothing is masked."""
    start = maps + (at.chunk * c.H + h) * c.rows * c.columns
    return start + (at.row[:, None] * c.columns + at.column[None, :])


@triton.jit
def load_map(maps, c, at, h):
    return tl.load(map_place(maps, c, at, h)).to(tl.float32)


@triton.jit
def store_map(maps, tile, c, at, h):
    """The map may be one that was loaded from: a thread loads and stores the same places (bench/gpu_resources.py checks it)."""
    tl.store(map_place(maps, c, at, h), tile)


@triton.jit
def load_row(rows, c, at, h):
    """One number for each query: [M, 1] of [B, H, T]."""
    return tl.load(rows + (at.b * c.H + h) * c.T + at.t, mask=at.t < at.end, other=0.0)[:, None]


@triton.jit
def share_place(shares, tile, c, at, h, w, W: tl.constexpr, size):
    """Where a program's share of the sum w begins in [tiles, B chunks, H, W, size]."""
    chunks = tl.num_programs(2) // c.groups
    return shares + (((tile.to(tl.int64) * chunks + at.chunk) * c.H + h) * W + w) * size


@triton.jit
def store_row_share(shares, share, c, at, h, w, W: tl.constexpr):
    """A program's share for its queries, of rows [M]."""
    tl.store(share_place(shares, tl.program_id(0), c, at, h, w, W, c.rows) + at.row, share)


@triton.jit
def column_place(shares, c, at, h, w, W: tl.constexpr):
    """Where a program's share for its keys goes: pointers [N]."""
    return share_place(shares, tl.program_id(1), c, at, h, w, W, c.columns) + at.column


@triton.jit
def store_column_share(shares, x, c, at, h, w, W: tl.constexpr, TF32: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The sums of x [M, N] over its rows.

    Rows lie in many threads. With TF32, ones times x sums them on tensor cores, with x rounded to 11 bits, which is no
    less than float16 and bfloat16 have. That takes a third fewer instructions of the whole kernel.
    """
    place = column_place(shares, c, at, h, w, W)
    if TF32:
        same = tl.arange(0, 16)  # all rows of the product are the sums
        # First in each thread, which has rows that lie 16 apart.
        found = tl.dot(tl.full([16, 16], 1.0, tl.float32), tl.sum(tl.reshape(x, [M // 16, 16, N]), 0), input_precision="tf32")
        tl.store(place[None, :] + 0 * same[:, None], found, mask=(same == 0)[:, None])
    else:
        tl.store(place, tl.sum(x, 0))


# ---------------------------------------------------------------------------------------------------------------------
# Mixes of a tile
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def query_weight(mix, c, at, h, w):
    """The query-wise weights w: [M, 1]."""
    W: tl.constexpr = 2 * mix.RQ + mix.q_gate
    size: tl.constexpr = c.H * W * QUERIES
    place = at.t // QUERIES * size + at.t % QUERIES
    return tl.load(mix.of_queries + (at.b * c.query_blocks * size + h * (W * QUERIES) + w * QUERIES) + place)[:, None]


@triton.jit
def key_weight(mix, c, at, h, w):
    """The key-wise weights w: [1, N]."""
    W: tl.constexpr = 2 * mix.RK + mix.k_gate
    size: tl.constexpr = c.H * W * KEYS
    s = at.s + c.keys_before
    place = s // KEYS * size + s % KEYS
    return tl.load(mix.of_keys + (at.b * c.key_blocks * size + h * (W * KEYS) + w * KEYS) + place)[None, :]


@triton.jit
def no_maps(mix, M: tl.constexpr, N: tl.constexpr):
    maps = ()
    for _ in tl.static_range(mix.RQ + mix.RK):
        maps = maps + (tl.zeros([M, N], tl.float32),)
    return maps


@triton.jit
def add_inner(maps, x, c, mix, at, h, REVERSE: tl.constexpr):
    """Adds head h to the inner maps z_0.., w_0.. of x; in reverse to those of dy, with `up` for `down`."""
    new = ()
    for r in tl.static_range(mix.RQ):
        weight = query_weight(mix, c, at, h, mix.RQ + r if REVERSE else r)
        new = new + (maps[r] + x * weight,)
    for r in tl.static_range(mix.RK):
        weight = key_weight(mix, c, at, h, mix.RK + r if REVERSE else r)
        new = new + (maps[mix.RQ + r] + x * weight,)
    return new


@triton.jit
def outer_weights(mix, c, at, h, REVERSE: tl.constexpr):
    """What ``mixed`` multiplies with for head h: query-wise and key-wise `up`, in reverse `down`, and the gates."""
    found = ()
    for r in tl.static_range(mix.RQ):
        found = found + (query_weight(mix, c, at, h, r if REVERSE else mix.RQ + r),)
    for r in tl.static_range(mix.RK):
        found = found + (key_weight(mix, c, at, h, r if REVERSE else mix.RK + r),)
    if mix.q_gate:
        found = found + (query_weight(mix, c, at, h, 2 * mix.RQ),)
    if mix.k_gate:
        found = found + (key_weight(mix, c, at, h, 2 * mix.RK),)
    return found


@triton.jit
def mixed(x, product, maps, weights, c, mix, at, h):
    """The tile y[h] of a mix of x, with the inner maps of x and its product with M. In reverse dx[h] of dy."""
    y = x
    if mix.static is not None:
        y = load_map(product, c, at, h)
    for r in tl.static_range(mix.RQ + mix.RK):
        y += maps[r] * weights[r]
    for gate in tl.static_range(mix.q_gate + mix.k_gate):
        y += x * weights[mix.RQ + mix.RK + gate]
    return y


# ---------------------------------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def exp2(x):
    """2^x by one instruction, which takes subnormal numbers for 0."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rounded(x, c, dtype: tl.constexpr):
    """x [M, N] in the type of a map in memory. Two values are converted by one instruction, where there is one."""
    if INTERPRETED or not c.pairs or dtype == tl.float32:
        return x.to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.bfloat16, True, 2)
    else:
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.float16, True, 2)


@triton.jit
def exp_difference(x, base):
    """exp(x - base), for x [M, N] and base [M, 1]."""
    return exp2(x * LOG2E - base * LOG2E)


@triton.jit
def value(x, base, EXP: tl.constexpr):
    """x as it stands in memory, or p = exp(a' - L) of a'."""
    x = x.to(tl.float32)
    return exp_difference(x, base) if EXP else x


@triton.jit
def load_x(maps, c, at, h, EXP: tl.constexpr):
    """The tile of head h, which ``of_head`` reads again."""
    x = tl.load(map_place(maps, c, at, h), eviction_policy="evict_last")
    return value(x, load_row(c.lse, c, at, h) if EXP else None, EXP)


@triton.jit
def of_head(maps, c, mix, at, h, EXP: tl.constexpr):
    """What ``mix_tile`` reads for head h the second time: its map, the weights of ``mixed``, and L where x is made from it."""
    found = (tl.load(map_place(maps, c, at, h), eviction_policy="evict_first"),) + outer_weights(mix, c, at, h, False)
    if EXP:
        found = found + (load_row(c.lse, c, at, h),)
    return found


@triton.jit
def mix_kernel(
    c,
    mix,
    maps,
    product,
    out,
    sums,
    EXP: tl.constexpr,  # x = exp(maps - L); otherwise x = maps
    TO: tl.constexpr,  # "scores", "weights" or "composed"
    M: tl.constexpr,
    N: tl.constexpr,
):
    """y = mix(x). What goes to `out`, which may be `maps`, is y where a query sees a key, and otherwise:

    "scores":   -inf; `sums` [key tiles, B chunks, H, 1, rows] takes log sum_s exp y of the tile
    "weights":  exp(y - L) of y, and 0
    "composed": 0
    """
    at, first, last = place(c, M, N)
    if some_visible(c, at, M, N):
        # Most tiles are seen as a whole: nothing is chosen in them.
        if all_visible(c, at, M, N):
            mix_tile(c, mix, maps, product, out, sums, at, first, last, None, EXP, TO, M, N)
        else:
            mix_tile(c, mix, maps, product, out, sums, at, first, last, visible(c, at), EXP, TO, M, N)
    else:
        for h in range(first, last):
            if TO == "scores":
                store_row_share(sums, tl.full([M], float("-inf"), tl.float32), c, at, h, 0, 1)
            else:
                store_map(out, tl.zeros([M, N], out.dtype.element_ty), c, at, h)


@triton.jit
def mix_tile(
    c, mix, maps, product, out, sums, at, first, last, seen,
    EXP: tl.constexpr, TO: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """``mix_kernel``, of which some place is seen; with `seen` None all are."""
    inner = no_maps(mix, M, N)
    if mix.RQ + mix.RK > 0:
        for h in tl.range(first, last, loop_unroll_factor=4):
            inner = add_inner(inner, load_x(maps, c, at, h, EXP), c, mix, at, h, False)
    loaded = of_head(maps, c, mix, at, first, EXP)
    for h in range(first, last):
        # What the next head needs is on its way while this one is computed. Otherwise it would wait for the store below.
        following = of_head(maps, c, mix, at, tl.minimum(h + 1, last - 1), EXP)
        x = value(loaded[0], loaded[len(loaded) - 1], EXP)
        y = mixed(x, product, inner, loaded[1:], c, mix, at, h)
        if TO == "scores":
            y = rounded(shown(y, seen, float("-inf")), c, out.dtype.element_ty)
            # Sums are of what later kernels read, which is rounded.
            found = y.to(tl.float32)
            largest = tl.max(found, 1)
            base = tl.where(largest == float("-inf"), 0.0, largest)
            total = tl.sum(exp_difference(found, base[:, None]), 1)
            log = tl.where(total == 0.0, float("-inf"), base + tl.log(tl.where(total == 0.0, 1.0, total)))
            store_row_share(sums, log, c, at, h, 0, 1)
        else:
            if TO == "weights":
                # Of y as the forward read it, which L was summed from.
                y = rounded(y, c, out.dtype.element_ty).to(tl.float32)
                y = exp_difference(y, load_row(c.lse, c, at, h))
            y = rounded(shown(y, seen, 0.0), c, out.dtype.element_ty)
        store_map(out, y, c, at, h)
        loaded = following


@triton.jit
def pack_kernel(sides, blocks, COUNT: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr):
    """The weights of some sides of mixes in their ``Blocks``: COUNT of them, which Triton 3.6 cannot count. HEADS is a power of 2."""
    for i in tl.static_range(COUNT):
        if tl.program_id(2) == i:
            if tl.program_id(0) < blocks[i].number:
                pack_block(sides[i], blocks[i], H, HEADS)


@triton.jit
def pack_block(side, blocks, H: tl.constexpr, HEADS: tl.constexpr):
    R: tl.constexpr = side.R
    SIZE: tl.constexpr = blocks.SIZE
    W: tl.constexpr = 2 * R + (side.gate is not None)
    b = tl.program_id(1).to(tl.int64)
    h = tl.arange(0, HEADS)[None, :]
    i = tl.arange(0, SIZE)[:, None]
    place = tl.program_id(0) * SIZE + i - blocks.before
    there = (place >= 0) & (place < side.L) & (h < H)
    at = blocks.out + (b * blocks.number + tl.program_id(0)) * (H * W * SIZE) + h * (W * SIZE) + i
    for w in tl.static_range(W):
        found = tl.load(side_place(side, b, place, h, w), mask=there, other=0.0)
        tl.store(at + w * SIZE, found.to(tl.float32), mask=h < H)


@triton.jit
def side_place(side, b, place, h, w: tl.constexpr):
    """Pointers to the weights w of a side, which are `down` of each rank, `up` of each rank and the gate."""
    R: tl.constexpr = side.R
    place = place.to(tl.int64)
    if w < R:
        return side.down + b * side.of_down[0] + place * side.of_down[1] + w * side.of_down[2] + h * side.of_down[3]
    elif w < 2 * R:
        return side.up + b * side.of_up[0] + place * side.of_up[1] + (w - R) * side.of_up[2] + h * side.of_up[3]
    else:
        return side.gate + b * side.of_gate[0] + place * side.of_gate[1] + h * side.of_gate[2]


@triton.jit
def unpack_kernel(totals, sides, COUNT: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Gradients of some sides of mixes in the operator's layout, each from the total [B, L, H, W] with its strides."""
    for i in tl.static_range(COUNT):
        if tl.program_id(2) == i:
            if tl.program_id(0) * SIZE < sides[i].L:
                unpack_places(totals[i][0], totals[i][1], sides[i], H, HEADS, SIZE)


@triton.jit
def unpack_places(total, of_total, side, H: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr):
    W: tl.constexpr = 2 * side.R + (side.gate is not None)
    b = tl.program_id(1).to(tl.int64)
    h = tl.arange(0, HEADS)[None, :]
    place = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)[:, None]).to(tl.int64)
    there = (place < side.L) & (h < H)
    at = total + b * of_total[0] + place * of_total[1] + h * of_total[2]
    for w in tl.static_range(W):
        to = side_place(side, b, place, h, w)
        tl.store(to, tl.load(at + w, mask=there).to(to.dtype.element_ty), mask=there)


@triton.jit
def cut_kernel(cuts, chunks, COUNT: tl.constexpr):
    """The chunks of some tensors (``Cut``), of `chunks` of the whole batch."""
    for i in tl.static_range(COUNT):
        if tl.program_id(2) // chunks == i:
            if (tl.program_id(0) * cuts[i].N < cuts[i].places) & (tl.program_id(1) < cuts[i].H):
                cut_places(cuts[i], tl.program_id(2) % chunks)


@triton.jit
def cut_places(cut, chunk):
    N: tl.constexpr = cut.N
    WIDTH: tl.constexpr = cut.WIDTH
    h = tl.program_id(1).to(tl.int64)
    chunk = chunk.to(tl.int64)
    w = tl.arange(0, WIDTH)[None, :]
    i = tl.program_id(0) * N + tl.arange(0, N)[:, None]
    place = cut.first + chunk % cut.chunks * cut.step + i  # chunk is 64 bits wide, and so is it
    at = cut.x + chunk // cut.chunks * cut.of_x[0] + place * cut.of_x[1] + h * cut.of_x[2] + w * cut.of_x[3]
    found = tl.load(at, mask=(place >= 0) & (place < cut.L) & (w < cut.W), other=0.0)
    to = cut.out + ((chunk * cut.H + h) * cut.places + i) * cut.W + w
    tl.store(to, found, mask=(i < cut.places) & (w < cut.W))


@triton.jit
def sum_kernel(sums, batch, COUNT: tl.constexpr):
    """Some sums (``Sum``). A program has places of a total, so that no two programs add to one of them."""
    for i in tl.static_range(COUNT):
        if tl.program_id(2) // batch == i:
            if (tl.program_id(0) * sums[i].N < sums[i].places) & (tl.program_id(1) < sums[i].H):
                sum_places(sums[i], (tl.program_id(2) % batch).to(tl.int64))


@triton.jit
def sum_places(c, b):
    N: tl.constexpr = c.N
    WIDTH: tl.constexpr = c.WIDTH
    h = tl.program_id(1).to(tl.int64)
    w = tl.arange(0, WIDTH)[None, :]
    first = tl.program_id(0) * N
    i = first + tl.arange(0, N)[:, None]
    found = tl.zeros([N, WIDTH], tl.float32)
    # The chunks that have some of these places.
    for chunk in range(tl.maximum(first - c.size + c.step, 0) // c.step, tl.minimum((first + N - 1) // c.step + 1, c.chunks)):
        place = i - chunk * c.step
        there = (place >= 0) & (place < c.size) & (w < c.W)
        at = c.parts + (b * c.chunks + chunk) * c.of_parts[1] + h * c.of_parts[2] + w * c.of_parts[3] + place * c.of_parts[4]
        for _ in tl.range(0, c.tiles, loop_unroll_factor=4):
            found += tl.load(at, mask=there, other=0.0).to(tl.float32)
            at += c.of_parts[0]
    there = (i < c.places) & (c.first + i >= 0) & (w < c.W)
    to = c.total + b * c.of_total[0] + (c.first + i).to(tl.int64) * c.of_total[1] + h * c.of_total[2] + w * c.of_total[3]
    if c.ADD:
        found += tl.load(to, mask=there, other=0.0).to(tl.float32)
    tl.store(to, found.to(c.total.dtype.element_ty), mask=there)


@triton.jit
def lse_kernel(sums, lse, T, chunks, step, rows, last, first, skipped, tiles, M: tl.constexpr):
    """L of the chunks' rows from `skipped` on, from [tiles, B, chunks, H, rows] to [B, H, T]. `first` and `last` are the first chunk's.

    A row that sees nothing gets +inf, with which each of its weights is exp(-inf)."""
    i = skipped + tl.program_id(0) * M + tl.arange(0, M)
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    chunk, all_chunks = tl.program_id(2), tl.num_programs(2)
    largest = tl.full([M], float("-inf"), tl.float32)
    for tile in range(tiles):
        x = tl.load(sums + ((tile * all_chunks + chunk) * heads + head) * rows + i, mask=i < rows, other=float("-inf"))
        largest = tl.maximum(largest, x)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros([M], tl.float32)
    for tile in range(tiles):
        x = tl.load(sums + ((tile * all_chunks + chunk) * heads + head) * rows + i, mask=i < rows, other=float("-inf"))
        total += tl.exp(x - base)
    found = tl.where(total == 0.0, float("inf"), base + tl.log(tl.where(total == 0.0, 1.0, total)))
    offset = chunk % chunks * step
    t = first + offset + i
    tl.store(lse + (chunk // chunks * heads + head) * T + t, found, mask=(i < rows) & (t < tl.minimum(last + offset, T)))


@triton.jit
def load_dy(grads, weights, delta, c, at, h, seen):
    """dy where it is seen: as it stands in memory, or p (dp - delta) of dp."""
    dy = load_map(grads, c, at, h)
    if weights is not None:
        dy = load_map(weights, c, at, h) * (dy - load_row(delta, c, at, h))
    return shown(dy, seen, 0.0)


@triton.jit
def mix_backward_kernel(
    c,
    mix,
    maps,
    product,
    out,
    weights,
    delta,
    grads,
    grad_product,
    sums,
    shares,
    TF32: tl.constexpr,  # sums over rows may be of values that are rounded to 11 bits
    M: tl.constexpr,
    N: tl.constexpr,
):
    """From x in `maps` and dy in `grads`: dx in place of dy, and the shares of the gradients of the mix's weights.

    With `out`, which is after softmax: y there, and the tile's sum_s x dx in `sums`. With `weights` and `delta`, which is
    before softmax: `grads` has dp instead of dy = p (dp - delta).
    """
    at, first, last = place(c, M, N)
    WQ: tl.constexpr = 2 * mix.RQ + mix.q_gate
    WK: tl.constexpr = 2 * mix.RK + mix.k_gate
    dtype: tl.constexpr = grads.dtype.element_ty
    if some_visible(c, at, M, N):
        if all_visible(c, at, M, N):
            mix_backward_tile(
                c, mix, maps, product, out, weights, delta, grads, grad_product, sums, shares, at, first, last, None, TF32, M, N
            )  # fmt: skip
        else:
            seen = visible(c, at)
            mix_backward_tile(
                c, mix, maps, product, out, weights, delta, grads, grad_product, sums, shares, at, first, last, seen, TF32, M, N
            )  # fmt: skip
    else:
        for h in range(first, last):
            for w in tl.static_range(WQ):
                store_row_share(shares.of_queries, tl.zeros([M], tl.float32), c, at, h, w, WQ)
            for w in tl.static_range(WK):
                tl.store(column_place(shares.of_keys, c, at, h, w, WK), tl.zeros([N], tl.float32))
            if out is not None:
                store_row_share(sums, tl.zeros([M], tl.float32), c, at, h, 0, 1)
                store_map(out, tl.zeros([M, N], dtype), c, at, h)
            store_map(grads, tl.zeros([M, N], dtype), c, at, h)


@triton.jit
def mix_backward_tile(
    c, mix, maps, product, out, weights, delta, grads, grad_product, sums, shares, at, first, last, seen,
    TF32: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """``mix_backward_kernel``, of which some place is seen; with `seen` None all are."""
    WQ: tl.constexpr = 2 * mix.RQ + mix.q_gate
    WK: tl.constexpr = 2 * mix.RK + mix.k_gate
    dtype: tl.constexpr = grads.dtype.element_ty
    inner = no_maps(mix, M, N)
    grad_inner = no_maps(mix, M, N)
    if mix.RQ + mix.RK > 0:
        for h in range(first, last):
            x = shown(load_map(maps, c, at, h), seen, 0.0)
            inner = add_inner(inner, x, c, mix, at, h, False)
            dy = load_dy(grads, weights, delta, c, at, h, seen)
            grad_inner = add_inner(grad_inner, dy, c, mix, at, h, True)
    for h in range(first, last):
        x = shown(load_map(maps, c, at, h), seen, 0.0)
        dy = load_dy(grads, weights, delta, c, at, h, seen)
        for r in tl.static_range(mix.RQ):
            store_row_share(shares.of_queries, tl.sum(x * grad_inner[r], 1), c, at, h, r, WQ)
            store_row_share(shares.of_queries, tl.sum(dy * inner[r], 1), c, at, h, mix.RQ + r, WQ)
        for r in tl.static_range(mix.RK):
            down = x * grad_inner[mix.RQ + r]
            up = dy * inner[mix.RQ + r]
            store_column_share(shares.of_keys, down, c, at, h, r, WK, TF32, M, N)
            store_column_share(shares.of_keys, up, c, at, h, mix.RK + r, WK, TF32, M, N)
        if mix.q_gate:
            store_row_share(shares.of_queries, tl.sum(x * dy, 1), c, at, h, 2 * mix.RQ, WQ)
        if mix.k_gate:
            store_column_share(shares.of_keys, x * dy, c, at, h, 2 * mix.RK, WK, TF32, M, N)
        dx = mixed(dy, grad_product, grad_inner, outer_weights(mix, c, at, h, True), c, mix, at, h)
        dx = rounded(shown(dx, seen, 0.0), c, dtype)
        if out is not None:
            # Of dx as the next kernel reads it, so that the gradients of a row's scores add up to 0.
            store_row_share(sums, tl.sum(x * dx.to(tl.float32), 1), c, at, h, 0, 1)
            y = mixed(x, product, inner, outer_weights(mix, c, at, h, False), c, mix, at, h)
            store_map(out, rounded(shown(y, seen, 0.0), c, dtype), c, at, h)
        store_map(grads, dx, c, at, h)
