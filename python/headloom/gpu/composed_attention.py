"""Composed attention on NVIDIA GPUs: matrix products by PyTorch, the mixes between them by Triton (``kernels.py``).

The queries are taken in chunks. For a chunk, a product makes the scores of all heads, kernels turn them into composed
weights in place, and a product makes the output. The maps of one chunk are in memory at a time. Where maps are convolved
(``convolution.py``), a chunk's maps also have the earlier queries that the convolutions reach back to, its *halo*.

``forward`` and ``backward`` have the schemas of ``headloom::composed_attention_fused`` and ``_backward`` and stand behind
their CUDA dispatch key. ``src/ops/composed_attention/cuda.cpp`` says which cases come here.
"""

from __future__ import annotations

from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import triton  # type: ignore[import-not-found]
from torch import Tensor

from headloom.gpu import kernels
from headloom.gpu.convolution import Chunk, Convolution
from headloom.gpu.gradients import wanted_gradients

# Bytes of one map of a chunk for all heads, unless 64 rows need more: a chunk's work is then long beside the time that the
# processor takes to launch it.
MAPS = 256 << 20
# Maps have whole tiles, and their first keys are such that a thread reads several of them at once.
ROWS, COLUMNS, ALIGNED = 64, 128, 16
BLOCK_Q, BLOCK_K = kernels.QUERIES.value, kernels.KEYS.value

Tensors = Sequence[Optional[Tensor]]


class Tile(NamedTuple):
    """How a kernel is compiled: queries and keys of a tile, warps of a program, and turns of a loop that load ahead."""

    M: int
    N: int
    warps: int
    stages: int = 1


