"""Causal "simple" and "local" of the attention-free transformer on NVIDIA GPUs, by Triton (``src/ops/aft/op.h``).

For one sequence and channel, with w[t,s] of the bias where t - s < W and 0 for older keys ("simple" is W = 0)::

    p[t,s] = exp(k_s + w[t,s] - L_t),   L_t = log sum_s exp(k_s + w[t,s])
    r_t    = sum_s p[t,s] v_s,          y_t = sigmoid(q_t) r_t

A running sum is three numbers: the sum with v, the sum without, and the exponent m that both are relative to, -1e38 where
nothing was summed. m is the largest exponent in the sum, so keys may lie any distance apart.

``sums_kernel`` sums each tile of keys by itself, and ``carry_kernel`` joins these sums from tile to tile. A program of
``rows_kernel`` begins with such a sum and goes over a tile of queries. At query t it adds key t - W, and so has the sum of all
keys to which w is 0. For R queries together it then goes over the keys of their windows, G at a time.

Backward, with g_t = dy_t sigmoid(q_t)::

    dv_s = sum_t p[t,s] g_t       dk_s = v_s dv_s - sum_t p[t,s] g_t r_t
    dw[t,s] = p[t,s] g_t (v_s - r_t), summed over channels

``rows_kernel`` computes -L, g and g r of every query again, and sums the last two over its tile, relative to an exponent of -L.
``carry_kernel`` joins these sums from the end on. A program of ``keys_kernel`` goes over a tile of keys from the newest on. At
key s it adds query t = s + W, and so has the sum of all queries to which w is 0. For R keys together it then goes over
the queries that see them through w. No program adds to what another one writes: results do not depend on their order.

A thread has the same channels of all positions, so nothing is exchanged between threads but the sums of dw. Positions of
the state's ring are keys s < 0. The state that is returned counts as one more query, at T, that sees the keys of its sums only.

``forward`` and ``backward`` have the schemas of ``headloom::aft_fused`` and ``_backward``.
"""

# In the kernels tuples get longer, which mypy does not know.
# mypy: disable-error-code="assignment, misc, var-annotated"

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from headloom.gpu.gradients import wanted_gradients

# Positions of a tile: as many as outputs() in src/ops/aft/op.cpp keeps sums for.
M = 32
# Channels of a program, which is one warp: four of a thread, for any type.
N = 128
# Queries that a program of rows_kernel has together, and keys that one of keys_kernel has. Each reading of the window serves
# all of them. With more, registers do not suffice.
QUERIES, KEYS = 2, 4
# Keys or sums that are loaded together, so that one load does not wait for another, and brought to one exponent together.
G = 4
EMPTY = -1e38  # the exponent of an empty sum, and the key of an empty place of the ring
# exp(x) is written exp2(x LOG2E), which is 0 below 2^-126. Triton's exp takes three more instructions for what is below.
LOG2E = tl.constexpr(1.4426950408889634)
BEFORE = -(1 << 30)  # where the document of the first position begins


class Call(NamedTuple):
    """What the kernels read of a call. The places of `k` and `v` begin with the ring of the state."""

    k: Any  # [B, earlier + T, C]
    v: Any
    bias: Any  # [L, W] float32 or None
    start: Any  # [B, T + 1] int32 or None: the first position of each position's document
    earlier: Any  # places of the state's ring, 0 without a state
    T: Any
    C: Any
    W: Any
    offset: Any


class Rows(NamedTuple):
    """Of every query: [B, T, C] float32."""

    negative: Any  # -L
    g: Any
    gr: Any


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def start_of(c, b, s):  # type: ignore[no-untyped-def]
    """The first position of the document of s, for s up to T."""
    if c.start is None:
        return s * 0 - (1 << 30)
    else:
        return tl.load(c.start + b * (c.T + 1) + s, (s >= 0) & (s <= c.T), -(1 << 30))


@triton.jit  # type: ignore[untyped-decorator]
def load_key(c, b, s, wanted, channel):  # type: ignore[no-untyped-def]
    """Key s and its value: -inf and 0 where it is not wanted, is not there or does not count."""
    there = (wanted & (s >= -c.earlier) & (s < c.T)) & (channel < c.C)
    place = (b * (c.earlier + c.T) + c.earlier + s) * c.C + channel
    k = tl.load(c.k + place, there, float("-inf")).to(tl.float32)
    v = tl.load(c.v + place, there, 0).to(tl.float32)
    counts = (k <= -5e37) == 0  # so does NaN
    return tl.where(counts, k, float("-inf")), tl.where(counts, v, 0)


