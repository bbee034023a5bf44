"""Causal "simple" and "local" of the attention-free transformer on NVIDIA GPUs, by Triton (``src/ops/aft/op.h``).

For one sequence and channel, with w[t,s] of the bias where t - s < W and 0 for older keys::

    p[t,s] = exp(k_s + w[t,s] - L_t),   L_t = log sum_s exp(k_s + w[t,s])
    r_t    = sum_s p[t,s] v_s,          y_t = sigmoid(q_t) r_t

A program of ``rows_kernel`` has a tile of queries and channels. It goes over the keys of the tile and of the W - 1 positions
before it one by one, each relative to the largest exponent so far, and takes all older keys from a running sum. These
sums are made by ``sums_kernel``, which goes over the sequence once, a tile of positions at a time.

Backward, with g_t = dy_t sigmoid(q_t)::

    dv_s = sum_t p[t,s] g_t       dk_s = v_s dv_s - sum_t p[t,s] g_t r_t       dw[t,s] = p[t,s] g_t (v_s - r_t), summed over channels

``rows_kernel`` computes -L, g and g r of every query again, ``later_kernel`` sums them from the end on, and a program of
``keys_kernel`` goes over the queries that see its tile of keys through w and takes the later ones from these sums.
``bias_kernel`` sums dw over the channels. No program adds to what another one writes: results do not depend on their order.

Positions of the state's ring are keys s < 0. The state that is returned counts as one more query, at T, that sees the keys
of its sums only. A running sum is three numbers: the sum with v, the sum without, and the exponent m that both are
relative to, -1e38 where nothing was summed.

``forward`` and ``backward`` have the schemas of ``headloom::aft_fused`` and ``_backward``.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from headloom.gpu.gradients import wanted_gradients

# Positions of a tile: as many as outputs() in src/ops/aft/op.cpp keeps sums for. Channels of a tile.
M, N = 32, 64
EMPTY = -1e38  # the exponent of an empty sum, and the key of an empty place of the ring
BEFORE = -(1 << 30)  # where the document of the first position begins


class Call(NamedTuple):
    """What the kernels read of a call. The places of `k` and `v` begin with the ring of the state."""

    k: Any  # [B, earlier + T, C]
    v: Any
    bias: Any  # [L, W] float32
    state: Any  # [B, 3 + 2(W - 1), C] float32 or None
    start: Any  # [B, T + 1] int32 or None: the first position of each position's document
    earlier: Any  # W - 1 with a state, 0 without
    T: Any
    C: Any
    W: Any
    offset: Any


class Rows(NamedTuple):
    """Of every query, the returned state at T included: [B, T + 1, C] float32."""

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
def load_keys(pointer, c, b, s, channel, other):  # type: ignore[no-untyped-def]
    """Rows s of k or v and their channels, `other` where there is none."""
    there = ((s >= -c.earlier) & (s < c.T))[:, None] & (channel < c.C)[None, :]
    place = (b * (c.earlier + c.T) + c.earlier + s)[:, None] * c.C + channel[None, :]
    return tl.load(pointer + place, there, other).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def load_key(pointer, c, b, s, channel, other):  # type: ignore[no-untyped-def]
    """Row s of k or v, which is there."""
    place = (b * (c.earlier + c.T) + c.earlier + s) * c.C + channel
    return tl.load(pointer + place, channel < c.C, other).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def load_bias(c, t, start, s, visible):  # type: ignore[no-untyped-def]
    """w[t,s] where it is visible and t - s < W, else 0."""
    if c.bias is None:
        return (t - s).to(tl.float32) * 0
    else:
        position = tl.where(start < 0, t + c.offset, t - start)
        place = position.to(tl.int64) * c.W + s - t + c.W - 1
        return tl.load(c.bias + place, visible & (t - s < c.W), 0)


@triton.jit  # type: ignore[untyped-decorator]
def store_sum(pointer, with_v, without, m, C, channel):  # type: ignore[no-untyped-def]
    """One running sum: [3, C]."""
    tl.store(pointer + channel, with_v, channel < C)
    tl.store(pointer + C + channel, without, channel < C)
    tl.store(pointer + 2 * C + channel, m, channel < C)


@triton.jit  # type: ignore[untyped-decorator]
def joined(with_v, without, m, x, y, exponent):  # type: ignore[no-untyped-def]
    """A running sum [N] with M more terms [M, N]: x and y times exp(exponent), which is -inf for what does not count."""
    top = tl.maximum(m, tl.max(exponent, 0))
    old = tl.exp(m - top)
    new = tl.exp(exponent - top[None, :])
    counts = exponent != float("-inf")
    return (
        with_v * old + tl.sum(tl.where(counts, x * new, 0), 0),
        without * old + tl.sum(tl.where(counts, y * new, 0), 0),
        top,
    )


@triton.jit  # type: ignore[untyped-decorator]
def sums_kernel(c, sums, end, tiles, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each tile of queries, the sum over the keys that are older than W - 1 at its first query, in the document of the
    newest of them: sums [B, tiles, 3, C]. end: the returned state's."""
    b = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * N + tl.arange(0, N)
    with_v = tl.zeros([N], tl.float32)
    without = tl.zeros([N], tl.float32)
    m = tl.full([N], -1e38, tl.float32)
    if c.state is not None:
        state = c.state + b * (2 * c.W + 1) * c.C + channel
        with_v = tl.load(state, channel < c.C, 0)
        without = tl.load(state + c.C, channel < c.C, 0)
        m = tl.load(state + 2 * c.C, channel < c.C, -1e38)
    for j in range(0, tiles + 1):
        first = tl.minimum(j * M, c.T)
        last = first - (c.W - 1)  # keys before this one
        begin = tl.maximum(j - 1, 0) * M - (c.W - 1)
        s = begin + tl.arange(0, M)
        document = start_of(c, b, last - 1)
        same = document == start_of(c, b, begin - 1)
        with_v = tl.where(same, with_v, 0)
        without = tl.where(same, without, 0)
        m = tl.where(same, m, -1e38)
        k = load_keys(c.k, c, b, s, channel, -1e38)
        v = load_keys(c.v, c, b, s, channel, 0)
        counts = ((s < last) & (start_of(c, b, s) == document))[:, None] & ((k <= -5e37) == 0)
        exponent = tl.where(counts, k, float("-inf"))
        with_v, without, m = joined(with_v, without, m, v, tl.full([M, N], 1.0, tl.float32), exponent)
        if j < tiles:
            store_sum(sums + (b * tiles + j) * 3 * c.C, with_v, without, m, c.C, channel)
    same = start_of(c, b, c.T - c.W) == start_of(c, b, c.T - 1)
    with_v, without, m = tl.where(same, with_v, 0), tl.where(same, without, 0), tl.where(same, m, -1e38)
    store_sum(end + b * (2 * c.W + 1) * c.C, with_v, without, m, c.C, channel)


