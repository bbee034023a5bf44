"""Composed attention on NVIDIA GPUs: matrix products by PyTorch, everything between them by Triton (``kernels.py``).

The queries are taken in chunks. For a chunk, a product makes the scores of all heads, a kernel turns them into composed
weights in place, and a product makes the output. The maps of one chunk are in memory at a time.

``forward`` and ``backward`` have the schemas of ``headloom::composed_attention_fused`` and ``_backward`` and stand behind
their CUDA dispatch key. ``src/ops/composed_attention/cuda.cpp`` says which cases come here.
"""

from __future__ import annotations

from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import triton
from torch import Tensor

from headloom.gpu import kernels

# Enough programs for each of some 130 multiprocessors to have two, when a program has 4 rows. More rows would only take
# memory; the products are large with fewer.
ROWS = 1024
# Bytes of the maps of a chunk, unless 64 rows need more.
MAPS = 512 << 20

Tensors = Sequence[Optional[Tensor]]


class Tile(NamedTuple):
    """How a kernel is compiled: queries and keys of a tile, and warps of a program."""

    M: int
    N: int
    warps: int


def padded_heads(heads: int, static: bool) -> int:
    """The heads of a group as a tile has them: a power of two, at least 16 where they enter a matrix product."""
    return max(triton.next_power_of_2(heads), 16 if static else 1)