@triton.jit  # type: ignore[untyped-decorator]
def load_row(c, rows, b, t, wanted, channel):  # type: ignore[no-untyped-def]
    """g, g r and -L of query t: 0 and -inf where it is not wanted."""
    there = wanted & (channel < c.C)
    place = (b * c.T + t) * c.C + channel
    return (
        tl.load(rows.g + place, there, 0),
        tl.load(rows.gr + place, there, 0),
        tl.load(rows.negative + place, there, float("-inf")),
    )


@triton.jit  # type: ignore[untyped-decorator]
def empty_sum(N: tl.constexpr):  # type: ignore[no-untyped-def]
    zero = tl.zeros([N], tl.float32)
    return zero, zero, zero - 1e38


@triton.jit  # type: ignore[untyped-decorator]
def load_sum(pointer, wanted, C, channel):  # type: ignore[no-untyped-def]
    """One running sum, [3, C], which is empty where it is not wanted."""
    there = wanted & (channel < C)
    return (
        tl.load(pointer + channel, there, 0),
        tl.load(pointer + C + channel, there, 0),
        tl.load(pointer + 2 * C + channel, there, -1e38),
    )


@triton.jit  # type: ignore[untyped-decorator]
def store_sum(pointer, total, wanted, C, channel):  # type: ignore[no-untyped-def]
    there = wanted & (channel < C)
    tl.store(pointer + channel, total[0], there)
    tl.store(pointer + C + channel, total[1], there)
    tl.store(pointer + 2 * C + channel, total[2], there)


@triton.jit  # type: ignore[untyped-decorator]
def kept(total, keep):  # type: ignore[no-untyped-def]
    """A running sum, or an empty one."""
    return tl.where(keep, total[0], 0), tl.where(keep, total[1], 0), tl.where(keep, total[2], -1e38)


@triton.jit  # type: ignore[untyped-decorator]
def joined(total, terms):  # type: ignore[no-untyped-def]
    """A running sum with more terms (x, y, exponent), x and y times exp(exponent)."""
    top = total[2]
    for i in tl.static_range(len(terms)):
        top = tl.maximum(top, terms[i][2])
    old = tl.exp2((total[2] - top) * LOG2E)
    x = total[0] * old
    y = total[1] * old
    for i in tl.static_range(len(terms)):
        p = tl.exp2((terms[i][2] - top) * LOG2E)
        x += p * terms[i][0]
        y += p * terms[i][1]
    return x, y, top


@triton.jit  # type: ignore[untyped-decorator]
def window_of(c, b, t):  # type: ignore[no-untyped-def]
    """Of query t, the oldest key that it sees by w, past t if there is no such query, and where w[t,0] would be."""
    start = start_of(c, b, t)
    oldest = tl.maximum(tl.maximum(start, t - c.W + 1), -c.earlier)
    position = tl.where(start < 0, t + c.offset, t - start)
    return tl.where(t < c.T, oldest, t + 1), c.bias + (position.to(tl.int64) * c.W - t + c.W - 1)