@triton.jit  # type: ignore[untyped-decorator]
def rows_kernel(
    c, q, sums, out, grad, grad_q, rows, tiles, BACKWARD: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):  # type: ignore[no-untyped-def]
    """A tile of queries. Forward: out. Backward: grad_q and rows, from grad, the gradient of out."""
    b = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * M
    t = first + tl.arange(0, M)
    channel = tl.program_id(0) * N + tl.arange(0, N)
    start = start_of(c, b, t)
    # Queries of a later document do not read the sum.
    reads = (start <= first - c.W)[:, None]
    sum_of = sums + (b * tiles + tl.program_id(1)) * 3 * c.C + channel
    there = channel < c.C
    above = tl.where(reads, tl.load(sum_of, there, 0)[None, :], 0)
    below = tl.where(reads, tl.load(sum_of + c.C, there, 0)[None, :], 0)
    m = tl.where(reads, tl.load(sum_of + 2 * c.C, there, -1e38)[None, :], -1e38)
    for s in range(tl.maximum(first - (c.W - 1), -c.earlier), tl.minimum(first + M, c.T)):
        k = load_key(c.k, c, b, s, channel, 0)
        v = load_key(c.v, c, b, s, channel, 0)
        visible = (s <= t) & (s >= start)
        x = k[None, :] + load_bias(c, t, start, s, visible)[:, None]
        visible = visible[:, None] & ((k <= -5e37) == 0)[None, :]
        x = tl.where(visible, x, float("-inf"))
        top = tl.maximum(m, x)
        old, new = tl.exp(m - top), tl.exp(x - top)
        above = above * old + tl.where(visible, v[None, :] * new, 0)
        below = below * old + new
        m = top
    some = below != 0
    r = tl.where(some, above / tl.where(some, below, 1), 0)
    there = (t < c.T)[:, None] & there[None, :]
    place = (b * c.T + t)[:, None] * c.C + channel[None, :]
    sigmoid = tl.sigmoid(tl.load(q + place, there, 0).to(tl.float32))
    if BACKWARD:
        dy = tl.load(grad + place, there, 0).to(tl.float32)
        g = dy * sigmoid
        tl.store(grad_q + place, (g * r * (1 - sigmoid)).to(grad_q.dtype.element_ty), there)
        place = (b * (c.T + 1) + t)[:, None] * c.C + channel[None, :]
        # A query that sees nothing gives no key a gradient.
        tl.store(rows.negative + place, tl.where(some, -m - tl.log(tl.where(some, below, 1)), -1e38), there)
        tl.store(rows.g + place, tl.where(some, g, 0), there)
        tl.store(rows.gr + place, tl.where(some, g * r, 0), there)
    else:
        tl.store(out + place, (sigmoid * r).to(out.dtype.element_ty), there)