def tile(heads: int, backward: bool) -> Tile:
    """The tile for so many (padded) heads of a group; ``docs/gpu.md`` has what it takes of a multiprocessor."""
    M = 4
    N = max(16, min(64, (2048 if backward else 4096) // (heads * M)))
    return Tile(M, N, 8)


class Chunk(NamedTuple):
    """Queries from `first` up to `last`, and the keys that some of them may see."""

    first: int
    last: int
    left: int
    right: int


def chunks(T: int, S: int, rows: int, causal: bool, window: Optional[int]) -> Iterator[Chunk]:
    past = S - T
    for first in range(0, T, rows):
        last = min(first + rows, T)
        left, right = 0, S
        if causal:
            right = min(right, max(last + past, 0))
        if window is not None:
            left = min(max(first + past - window + 1, 0), right)
            if not causal:
                right = max(min(right, last + past + window - 1), left)
        yield Chunk(first, last, left, right)


class Problem:
    """A call's arguments as the kernels want them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pre: Tensors,
        post: Tensors,
        pre_groups: int,
        post_groups: int,
        pre_conv: Optional[Tensor],
        post_conv: Optional[Tensor],
        conv_padding: str,
        conv_mask: str,
        bias: Optional[Tensor],
        causal: bool,
        window: Optional[int],
        lengths: Optional[Tensor],
        documents: Optional[Tensor],
        mask: Optional[Tensor],
        scale: Optional[float],
    ) -> None:
        self.B, self.T, self.H, self.D = q.shape
        self.S, self.E = v.shape[1], v.shape[3]
        self.Gk, self.Gv = k.shape[2], v.shape[2]
        self.q = q
        self.k = by_head(k)
        self.v = by_head(v)
        # A mix without terms across heads fits any grouping.
        self.groups = max(pre_groups if pre else 1, post_groups if post else 1)
        self.pre = pack(pre, self.groups)
        self.post = pack(post, self.groups)
        self.bias = None if bias is None else bias.expand(self.B, self.H, self.T, self.S)
        self.causal = causal
        # A window that reaches over everything is none; the kernels add to it.
        self.window = None if window is None or window >= self.S + self.T else window
        self.lengths = None if lengths is None else lengths.contiguous()
        self.documents = None if documents is None else documents.contiguous()
        self.mask = None if mask is None else mask.expand(self.B, 1, self.T, self.S).view(torch.uint8)
        self.scale = self.D**-0.5 if scale is None else scale
        heads = self.H // self.groups
        self.heads = padded_heads(heads, self.pre.static is not None or self.post.static is not None)

    def chunks(self) -> Iterator[Chunk]:
        """At least one query has a key: a row of maps is never empty."""
        fit = MAPS // max(self.B * self.H * self.S * self.q.element_size(), 1)
        rows = max(64, min(-(-ROWS // (self.B * self.groups)), fit) // 64 * 64)
        return chunks(self.T, self.S, min(rows, ROWS), self.causal, self.window)

    def maps(self, chunk: Chunk) -> Tensor:
        """Fresh memory for the maps of a chunk: [B, H, rows, keys], each row aligned."""
        keys = chunk.right - chunk.left
        size = (self.B, self.H, chunk.last - chunk.first, -(-keys // 8) * 8)
        return self.q.new_empty(size)[..., :keys]

    def scores(self, queries: Tensor, chunk: Chunk) -> Tensor:
        """a of a chunk, from its queries by head."""
        maps = self.maps(chunk)
        multiply(maps, queries, self.k[..., chunk.left : chunk.right, :].mT, self.scale)
        if self.bias is not None:
            maps += self.bias[:, :, chunk.first : chunk.last, chunk.left : chunk.right]
        return maps

    def call(self, chunk: Chunk, lse: Tensor, maps: Tensor) -> kernels.Call:
        mask = (0, 0, 0) if self.mask is None else (self.mask.stride(0), self.mask.stride(2), self.mask.stride(3))
        constant = triton.language.constexpr
        return kernels.Call(
            self.lengths,
            self.documents,
            self.mask,
            *mask,
            lse,
            self.T,
            self.S,
            self.window,
            chunk.first,
            chunk.last,
            chunk.left,
            chunk.right,
            maps.shape[2],
            maps.stride(2),
            constant(self.H),
            constant(self.groups),
            constant(self.causal),
        )


def by_head(x: Tensor) -> Tensor:
    """[B, L, G, D] as [B, G, L, D], which products read without a copy of their own."""
    return x.transpose(1, 2).contiguous()


def pack(mix: Tensors, groups: int) -> kernels.Mix:
    if not mix:
        zero = triton.language.constexpr(0)
        return kernels.Mix(None, None, None, None, None, None, None, zero, zero)
    static, q_down, q_up, q_gate, k_down, k_up, k_gate = mix

    def rank(down: Optional[Tensor]) -> triton.language.constexpr:
        return triton.language.constexpr(0 if down is None else down.shape[2])

    def of_queries(weight: Optional[Tensor]) -> Optional[Tensor]:
        return None if weight is None else weight.contiguous()

    def of_keys(weight: Optional[Tensor]) -> Optional[Tensor]:
        return None if weight is None else weight.permute(0, 2, 3, 1).contiguous()

    def gate(weight: Optional[Tensor]) -> Optional[Tensor]:
        return None if weight is None else weight.unsqueeze(2)

    return kernels.Mix(
        None if static is None else static.contiguous(),
        of_queries(q_down),
        of_queries(q_up),
        of_queries(gate(q_gate)),
        of_keys(k_down),
        of_keys(k_up),
        of_keys(gate(k_gate)),
        rank(q_down),
        rank(k_down),
    )


def multiply(out: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
    """out [B, H, M, N] = scale x [B, H, M, K] y [B, G, K, N]: heads share the groups of y."""
    B, G = y.shape[:2]
    n = x.shape[1] // G

    def fold(z: Tensor) -> Tensor:
        # [B, G, n, M, .] as [B G, n M, .]
        return z.view(B * G, n * z.shape[2], z.shape[3])

    torch.baddbmm(fold(out), fold(x), y.flatten(0, 1), beta=0, alpha=scale, out=fold(out))


def add_transposed(total: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
    """total [B, G, N, K] += scale sum over the group's heads of x^T y, x [B, H, M, N], y [B, H, M, K]."""
    B, G = total.shape[:2]
    n = x.shape[1] // G
    x = x.view(B * G, n * x.shape[2], x.shape[3])
    y = y.view(B * G, n * y.shape[2], y.shape[3])
    total += torch.bmm(x.mT, y).view(total.shape).to(total.dtype).mul_(scale)


def run(kernel: triton.JITFunction, p: Problem, chunk: Chunk, of: Tile, *arguments: object) -> None:
    grid = (-(-(chunk.last - chunk.first) // of.M), p.B * p.groups)
    kernel[grid](*arguments, HP=p.heads, M=of.M, N=of.N, num_warps=of.warps)


def forward(*arguments: object) -> List[Tensor]:
    """The output [B, T, H, E] and L [B, H, T]; the schema of ``headloom::composed_attention_fused``."""
    p = Problem(*arguments[:-1])  # type: ignore[arg-type]  # without `training`
    out = p.q.new_empty((p.B, p.T, p.H, p.E))
    lse = p.q.new_empty((p.B, p.H, p.T), dtype=torch.float32)
    if p.q.numel() == 0 or p.S == 0:
        return [out.zero_(), lse.fill_(float("inf"))]
    for chunk in p.chunks():
        rows = slice(chunk.first, chunk.last)
        if chunk.left == chunk.right:
            out[:, rows].zero_()
            lse[:, :, rows].fill_(float("inf"))
            continue
        maps = p.scores(by_head(p.q[:, rows]), chunk)
        run(
            kernels.forward_kernel, p, chunk, tile(p.heads, False), p.call(chunk, lse, maps), p.pre, p.post, maps
        )
        part = p.q.new_empty((p.B, p.H, chunk.last - chunk.first, p.E))
        multiply(part, maps, p.v[..., chunk.left : chunk.right, :])
        out[:, rows] = part.transpose(1, 2)
    return [out, lse]


class MixGradients:
    """The gradients of a mix, as the chunks' parts are added."""

    def __init__(self, mix: kernels.Mix, p: Problem) -> None:
        self.mix = mix

        def of_queries(weight: Optional[Tensor]) -> Optional[Tensor]:
            # A chunk without keys writes nothing.
            return None if weight is None else torch.zeros_like(weight, dtype=torch.float32)

        self.static, self.q_down, self.q_up, self.q_gate, self.k_down, self.k_up, self.k_gate = map(
            of_queries, mix[:7]
        )

    def places(self, p: Problem, chunk: Chunk, of: Tile, columns: int) -> kernels.MixGradient:
        """Where the kernel writes: gradients of the queries' weights in place, shares of the others in fresh memory."""
        tiles = -(-(chunk.last - chunk.first) // of.M)
        heads = p.H // p.groups

        def shares(total: Optional[Tensor]) -> Optional[Tensor]:
            return None if total is None else total.new_empty((tiles, *total.shape[:3], columns))

        static = None
        if self.static is not None:
            static = self.static.new_empty((tiles, p.B, p.groups, heads, heads))
        return kernels.MixGradient(
            static,
            self.q_down,
            self.q_up,
            self.q_gate,
            shares(self.k_down),
            shares(self.k_up),
            shares(self.k_gate),
        )

    def add(self, places: kernels.MixGradient, chunk: Chunk) -> None:
        keys = chunk.right - chunk.left
        if self.static is not None:
            self.static += places.static.sum((0, 1)).view(self.static.shape)
        for total, shares in zip((self.k_down, self.k_up, self.k_gate), places[4:]):
            if total is not None:
                total[..., chunk.left : chunk.right] += shares.sum(0)[..., :keys]

    def finished(self) -> List[Optional[Tensor]]:
        """In the order and layout of the operator's list."""

        def of_keys(total: Optional[Tensor]) -> Optional[Tensor]:
            return None if total is None else total.permute(0, 3, 1, 2)

        def gate(total: Optional[Tensor]) -> Optional[Tensor]:
            return None if total is None else total.squeeze(2)

        return [
            self.static,
            self.q_down,
            self.q_up,
            gate(self.q_gate),
            of_keys(self.k_down),
            of_keys(self.k_up),
            gate(of_keys(self.k_gate)),
        ]


def backward(grads: Tensors, *arguments: object) -> List[Tensor]:
    """The gradient of each differentiable tensor that is there; the schema of ``headloom::composed_attention_backward``."""
    *call, kept, wanted = arguments
    p = Problem(*call)  # type: ignore[arg-type]
    lse = kept[0]  # type: ignore[index]
    bias = call[11]
    of = tile(p.heads, True)
    pre, post = MixGradients(p.pre, p), MixGradients(p.post, p)
    dq = torch.zeros((p.B, p.T, p.H, p.D), dtype=p.q.dtype, device=p.q.device)
    dk = torch.zeros_like(p.k, dtype=torch.float32)
    dv = torch.zeros_like(p.v, dtype=torch.float32)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    grad_out = grads[0]
    assert grad_out is not None
    for chunk in p.chunks() if p.q.numel() > 0 and p.S > 0 else ():
        if chunk.left == chunk.right:
            continue
        rows, keys = slice(chunk.first, chunk.last), slice(chunk.left, chunk.right)
        queries = by_head(p.q[:, rows])
        of_out = by_head(grad_out[:, rows])
        maps = p.scores(queries, chunk)
        grad_maps = p.maps(chunk)
        multiply(grad_maps, of_out, p.v[..., keys, :].mT)
        to_pre, to_post = (g.places(p, chunk, of, maps.stride(2)) for g in (pre, post))
        run(
            kernels.backward_kernel,
            p,
            chunk,
            of,
            p.call(chunk, lse, maps),
            p.pre,
            p.post,
            maps,
            grad_maps,
            to_pre,
            to_post,
        )
        pre.add(to_pre, chunk)
        post.add(to_post, chunk)
        da, weights = maps, grad_maps
        part = torch.empty_like(queries)
        multiply(part, da, p.k[..., keys, :], p.scale)
        dq[:, rows] = part.transpose(1, 2)
        add_transposed(dk[..., keys, :], da, queries, p.scale)
        add_transposed(dv[..., keys, :], weights, of_out)
        if dbias is not None:
            add_bias_gradient(dbias, da, chunk)
    found: List[Tuple[Optional[Tensor], Optional[Tensor]]] = [
        (p.q, dq),
        (p.k, dk.transpose(1, 2)),
        (p.v, dv.transpose(1, 2)),
        *zip(call[3] or [None] * 7, pre.finished()),  # type: ignore[call-overload]
        *zip(call[4] or [None] * 7, post.finished()),  # type: ignore[call-overload]
        (None, None),
        (None, None),
        (bias, dbias),  # type: ignore[list-item]
    ]
    out = []
    for bit, (tensor, gradient) in enumerate(found):
        if tensor is None:
            continue
        assert gradient is not None
        is_wanted = wanted >> bit & 1  # type: ignore[operator]
        out.append(gradient.to(tensor.dtype).contiguous() if is_wanted else tensor.new_empty(0))
    return out


def add_bias_gradient(total: Tensor, da: Tensor, chunk: Chunk) -> None:
    """Adds da of a chunk to the gradient of a bias, summed where the bias was broadcast."""
    place = total[(None,) * (4 - total.dim())]
    if place.shape[2] > 1:
        place = place[:, :, chunk.first : chunk.last]
    if place.shape[3] > 1:
        place = place[..., chunk.left : chunk.right]
    place += da.float().sum_to_size(place.shape)
