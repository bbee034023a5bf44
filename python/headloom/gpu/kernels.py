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
    left: Any  # ... and its maps the keys from `left` up to `right`, of which some may lie beyond the sequence
    right: Any
    chunks: Any  # there are so many, each `step` queries and keys behind the one before
    step: Any
    rows: Any  # a map in memory is [rows, columns], whole tiles; [B, chunks, H] of them
    columns: Any
    span: Any  # keys of a program
    H: Any
    groups: Any
    causal: Any
    ahead: Any  # with causal: keys behind its own that a query sees


class Mix(NamedTuple):
    """One mix, as matrices of a place. What it does not have is None, a constant of the compilation.

    E of a query or key is [groups, HEADS, HEADS], from head h to head h', in the maps' type, with 0 for heads that a group does not
    have. It lies `place` values behind that of the place before, and `batch` behind that of the sequence before.
    """

    of_queries: Any
    query_batch: Any
    query_place: Any
    of_keys: Any
    key_batch: Any
    key_place: Any
    static: Any  # whether E of queries has M in place of the identity: a constant


# ---------------------------------------------------------------------------------------------------------------------
# The place of a program, and its tiles
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def place(c):
    """Sequence, the chunk's number in all of the batch, first head of the group, and how far the chunk lies behind the first."""
    chunk = (tl.program_id(2) // c.groups).to(tl.int64)
    first = tl.program_id(2) % c.groups * (c.H // c.groups)
    return chunk // c.chunks, chunk, first, (chunk % c.chunks).to(tl.int32) * c.step


@triton.jit
def visible_keys(c, b, behind, M: tl.constexpr):
    """The keys that some query of the program's tile may see by positions alone, and those that each of them sees: from, to,
    from, to. The second is empty, or inside the first."""
    first = c.first + behind + tl.program_id(1) * M + (c.S - c.T)  # positions of the first and the last query
    end = tl.minimum(c.last + behind, c.T) + (c.S - c.T)
    last = tl.minimum(first + M, end) - 1
    some_from, some_to = tl.maximum(c.left + behind, 0), tl.minimum(c.right + behind, c.S)
    all_from, all_to = some_from, some_to
    if c.causal:
        some_to = tl.minimum(some_to, last + c.ahead + 1)
        all_to = tl.minimum(all_to, first + c.ahead + 1)
    if c.window is not None:
        some_from = tl.maximum(some_from, first - c.window + 1)
        all_from = tl.maximum(all_from, last - c.window + 1)
        if not c.causal:
            some_to = tl.minimum(some_to, last + c.window)
            all_to = tl.minimum(all_to, first + c.window)
    if c.lengths is not None:
        length = tl.load(c.lengths + b).to(tl.int32)
        some_to = tl.minimum(some_to, length)
        all_to = tl.minimum(all_to, length)
    # Rows behind the chunk's last query see nothing.
    if c.documents is not None or c.mask is not None:
        all_to = all_from
    all_to = tl.where(first + M > end, all_from, all_to)
    return some_from, some_to, all_from, all_to


@triton.jit
def columns_of(c, b, behind, M: tl.constexpr, N: tl.constexpr):
    """The program's span of columns, from `begin` up to `end`, the tiles of it in which some key may be seen, from `start` up to
    `stop`, and whether all of the span's are: begin, start, stop, end, whole."""
    some_from, some_to, all_from, all_to = visible_keys(c, b, behind, M)
    left = c.left + behind
    begin = tl.program_id(0) * c.span
    end = tl.minimum(begin + c.span, c.right - c.left)
    start = begin + tl.maximum(some_from - left - begin, 0) // N * N
    stop = begin + (tl.maximum(tl.minimum(some_to - left, end) - begin, 0) + N - 1) // N * N
    start = tl.minimum(start, stop)
    whole = (left + begin >= all_from) & (left + end <= all_to) & ((end - begin) % N == 0)
    return begin, start, stop, end, whole


@triton.jit
def visible(c, b, behind, t, s):
    """Which keys s [N] the queries t [M] see: boolean [M, 1, N], false beyond the chunk."""
    position = t + (c.S - c.T)
    distance = position[:, None] - s[None, :]
    seen = (t < tl.minimum(c.last + behind, c.T))[:, None] & ((s >= 0) & (s < c.S))[None, :]
    if c.causal:
        seen &= distance >= -c.ahead
    if c.window is not None:
        seen &= distance < c.window
        if not c.causal:
            seen &= -distance < c.window
    if c.lengths is not None:
        seen &= (s < tl.load(c.lengths + b))[None, :]
    if c.documents is not None:
        of_query = tl.load(c.documents + b * c.S + position, mask=(t < c.T) & (position >= 0), other=0)
        of_key = tl.load(c.documents + b * c.S + s, mask=(s >= 0) & (s < c.S), other=0)
        seen &= of_query[:, None] == of_key[None, :]
    if c.mask is not None:
        row = b * c.mask_batch + t.to(tl.int64)[:, None] * c.mask_row
        seen &= tl.load(c.mask + row + s.to(tl.int64)[None, :] * c.mask_key, mask=seen, other=0) != 0
    return seen[:, None, :]


@triton.jit
def map_place(maps, c, chunk, first, h, row, column):
    """Pointers to the tile [M, heads, N] of a group. Maps consist of whole tiles, so that no query and no key is masked."""
    start = maps + (chunk * c.H + first) * c.rows * c.columns
    of_head = start + h.to(tl.int64)[None, :, None] * c.rows * c.columns
    return of_head + (row[:, None, None] * c.columns + column[None, None, :])


@triton.jit
def load_map(maps, c, chunk, first, h, row, column):
    at = map_place(maps, c, chunk, first, h, row, column)
    if h.shape[0] == c.H // c.groups:
        return tl.load(at)
    else:
        return tl.load(at, mask=(h < c.H // c.groups)[None, :, None], other=0.0)


@triton.jit
def store_map(maps, tile, c, chunk, first, h, row, column):
    """The map may be one that the tile was made from: each value depends on the one in its place."""
    at = map_place(maps, c, chunk, first, h, row, column)
    if h.shape[0] == c.H // c.groups:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=(h < c.H // c.groups)[None, :, None])


@triton.jit
def clear_map(maps, c, chunk, first, h, row, start, stop, N: tl.constexpr):
    """Columns from `start` up to `stop`, of whole tiles."""
    for column in range(start, stop, N):
        nothing = tl.zeros([row.shape[0], h.shape[0], N], maps.dtype.element_ty)
        store_map(maps, nothing, c, chunk, first, h, row, column + tl.arange(0, N))


@triton.jit
def load_rows(rows, c, b, first, h, t):
    """One number for each query and head: [M, heads, 1] of [B, H, T]."""
    there = (t < c.T)[:, None] & (h < c.H // c.groups)[None, :]
    return tl.load(rows + (b * c.H + first + h)[None, :] * c.T + t[:, None], mask=there, other=0.0)[:, :, None]


@triton.jit
def store_sums(sums, x, c, chunk, first, h, row):
    """A number for each query and head, of x [M, heads], of the program's span: [spans, B, chunks, H, rows]."""
    at = sums + ((tl.program_id(0).to(tl.int64) * (tl.num_programs(2) // c.groups) + chunk) * c.H + first) * c.rows
    tl.store(at + h[None, :] * c.rows + row[:, None], x, mask=(h < c.H // c.groups)[None, :])


# ---------------------------------------------------------------------------------------------------------------------
# Products with the matrices of a mix
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def load_matrices(matrices, batch, place, length, c, b, h, places):
    """E of the group for queries or keys: [places, heads h', heads h], 0 beyond the sequence; nothing without `matrices`."""
    size: tl.constexpr = h.shape[0]
    if matrices is None:
        return 0.0
    else:
        start = matrices + b * batch + (tl.program_id(2) % c.groups) * size * size
        at = start + (places.to(tl.int64) * place)[:, None, None] + (h[:, None] * size + h[None, :])[None, :, :]
        return tl.load(at, mask=((places >= 0) & (places < length))[:, None, None], other=0.0)


@triton.jit
def transposed(x):
    return tl.permute(x, (0, 2, 1))


@triton.jit
def dot(x, y, total=None):
    """`total` + products [A, I, K] of x [A, I, J] and y [A, J, K], added up in float32. Those of float32 are of three parts in TF32."""
    return tl.dot(x, y, total, input_precision="tf32x3" if x.dtype == tl.float32 else "tf32")


@triton.jit
def identity(x, M: tl.constexpr):
    """[M, heads, heads] for x [., heads, .]."""
    h = tl.arange(0, x.shape[1])
    one = tl.where(h[:, None] == h[None, :], 1.0, 0.0).to(x.dtype)
    return tl.broadcast_to(one[None, :, :], [M, x.shape[1], x.shape[1]])


@triton.jit
def of_places(x):
    """x [M, heads, N] as [M, N, heads]. Tensor cores hand it over with the heads of a place in one thread, two by two. Shared memory
    takes and gives them so without conflicts, for queries and for keys; as they come from memory it does for queries alone."""
    return dot(transposed(x), identity(x, x.shape[0])).to(x.dtype)


@triton.jit
def mixed(x, x_of_places, of_queries, of_keys, mix, REVERSE: tl.constexpr):
    """A mix of x [M, heads, N] in the maps' type, in reverse with transposed matrices: float32."""
    y = tl.zeros(x.shape, tl.float32)
    if mix.of_keys is not None:
        of_key = dot(tl.permute(x_of_places, (1, 0, 2)), of_keys if REVERSE else transposed(of_keys))
        y = tl.permute(of_key, (1, 2, 0))
    if not mix.static:
        y = dot(identity(x, x.shape[0]), x, y)
    if mix.of_queries is not None:
        y = dot(transposed(of_queries) if REVERSE else of_queries, x, y)
    return y


@triton.jit
def places_of(x, mix):
    """What ``mixed`` wants beside x."""
    if mix.of_keys is None:
        return 0.0
    else:
        return of_places(x)


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
def once(x, dtype: tl.constexpr):
    """x in a map's type. Without this, Triton computes all of x again for each layout of threads in which it is needed."""
    if INTERPRETED or dtype == tl.float32:
        return x.to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.bfloat16, False, 2)
    else:
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.float16, False, 2)


@triton.jit
def exp_difference(x, base):
    """exp(x - base)."""
    return exp2(x * LOG2E - base * LOG2E)


@triton.jit
def mix_kernel(
    c,
    mix,
    maps,
    out,
    sums,
    EXP: tl.constexpr,  # x = exp(maps - L); otherwise x = maps
    TO: tl.constexpr,  # "scores", "weights" or "composed"
    HEADS: tl.constexpr,  # of a group, or more: a power of 2
    M: tl.constexpr,
    N: tl.constexpr,
):
    """y = mix(x). What goes to `out`, which may be `maps`, is y where a query sees a key, and otherwise:

    "scores":   -inf, or nothing where no query of a tile sees a key of it; `sums` takes log sum_s exp y of the span
    "weights":  exp(y - L) of y, and 0
    "composed": 0
    """
    b, chunk, first, behind = place(c)
    h = tl.arange(0, HEADS)
    row = tl.program_id(1) * M + tl.arange(0, M)
    begin, start, stop, end, whole = columns_of(c, b, behind, M, N)
    if TO != "scores":
        clear_map(out, c, chunk, first, h, row, begin, start, N)
        clear_map(out, c, chunk, first, h, row, stop, end, N)
    # Most programs see all of their keys: nothing is chosen in them.
    if whole:
        mix_span(c, mix, maps, out, sums, b, chunk, first, behind, h, row, start, stop, False, EXP, TO, M, N)
    else:
        mix_span(c, mix, maps, out, sums, b, chunk, first, behind, h, row, start, stop, True, EXP, TO, M, N)


@triton.jit
def mix_span(
    c, mix, maps, out, sums, b, chunk, first, behind, h, row, start, stop,
    MASKED: tl.constexpr, EXP: tl.constexpr, TO: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """``mix_kernel`` from column `start` up to `stop`."""
    HEADS: tl.constexpr = h.shape[0]
    dtype: tl.constexpr = maps.dtype.element_ty
    t = c.first + behind + row
    of_queries = load_matrices(mix.of_queries, mix.query_batch, mix.query_place, c.T, c, b, h, t)
    if EXP or TO == "weights":
        lse = load_rows(c.lse, c, b, first, h, t)
    largest = tl.full([M, HEADS], float("-inf"), tl.float32)
    total = tl.zeros([M, HEADS], tl.float32)
    for tile in range(start, stop, N):
        column = tile + tl.arange(0, N)
        s = c.left + behind + column
        seen = visible(c, b, behind, t, s) if MASKED else None
        x = load_map(maps, c, chunk, first, h, row, column)
        if EXP:
            x = once(exp_difference(x.to(tl.float32), lse), dtype)
        of_keys = load_matrices(mix.of_keys, mix.key_batch, mix.key_place, c.S, c, b, h, s)
        y = mixed(x, places_of(x, mix), of_queries, of_keys, mix, False)
        if TO == "scores":
            if MASKED:
                y = tl.where(seen, y, float("-inf"))
            # Sums are of what later kernels read, which is rounded.
            y = y.to(dtype)
            found = y.to(tl.float32)
            now = tl.maximum(largest, tl.max(found, 2))
            base = tl.where(now == float("-inf"), 0.0, now)
            total = total * exp_difference(largest, base) + tl.sum(exp_difference(found, base[:, :, None]), 2)
            largest = now
        else:
            if TO == "weights":
                # Of y as the forward read it, which L was summed from.
                y = exp_difference(y.to(dtype).to(tl.float32), lse)
            if MASKED:
                y = tl.where(seen, y, 0.0)
            y = y.to(dtype)
        store_map(out, y, c, chunk, first, h, row, column)
    if TO == "scores":
        base = tl.where(largest == float("-inf"), 0.0, largest)
        log = tl.where(total == 0.0, float("-inf"), base + tl.log(tl.where(total == 0.0, 1.0, total)))
        store_sums(sums, log, c, chunk, first, h, row)


@triton.jit
def lse_kernel(sums, lse, T, chunks, step, rows, last, first, skipped, spans, M: tl.constexpr):
    """L of the chunks' rows from `skipped` on, from [spans, B, chunks, H, rows] to [B, H, T]. `first` and `last` are the first chunk's.

    A row that sees nothing gets +inf, with which each of its weights is exp(-inf)."""
    i = skipped + tl.program_id(0) * M + tl.arange(0, M)
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    chunk, all_chunks = tl.program_id(2), tl.num_programs(2)
    largest = tl.full([M], float("-inf"), tl.float32)
    for span in range(spans):
        x = tl.load(sums + ((span * all_chunks + chunk) * heads + head) * rows + i, mask=i < rows, other=float("-inf"))
        largest = tl.maximum(largest, x)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros([M], tl.float32)
    for span in range(spans):
        x = tl.load(sums + ((span * all_chunks + chunk) * heads + head) * rows + i, mask=i < rows, other=float("-inf"))
        total += tl.exp(x - base)
    found = tl.where(total == 0.0, float("inf"), base + tl.log(tl.where(total == 0.0, 1.0, total)))
    behind = chunk % chunks * step
    t = first + behind + i
    tl.store(lse + (chunk // chunks * heads + head) * T + t, found, mask=(i < rows) & (t < tl.minimum(last + behind, T)))


@triton.jit
def mix_backward_kernel(
    c,
    mix,
    maps,
    out,
    weights,
    delta,
    grads,
    sums,
    shares,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """From x in `maps` and dy in `grads`: dx in place of dy.

    Before softmax there are `weights` and `delta`, and `grads` has dp instead of dy = p (dp - delta). After softmax there is
    `sums`, which takes the span's sum_s x dx. `out`, if there is one, takes y, and `shares` those of the gradient of E of
    queries, sum_s dy x.
    """
    b, chunk, first, behind = place(c)
    h = tl.arange(0, HEADS)
    row = tl.program_id(1) * M + tl.arange(0, M)
    begin, start, stop, end, whole = columns_of(c, b, behind, M, N)
    clear_map(grads, c, chunk, first, h, row, begin, start, N)
    clear_map(grads, c, chunk, first, h, row, stop, end, N)
    if out is not None:
        clear_map(out, c, chunk, first, h, row, begin, start, N)
        clear_map(out, c, chunk, first, h, row, stop, end, N)
    if whole:
        mix_backward_span(
            c, mix, maps, out, weights, delta, grads, sums, shares, b, chunk, first, behind, h, row, start, stop, False, M, N
        )  # fmt: skip
    else:
        mix_backward_span(
            c, mix, maps, out, weights, delta, grads, sums, shares, b, chunk, first, behind, h, row, start, stop, True, M, N
        )  # fmt: skip


@triton.jit
def load_x_dy(c, maps, weights, delta, grads, b, chunk, first, behind, h, row, column, MASKED: tl.constexpr):
    """x and dy of a tile, 0 where they are not seen. With `weights`, dy is p (dp - delta) of dp in `grads`."""
    x = load_map(maps, c, chunk, first, h, row, column)
    dy = load_map(grads, c, chunk, first, h, row, column)
    if weights is not None:
        p = load_map(weights, c, chunk, first, h, row, column).to(tl.float32)
        dy = once(p * (dy.to(tl.float32) - load_rows(delta, c, b, first, h, c.first + behind + row)), x.dtype)
    if MASKED:
        seen = visible(c, b, behind, c.first + behind + row, c.left + behind + column)
        x = tl.where(seen, x, 0.0)
        dy = tl.where(seen, dy, 0.0)
    return x, dy


@triton.jit
def store_matrices(shares, x, program, length, c, chunk, h, places):
    """A program's share of the gradient of E: [programs, B, chunks, length, groups, heads h', heads h]."""
    size: tl.constexpr = h.shape[0]
    number = program.to(tl.int64) * (tl.num_programs(2) // c.groups) + chunk
    of_place = (number * length + places) * c.groups + tl.program_id(2) % c.groups
    at = shares + (of_place * size * size)[:, None, None] + (h[:, None] * size + h[None, :])[None, :, :]
    tl.store(at, x)


@triton.jit
def mix_backward_span(
    c, mix, maps, out, weights, delta, grads, sums, shares, b, chunk, first, behind, h, row, start, stop,
    MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """``mix_backward_kernel`` from column `start` up to `stop`."""
    HEADS: tl.constexpr = h.shape[0]
    dtype: tl.constexpr = grads.dtype.element_ty
    t = c.first + behind + row
    of_queries = load_matrices(mix.of_queries, mix.query_batch, mix.query_place, c.T, c, b, h, t)
    share = tl.zeros([M, HEADS, HEADS], tl.float32)
    total = tl.zeros([M, HEADS], tl.float32)
    for tile in range(start, stop, N):
        column = tile + tl.arange(0, N)
        s = c.left + behind + column
        x, dy = load_x_dy(c, maps, weights, delta, grads, b, chunk, first, behind, h, row, column, MASKED)
        if shares is not None:
            share = dot(dy, transposed(x), share)
        of_keys = load_matrices(mix.of_keys, mix.key_batch, mix.key_place, c.S, c, b, h, s)
        dx = mixed(dy, places_of(dy, mix), of_queries, of_keys, mix, True)
        if MASKED:
            seen = visible(c, b, behind, t, s)
            dx = tl.where(seen, dx, 0.0)
        dx = dx.to(dtype)
        if sums is not None:
            # Of dx as the next kernel reads it, so that the gradients of a row's scores add up to 0.
            total += tl.sum(x.to(tl.float32) * dx.to(tl.float32), 2)
        if out is not None:
            y = mixed(x, places_of(x, mix), of_queries, of_keys, mix, False)
            if MASKED:
                y = tl.where(seen, y, 0.0)
            store_map(out, y.to(dtype), c, chunk, first, h, row, column)
        store_map(grads, dx, c, chunk, first, h, row, column)
    if shares is not None:
        store_matrices(shares, share, tl.program_id(0), c.rows, c, chunk, h, row)
    if sums is not None:
        store_sums(sums, total, c, chunk, first, h, row)


@triton.jit
def gradient_kernel(
    c,
    maps,
    weights,
    delta,
    grads,
    shares,
    turns,
    OF_KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """The shares of the gradient of E of keys, sum_t dy x, for N keys and `turns` tiles of M queries; or of E of queries,
    sum_s dy x, for M queries and a span of keys. x and dy are those of ``mix_backward_kernel``, which comes after it."""
    b, chunk, first, behind = place(c)
    h = tl.arange(0, HEADS)
    if OF_KEYS:
        column = tl.program_id(0) * N + tl.arange(0, N)
        key = c.left + behind + tl.program_id(0) * N  # the first one's position
        query = c.first + behind + (c.S - c.T)
        begin = tl.program_id(1) * turns * M
        stop = tl.minimum(begin + turns * M, c.last - c.first)
        start = begin
        if c.causal:
            # No earlier query sees the first key.
            start += tl.maximum(key - c.ahead - query - begin, 0) // M * M
        if c.window is not None:
            stop = tl.minimum(stop, key + N - 1 + c.window - query)
        share = tl.zeros([N, HEADS, HEADS], tl.float32)
        for tile in range(start, stop, M):
            row = tile + tl.arange(0, M)
            x, dy = load_x_dy(c, maps, weights, delta, grads, b, chunk, first, behind, h, row, column, True)
            share = dot(tl.permute(of_places(dy), (1, 2, 0)), tl.permute(of_places(x), (1, 0, 2)), share)
        store_matrices(shares, share, tl.program_id(1), c.columns, c, chunk, h, column)
    else:
        row = tl.program_id(1) * M + tl.arange(0, M)
        begin, start, stop, end, whole = columns_of(c, b, behind, M, N)
        share = tl.zeros([M, HEADS, HEADS], tl.float32)
        for tile in range(start, stop, N):
            column = tile + tl.arange(0, N)
            x, dy = load_x_dy(c, maps, weights, delta, grads, b, chunk, first, behind, h, row, column, True)
            share = dot(dy, transposed(x), share)
        store_matrices(shares, share, tl.program_id(0), c.rows, c, chunk, h, row)


@triton.jit
def matrix_kernel(down, up, gate, static, out, groups, heads: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr):
    """E of a place: M, if there is one, + sum_r up_r down_r + the gate on the diagonal."""
    place = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    i = tl.arange(0, HEADS)[:, None]
    j = tl.arange(0, HEADS)[None, :]
    row, column = group * heads + i, group * heads + j
    e = tl.zeros([HEADS, HEADS], tl.float32)
    if static is not None:
        e += tl.load(static + (group * heads + j) * heads + i, mask=(i < heads) & (j < heads), other=0.0).to(tl.float32)
    for r in tl.static_range(R):
        at = (place * R + r) * (groups * heads)
        u = tl.load(up + at + row, mask=i < heads, other=0.0).to(tl.float32)
        e += u * tl.load(down + at + column, mask=j < heads, other=0.0).to(tl.float32)
    if gate is not None:
        g = tl.load(gate + place * (groups * heads) + row, mask=i < heads, other=0.0).to(tl.float32)
        e += tl.where(i == j, g, 0.0)
    tl.store(out + ((place * groups + group) * HEADS + i) * HEADS + j, e.to(out.dtype.element_ty))


@triton.jit
def matrix_backward_kernel(
    grad, down, up, d_down, d_up, d_gate, groups, heads: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr
):
    """The gradients of a place's weights from that of E."""
    place = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    i = tl.arange(0, HEADS)[:, None]
    j = tl.arange(0, HEADS)[None, :]
    row, column = group * heads + i, group * heads + j
    e = tl.load(grad + ((place * groups + group) * HEADS + i) * HEADS + j)
    for r in tl.static_range(R):
        at = (place * R + r) * (groups * heads)
        u = tl.load(up + at + row, mask=i < heads, other=0.0).to(tl.float32)
        d = tl.load(down + at + column, mask=j < heads, other=0.0).to(tl.float32)
        tl.store(d_up + at + row, tl.sum(e * d, 1)[:, None].to(d_up.dtype.element_ty), mask=i < heads)
        tl.store(d_down + at + column, tl.sum(e * u, 0)[None, :].to(d_down.dtype.element_ty), mask=j < heads)
    if d_gate is not None:
        g = tl.sum(tl.where(i == j, e, 0.0), 1)[:, None]
        tl.store(d_gate + place * (groups * heads) + row, g.to(d_gate.dtype.element_ty), mask=i < heads)
