"""The CUDA kernels of composed attention's mixes, run on the CPU (cuda_emulation.py), against the equations in kernels.py in float64.

Tensors have margins that must stay as they are, what a query does not see is NaN before, and so are outputs. Tolerances are what
rounding explains. ``python tests/python/test_gpu_mixes.py SECONDS [SEED]`` compares random calls for so long.
"""

import itertools
import math
import random
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Optional, Tuple

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, __file__.rsplit("/tests/", 1)[0] + "/python")

import cuda_emulation

from headloom.gpu import mixes

QUERIES, KEYS = 16, 128  # of a block of a mix's weights, as in kernels.py
ROWS, COLUMNS = 64, 128  # of which maps in memory have multiples, as in composed_attention.py
NAN = float("nan")
MARGIN = 512  # numbers around each tensor, which the kernels must leave alone


def up(size, multiple):
    return -(-size // multiple) * multiple


@dataclass
class Case:
    """A call of one kernel. `chunk` is first, last, left, right, chunks and step; by default all queries and keys."""

    heads: int = 3  # of a group
    groups: int = 1
    rank_q: int = 1
    rank_k: int = 1
    gate_q: bool = False
    gate_k: bool = False
    dtype: torch.dtype = torch.bfloat16
    B: int = 1
    T: int = 20
    S: int = 20
    causal: bool = True
    window: Optional[int] = None
    lengths: Optional[Tuple[int, ...]] = None
    documents: bool = False
    mask: bool = False
    chunk: Optional[Tuple[int, ...]] = None
    seed: int = 1
    order: int = 2
    block: int = 232448  # bytes of shared memory
    scale: float = 1.0
    offset: float = 0.0  # of scores
    tensors: list = field(default_factory=list, repr=False)

    def __post_init__(self):
        self.random = torch.Generator().manual_seed(self.seed)
        self.H = self.heads * self.groups
        self.first, self.last, self.left, self.right, self.chunks, self.step = self.chunk or (0, self.T, 0, self.S, 1, 0)
        self.C = self.B * self.chunks
        self.rows, self.columns = up(self.last - self.first, ROWS), up(self.right - self.left, COLUMNS)
        self.keys = self.right - self.left
        reach = 0 if self.window is None else up(self.window, KEYS)
        self.keys_before = 0 if self.window is None else reach + up(max(self.T - self.S, 0), KEYS)
        self.query_blocks = up(self.T + ROWS + reach, QUERIES) // QUERIES
        self.key_blocks = up(self.keys_before + self.S + 3 * reach + COLUMNS, KEYS) // KEYS
        # Half the distance of two numbers: in parts of a number, and at the least.
        self.unit, self.tiny = (2**-8, 2.0**-134) if self.dtype == torch.bfloat16 else (2**-11, 2.0**-25)
        self.documents_of = torch.randint(0, 3, (self.B, self.S), generator=self.random).sort().values if self.documents else None
        self.lengths_of = None if self.lengths is None else torch.tensor(self.lengths)
        self.mask_of = None
        if self.mask:
            # Not as memory has it.
            self.mask_of = (torch.rand(self.B, self.S, self.T, generator=self.random) < 0.7).view(torch.uint8).transpose(1, 2)
        self.visible = self.find_visible()
        n = self.heads

        def weights(length, rank, gate):
            down, up = (torch.randn(self.B, length, rank, self.H, generator=self.random) / math.sqrt(n) for _ in range(2))
            found = torch.cat((down, up, torch.randn(self.B, length, int(gate), self.H, generator=self.random)), 2)
            return found.to(self.dtype).float()  # The kernels may keep them in 16 bits.

        self.of_queries = weights(self.T, self.rank_q, self.gate_q)  # [B, T, WQ, H]
        self.of_keys = weights(self.S, self.rank_k, self.gate_k)

    # -- Geometry ---------------------------------------------------------------------------------------------------------

    def places(self):
        """t [C, rows] and s [C, columns] of the chunks, and whether they are queries of the chunk and keys of the sequence."""
        offset = (torch.arange(self.C) % self.chunks * self.step)[:, None]
        t = self.first + offset + torch.arange(self.rows)
        s = self.left + offset + torch.arange(self.columns)
        return t, t < torch.clamp(self.last + offset, max=self.T), s, (s >= 0) & (s < self.S)

    def find_visible(self):
        t, of_t, s, of_s = self.places()
        position = (t + self.S - self.T)[:, :, None]
        distance = position - s[:, None, :]
        seen = of_t[:, :, None] & of_s[:, None, :]
        if self.causal:
            seen = seen & (distance >= 0)
        if self.window is not None:
            seen = seen & (distance < self.window)
            if not self.causal:
                seen = seen & (-distance < self.window)
        b = (torch.arange(self.C) // self.chunks)[:, None]
        s, t = s.clamp(0, self.S - 1), t.clamp(max=self.T - 1)
        if self.lengths_of is not None:
            seen = seen & (s < self.lengths_of[b])[:, None, :]
        if self.documents_of is not None:
            of_query = torch.where(position[..., 0] < 0, 0, self.documents_of[b, (t + self.S - self.T).clamp(min=0)])
            seen = seen & (of_query[:, :, None] == self.documents_of[b, s][:, None, :])
        if self.mask_of is not None:
            seen = seen & (self.mask_of[b[:, :, None], t[:, :, None], s[:, None, :]] != 0)
        return seen[:, None]  # [C, 1, rows, columns]

    def of_chunks(self, x, of_keys):
        """[B, length, ...] as [C, rows or columns, ...], 0 elsewhere."""
        t, of_t, s, of_s = self.places()
        place, there = (s, of_s) if of_keys else (t, of_t)
        b = (torch.arange(self.C) // self.chunks)[:, None]
        found = x[b, place.clamp(0, x.shape[1] - 1)]
        return torch.where(there.view(*there.shape, *[1] * (x.dim() - 2)), found, 0)

    # -- Memory -----------------------------------------------------------------------------------------------------------

    def kept(self, x):
        """x in memory with margins; ``check_margins`` finds what is written there."""
        value = NAN if x.is_floating_point() else 85
        whole = torch.full((x.numel() + 2 * MARGIN,), value, dtype=x.dtype)
        inner = whole[MARGIN : MARGIN + x.numel()].view(x.shape)
        inner.copy_(x)
        self.tensors.append((whole, whole.clone(), inner.numel()))
        return inner

    def fresh(self, *size, dtype=torch.float32):
        return self.kept(torch.full(size, NAN, dtype=dtype))

    def maps(self, scale=1.0):
        x = torch.randn(self.C, self.H, self.rows, self.columns, generator=self.random) * scale
        return x.to(self.dtype)

    def check_margins(self):
        for whole, before, size in self.tensors:
            for part in (slice(0, MARGIN), slice(MARGIN + size, None)):
                same = whole[part].view(torch.uint8) if whole.dtype == torch.uint8 else whole[part]
                assert torch.equal(same.nan_to_num(7), before[part].nan_to_num(7)), "A kernel writes beside a tensor."

    def packed(self, x, blocks, of_block, before):
        """[B, length, W, H] as the kernels read it."""
        if x.shape[2] == 0:
            return None
        out = torch.zeros(self.B, blocks * of_block, self.H, x.shape[2])
        out[:, before : before + x.shape[1]] = x.transpose(2, 3)
        return self.kept(out.unflatten(1, (blocks, of_block)).permute(0, 1, 3, 4, 2))

    # -- The call ---------------------------------------------------------------------------------------------------------

    def run(self, name, after, more, maps, lse, others):
        """`others` makes the arguments after the maps for blocks of so many keys."""

        def value(x):
            return SimpleNamespace(value=x)

        def kept(x):
            return None if x is None else self.kept(x)

        mask = self.mask_of
        batch, row, key = (0, 0, 0) if mask is None else mask.stride()
        call = SimpleNamespace(
            lengths=kept(self.lengths_of), documents=kept(self.documents_of),
            mask=mask, mask_batch=batch, mask_row=row, mask_key=key, lse=lse, T=self.T, S=self.S, window=self.window,
            first=self.first, last=self.last, left=self.left, right=self.right, chunks=self.chunks, step=self.step,
            rows=self.rows, columns=self.columns, query_blocks=self.query_blocks, key_blocks=self.key_blocks,
            keys_before=self.keys_before, H=value(self.H), groups=value(self.groups), causal=value(self.causal), ahead=value(0),
        )  # fmt: skip
        mix = SimpleNamespace(
            static=None,
            of_queries=self.packed(self.of_queries, self.query_blocks, QUERIES, 0),
            of_keys=self.packed(self.of_keys, self.key_blocks, KEYS, self.keys_before),
            RQ=value(self.rank_q), RK=value(self.rank_k), q_gate=value(self.gate_q), k_gate=value(self.gate_k),
        )  # fmt: skip
        plan = mixes.plan(call, mix, maps, after)
        assert plan is not None, "These kernels do not take the case."
        cuda_emulation.Kernel.order = self.order
        made = others(plan.columns)
        mixes.run(name, plan, more, call, mix, maps, self.keys, *made)
        self.check_margins()
        self.of_block, self.of_step = plan.columns, plan.step
        self.tiles = -(-self.keys // plan.columns)
        return made

    # -- The equations ----------------------------------------------------------------------------------------------------

    def weights(self, absolute=False):
        def parts(x, rank, of_keys):
            x = self.of_chunks(x.double(), of_keys)
            x = x.abs() if absolute else x
            # [C, rows or columns, rank, H] of down and of up, and [C, H, rows or columns] of the gate
            gate = x[:, :, 2 * rank].transpose(1, 2) if x.shape[2] > 2 * rank else None
            return x[:, :, :rank], x[:, :, rank : 2 * rank], gate

        return parts(self.of_queries, self.rank_q, False), parts(self.of_keys, self.rank_k, True)

    def inner(self, x, reverse=False, absolute=False):
        """z [C, groups, RQ, rows, columns] and w."""
        (qd, qu, _), (kd, ku, _) = self.weights(absolute)
        x = x.unflatten(1, (self.groups, self.heads))
        q, k = ((u if reverse else d).unflatten(3, (self.groups, self.heads)) for d, u in ((qd, qu), (kd, ku)))
        return torch.einsum("cghmn,cmrgh->cgrmn", x, q), torch.einsum("cghmn,cnrgh->cgrmn", x, k)

    def mixed(self, x, reverse=False, absolute=False):
        (qd, qu, qg), (kd, ku, kg) = self.weights(absolute)
        z, w = self.inner(x, reverse, absolute)
        y = x.clone()
        q, k = ((d if reverse else u).unflatten(3, (self.groups, self.heads)) for d, u in ((qd, qu), (kd, ku)))
        if self.rank_q:
            y += torch.einsum("cgrmn,cmrgh->cghmn", z, q).flatten(1, 2)
        if self.rank_k:
            y += torch.einsum("cgrmn,cnrgh->cghmn", w, k).flatten(1, 2)
        for gate in (None if qg is None else qg[..., None], None if kg is None else kg[:, :, None]):
            if gate is not None:
                y += x * gate
        return y

    def round(self, x):
        return x.to(self.dtype).double()

    def error(self, x):
        """Of rounding x."""
        return self.unit * x.abs() + self.tiny

    def error_of_mix(self, x, reverse=False):
        """Of y = mixed(x): inner maps are rounded, and so is y after each of its terms."""
        (qd, qu, qg), (kd, ku, kg) = self.weights(absolute=True)
        z, w = (inner.abs() for inner in self.inner(x, reverse))
        q, k = ((d if reverse else u).unflatten(3, (self.groups, self.heads)) for d, u in ((qd, qu), (kd, ku)))
        ranks = torch.einsum("cgrmn,cmrgh->cghmn", z, q).flatten(1, 2) + torch.einsum("cgrmn,cnrgh->cghmn", w, k).flatten(1, 2)
        size = x.abs() + ranks
        for gate in (None if qg is None else qg[..., None], None if kg is None else kg[:, :, None]):
            if gate is not None:
                size = size + x.abs() * gate
        terms = self.rank_q + self.rank_k + self.gate_q + self.gate_k
        return 1.1 * self.unit * (terms * size + ranks) + 20 * (terms + 1) * self.tiny

    def by_sequence(self, x, fill):
        """[C, H, rows] of queries as [B, H, T]; `fill` elsewhere."""
        t, of_t, _, _ = self.places()
        out = torch.full((self.B, self.H, self.T), fill, dtype=torch.float32)
        for c, i in of_t.nonzero().tolist():
            out[c // self.chunks, :, t[c, i]] = x[c, :, i].float()
        return out

    def rows_of(self, x):
        """[B, H, T] as [C, H, rows, 1]."""
        return self.of_chunks(x.double().transpose(1, 2), False).transpose(1, 2)[..., None]


def close(found, expected, tolerance, what):
    """Each number is within its tolerance, and many of them together within 0.7 of it, as roundings that differ are."""
    found, expected = found.double(), expected.double().expand(found.shape)
    tolerance = torch.as_tensor(tolerance, dtype=torch.float64).expand(found.shape)
    bad = found.isnan() != expected.isnan()
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(f"{what}: {int(bad.sum())} of {bad.numel()} are NaN or not, at {place} {found[place]} for {expected[place]}")
    finite = expected.isfinite()
    bad = torch.where(finite, (found - expected).abs() > tolerance, (found != expected) & ~expected.isnan())
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} differ, at {place} {found[place]} for {expected[place]}, "
            f"tolerance {tolerance[place]}"
        )
    error, of_all = (torch.where(finite, e, 0).norm() for e in (found - expected, tolerance))
    few = (finite & (tolerance > 1e-20)).sum() < 100
    assert few or error <= 0.7 * of_all, f"{what}: an error of {error} in all, tolerance {0.7 * of_all}"


def forward(case, to, exp=False, in_place=False, poison=None):
    """Compares a call of ``mix``."""
    seen = case.visible
    x = case.maps(case.scale if to == "composed" and not exp else 3 * case.scale) + case.offset
    if poison is not None:
        poison(x)
    x = torch.where(seen, x, torch.tensor(NAN, dtype=case.dtype))  # what nobody sees must go no further
    shown = torch.where(seen, x, 0).double()
    lse = torch.full((case.B, case.H, case.T), NAN)

    def log_sum(y):
        total = torch.where(seen, y, -math.inf).logsumexp(-1)
        return torch.where(total == -math.inf, math.inf, total)

    # fp32 errs by the size of what is added.
    slack = 3e-6
    if exp:
        of_rows = case.by_sequence(log_sum(shown), NAN)
        lse = of_rows
        p = torch.exp(shown - case.rows_of(of_rows))
        p = torch.where(seen, p, 0)
        error = 2 * case.error(p) + 2.0**-126 + 3e-6 * p * (1 + shown.abs() + torch.where(seen, case.rows_of(of_rows), 0).abs())
        source, of_source = case.round(p), torch.where(seen, error, 0)
    else:
        source, of_source = shown, torch.zeros_like(shown)
    y = case.mixed(source)
    allowed = case.error_of_mix(source) + slack * case.mixed(source.abs(), absolute=True) + case.mixed(of_source, absolute=True)
    maps = case.kept(x)
    if to == "weights":
        # p is that of the scores as the forward has rounded them.
        def scores(columns):
            return case.fresh(*x.shape, dtype=case.dtype), case.fresh(-(-case.keys // columns), case.C, case.H, 1, case.rows)

        y = torch.where(seen, case.run("mix", None, {"TO": mixes.TO["scores"], "EXP": 0}, maps, None, scores)[0], 0).double()
        lse = case.by_sequence(log_sum(y), NAN)
        L = case.rows_of(lse)
        of_exponent = 3e-6 * (L.nan_to_num(0, 0, 0).abs() + y.abs())
        y = torch.exp(y - L)
        allowed = y * torch.expm1(of_exponent) + 1.01 * case.error(y) + 2.0**-126
    lse = case.kept(lse)

    def made(columns):
        out = maps if in_place else case.fresh(*x.shape, dtype=case.dtype)
        tiles = -(-case.keys // columns)
        return out, case.fresh(tiles, case.C, case.H, 1, case.rows) if to == "scores" else None

    out, sums = case.run("mix", None, {"TO": mixes.TO[to], "EXP": int(exp)}, maps, lse, made)
    if not in_place:
        assert torch.equal(maps.nan_to_num(7), x.nan_to_num(7))
    written = case.tiles * case.of_block
    if not in_place:
        assert out[..., written:].isnan().all()
    y, allowed, seen, out = y[..., :written], allowed[..., :written], seen[..., :written], out[..., :written]
    if to != "scores":
        close(out, torch.where(seen, y, 0), torch.where(seen, allowed, 0), to)
        return
    close(torch.where(seen, out, 0), torch.where(seen, y, 0), allowed, to)
    # What is not seen is -inf; where a step sees nothing at all, nothing need be written.
    steps = seen.unflatten(2, (-1, case.of_step)).unflatten(4, (-1, case.of_block)).any(5).any(3)
    steps = steps.repeat_interleave(case.of_step, 2).repeat_interleave(case.of_block, 3).expand(out.shape)
    hidden = ~seen.expand(out.shape)
    assert (out[hidden & steps] == -math.inf).all()
    rest = out[hidden & ~steps]
    assert ((rest == -math.inf) | rest.isnan()).all()
    values = torch.where(seen, out.double(), -math.inf).unflatten(3, (case.tiles, case.of_block)).logsumexp(-1)
    close(sums, values.permute(3, 0, 1, 2)[:, :, :, None], 3e-6 * (1 + values.abs()).permute(3, 0, 1, 2)[:, :, :, None], "sums")


def backward(case, after, poison=None):
    """Compares a call of ``mix_backward``."""
    seen = case.visible
    nan = torch.tensor(NAN, dtype=case.dtype)
    x, dy = case.maps(case.scale), case.maps(case.scale)
    p = torch.rand(x.shape, generator=case.random).to(case.dtype)
    if poison is not None:
        poison(x)
    x, dy, p = (torch.where(seen, y, nan) for y in (x, dy, p))
    delta = case.by_sequence(torch.randn(case.C, case.H, case.rows, generator=case.random), NAN)
    maps, grads = case.kept(x), case.kept(dy)
    weights, deltas = (None, None) if after else (case.kept(p), case.kept(delta))
    W = 2 * case.rank_q + case.gate_q, 2 * case.rank_k + case.gate_k

    def made(columns):
        tiles = -(-case.keys // columns)
        out, sums = (case.fresh(*x.shape, dtype=case.dtype), case.fresh(tiles, case.C, case.H, 1, case.rows)) if after else (None, None)
        of_queries = case.fresh(tiles, case.C, case.H, W[0], case.rows) if W[0] else None
        of_keys = case.fresh(case.rows // mixes.ROWS, case.C, case.H, W[1], case.columns) if W[1] else None
        return out, weights, deltas, grads, sums, of_queries, of_keys

    lse = case.fresh(case.B, case.H, case.T)
    out, _, _, _, sums, of_queries, of_keys = case.run("mix_backward", after, {"AFTER": int(after)}, maps, lse, made)
    assert torch.equal(maps.nan_to_num(7), x.nan_to_num(7))
    if not after:
        assert torch.equal(weights.nan_to_num(7), p.nan_to_num(7))

    x, dy, p = (torch.where(seen, y, 0).double() for y in (x, dy, p))
    of_dy = torch.zeros_like(dy)
    if not after:
        dy = case.round(torch.where(seen, p * (dy - case.rows_of(delta)), 0))
        of_dy = torch.where(seen, 2 * case.error(dy), 0)
    slack = 3e-6
    written = case.tiles * case.of_block
    dx = case.mixed(dy, reverse=True)
    allowed = case.error(dx) + slack * case.mixed(dy.abs(), True, True) + case.mixed(of_dy, True, True)
    close(grads[..., :written], torch.where(seen, dx, 0)[..., :written], torch.where(seen, allowed, 0)[..., :written], "dx")
    assert torch.equal(grads[..., written:].nan_to_num(7), torch.full_like(grads[..., written:], 7))

    def by_tile(a):
        """Sums over the keys of each tile: of [C, ., rows, columns] [tiles, C, ., rows]."""
        return a[..., :written].unflatten(-1, (case.tiles, case.of_block)).sum(-1).movedim(-1, 0)

    def by_rows(a):
        """Sums over the queries of each tile: [row tiles, C, ., columns]."""
        return a.unflatten(2, (-1, mixes.ROWS)).sum(3).movedim(2, 0)

    if after:
        y = case.mixed(x)
        allowed = case.error(y) + slack * case.mixed(x.abs(), False, True)
        close(out[..., :written], torch.where(seen, y, 0)[..., :written], torch.where(seen, allowed, 0)[..., :written], "y")
        product = x * torch.where(seen, grads, 0).double()
        close(sums[:, :, :, 0], by_tile(product), 1e-5 * by_tile(product.abs()) + 1e-30, "sums")

    inner = case.inner(x), case.inner(dy, reverse=True)
    sizes = case.inner(x.abs(), False, True), case.inner(dy.abs(), True, True)
    errors = case.inner(of_dy, True, True)
    for side, (found, rank, gate, sum_up) in enumerate(
        ((of_queries, case.rank_q, case.gate_q, by_tile), (of_keys, case.rank_k, case.gate_k, by_rows))
    ):
        if found is None:
            continue
        found = found if side == 0 else found[..., :written]

        def compare(w, a, of_a, b, of_b, what):
            expected, allowed = sum_up(a * b), sum_up(a.abs() * of_b + of_a * b.abs() + of_a * of_b + 1e-5 * (a * b).abs()) + 1e-30
            if side == 1:
                expected, allowed = expected[..., :written], allowed[..., :written]
            close(found[:, :, :, w], expected, allowed, f"{what} {w} of {('queries', 'keys')[side]}")

        def heads(z, r):
            return z[:, :, r].repeat_interleave(case.heads, 1)

        for r in range(rank):
            dz, z = heads(inner[1][side], r), heads(inner[0][side], r)
            of_dz = case.error(dz) + slack * heads(sizes[1][side], r) + 1.01 * heads(errors[side], r)
            of_z = case.error(z) + slack * heads(sizes[0][side], r)
            compare(r, x, torch.zeros_like(x), dz, of_dz, "down")
            compare(rank + r, dy, of_dy, z, of_z, "up")
        if gate:
            compare(2 * rank, x, torch.zeros_like(x), dy, of_dy, "gate")


KINDS = {
    "scores": lambda case, **more: forward(case, "scores", **more),
    "scores in place": lambda case, **more: forward(case, "scores", in_place=True, **more),
    "weights": lambda case, **more: forward(case, "weights", **more),
    "composed": lambda case, **more: forward(case, "composed", in_place=True, **more),
    "composed of scores": lambda case, **more: forward(case, "composed", True, True, **more),
    "backward before softmax": lambda case, **more: backward(case, False, **more),
    "backward after softmax": lambda case, **more: backward(case, True, **more),
}


def chunk_of(T, S, causal, window, first, rows, together=1):
    """A chunk as ``KernelArguments.chunks`` makes it, of rows from `first` on."""
    past = S - T
    if together > 1:
        before = up(window - 1, 16)
        keys = before + rows + (0 if causal else window - 1)
        return first, first + rows, first + past - before, first + past - before + keys, min(together, -(-(T - first) // rows)), rows
    last = min(first + rows, T)
    left, right = 0, S
    if causal:
        right = min(right, max(last + past, 0))
    if window is not None:
        left = min(max(first + past - window + 1, 0) // 16 * 16, right)
        if not causal:
            right = max(min(right, last + past + window - 1), left)
    return first, last, left, right, 1, 0


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    cuda_emulation.install(monkeypatch)


HALF = {"dtype": torch.float16}
MIXES = {
    "one head": {"heads": 1, "rank_q": 1, "rank_k": 0, "gate_k": True},
    "query-wise": {"heads": 3, "rank_q": 1, "rank_k": 0, **HALF},
    "key-wise": {"heads": 3, "groups": 2, "rank_q": 0, "rank_k": 2, "gate_q": True},
    "gates alone": {"heads": 3, "groups": 2, "rank_q": 0, "rank_k": 0, "gate_q": True, "gate_k": True, **HALF},
    "dcmha": {"heads": 12, "rank_q": 2, "rank_k": 2, "gate_q": True, "gate_k": True},
    "rank 4": {"heads": 6, "rank_q": 4, "rank_k": 3},
    "32 heads": {"heads": 32, "rank_q": 1, "rank_k": 1, "gate_q": True, "gate_k": True, **HALF},
}


def together(T, S, window, count, first=0, causal=True):
    """Chunks of 64 queries of a window, from `first` on."""
    return {"T": T, "S": S, "window": window, "causal": causal, "chunk": chunk_of(T, S, causal, window, first, 64, count)}


# What is seen, and which part of it the call computes.
SEEN = {
    "causal": {"T": 85, "S": 85},
    "bidirectional": {"T": 20, "S": 75, "causal": False, "B": 2},
    "more queries than keys": {"T": 70, "S": 11},
    "a later chunk": {"T": 150, "S": 190, "chunk": (64, 128, 0, 168, 1, 0)},
    "a chunk of some rows": {"T": 150, "S": 150, "chunk": (40, 110, 0, 110, 1, 0)},
    "window": together(150, 150, 20, 3),
    "bidirectional window": together(150, 170, 3, 2, 64, False),
    "window, fewer keys than queries": {**together(150, 40, 20, 2), "B": 2},
    "lengths": {"B": 3, "T": 20, "S": 70, "lengths": (3, 0, 99), "causal": False},
    "documents": {"B": 2, "T": 19, "S": 27, "documents": True},
    "mask": {"B": 2, "T": 21, "S": 30, "mask": True, "causal": False},
    "one query": {"T": 1, "S": 1},
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kind", ["scores", "composed of scores", "backward before softmax", "backward after softmax"])
def test_equals_the_equations(mix, kind):
    """Each mix sees in a few ways, and all ways are seen by some mix."""
    ways = list(SEEN.values())
    at = list(MIXES).index(mix) * 3 + list(KINDS).index(kind)
    for i in range(4):
        KINDS[kind](Case(**MIXES[mix], **ways[(at + 3 * i) % len(ways)], seed=at, order=at + i))


DCMHA = MIXES["dcmha"]


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_sees_what_it_should(kind, seen):
    KINDS[kind](Case(**DCMHA, **SEEN[seen]))


@pytest.mark.parametrize("kind", ["scores", "weights", "backward before softmax", "backward after softmax"])
def test_nan_reaches_its_place_and_what_is_summed_over_it(kind):
    def poison(x):
        x[0, 4, 13, 9] = x[0, 7, 40, 41] = NAN

    KINDS[kind](Case(**DCMHA, T=85, S=85), poison=poison)


@pytest.mark.parametrize("offset", [-300.0, 80.0])
def test_sums_of_large_scores_keep_to_the_numbers(offset):
    """A warp whose keys are all hidden, or far below others, takes nothing from the sum."""
    for seen in ("causal", "window"):
        KINDS["scores"](Case(heads=3, gate_q=True, offset=offset, **SEEN[seen]))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_two_warps(kind):
    """Where shared memory does not suffice for four."""
    KINDS[kind](Case(heads=12, rank_q=1, rank_k=3, gate_k=True, T=70, S=70, block=36000))


def test_results_do_not_depend_on_the_order_of_threads():
    """To the bit: no thread reads what another writes without waiting for it."""
    for kind in KINDS:
        found = []
        for order in (0, 1, 2, 17):
            case = Case(**DCMHA, T=70, S=70, order=order)
            KINDS[kind](case)
            found.append([whole.nan_to_num(7) for whole, _, _ in case.tensors])
        for other in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True)), kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_emulation_rounds_like_pytorch(dtype):
    library = cuda_emulation.some_library()
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    values = bits.view(dtype).float()
    bfloat16 = int(dtype == torch.bfloat16)
    for x, y in zip(bits.tolist(), values.tolist()):
        found = library.lower_value(bfloat16, x & 0xFFFF)
        assert found == y or (math.isnan(found) and math.isnan(y))
    # Numbers, the middle between two of them, and what lies beside that.
    values = values[values.isfinite() & (values >= 0)].sort().values
    middle = (values[1:] + values[:-1]) / 2
    all_values = torch.cat([values, middle, torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1)])
    all_values = torch.cat([all_values, -all_values, torch.tensor([math.inf, 65519.0, 65520.0, 3.4e38, 1e-45])])
    expected = all_values.to(dtype).view(torch.int16)
    for x, y in zip(all_values.tolist(), expected.tolist()):
        assert library.packed_values(bfloat16, x, 1.0) & 0xFFFF == y & 0xFFFF, x
    assert library.packed_values(bfloat16, NAN, 1.0) & 0x7FFF == 0x7FFF


def random_case(seed):
    """A kind of call, its case and how it is poisoned."""
    r = random.Random(seed // 10)  # so many share a compilation
    heads, groups = r.choice([(1, 1), (1, 2), (2, 1), (3, 1), (3, 2), (4, 1), (6, 1), (6, 2), (7, 1), (12, 1), (16, 1), (32, 1)])
    rank_q, rank_k = r.choice([(0, 0), (1, 0), (0, 1), (1, 1), (2, 2), (2, 0), (0, 2), (3, 1), (4, 0), (0, 4), (4, 4), (1, 3), (3, 3)])
    gates = r.choice([(True, True), (True, False), (False, True), (rank_q + rank_k == 0, False)])
    if heads * (rank_q + rank_k) > 128:
        rank_q, rank_k = min(rank_q, 2), min(rank_k, 2)
    kind, memory = r.choice(list(KINDS)), r.choice([232448, 101376])
    r = random.Random(seed)
    B, causal = r.choice([1, 1, 2]), r.random() < 0.6
    T = r.choice([r.randint(1, 20), r.randint(1, 200)])
    S = r.choice([T, T, r.randint(1, 200), T + r.randint(1, 40), max(T - r.randint(1, 40), 1)])
    window = r.choice([None, None, r.randint(1, 20), r.randint(1, 150)])
    if window is not None and window >= S + T:
        window = None
    rows = r.choice([64, 128]) if window is None else min(64 * r.randint(1, 3), up(window, 64))
    together = r.choice([1, 2, 3]) if window is not None else 1
    chunks = [chunk_of(T, S, causal, window, first, rows, together) for first in range(0, T, rows * together)]
    chunks = [c for c in chunks if c[3] > c[2]]
    if not chunks:
        return random_case(seed + 1000000000)
    case = Case(
        heads, groups, rank_q, rank_k, *gates, r.choice([torch.bfloat16, torch.float16]), B, T, S, causal, window,
        tuple(r.randint(0, S + 3) for _ in range(B)) if r.random() < 0.2 else None,
        r.random() < 0.2, r.random() < 0.2, r.choice(chunks), seed, r.choice([0, 1, 2, 3 + seed % 1000]),
        memory, r.choice([0.3, 1.0, 1.0, 10.0]), r.choice([0.0, 0.0, 0.0, -300.0, 80.0]),
    )  # fmt: skip
    return kind, case, poison_one if r.random() < 0.2 else None


def test_without_a_home_code_is_not_kept(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(mixes.Path, "home", no_home)
    monkeypatch.setattr(mixes, "compiler", lambda: SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0)))
    monkeypatch.setattr(mixes, "compiled", lambda constants, capability: (b"code", ""))
    assert mixes.kept({"TO": 0}, 90) == b"code"


def poison_one(x):
    """One NaN, which may or may not be seen."""
    x.view(-1)[x.numel() * 3 // 7] = NAN


def fuzz(seconds, seed):
    end, count, failures, kinds = time.time() + seconds, 0, 0, {}
    for seed in itertools.count(seed):
        if time.time() > end:
            break
        kind, case, poison = random_case(seed)
        try:
            KINDS[kind](case, poison=poison)
        except AssertionError as error:
            if "do not take" in str(error):
                continue
            print(f"seed {seed}: {kind}: {str(error)[:1500]}\n  {case} {poison}", flush=True)
            failures += 1
            if failures == 8:
                break
        kinds[kind] = kinds.get(kind, 0) + 1
        count += 1
    print(f"{count} calls, {failures} failures: {kinds}; {cuda_emulation.library.cache_info().misses} compilations")


class Permanent:
    """In place of pytest's monkeypatch."""

    setattr = staticmethod(setattr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    cuda_emulation.install(Permanent)
    fuzz(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