@triton.jit  # type: ignore[untyped-decorator]
def later_kernel(c, rows, later, tiles, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each tile of keys, sums of g and g r, relative to an exponent of -L, over the queries to which its last key is
    older than W - 1, in the document of the first of them: later [B, 1 + tiles, 3, C]. What is before all keys is tile 0."""
    b = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * N + tl.arange(0, N)
    g = tl.zeros([N], tl.float32)
    gr = tl.zeros([N], tl.float32)
    m = tl.full([N], -1e38, tl.float32)
    for i in range(0, tiles + 1):
        j = tiles - 1 - i
        first = (j + 1) * M - c.earlier + c.W - 1
        t = first + tl.arange(0, M)
        document = start_of(c, b, first)
        same = document == start_of(c, b, first + M)
        g = tl.where(same, g, 0)
        gr = tl.where(same, gr, 0)
        m = tl.where(same, m, -1e38)
        counts = ((t <= c.T) & (start_of(c, b, t) == document))[:, None] & (channel < c.C)[None, :]
        place = (b * (c.T + 1) + t)[:, None] * c.C + channel[None, :]
        exponent = tl.load(rows.negative + place, counts, float("-inf"))
        g, gr, m = joined(
            g, gr, m, tl.load(rows.g + place, counts, 0), tl.load(rows.gr + place, counts, 0), exponent
        )
        store_sum(later + (b * (tiles + 1) + j + 1) * 3 * c.C, g, gr, m, c.C, channel)


@triton.jit  # type: ignore[untyped-decorator]
def keys_kernel(c, rows, later, grad_k, grad_v, tiles, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradients of a tile of keys and values: [B, earlier + T, C]."""
    b = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * M - c.earlier
    s = first + tl.arange(0, M)
    channel = tl.program_id(0) * N + tl.arange(0, N)
    k = load_keys(c.k, c, b, s, channel, -1e38)
    v = load_keys(c.v, c, b, s, channel, 0)
    real = (k <= -5e37) == 0
    after = first + M + c.W - 1  # the queries that `later` has
    reads = (start_of(c, b, after) <= s)[:, None] & real
    sum_of = later + (b * (tiles + 1) + tl.program_id(1) + 1) * 3 * c.C + channel
    there = channel < c.C
    p = tl.exp(tl.where(reads, k + tl.load(sum_of + 2 * c.C, there, -1e38)[None, :], float("-inf")))
    dv = tl.where(reads, p * tl.load(sum_of, there, 0)[None, :], 0)
    pgr = tl.where(reads, p * tl.load(sum_of + c.C, there, 0)[None, :], 0)
    for t in range(tl.maximum(first, 0), tl.minimum(after, c.T + 1)):
        start = start_of(c, b, t)
        # The state that is returned sees no key of its ring.
        visible = (s >= start) & (s <= tl.where(t < c.T, t, t - c.W))
        place = (b * (c.T + 1) + t) * c.C + channel
        x = k + load_bias(c, t, start, s, visible)[:, None] + tl.load(rows.negative + place, there, -1e38)[None, :]
        visible = visible[:, None] & real
        p = tl.exp(tl.where(visible, x, float("-inf")))
        dv += tl.where(visible, p * tl.load(rows.g + place, there, 0)[None, :], 0)
        pgr += tl.where(visible, p * tl.load(rows.gr + place, there, 0)[None, :], 0)
    there = (s < c.T)[:, None] & there[None, :]
    place = (b * (c.earlier + c.T) + c.earlier + s)[:, None] * c.C + channel[None, :]
    tl.store(grad_v + place, dv.to(grad_v.dtype.element_ty), there)
    # A key that nobody reads may be far from any number.
    dk = tl.where(real, v * dv - pgr, 0)
    tl.store(grad_k + place, dk.to(grad_k.dtype.element_ty), there)


@triton.jit  # type: ignore[untyped-decorator]
def bias_kernel(c, rows, grad, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of w of a tile of queries and one age: grad [B, T, W]."""
    b = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0)
    t = tl.program_id(1) * M + tl.arange(0, M)
    s = t - (c.W - 1) + i
    start = start_of(c, b, t)
    visible = (t < c.T) & (s >= start) & (s >= -c.earlier)
    w = tl.load(c.bias + tl.where(start < 0, t + c.offset, t - start).to(tl.int64) * c.W + i, visible, 0)
    total = tl.zeros([M], tl.float32)
    for begin in range(0, c.C, N):
        channel = begin + tl.arange(0, N)
        k = load_keys(c.k, c, b, s, channel, -1e38)
        v = load_keys(c.v, c, b, s, channel, 0)
        counts = visible[:, None] & (channel < c.C)[None, :] & ((k <= -5e37) == 0)
        place = (b * (c.T + 1) + t)[:, None] * c.C + channel[None, :]
        p = tl.exp(k + w[:, None] + tl.load(rows.negative + place, counts, 0))
        each = p * (tl.load(rows.g + place, counts, 0) * v - tl.load(rows.gr + place, counts, 0))
        total += tl.sum(tl.where(counts, each, 0), 1)
    tl.store(grad + (b * c.T + t) * c.W + i, total, t < c.T)


# ---------------------------------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------------------------------


class Problem:
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
        self.W = 1 if bias is None else bias.shape[1]
        self.ring = self.W - 1
        self.bias, self.state, self.offset = bias, state, offset
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
            None if state is None else state.contiguous(),
            self.start,
            self.earlier,
            self.T,
            self.C,
            self.W,
            offset,
        )
        self.tiles = -(-self.T // M)
        self.columns = -(-self.C // N)

    def empty(self) -> bool:
        return self.q.numel() == 0

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


def forward(*arguments: Any) -> List[Tensor]:
    *call, training = arguments
    p = Problem(*call)
    out = p.q.new_empty(p.q.shape)
    end = p.floats(p.B, 3 + 2 * p.ring, p.C)
    sums = p.floats(p.B, p.tiles, 3, p.C)
    if not p.empty():
        sums_kernel[(p.columns, p.B)](p.call, sums, end, p.tiles, M=M, N=N)
        grid = (p.columns, p.tiles, p.B)
        rows_kernel[grid](p.call, p.q, sums, out, None, None, None, p.tiles, BACKWARD=False, M=M, N=N)
        end[:, 3 : 3 + p.ring] = p.newest(p.k, EMPTY)
        end[:, 3 + p.ring :] = p.newest(p.v, 0)
    return [out, end, sums if training else p.floats(p.B, 0, 3, p.C)]


def backward(grads: Sequence[Optional[Tensor]], *arguments: Any) -> List[Tensor]:
    *call, kept, wanted = arguments
    p = Problem(*call)
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (p.q, p.k, p.v))
    grad_bias = None if p.bias is None else torch.zeros_like(p.bias, dtype=torch.float32)
    grad_state = None if p.state is None else p.state.new_empty(p.state.shape)
    if not p.empty():
        grad_out = torch.zeros_like(p.q) if grads[0] is None else grads[0].contiguous()
        rows = Rows(*(p.floats(p.B, p.T + 1, p.C) for _ in range(3)))
        grid = (p.columns, p.tiles, p.B)
        rows_kernel[grid](p.call, p.q, kept[0], None, grad_out, grad_q, rows, p.tiles, BACKWARD=True, M=M, N=N)
        untouched = end_of_rows(p, rows, kept, grads[1])
        tiles = -(-(p.T + p.earlier) // M)
        later = p.floats(p.B, tiles + 1, 3, p.C)
        later_kernel[(p.columns, p.B)](p.call, rows, later, tiles, M=M, N=N)
        keys_kernel[(p.columns, tiles, p.B)](p.call, rows, later, grad_k, grad_v, tiles, M=M, N=N)
        if grad_bias is not None:
            shares = p.floats(p.B, p.T, p.W)
            bias_kernel[(p.W, p.tiles, p.B)](p.call, rows, shares, M=M, N=N)
            add_bias_shares(p, grad_bias, shares)
        if grads[1] is not None and p.ring > 0:
            add_ring(p, grad_k, grads[1][:, 3 : 3 + p.ring])
            add_ring(p, grad_v, grads[1][:, 3 + p.ring :])
        if grad_state is not None:
            assert p.state is not None
            g, gr, m = later[:, 0].unbind(1)
            factor = torch.exp(p.state[:, 2] + m)
            grad_state[:, 0], grad_state[:, 1] = factor * g, -factor * gr
            if grads[1] is not None:
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


def end_of_rows(p: Problem, rows: Rows, kept: Sequence[Tensor], grad_end: Optional[Tensor]) -> Tensor:
    """The row of the returned state: its sums are y's without the division. Says where they are the given state's, and empty:
    [B, C]."""
    rows.negative[:, p.T], rows.g[:, p.T], rows.gr[:, p.T] = EMPTY, 0, 0
    if grad_end is None:
        return torch.zeros_like(rows.g[:, p.T], dtype=torch.bool)
    end = p.floats(p.B, 3 + 2 * p.ring, p.C)
    sums_kernel[(p.columns, p.B)](p.call, torch.empty_like(kept[0]), end, p.tiles, M=M, N=N)
    some = end[:, 2] > EMPTY / 2
    rows.negative[:, p.T] = torch.where(some, -end[:, 2], EMPTY)
    rows.g[:, p.T] = torch.where(some, grad_end[:, 0], 0)
    rows.gr[:, p.T] = torch.where(some, -grad_end[:, 1], 0)
    return ~some if p.start is None else ~some & (p.start[:, -1:] == BEFORE)


def add_bias_shares(p: Problem, total: Tensor, shares: Tensor) -> None:
    """Adds [B, T, W] to the rows of the bias that the positions read, in a fixed order."""
    if p.start is None:
        total[p.offset : p.offset + p.T] = shares.sum(0)
        return
    t = torch.arange(p.T, device=shares.device)
    start = p.start[:, : p.T]
    position = torch.where(start < 0, t + p.offset, t - start)
    total.index_put_((position.flatten(),), shares.flatten(0, 1), accumulate=True)


def add_ring(p: Problem, total: Tensor, grad: Tensor) -> None:
    """Adds the gradient of the returned state's ring to that of its positions."""
    if p.start is not None:
        grad = torch.where(p.same_document(), grad, 0)
    places = min(p.ring, total.shape[1])
    total[:, total.shape[1] - places :] += grad[:, p.ring - places :]