def capability(device: torch.device) -> int:
    """The first number of a GPU's compute capability; an H100's where no GPU is asked."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def tile(mix: kernels.Mix, backward: bool, roomy: bool) -> Tile:
    """Inner maps of x, and in the backward of dy too, stay in registers, and beside them the product with M. So the more
    there are the fewer places a thread has. For rank 2, these were the fastest on an H100 (``docs/gpu.md``).

    Args:
        roomy: whether 16 places of 8 inner maps fit a thread's registers: not in float32, and not on cards after Hopper.
    """
    inner = (mix.RQ.value + mix.RK.value) * (2 if backward else 1) + (mix.static is not None)
    if not backward:
        return Tile(32, 128, 8) if inner <= 2 else Tile(32, 64, 4) if inner <= 4 else Tile(16, 64, 4)
    # Sums over rows by tensor cores want at least 16 of them.
    if inner <= 2:
        return Tile(32, 64, 4, 3)
    if inner <= 8 and roomy:
        return Tile(32, 32, 2, 3)
    return Tile(16, 64, 4 if inner <= 9 else 8, 3)


def span(T: int, S: int, first: int, last: int, causal: bool, window: Optional[int]) -> Chunk:
    """The queries from `first` up to `last`, with the keys that some of them may see."""
    past = S - T
    left, right = 0, S
    if causal:
        right = min(right, max(last + past, 0))
    if window is not None:
        left = min(max(first + past - window + 1, 0) // ALIGNED * ALIGNED, right)
        if not causal:
            right = max(min(right, last + past + window - 1), left)
    return Chunk(first, last, left, right)


class Parts(NamedTuple):
    """A chunk of queries, with the same keys: those with outputs, those with weights and those with scores."""

    own: Chunk
    weighed: Chunk
    scored: Chunk


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
        self.roomy = q.dtype != torch.float32 and capability(q.device) < 10
        self.q = q
        self.k = by_head(k)
        self.v = by_head(v)
        # A mix without terms across heads fits any grouping.
        self.groups = max(pre_groups if pre else 1, post_groups if post else 1)
        # Blocks of a mix's weights: every tile of queries and of keys lies inside.
        self.query_blocks = up(self.T + ROWS, BLOCK_Q) // BLOCK_Q
        self.key_blocks = up(self.S + COLUMNS, BLOCK_K) // BLOCK_K
        self.pre = pack(pre, self.groups, self.query_blocks, self.key_blocks)
        self.post = pack(post, self.groups, self.query_blocks, self.key_blocks)
        self.bias = None if bias is None else bias.expand(self.B, self.H, self.T, self.S)
        self.causal = causal
        # A window that reaches over everything is none; the kernels add to it.
        self.window = None if window is None or window >= self.S + self.T else window
        self.lengths = None if lengths is None else lengths.contiguous()
        self.documents = None if documents is None else documents.contiguous()
        self.mask = None if mask is None else mask.expand(self.B, 1, self.T, self.S).view(torch.uint8)
        self.scale = self.D**-0.5 if scale is None else scale
        self.static = self.pre.static is not None or self.post.static is not None
        past = self.S - self.T

        def convolution(kernel: Optional[Tensor], exact: bool) -> Optional[Convolution]:
            return None if kernel is None else Convolution(kernel, conv_padding, exact, documents, past)

        self.pre_conv = convolution(pre_conv, conv_mask == "exact" and causal)
        self.post_conv = convolution(post_conv, False)
        # Keys behind its own that a row of scores keeps for the convolution of later rows.
        self.ahead = self.pre_conv.halo if self.pre_conv is not None and self.pre_conv.exact else 0

    def chunks(self) -> Iterator[Parts]:
        keys = self.S if self.window is None else min(self.S, 2 * self.window)
        rows = MAPS // max(self.B * self.H * keys * self.q.element_size(), 1) // ROWS * ROWS
        if self.window is not None:
            # Maps of more rows would have more places that nobody sees.
            rows = min(rows, up(self.window, ROWS))
        rows = max(ROWS, rows)
        for first in range(0, self.T, rows):
            yield self.parts(first, min(first + rows, self.T))

    def parts(self, first: int, last: int) -> Parts:
        weighed = first - (0 if self.post_conv is None else self.post_conv.halo)
        scored = weighed - (0 if self.pre_conv is None else self.pre_conv.halo)
        whole = span(self.T, self.S, max(scored, 0), last, self.causal, self.window)
        return Parts(whole._replace(first=first), whole._replace(first=max(weighed, 0)), whole)

    def maps(self, chunk: Chunk) -> Tensor:
        """Memory for the maps of a chunk: [B, H, rows, columns] of whole tiles."""
        size = (self.B, self.H, up(chunk.rows, ROWS), up(chunk.keys, COLUMNS))
        # The gradient of M is a product over all places.
        return self.q.new_zeros(size) if self.static else self.q.new_empty(size)

    def maps_of(self, x: Tensor, chunk: Chunk) -> Tensor:
        """The maps x [B, H, queries, keys] of a chunk in memory of whole tiles."""
        maps = self.maps(chunk)
        maps[:, :, : chunk.rows, : chunk.keys] = x
        return maps

    def scores(self, queries: Tensor, chunk: Chunk) -> Tensor:
        """a of a chunk, from its queries by head."""
        maps = self.maps(chunk)
        multiply(maps[..., : chunk.keys], queries, self.k[..., chunk.left : chunk.right, :].mT, self.scale)
        if self.bias is not None:
            maps[:, :, : chunk.rows, : chunk.keys] += self.bias[:, :, chunk.first : chunk.last, chunk.left : chunk.right]
        return maps

    def call(self, chunk: Chunk, lse: Tensor, maps: Tensor, ahead: int = 0) -> kernels.Call:
        batch, _, row, key = (0, 0, 0, 0) if self.mask is None else self.mask.stride()
        constant = triton.language.constexpr
        return kernels.Call(
            self.lengths,
            self.documents,
            self.mask,
            batch,
            row,
            key,
            lse,
            self.T,
            self.S,
            self.window,
            chunk.first,
            chunk.last,
            chunk.left,
            chunk.right,
            maps.shape[2],
            maps.shape[3],
            self.query_blocks,
            self.key_blocks,
            constant(self.H),
            constant(self.groups),
            constant(self.causal),
            constant(ahead),
        )


def by_head(x: Tensor) -> Tensor:
    """[B, L, G, D] as [B, G, L, D], which products read without a copy of their own."""
    return x.transpose(1, 2).contiguous()


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def whole_rows(x: Tensor) -> Tensor:
    """[B, L, H, D] by head, [B, H, rows, D], with rows of 0 behind the L as in the maps of a chunk."""
    B, L, H, D = x.shape
    out = x.new_zeros((B, H, up(L, ROWS), D))
    out[:, :, :L] = x.transpose(1, 2)
    return out


def pack(mix: Tensors, groups: int, query_blocks: int, key_blocks: int) -> kernels.Mix:
    """A mix as the kernels read it. Its weights are 0 behind the last query or key."""
    constant = triton.language.constexpr
    if not mix:
        return kernels.Mix(None, None, None, constant(0), constant(0), constant(False), constant(False))
    static = mix[0]

    def packed(weights: Tensors, blocks: int, of_block: int) -> Optional[Tensor]:
        """Down, up and gate: [B, L, R, H] and [B, L, H] as [B, blocks, H, weights, L of a block]."""
        parts = [x if x.dim() == 4 else x.unsqueeze(2) for x in weights if x is not None]
        if not parts:
            return None
        B, L, _, H = parts[0].shape
        W = sum(x.shape[2] for x in parts)
        out = parts[0].new_zeros((B, blocks * of_block, W, H), dtype=torch.float32)
        out[:, :L] = torch.cat(parts, 2)
        return out.view(B, blocks, of_block, W, H).permute(0, 1, 4, 3, 2).contiguous()

    def rank(down: Optional[Tensor]) -> int:
        return 0 if down is None else down.shape[2]

    return kernels.Mix(
        None if static is None else static.view(groups, *static.shape[-2:]),
        packed(mix[1:4], query_blocks, BLOCK_Q),
        packed(mix[4:7], key_blocks, BLOCK_K),
        constant(rank(mix[1])),
        constant(rank(mix[4])),
        constant(mix[3] is not None),
        constant(mix[6] is not None),
    )


NO_MIX = pack([], 1, 0, 0)


def multiply(out: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
    """out [B, H, M, N] = scale x [B, H, M, K] y [B, G, K, N]: heads share the groups of y."""
    B, G = y.shape[:2]
    n = x.shape[1] // G

    def fold(z: Tensor) -> Tensor:
        # [B, G, n, M, .] as [B G, n M, .]
        return z.view(B * G, n * z.shape[2], z.shape[3])

    torch.baddbmm(fold(out), fold(x), y.flatten(0, 1), beta=0, alpha=scale, out=fold(out))


def add_transposed(total: Tensor, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
    """total [B, G, N, K], in float32, += scale sum over the group's heads of x^T y, x [B, H, M, N], y [B, H, M, K]."""
    B, G = total.shape[:2]
    n = x.shape[1] // G
    x = x.view(B * G, n * x.shape[2], x.shape[3])
    y = y.view(B * G, n * y.shape[2], y.shape[3])
    total = total.view(B * G, *total.shape[2:])  # and no copy, since it is added to
    if x.dtype == total.dtype:
        torch.baddbmm(total, x.mT, y, alpha=scale, out=total)
    elif x.is_cuda:
        torch.baddbmm(total, x.mT, y, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        total += torch.bmm(x.mT, y).to(total.dtype).mul_(scale)


def static_product(mix: kernels.Mix, maps: Tensor, reverse: bool = False) -> Optional[Tensor]:
    """sum_h x[h] M[h,h'], in reverse sum_h' M[h,h'] x[h']; None without M."""
    if mix.static is None:
        return None
    matrix = mix.static if reverse else mix.static.mT
    return torch.matmul(matrix, joined(maps, mix)).view(maps.shape)


def joined(maps: Tensor, mix: kernels.Mix) -> Tensor:
    """[B, H, rows, columns] as [B, groups, heads of a group, places]."""
    groups, heads = mix.static.shape[:2]
    return maps.view(maps.shape[0], groups, heads, -1)


def run(kernel: triton.JITFunction, p: Problem, chunk: Chunk, of: Tile, *arguments: object, **constants: object) -> None:
    grid = (-(-chunk.keys // of.N), up(chunk.rows, ROWS) // of.M, p.B * p.groups)
    options = {"num_warps": of.warps, "num_stages": of.stages, "enable_fp_fusion": True}
    kernel[grid](*arguments, **constants, M=of.M, N=of.N, **options)


def mix_maps(
    p: Problem, chunk: Chunk, lse: Tensor, mix: kernels.Mix, maps: Tensor, out: Tensor, to: str, exp: bool = False
) -> Optional[Tensor]:
    """Runs ``mix_kernel``; for scores, log sum_s exp y of each tile: [tiles, B, H, 1, rows]."""
    if mix.static is not None and exp:
        # M's product needs the weights themselves.
        mix_maps(p, chunk, lse, NO_MIX, maps, maps, "composed", exp=True)
        exp = False
    of = tile(mix, False, p.roomy)
    sums = row_shares(p, chunk, of, lse) if to == "scores" else None
    call = p.call(chunk, lse, maps)
    run(kernels.mix_kernel, p, chunk, of, call, mix, maps, static_product(mix, maps), out, sums, EXP=exp, TO=to)
    return sums


def keep_lse(lse: Tensor, of_tiles: Tensor, own: Chunk, halo: int) -> None:
    """L of the queries of `own`, from the sums of tiles, which also have the `halo` queries before."""
    tiles, B, H, _, rows = of_tiles.shape
    kernels.lse_kernel[(-(-own.rows // 128), B * H)](of_tiles, lse, lse.shape[2], rows, own.first, halo, tiles, M=128)


def hide(p: Problem, chunk: Chunk, lse: Tensor, maps: Tensor, ahead: int = 0) -> None:
    """Sets to 0, in place, what a query does not see; it sees `ahead` keys behind its own."""
    call = p.call(chunk, lse, maps, ahead)
    run(kernels.mix_kernel, p, chunk, tile(NO_MIX, False, p.roomy), call, NO_MIX, maps, None, maps, None, EXP=False, TO="composed")


def row_shares(p: Problem, chunk: Chunk, of: Tile, lse: Tensor) -> Tensor:
    """Memory for a number of each tile, head and query."""
    tiles = -(-chunk.keys // of.N)
    return lse.new_empty((tiles, p.B, p.H, 1, chunk.rows))


def forward(*arguments: object) -> List[Tensor]:
    """The output [B, T, H, E] and L [B, H, T]; the schema of ``headloom::composed_attention_fused``."""
    p = Problem(*arguments[:-1])  # type: ignore[arg-type]  # without `training`
    out = p.q.new_empty((p.B, p.T, p.H, p.E))
    lse = p.q.new_empty((p.B, p.H, p.T), dtype=torch.float32)
    if p.q.numel() == 0 or p.S == 0:
        return [out.zero_(), lse.fill_(float("inf"))]
    for own, weighed, scored in p.chunks():
        rows = slice(own.first, own.last)
        if scored.keys == 0:
            out[:, rows].zero_()
            lse[:, :, rows].fill_(float("inf"))
            continue
        maps = convolved_scores(p, lse, p.scores(whole_rows(p.q[:, scored.first : scored.last]), scored), scored, weighed)
        found = mix_maps(p, weighed, lse, p.pre, maps, maps, "scores")
        assert found is not None
        keep_lse(lse, found, own, own.first - weighed.first)
        if p.post_conv is not None:
            mix_maps(p, weighed, lse, NO_MIX, maps, maps, "composed", exp=True)
            maps = p.maps_of(p.post_conv.apply(maps, weighed, own), own)
        mix_maps(p, own, lse, p.post, maps, maps, "composed", exp=p.post_conv is None)
        part = p.q.new_empty((*maps.shape[:3], p.E))
        multiply(part, maps[..., : own.keys], p.v[..., own.left : own.right, :])
        out[:, rows] = part[:, :, : own.rows].transpose(1, 2)
    return [out, lse]


def convolved_scores(p: Problem, lse: Tensor, maps: Tensor, scored: Chunk, weighed: Chunk) -> Tensor:
    """What enters the mix before softmax. With a convolution, `maps` are hidden in place first."""
    if p.pre_conv is None:
        return maps
    hide(p, scored, lse, maps, p.ahead)
    return p.maps_of(p.pre_conv.apply(maps, scored, weighed), weighed)


class MixGradients:
    """The gradients of a mix, as the chunks' parts are added."""

    def __init__(self, mix: kernels.Mix, T: int, S: int) -> None:
        self.mix = mix
        # Zeros: a chunk without keys writes nothing.
        self.static = None if mix.static is None else torch.zeros_like(mix.static, dtype=torch.float32)

        def zeros(packed: Optional[Tensor], length: int) -> Optional[Tensor]:
            if packed is None:
                return None
            B, _, H, W, _ = packed.shape
            return packed.new_zeros((B, H, W, length))

        self.weights = [zeros(mix.of_queries, T), zeros(mix.of_keys, S)]

    def shares(self, chunk: Chunk, of: Tile, columns: int) -> kernels.Shares:
        sizes = [(-(-chunk.keys // of.N), chunk.rows), (up(chunk.rows, ROWS) // of.M, columns)]
        return kernels.Shares(
            *(
                None if total is None else total.new_empty((tiles, *total.shape[:3], size))
                for total, (tiles, size) in zip(self.weights, sizes)
            )
        )

    def add_static(self, x: Tensor, dy: Tensor) -> None:
        if self.static is not None:
            self.static += (joined(x, self.mix) @ joined(dy, self.mix).mT).sum(0)

    def add(self, shares: kernels.Shares, chunk: Chunk) -> None:
        for total, share, (first, last) in zip(
            self.weights, shares, [(chunk.first, chunk.last), (chunk.left, chunk.right)]
        ):
            if total is not None:
                total[..., first:last] += share.sum(0)[..., : last - first]

    def finished(self, mix: Tensors) -> List[Optional[Tensor]]:
        """In the order and layout of the operator's list."""
        # M has no group where there is one.
        found = [None if self.static is None else self.static.reshape(mix[0].shape)]  # type: ignore[union-attr]
        for total, given in zip(self.weights, (mix[1:4], mix[4:7])):
            first = 0
            for weight in given:
                if weight is None or total is None:
                    found.append(None)
                    continue
                rank = weight.shape[2] if weight.dim() == 4 else 1
                found.append(total[:, :, first : first + rank].permute(0, 3, 2, 1).reshape(weight.shape))
                first += rank
        return found


def mix_backward(
    p: Problem,
    chunk: Chunk,
    lse: Tensor,
    total: MixGradients,
    maps: Tensor,
    grads: Tensor,
    out: Optional[Tensor] = None,
    weights: Optional[Tensor] = None,
    delta: Optional[Tensor] = None,
) -> Optional[Tensor]:
    """Runs ``mix_backward_kernel``; with `out`, sum_s x dx of the chunk's rows: [B, H, rows]."""
    mix = total.mix
    if mix.static is not None and weights is not None:
        # M's products need dy itself.
        rows = slice(0, chunk.rows)
        grads[:, :, rows].sub_(delta[:, :, chunk.first : chunk.last, None]).mul_(weights[:, :, rows])  # type: ignore[index]
        weights = None
    total.add_static(maps, grads)
    of = tile(mix, True, p.roomy)
    shares = total.shares(chunk, of, maps.shape[3])
    sums = None if out is None else row_shares(p, chunk, of, lse)
    run(
        kernels.mix_backward_kernel,
        p,
        chunk,
        of,
        p.call(chunk, lse, maps),
        mix,
        maps,
        None if out is None else static_product(mix, maps),
        out,
        weights,
        delta,
        grads,
        static_product(mix, grads, reverse=True),
        sums,
        shares,
        TF32=maps.dtype != torch.float32,
    )
    total.add(shares, chunk)
    return None if sums is None else sums.sum(0).squeeze(2)


def backward(grads: Tensors, *arguments: object) -> List[Tensor]:
    """The gradient of each differentiable tensor that is there; the schema of ``headloom::composed_attention_backward``."""
    *call, kept, wanted = arguments
    p = Problem(*call)  # type: ignore[arg-type]
    lse: Tensor = kept[0]  # type: ignore[index]
    bias: Optional[Tensor] = call[11]  # type: ignore[assignment]
    pre, post = (MixGradients(mix, p.T, p.S) for mix in (p.pre, p.post))
    delta = torch.zeros_like(lse)
    dq = torch.zeros((p.B, p.T, p.H, p.D), dtype=p.q.dtype, device=p.q.device)
    dk = torch.zeros_like(p.k, dtype=torch.float32)
    dv = torch.zeros_like(p.v, dtype=torch.float32)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    grad_out = grads[0]
    assert grad_out is not None
    for own, weighed, scored in p.chunks() if p.q.numel() > 0 and p.S > 0 else ():
        if scored.keys == 0:
            continue
        keys = slice(own.left, own.right)
        queries = whole_rows(p.q[:, scored.first : scored.last])
        of_out = whole_rows(grad_out[:, own.first : own.last])
        raw = p.scores(queries, scored)
        scores = convolved_scores(p, lse, raw, scored, weighed)
        weights = p.maps(weighed)
        mix_maps(p, weighed, lse, p.pre, scores, weights, "weights")
        before = weights  # what enters the mix after softmax
        if p.post_conv is not None:
            before = p.maps_of(p.post_conv.apply(weights, weighed, own), own)
            hide(p, own, lse, before)
        grad_maps = p.maps(own)
        multiply(grad_maps[..., : own.keys], of_out, p.v[..., keys, :].mT)
        composed = p.maps(own)
        found = mix_backward(p, own, lse, post, before, grad_maps, out=composed)
        add_transposed(dv[..., keys, :], composed[..., : own.keys], of_out)
        if p.post_conv is not None:
            grad_maps = p.maps_of(p.post_conv.backward(weights, grad_maps, weighed, own), weighed)
            hide(p, weighed, lse, grad_maps)
            # Rows of the halo have a part of their gradient here and the rest in the chunk before. All that follows is linear
            # in it.
            found = (weights.float() * grad_maps.float())[:, :, : weighed.rows, : weighed.keys].sum(-1)
        assert found is not None
        delta[:, :, weighed.first : weighed.last] = found
        mix_backward(p, weighed, lse, pre, scores, grad_maps, weights=weights, delta=delta)
        if p.pre_conv is not None:
            grad_maps = p.maps_of(p.pre_conv.backward(raw, grad_maps, scored, weighed), scored)
            hide(p, scored, lse, grad_maps, p.ahead)
        part = torch.empty_like(queries)
        multiply(part, grad_maps[..., : own.keys], p.k[..., keys, :], p.scale)
        dq[:, scored.first : scored.last] += part[:, :, : scored.rows].transpose(1, 2)
        add_transposed(dk[..., keys, :], grad_maps[..., : own.keys], queries, p.scale)
        if dbias is not None:
            add_bias_gradient(dbias, grad_maps[:, :, : scored.rows, : own.keys], scored)
    places: List[Tuple[Optional[Tensor], Optional[Tensor]]] = [
        (p.q, dq),
        (p.k, dk.transpose(1, 2)),
        (p.v, dv.transpose(1, 2)),
        *mix_gradients(call[3], pre),  # type: ignore[arg-type]
        *mix_gradients(call[4], post),  # type: ignore[arg-type]
        convolution_gradient(call[7], p.pre_conv),  # type: ignore[arg-type]
        convolution_gradient(call[8], p.post_conv),  # type: ignore[arg-type]
        (bias, dbias),
    ]
    return wanted_gradients(places, wanted)  # type: ignore[arg-type]


def mix_gradients(mix: Tensors, total: MixGradients) -> List[Tuple[Optional[Tensor], Optional[Tensor]]]:
    """The seven tensors of a mix beside their gradients."""
    return list(zip(mix, total.finished(mix))) if mix else [(None, None)] * 7


def convolution_gradient(kernel: Optional[Tensor], of: Optional[Convolution]) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    return (None, None) if kernel is None or of is None else (kernel, of.grad.view(kernel.shape))


def add_bias_gradient(total: Tensor, da: Tensor, chunk: Chunk) -> None:
    """Adds da of a chunk to the gradient of a bias, summed where the bias was broadcast."""
    place = total[(None,) * (4 - total.dim())]
    if place.shape[2] > 1:
        place = place[:, :, chunk.first : chunk.last]
    if place.shape[3] > 1:
        place = place[..., chunk.left : chunk.right]
    place += da.float().sum_to_size(place.shape)