@triton.jit  # type: ignore[untyped-decorator]
def last_of_tile(c, j, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last key of tile j, or the last one that the returned state's sums have."""
    return tl.minimum((j + 1) * M - c.W - 1, c.T - c.W)


@triton.jit  # type: ignore[untyped-decorator]
def sums_kernel(c, own, tiles, M: tl.constexpr, N: tl.constexpr, G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each tile of keys, the sum over those in the document of the last: own [B, tiles, 3, C]."""
    b = tl.program_id(2).to(tl.int64)
    j = tl.program_id(1)
    channel = tl.program_id(0) * N + tl.arange(0, N)
    total = empty_sum(N)
    last = last_of_tile(c, j, M)
    first = tl.maximum(tl.maximum(j * M - c.W, -c.earlier), start_of(c, b, last))
    for begin in range(first, last + 1, G):
        terms = ()
        for i in tl.static_range(G):
            k, v = load_key(c, b, begin + i, begin + i <= last, channel)
            terms = terms + ((v, 1.0, k),)
        total = joined(total, terms)
    store_sum(own + (b * tiles + j) * 3 * c.C, total, True, c.C, channel)


@triton.jit  # type: ignore[untyped-decorator]
def carry_kernel(  # type: ignore[no-untyped-def]
    c, own, owns, carried, carries, before, wide_before, after, wide_after, steps,
    BACKWARD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
):
    """Joins the tiles' own sums, [B, owns, 3, C], in the backward from the last tile on.

    carried [B, carries, 3, C] gets the sum of what comes before each tile, and `after` that of everything. `before` is the sum
    that it begins with, if any. A sum is dropped where the next tile does not go on in its document to the end. A tile
    beyond `own` adds nothing."""
    b = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * N + tl.arange(0, N)
    total = empty_sum(N)
    if before is not None:
        total = load_sum(before + b * wide_before, True, c.C, channel)
    for begin in range(0, steps, G):
        sums = ()
        for i in tl.static_range(G):
            j = steps - 1 - begin - i if BACKWARD else begin + i
            sums = sums + (load_sum(own + (b * owns + j) * 3 * c.C, (j >= 0) & (j < owns), c.C, channel),)
        for i in tl.static_range(G):
            j = steps - 1 - begin - i if BACKWARD else begin + i
            store_sum(carried + (b * carries + j) * 3 * c.C, total, (j >= 0) & (j < carries), c.C, channel)
            if c.start is not None:
                if BACKWARD:
                    same = start_of(c, b, tl.minimum(j * M, c.T)) == start_of(c, b, tl.minimum(j * M + M, c.T))
                else:
                    same = start_of(c, b, j * M - c.W - 1) == start_of(c, b, last_of_tile(c, j, M))
                total = kept(total, same | (j < 0) | (j >= steps))
            total = joined(total, (sums[i],))
    if c.start is not None and not BACKWARD:
        total = kept(total, start_of(c, b, c.T) <= c.T - c.W)
    store_sum(after + b * wide_after, total, True, c.C, channel)


@triton.jit  # type: ignore[untyped-decorator]
def rows_kernel(  # type: ignore[no-untyped-def]
    c, q, sums, out, grad, grad_q, rows, own, tiles,
    BACKWARD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
):
    """A tile of queries. Forward: out. Backward: grad_q and rows, from grad, the gradient of out, and of each tile the sum of g
    and g r over the queries in the document of the first: own [B, tiles, 3, C]."""
    b = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * M
    channel = tl.program_id(0) * N + tl.arange(0, N)
    there = channel < c.C
    older = load_sum(sums + (b * tiles + tl.program_id(1)) * 3 * c.C, True, c.C, channel)
    total = empty_sum(N)
    for begin in range(first, tl.minimum(first + M, c.T), R):
        seen = ()
        for i in tl.static_range(R):
            t = begin + i
            start = start_of(c, b, t)
            k, v = load_key(c, b, t - c.W, start <= t - c.W, channel)
            if c.start is not None:
                # It is of another document until key t - W is at least the second of t's.
                older = kept(older, start < t - c.W)
            older = joined(older, ((v, 1.0, k),))
            seen = seen + (older,)
        if c.bias is not None:
            windows = ()
            for i in tl.static_range(R):
                windows = windows + (window_of(c, b, begin + i),)
            for s in range(windows[0][0], begin + R, G):
                keys = ()
                for j in tl.static_range(G):
                    keys = keys + (load_key(c, b, s + j, s + j < begin + R, channel),)
                new = ()
                for i in tl.static_range(R):
                    oldest, bias = windows[i]
                    terms = ()
                    for j in tl.static_range(G):
                        visible = (s + j >= oldest) & (s + j <= begin + i)
                        w = tl.load(bias + (s + j), visible, float("-inf"))
                        terms = terms + ((tl.where(visible, keys[j][1], 0), 1.0, keys[j][0] + w),)
                    new = new + (joined(seen[i], terms),)
                seen = new
        terms = ()
        for i in tl.static_range(R):
            t = begin + i
            above, below, m = seen[i]
            some = below != 0
            r = tl.where(some, above / tl.where(some, below, 1), 0)
            counts = (t < c.T) & there
            place = (b * c.T + t) * c.C + channel
            sigmoid = tl.sigmoid(tl.load(q + place, counts, 0).to(tl.float32))
            if BACKWARD:
                dy = tl.load(grad + place, counts, 0).to(tl.float32)
                tl.store(grad_q + place, (dy * sigmoid * r * (1 - sigmoid)).to(grad_q.dtype.element_ty), counts)
                # A query that sees nothing gives no key a gradient.
                g = tl.where(some, dy * sigmoid, 0)
                gr = tl.where(some, dy * sigmoid * r, 0)
                negative = tl.where(some, -m - tl.log(tl.where(some, below, 1)), -1e38)
                tl.store(rows.negative + place, negative, counts)
                tl.store(rows.g + place, g, counts)
                tl.store(rows.gr + place, gr, counts)
                same = (t < c.T) & (start_of(c, b, t) == start_of(c, b, first))
                terms = terms + ((tl.where(same, g, 0), tl.where(same, gr, 0), tl.where(same, negative, float("-inf"))),)
            else:
                tl.store(out + place, (sigmoid * r).to(out.dtype.element_ty), counts)
        if BACKWARD:
            total = joined(total, terms)
    if BACKWARD:
        store_sum(own + (b * tiles + tl.program_id(1)) * 3 * c.C, total, True, c.C, channel)


@triton.jit  # type: ignore[untyped-decorator]
def keys_kernel(  # type: ignore[no-untyped-def]
    c, rows, later, grad_k, grad_v, shares, tiles,
    M: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):
    """The gradients of a tile of keys and values, [B, earlier + T, C], and of w over the program's channels:
    shares [columns, B, T, W]."""
    b = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * M - c.W
    channel = tl.program_id(0) * N + tl.arange(0, N)
    sum_of = load_sum(later + (b * tiles + tl.program_id(1)) * 3 * c.C, True, c.C, channel)
    for back in range(0, M, R):
        begin = first + M - R - back
        keys = ()
        grads = ()
        for i in tl.static_range(R):
            s = begin + R - 1 - i  # from the newest on
            t = s + c.W
            if c.start is not None:
                # It is of the document of query t + 1. The returned state, at T, belongs to the last one.
                sum_of = kept(sum_of, (t >= c.T) | (start_of(c, b, t) == start_of(c, b, t + 1)))
            sum_of = joined(sum_of, (load_row(c, rows, b, t, t < c.T, channel),))
            k, v = load_key(c, b, s, True, channel)
            reads = (t <= c.T) & (start_of(c, b, t) <= s) & (k != float("-inf"))
            p = tl.exp2((k + sum_of[2]) * LOG2E)
            keys = keys + ((k, v),)
            grads = grads + ((tl.where(reads, p * sum_of[0], 0), tl.where(reads, p * sum_of[1], 0)),)
        if c.bias is not None:
            # None where the tile begins before all keys.
            end = tl.where(begin + R > -c.earlier, tl.minimum(begin + R - 1 + c.W, c.T), 0)
            for t in range(tl.maximum(begin, 0), end):
                oldest, bias = window_of(c, b, t)
                g, gr, negative = load_row(c, rows, b, t, True, channel)
                new = ()
                for i in tl.static_range(R):
                    s = begin + R - 1 - i
                    k, v = keys[i]
                    visible = (s >= oldest) & (s <= t)
                    p = tl.exp2((k + tl.load(bias + s, visible, float("-inf")) + negative) * LOG2E)
                    counts = visible & (k != float("-inf"))
                    pg = tl.where(counts, p * g, 0)
                    pgr = tl.where(counts, p * gr, 0)
                    new = new + ((grads[i][0] + pg, grads[i][1] + pgr),)
                    share = ((tl.program_id(0) * tl.num_programs(2) + b) * c.T + t) * c.W + s - t + c.W - 1
                    tl.store(shares + share, tl.sum(pg * v - pgr, 0), visible)
                grads = new
        for i in tl.static_range(R):
            s = begin + R - 1 - i
            there = ((s >= -c.earlier) & (s < c.T)) & (channel < c.C)
            place = (b * (c.earlier + c.T) + c.earlier + s) * c.C + channel
            dv, pgr = grads[i]
            tl.store(grad_v + place, dv.to(grad_v.dtype.element_ty), there)
            tl.store(grad_k + place, (keys[i][1] * dv - pgr).to(grad_k.dtype.element_ty), there)


# ---------------------------------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------------------------------


class KernelArguments:
    """A call's arguments as the kernels want them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        form: str,
        bias: Optional[Tensor],
        causal: bool,
        lengths: Optional[Tensor],
        documents: Optional[Tensor],
        state: Optional[Tensor],
        offset: int,
    ) -> None:
        self.q = q.contiguous()
        self.B, self.T, self.C = q.shape
        self.W = 0 if bias is None else bias.shape[1]
        self.ring = max(self.W - 1, 0)
        self.bias, self.offset = bias, offset
        self.state = None if state is None else state.contiguous()
        self.start = None if documents is None else starts(documents)
        self.earlier = 0
        self.k, self.v = k.contiguous(), v.contiguous()
        if state is not None and self.ring > 0:
            self.earlier = self.ring
            self.k = torch.cat((state[:, 3 : 3 + self.ring], k.float()), 1)
            self.v = torch.cat((state[:, 3 + self.ring :], v.float()), 1)
        self.call = Call(
            self.k,
            self.v,
            None if bias is None else bias.float().contiguous(),
            self.start,
            self.earlier,
            self.T,
            self.C,
            self.W,
            offset,
        )
        self.tiles = -(-self.T // M)
        self.key_tiles = (self.T - 1 + self.W) // M + 1  # of keys s from jM - W on
        self.columns = -(-self.C // N)

    def floats(self, *size: int) -> Tensor:
        return self.q.new_empty(size, dtype=torch.float32)

    def same_document(self) -> Tensor:
        """Of the ring of the returned state, which places are of the last document: [B, W - 1, 1]."""
        assert self.start is not None
        s = torch.arange(self.T - self.ring, self.T, device=self.q.device)
        return (self.start[:, -1:] <= s).unsqueeze(-1)

    def newest(self, x: Tensor, empty: float) -> Tensor:
        """The ring of the returned state."""
        missing = max(self.ring - x.shape[1], 0)
        x = torch.nn.functional.pad(x[:, x.shape[1] - self.ring + missing :].float(), (0, 0, missing, 0), value=empty)
        return x if self.start is None else torch.where(self.same_document(), x, empty)


def starts(documents: Tensor) -> Tensor:
    """The first position of the document of each position, and once more of the last one: [B, T + 1] int32."""
    place = torch.arange(1, documents.shape[1], device=documents.device, dtype=torch.int32)
    begins = torch.where(documents[:, 1:] != documents[:, :-1], place, BEFORE)
    begins = torch.nn.functional.pad(begins, (1, 0), value=BEFORE)
    start = begins.cummax(1).values.to(torch.int32)
    return torch.cat((start, start[:, -1:]), 1)


def running_sums(p: KernelArguments, end: Tensor) -> Tensor:
    """Before every tile of queries, [B, tiles, 3, C], and those of the returned state."""
    tiles = p.T // M + 1  # with the keys of its sums
    own, sums = p.floats(p.B, tiles, 3, p.C), p.floats(p.B, p.tiles, 3, p.C)
    sums_kernel[(p.columns, tiles, p.B)](p.call, own, tiles, M=M, N=N, G=G, num_warps=1)
    carry(p, own, sums, p.state, end, tiles, backward=False)
    return sums


def carry(
    p: KernelArguments, own: Tensor, carried: Tensor, before: Optional[Tensor], after: Tensor, steps: int, *, backward: bool
) -> None:
    """Starts `carry_kernel` over so many tiles. `before` and `after` are the first rows of [B, ..., C]."""
    carry_kernel[(p.columns, p.B)](
        p.call, own, own.shape[1], carried, carried.shape[1],
        before, 0 if before is None else before.stride(0), after, after.stride(0), steps,
        BACKWARD=backward, M=M, N=N, G=G, num_warps=1,
    )  # fmt: skip


def forward(*arguments: Any) -> List[Tensor]:
    *call, training = arguments
    p = KernelArguments(*call)
    out = p.q.new_empty(p.q.shape)
    end = p.floats(p.B, 3 + 2 * p.ring, p.C)
    sums = running_sums(p, end)
    grid = (p.columns, p.tiles, p.B)
    rows_kernel[grid](
        p.call, p.q, sums, out, None, None, None, None, p.tiles, BACKWARD=False, M=M, N=N, R=QUERIES, G=G, num_warps=1
    )
    end[:, 3 : 3 + p.ring] = p.newest(p.k, EMPTY)
    end[:, 3 + p.ring :] = p.newest(p.v, 0)
    return [out, end, sums if training else p.floats(p.B, 0, 3, p.C)]


def backward(grads: Sequence[Optional[Tensor]], *arguments: Any) -> List[Tensor]:
    *call, kept, wanted = arguments
    p = KernelArguments(*call)
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (p.q, p.k, p.v))
    grad_bias = None if p.bias is None else torch.zeros_like(p.bias, dtype=torch.float32)
    grad_state = None if p.state is None else p.state.new_empty(p.state.shape)
    grad_out = torch.zeros_like(p.q) if grads[0] is None else grads[0].contiguous()
    rows = Rows(*(p.floats(p.B, p.T, p.C) for _ in range(3)))
    own, later = p.floats(p.B, p.tiles, 3, p.C), p.floats(p.B, p.key_tiles, 3, p.C)
    grid = (p.columns, p.tiles, p.B)
    rows_kernel[grid](
        p.call, p.q, kept[0], None, grad_out, grad_q, rows, own, p.tiles,
        BACKWARD=True, M=M, N=N, R=QUERIES, G=G, num_warps=1,
    )  # fmt: skip
    last, untouched = (None, None) if grads[1] is None else row_of_end(p, grads[1])
    of_all = p.floats(p.B, 3, p.C)
    carry(p, own, later, last, of_all, p.key_tiles, backward=True)
    shares = None if p.bias is None else p.floats(p.columns, p.B, p.T, p.W).zero_()
    keys_kernel[(p.columns, p.key_tiles, p.B)](
        p.call, rows, later, grad_k, grad_v, shares, p.key_tiles, M=M, N=N, R=KEYS, num_warps=1
    )
    if grad_bias is not None and shares is not None:
        add_bias_shares(p, grad_bias, shares.sum(0))
    if grads[1] is not None and p.ring > 0:
        add_ring(p, grad_k, grads[1][:, 3 : 3 + p.ring])
        add_ring(p, grad_v, grads[1][:, 3 + p.ring :])
    if grad_state is not None:
        assert p.state is not None
        g, gr, m = of_all.unbind(1)
        factor = torch.exp(p.state[:, 2] + m)
        grad_state[:, 0], grad_state[:, 1] = factor * g, -factor * gr
        if grads[1] is not None and untouched is not None:
            grad_state[:, :2] += torch.where(untouched.unsqueeze(1), grads[1][:, :2], 0)
        grad_state[:, 2] = (p.state[:, :2] * grad_state[:, :2]).sum(1)  # both sums stand for themselves times exp(m)
        grad_state[:, 3 : 3 + p.earlier] = grad_k[:, : p.earlier]
        grad_state[:, 3 + p.earlier :] = grad_v[:, : p.earlier]
    places = [
        (p.q, grad_q),
        (call[1], grad_k[:, p.earlier :]),
        (call[2], grad_v[:, p.earlier :]),
        (p.bias, grad_bias),
        (p.state, grad_state),
    ]
    return wanted_gradients(places, wanted)


def row_of_end(p: KernelArguments, grad_end: Tensor) -> Tuple[Tensor, Tensor]:
    """g, g r and -L of the returned state, [B, 3, C]: its sums are y's without the division. Says where they are the given
    state's, and empty: [B, C]."""
    end = p.floats(p.B, 3, p.C)
    running_sums(p, end)
    some = end[:, 2] > EMPTY / 2
    row = torch.stack((grad_end[:, 0], -grad_end[:, 1]), 1).where(some.unsqueeze(1), 0)
    row = torch.cat((row, torch.where(some, -end[:, 2], EMPTY).unsqueeze(1)), 1)
    return row, ~some if p.start is None else ~some & (p.start[:, -1:] == BEFORE)


def add_bias_shares(p: KernelArguments, total: Tensor, shares: Tensor) -> None:
    """Adds [B, T, W] to the rows of the bias that the positions read, in a fixed order."""
    if p.start is None:
        total[p.offset : p.offset + p.T] = shares.sum(0)
        return
    t = torch.arange(p.T, device=shares.device)
    start = p.start[:, : p.T]
    position = torch.where(start < 0, t + p.offset, t - start)
    total.index_put_((position.flatten(),), shares.flatten(0, 1), accumulate=True)


def add_ring(p: KernelArguments, total: Tensor, grad: Tensor) -> None:
    """Adds the gradient of the returned state's ring to that of its positions."""
    if p.start is not None:
        grad = torch.where(p.same_document(), grad, 0)
    places = min(p.ring, total.shape[1])
    total[:, total.shape[1] - places :] += grad[:, p.ring - places :]
