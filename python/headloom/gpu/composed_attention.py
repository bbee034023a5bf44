"""Composed attention on NVIDIA GPUs: matrix products by PyTorch, and the mixes between them by kernels of ours, in Triton
(``kernels.py``) or CUDA (``mixes.py``).

The queries are taken in chunks. For a chunk, a product makes the scores of all heads, kernels turn them into composed
weights in place, and a product makes the output. The maps of one chunk, or of several chunks of a window, are in memory at
a time. Where maps are convolved (``convolution.py``), a chunk's maps also have the earlier queries that the convolutions
reach back to, its *halo*.

``forward`` and ``backward`` have the schemas of ``headloom::composed_attention_fused`` and ``_backward`` and are registered
under their CUDA dispatch key. ``src/ops/composed_attention/cuda.cpp`` says which cases come here.
"""

from __future__ import annotations

import math
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import triton  # type: ignore[import-not-found]
from torch import Tensor

from headloom.gpu import kernels, mixes
from headloom.gpu.convolution import Chunk, Convolution
from headloom.gpu.gradients import wanted_gradients

# Bytes of one map of a chunk for all heads, unless 64 rows need more: a chunk's work is then long beside the time that the
# processor takes to launch it.
MAPS = 256 << 20
# Maps have whole tiles, and their first keys are such that a thread reads several of them at once.
ROWS, COLUMNS, ALIGNED = 64, 128, 16
# Queries, or keys, for which a product leaves out what none of them sees. In products to gradients of keys a band is the whole
# output, which has to fill the card.
BAND, KEY_BAND = 256, 512
# A launch has at most BLOCKS programs in its second and in its third direction. The third one has all chunks of the batch, once for
# each group of heads or for each of at most JOBS tensors.
BLOCKS, JOBS = 65535, 4
QUERIES, KEYS = kernels.QUERIES.value, kernels.KEYS.value  # of a block of weights
NO_MIX = kernels.Mix(None, None, None, *map(triton.language.constexpr, (0, 0, False, False)))

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


class KernelArguments:
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
        # A mix without terms across heads fits any grouping.
        self.groups = max(pre_groups if pre else 1, post_groups if post else 1)
        self.bias = None if bias is None else bias.expand(self.B, self.H, self.T, self.S)
        self.causal = causal
        # A window that reaches over everything is none; the kernels add to it.
        self.window = None if window is None or window >= self.S + self.T else window
        # With a window, each chunk's keys are copied. Without, all are copied once: [B, G, S, D], as products read them.
        self.k, self.v = k, v
        if self.window is None:
            every = Chunk(0, self.S, 0, self.S)
            self.k, self.v = cut((k, 0, self.S, every), (v, 0, self.S, every))
        # Chunks of a window are taken together, and the first and the last reach beyond the sequence.
        reach = 0 if self.window is None else up(self.window, KEYS)
        self.keys_before = 0 if self.window is None else reach + up(max(self.T - self.S, 0), KEYS)
        self.keys_after = 2 * reach  # the last chunk's queries, and what they see after them
        # Blocks of a mix's weights: every tile of queries and of keys lies inside.
        self.query_blocks = up(self.T + ROWS + reach, QUERIES) // QUERIES
        self.key_blocks = up(self.keys_before + self.S + self.keys_after + COLUMNS, KEYS) // KEYS
        self.pre, self.post = packed((pre, post), self)
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
        # Keys after its own that a row of scores keeps for the convolution of later rows.
        self.ahead = self.pre_conv.halo if self.pre_conv is not None and self.pre_conv.exact else 0

    def chunks(self) -> Iterator[Parts]:
        """With a window, chunks have no more queries than it: longer ones would have more places that nobody sees. Then as many
        chunks are taken together as fit the memory for maps and a launch."""
        of_place = max(self.B * self.H * self.q.element_size(), 1)
        keys = self.S if self.window is None else min(self.S, 2 * self.window)
        rows = MAPS // (of_place * keys) // ROWS * ROWS
        if self.window is not None:
            rows = min(rows, up(self.window, ROWS))
        halo = sum(up(conv.halo, ROWS) for conv in (self.pre_conv, self.post_conv) if conv is not None)
        rows = max(min(rows, 16 * BLOCKS // ROWS * ROWS - halo), ROWS)  # a launch has a block for 16 of them or more
        together = 1
        if self.window is not None and self.pre_conv is None and self.post_conv is None and self.bias is None:
            before = up(self.window - 1, ALIGNED)
            keys = before + rows + (0 if self.causal else self.window - 1)
            room = min(MAPS // (of_place * rows * up(keys, COLUMNS)), BLOCKS // (self.B * max(JOBS, self.groups)))
            together = min(room, -(-self.T // rows))
        if together <= 1:
            for first in range(0, self.T, rows):
                yield self.parts(first, min(first + rows, self.T))
            return
        for first in range(0, self.T, together * rows):
            left = first + self.S - self.T - before
            count = min(-(-(self.T - first) // rows), together)
            yield Parts(*[Chunk(first, first + rows, left, left + keys, count, rows)] * 3)

    def parts(self, first: int, last: int) -> Parts:
        weighed = first - (0 if self.post_conv is None else self.post_conv.halo)
        scored = weighed - (0 if self.pre_conv is None else self.pre_conv.halo)
        whole = span(self.T, self.S, max(scored, 0), last, self.causal, self.window)
        return Parts(whole._replace(first=first), whole._replace(first=max(weighed, 0)), whole)

    def maps(self, chunk: Chunk) -> Tensor:
        """Memory for the maps of a chunk: [B chunks, H, rows, columns] of whole tiles."""
        size = (self.B * chunk.chunks, self.H, up(chunk.rows, ROWS), up(chunk.keys, COLUMNS))
        # The gradient of M is a product over all places.
        return self.q.new_zeros(size) if self.static else self.q.new_empty(size)

    def maps_of(self, x: Tensor, chunk: Chunk) -> Tensor:
        """The maps x [B, H, queries, keys] of a chunk in memory of whole tiles."""
        maps = self.maps(chunk)
        maps[:, :, : chunk.rows, : chunk.keys] = x
        return maps

    def inputs(self, scored: Chunk, own: Chunk, *of_queries: Tensor) -> Sequence[Tensor]:
        """q, k and v of a chunk, and others that are like q, by head: [B chunks, H, rows of its maps or keys, D]. Rows after the last
        query, and keys beyond the sequence, are 0."""
        rows = [(x, at.first, up(at.rows, ROWS), at) for x, at in zip((self.q, *of_queries), (scored, own))]
        if self.window is None:
            q, *others = cut(*rows)
            return q, *(x[:, :, scored.left : scored.right] for x in (self.k, self.v)), *others
        q, k, v, *others = cut(rows[0], *((x, scored.left, scored.keys, scored) for x in (self.k, self.v)), *rows[1:])
        return q, k, v, *others

    def scores(self, queries: Tensor, k: Tensor, chunk: Chunk) -> Tensor:
        """a of a chunk, from its queries and keys by head."""
        maps = self.maps(chunk)
        self.multiply_keys(maps, queries, k, chunk, self.scale)
        if self.bias is not None:
            maps[:, :, : chunk.rows, : chunk.keys] += self.bias[:, :, chunk.first : chunk.last, chunk.left : chunk.right]
        return maps

    def bands(self, chunk: Chunk, count: int, groups: int) -> List[Tuple[slice, int]]:
        """Parts of a causal chunk's rows, each with the number of keys that some of them see, up to a whole tile. Products leave out
        the rest, which no kernel reads: in a chunk that begins at the sequence's beginning this is nearly half."""
        past = self.S - self.T
        if not self.causal or chunk.chunks > 1 or chunk.left != 0 or groups != self.H:
            return [(slice(None), chunk.keys)]
        found = []
        for row in range(0, count, BAND):
            end = min(row + BAND, count)
            keys = min(up(max(chunk.first + end + past + self.ahead, 0), COLUMNS), chunk.keys)
            found.append((slice(row, end), keys))
        return found

    def multiply_keys(self, maps: Tensor, queries: Tensor, k: Tensor, chunk: Chunk, scale: float = 1.0) -> None:
        """maps = scale queries k^T of a chunk, where a query may see a key; the rest stays as it is."""
        G = k.shape[1]
        out, x, y = folded(maps, G), folded(queries, G), k.flatten(0, 1).mT
        for rows, seen in self.bands(chunk, maps.shape[2], G):
            multiply(out[:, rows, :seen], x[:, rows], y[..., :seen], scale)

    def multiply_maps(self, out: Tensor, maps: Tensor, x: Tensor, chunk: Chunk, scale: float = 1.0) -> None:
        """out = scale maps x, for x of the keys of a chunk; maps are 0 where a query does not see a key."""
        G = x.shape[1]
        out, maps, x = folded(out, G), folded(maps, G), x.flatten(0, 1)
        for rows, seen in self.bands(chunk, out.shape[1], G):
            multiply(out[:, rows], maps[:, rows, :seen], x[:, :seen], scale)

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
            *chunk,
            maps.shape[2],
            maps.shape[3],
            self.query_blocks,
            self.key_blocks,
            self.keys_before,
            constant(self.H),
            constant(self.groups),
            constant(self.causal),
            constant(ahead),
            constant(capability(self.q.device) >= 8),
        )


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def program(width: int) -> Tuple[triton.language.constexpr, triton.language.constexpr]:
    """Of a program that copies or sums up rows of this width: so many rows, and the power of 2 that takes one."""
    WIDTH = triton.next_power_of_2(width)
    return triton.language.constexpr(min(max(4096 // WIDTH, 1), 64)), triton.language.constexpr(WIDTH)


def launch(kernel: triton.JITFunction, jobs: Sequence[kernels.Cut] | Sequence[kernels.Sum], batch: int) -> None:
    """A kernel that takes several jobs, each for so many sequences or chunks."""
    programs = max((-(-job.places // job.N.value) for job in jobs), default=0)
    kernel[(programs, max((job.H for job in jobs), default=0), len(jobs) * batch)](tuple(jobs), batch, COUNT=len(jobs))


def cut(*given: Tuple[Tensor, int, int, Chunk]) -> List[Tensor]:
    """Chunks of tensors [B, L, H, D], of each so many places from a first one on: [B chunks, H, places, D], 0 beyond the tensor."""
    jobs = []
    for x, first, size, chunk in given:
        B, L, H, D = x.shape
        out = x.new_empty((B * chunk.chunks, H, size, D))
        jobs.append(kernels.Cut(x, x.stride(), out, L, H, D, size, first, chunk.chunks, chunk.step, *program(D)))
    launch(kernels.cut_kernel, jobs, jobs[0].out.shape[0])
    return [job.out for job in jobs]


def summed(total: Tensor, first: int, size: int, chunk: Chunk, parts: Tensor, add: bool = True) -> kernels.Sum:
    """Adds parts [tiles, B chunks, H, W, size] of the chunks to a total [B, L, H, W], in which the first chunk begins at `first`.

    Without `add` their sum takes the place of what is there. What lies beyond the total is left out."""
    L, H, W = total.shape[1:]
    reached = min((chunk.chunks - 1) * chunk.step + size, L - first)
    step = max(chunk.step, 1)  # of one chunk, any
    return kernels.Sum(
        parts, parts.stride(), total, total.stride(), parts.shape[0], H, W, size, chunk.chunks, step, first, reached,
        *program(W), triton.language.constexpr(add),
    )  # fmt: skip


def of_rows(total: Tensor, chunk: Chunk, parts: Tensor, add: bool = True) -> kernels.Sum:
    """``summed`` for a total of all queries."""
    return summed(total, chunk.first, chunk.rows, chunk, parts, add)


def sum_up(*sums: Optional[kernels.Sum]) -> None:
    found = [x for x in sums if x is not None]
    if found:
        launch(kernels.sum_kernel, found, found[0].total.shape[0])


def of_type(*given: Tuple[Tensor, Tensor]) -> List[Tensor]:
    """Totals [B, L, H, W] in the type and layout of other tensors."""
    found = [like.new_empty(like.shape) for _, like in given]
    whole = Chunk(0, found[0].shape[1], 0, 0)
    sum_up(*(of_rows(out, whole, by_place(total.transpose(1, 2)), add=False) for out, (total, _) in zip(found, given)))
    return found


def by_place(x: Tensor) -> Tensor:
    """[B chunks, H, places, W] as parts of one tile."""
    return x.mT[None]


class OfKeys:
    """What is added up for keys in float32, [B, S, G, K], with room for the keys of chunks that lie beyond the sequence. In memory
    G comes before S.

    Args:
        once: whether the first chunks are the last and write all keys. Memory then has the keys of the sequence, in any type.
    """

    def __init__(self, p: KernelArguments, memory: Tensor, once: bool = False) -> None:
        self.once = once
        self.before = 0 if once else p.keys_before
        self.causal, self.past, self.ahead = p.causal, p.S - p.T, p.ahead
        self.padded = memory.transpose(1, 2)
        self.total = self.padded[:, self.before : self.before + p.S]

    @staticmethod
    def size(p: KernelArguments, G: int, K: int) -> Tuple[int, ...]:
        """Of its memory."""
        return p.B, G, p.keys_before + p.S + p.keys_after, K

    def bands(self, chunk: Chunk, of_group: int) -> List[Tuple[int, slice]]:
        """Parts of a causal chunk's keys, each with the first row that sees some of them: what ``KernelArguments.bands`` is for
        rows. The keys that all rows see are one part."""
        if not self.causal or chunk.left != 0 or of_group > 1:
            return [(0, slice(0, chunk.keys))]
        common = min(max(chunk.first + self.past, 0) // COLUMNS * COLUMNS, chunk.keys)
        bounds = [0, *range(common, chunk.keys, KEY_BAND), chunk.keys]
        return [
            (max(key - self.past - self.ahead - chunk.first, 0) // ROWS * ROWS, slice(key, end))
            for key, end in zip(bounds, bounds[1:])
            if end > key
        ]

    def of(self, chunk: Chunk) -> Tensor:
        """The keys of one chunk, to add to: [B, keys, G, K]."""
        first = self.before + chunk.left
        return self.padded[:, first : first + chunk.keys]

    def add(self, parts: Tensor, chunk: Chunk) -> kernels.Sum:
        """`parts` are [tiles, B chunks, G, K, keys]. Those of chunks that have a key in common are added one after the other."""
        return summed(self.padded, self.before + chunk.left, chunk.keys, chunk, parts, add=not self.once)


def rank(down: Optional[Tensor]) -> int:
    return 0 if down is None else down.shape[2]


def side(weights: Tensors, length: int) -> Optional[kernels.Side]:
    """None without weights."""
    if all(x is None for x in weights):
        return None
    down, up, gate = weights
    of_down, of_up, of_gate = (None if x is None else x.stride() for x in weights)
    return kernels.Side(down, up, gate, of_down, of_up, of_gate, length, triton.language.constexpr(rank(down)))


def packed(given: Sequence[Tensors], p: "KernelArguments") -> List[kernels.Mix]:
    """Mixes as the kernels read them. Weights are 0 after the last query or key, and before the first key."""
    constant = triton.language.constexpr
    sides: List[kernels.Side] = []
    places: List[kernels.Blocks] = []

    def blocks(weights: Tensors, length: int, number: int, before: int, of_block: int) -> Optional[Tensor]:
        of = side(weights, length)
        if of is None:
            return None
        out = p.q.new_empty((p.B, number, p.H, 2 * of.R.value + (of.gate is not None), of_block), dtype=torch.float32)
        sides.append(of)
        places.append(kernels.Blocks(out, number, before, constant(of_block)))
        return out

    mixes = []
    for mix in given:
        if not mix:
            mixes.append(NO_MIX)
            continue
        mixes.append(
            kernels.Mix(
                None if mix[0] is None else mix[0].view(p.groups, *mix[0].shape[-2:]),
                blocks(mix[1:4], p.T, p.query_blocks, 0, QUERIES),
                blocks(mix[4:7], p.S, p.key_blocks, p.keys_before, KEYS),
                constant(rank(mix[1])),
                constant(rank(mix[4])),
                constant(mix[3] is not None),
                constant(mix[6] is not None),
            )
        )
    if sides:
        grid = max(of.number for of in places), p.B, len(sides)
        kernels.pack_kernel[grid](tuple(sides), tuple(places), COUNT=len(sides), H=p.H, HEADS=triton.next_power_of_2(p.H))
    return mixes


def unpacked(given: Sequence[Tensors], totals: Sequence["MixGradients"]) -> List[List[Optional[Tensor]]]:
    """The gradients of mixes, in the order and layout of the operator's lists."""
    sides: List[kernels.Side] = []
    places: List[Tuple[Tensor, Tuple[int, ...]]] = []
    found: List[List[Optional[Tensor]]] = []
    for mix, total in zip(given, totals):
        found.append([])
        if mix:
            # M has no group where there is one.
            found[-1].append(None if total.static is None else total.static.reshape(mix[0].shape))  # type: ignore[union-attr]
        of_sides = total.of_queries, None if total.of_keys is None else total.of_keys.total
        for weights, of_side in zip((mix[1:4], mix[4:7]), of_sides):
            gradients = [None if x is None else x.new_empty(x.shape) for x in weights]
            found[-1] += gradients
            if of_side is not None and of_side.numel() > 0:
                of = side(gradients, of_side.shape[1])
                assert of is not None
                sides.append(of)
                places.append((of_side, of_side.stride()))
    if sides:
        B, _, H, _ = places[0][0].shape
        grid = max(-(-of.L // 64) for of in sides), B, len(sides)
        kernels.unpack_kernel[grid](tuple(places), tuple(sides), COUNT=len(sides), H=H, HEADS=triton.next_power_of_2(H), SIZE=64)
    return found


def folded(x: Tensor, G: int) -> Tensor:
    """[B, H, M, K] as [B G, n M, K], without a copy: a group has n heads, which share its keys."""
    B, H, M, K = x.shape
    return x.flatten(0, 1) if G == H else x.view(B * G, H // G * M, K)


def multiply(out: Tensor, x: Tensor, y: Tensor, scale: float) -> None:
    """out = scale x y."""
    torch.baddbmm(out, x, y, beta=0, alpha=scale, out=out)


def add_transposed(total: OfKeys, chunk: Chunk, x: Tensor, y: Tensor, scale: float = 1.0) -> Optional[kernels.Sum]:
    """total [B, S, G, K] += scale sum over the group's heads of x^T y for a chunk: x [B chunks, H, M, columns] and
    y [B chunks, H, M, K]. Chunks of a window still have to be summed up."""
    G = total.total.shape[2]
    of_group = x.shape[1] // G
    x, y = folded(x, G)[..., : chunk.keys].mT, folded(y, G)
    if chunk.chunks == 1:
        place = total.of(chunk).transpose(1, 2).flatten(0, 1)  # flattened without a copy: it is added to
        for first, keys in total.bands(chunk, of_group):
            add_product(place[:, keys], x[:, keys, first:], y[:, first:], scale, 1)
        return None
    part = y.new_empty((y.shape[0], chunk.keys, y.shape[2]), dtype=torch.float32)
    add_product(part, x, y, scale, 0)
    return total.add(by_place(part.unflatten(0, (-1, G))), chunk)


def add_product(total: Tensor, x: Tensor, y: Tensor, scale: float, beta: int) -> None:
    """total, in float32, = beta total + scale x y; with a beta of 0 it may be fresh memory."""
    if x.dtype == total.dtype:
        torch.baddbmm(total, x, y, beta=beta, alpha=scale, out=total)
    elif x.is_cuda:
        torch.baddbmm(total, x, y, out_dtype=total.dtype, beta=beta, alpha=scale, out=total)
    else:
        product = torch.bmm(x, y).to(total.dtype).mul_(scale)
        total.copy_(product if beta == 0 else total + product)


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


def run(kernel: triton.JITFunction, p: KernelArguments, chunk: Chunk, of: Tile, *arguments: object, **constants: object) -> None:
    grid = (-(-chunk.keys // of.N), up(chunk.rows, ROWS) // of.M, p.B * chunk.chunks * p.groups)
    options = {"num_warps": of.warps, "num_stages": of.stages, "enable_fp_fusion": True}
    kernel[grid](*arguments, **constants, M=of.M, N=of.N, **options)


def mix_maps(
    p: KernelArguments, chunk: Chunk, lse: Tensor, mix: kernels.Mix, maps: Tensor, out: Tensor, to: str, exp: bool = False
) -> Optional[Tensor]:
    """Runs ``mix`` in CUDA or ``mix_kernel`` in Triton; for scores, log sum_s exp y of each tile: [tiles, B chunks, H, 1, rows]."""
    if mix.static is not None and exp:
        # M's product needs the weights themselves.
        mix_maps(p, chunk, lse, NO_MIX, maps, maps, "composed", exp=True)
        exp = False
    call = p.call(chunk, lse, maps)
    plan = mixes.plan(call, mix, maps)
    if plan is not None:
        sums = row_shares(chunk, plan.columns, maps) if to == "scores" else None
        mixes.run("mix", plan, {"TO": mixes.TO[to], "EXP": int(exp)}, call, mix, maps, chunk.keys, out, sums)
        return sums
    of = tile(mix, False, p.roomy)
    sums = row_shares(chunk, of.N, maps) if to == "scores" else None
    run(kernels.mix_kernel, p, chunk, of, call, mix, maps, static_product(mix, maps), out, sums, EXP=exp, TO=to)
    return sums


def keep_lse(lse: Tensor, of_tiles: Tensor, own: Chunk, halo: int) -> None:
    """L of the queries of `own`, from the sums of tiles, which also have the `halo` queries before."""
    tiles, chunks, H, _, rows = of_tiles.shape
    grid = (-(-own.rows // 128), H, chunks)
    kernels.lse_kernel[grid](
        of_tiles, lse, lse.shape[2], own.chunks, own.step, rows, own.last, own.first - halo, halo, tiles, M=128
    )  # fmt: skip


def hide(p: KernelArguments, chunk: Chunk, lse: Tensor, maps: Tensor, ahead: int = 0) -> None:
    """Sets to 0, in place, what a query does not see; it sees `ahead` keys after its own."""
    call = p.call(chunk, lse, maps, ahead)
    run(kernels.mix_kernel, p, chunk, tile(NO_MIX, False, p.roomy), call, NO_MIX, maps, None, maps, None, EXP=False, TO="composed")


def row_shares(chunk: Chunk, keys: int, maps: Tensor) -> Tensor:
    """Memory for a number of each tile of so many keys, head and query."""
    tiles = -(-chunk.keys // keys)
    return maps.new_empty((tiles, *maps.shape[:2], 1, maps.shape[2]), dtype=torch.float32)


def forward(*arguments: object) -> List[Tensor]:
    """The output [B, T, H, E] and L [B, H, T]; the schema of ``headloom::composed_attention_fused``."""
    p = KernelArguments(*arguments[:-1])  # type: ignore[arg-type]  # without `training`
    out = p.q.new_empty((p.B, p.T, p.H, p.E))
    lse = p.q.new_empty((p.B, p.H, p.T), dtype=torch.float32)
    if p.q.numel() == 0 or p.S == 0:
        return [out.zero_(), lse.fill_(float("inf"))]
    for own, weighed, scored in p.chunks():
        rows = own.queries
        if scored.keys == 0:
            out[:, rows].zero_()
            lse[:, :, rows].fill_(float("inf"))
            continue
        queries, k, v = p.inputs(scored, own)
        maps = convolved_scores(p, lse, p.scores(queries, k, scored), scored, weighed)
        found = mix_maps(p, weighed, lse, p.pre, maps, maps, "scores")
        assert found is not None
        keep_lse(lse, found, own, own.first - weighed.first)
        if p.post_conv is not None:
            mix_maps(p, weighed, lse, NO_MIX, maps, maps, "composed", exp=True)
            maps = p.maps_of(p.post_conv.apply(maps, weighed, own), own)
        mix_maps(p, own, lse, p.post, maps, maps, "composed", exp=p.post_conv is None)
        part = p.q.new_empty((*maps.shape[:3], p.E))
        p.multiply_maps(part, maps, v, own)
        sum_up(of_rows(out, own, by_place(part), add=False))
    return [out, lse]


def convolved_scores(p: KernelArguments, lse: Tensor, maps: Tensor, scored: Chunk, weighed: Chunk) -> Tensor:
    """What enters the mix before softmax. With a convolution, `maps` are hidden in place first."""
    if p.pre_conv is None:
        return maps
    hide(p, scored, lse, maps, p.ahead)
    return p.maps_of(p.pre_conv.apply(maps, scored, weighed), weighed)


class MixGradients:
    """The gradients of a mix, as the chunks' parts are added."""

    def __init__(self, mix: kernels.Mix, p: KernelArguments, memory: Iterator[Tensor]) -> None:
        self.mix = mix
        self.static = None if mix.static is None else torch.zeros_like(mix.static, dtype=torch.float32)
        self.of_queries = None if mix.of_queries is None else next(memory)
        self.of_keys = None if mix.of_keys is None else OfKeys(p, next(memory))

    @staticmethod
    def sizes(mix: kernels.Mix, p: KernelArguments) -> List[Tuple[int, ...]]:
        """Of its memory."""
        found: List[Tuple[int, ...]] = []
        if mix.of_queries is not None:
            found.append((p.B, p.T, *mix.of_queries.shape[2:4]))
        if mix.of_keys is not None:
            found.append(OfKeys.size(p, *mix.of_keys.shape[2:4]))
        return found

    def shares(self, chunk: Chunk, M: int, N: int, maps: Tensor) -> kernels.Shares:
        """Memory for the shares of tiles of M queries and N keys."""
        chunks, _, rows, columns = maps.shape
        tiles = -(-chunk.keys // N), rows // M
        found: List[Optional[Tensor]] = []
        for packed, count, size in zip((self.mix.of_queries, self.mix.of_keys), tiles, (rows, columns)):
            found.append(None if packed is None else packed.new_empty((count, chunks, *packed.shape[2:4], size)))
        return kernels.Shares(*found)

    def add_static(self, x: Tensor, dy: Tensor) -> None:
        if self.static is not None:
            self.static += (joined(x, self.mix) @ joined(dy, self.mix).mT).sum(0)

    def add(self, shares: kernels.Shares, chunk: Chunk) -> List[kernels.Sum]:
        found = []
        if self.of_queries is not None:
            found.append(of_rows(self.of_queries, chunk, shares.of_queries))
        if self.of_keys is not None:
            found.append(self.of_keys.add(shares.of_keys, chunk))
        return found


def mix_backward(
    p: KernelArguments,
    chunk: Chunk,
    lse: Tensor,
    total: MixGradients,
    maps: Tensor,
    grads: Tensor,
    out: Optional[Tensor] = None,
    weights: Optional[Tensor] = None,
    delta: Optional[Tensor] = None,
) -> Tuple[List[kernels.Sum], Optional[Tensor]]:
    """Runs ``mix_backward`` in CUDA or ``mix_backward_kernel`` in Triton.

    Returns:
        What has to be summed up for the gradients of the mix, and with `out` each tile's sum_s x dx: [tiles, B chunks, H, 1, rows].
    """
    mix = total.mix
    if mix.static is not None and weights is not None:
        # M's products need dy itself.
        rows = slice(0, chunk.rows)
        (of_row,) = cut((delta.transpose(1, 2)[..., None], chunk.first, chunk.rows, chunk))  # type: ignore[union-attr]
        grads[:, :, rows].sub_(of_row).mul_(weights[:, :, rows])
        weights = None
    total.add_static(maps, grads)
    call = p.call(chunk, lse, maps)
    plan = mixes.plan(call, mix, maps, after=out is not None)
    if plan is not None:
        shares = total.shares(chunk, mixes.ROWS, plan.columns, maps)
        sums = None if out is None else row_shares(chunk, plan.columns, maps)
        others = out, weights, delta, grads, sums, *shares
        mixes.run("mix_backward", plan, {"AFTER": int(out is not None)}, call, mix, maps, chunk.keys, *others)
        return total.add(shares, chunk), sums
    of = tile(mix, True, p.roomy)
    shares = total.shares(chunk, of.M, of.N, maps)
    sums = None if out is None else row_shares(chunk, of.N, maps)
    run(
        kernels.mix_backward_kernel,
        p,
        chunk,
        of,
        call,
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
    return total.add(shares, chunk), sums


def all_keys_at_once(p: KernelArguments, chunks: Sequence[Parts]) -> bool:
    """Whether all chunks of a window are taken together, and have all keys."""
    if len(chunks) != 1 or chunks[0].own.chunks == 1:
        return False
    own = chunks[0].own
    return own.left <= 0 and own.right + (own.chunks - 1) * own.step >= p.S


def zeros(p: KernelArguments, sizes: Sequence[Tuple[int, ...]]) -> List[Tensor]:
    """Memory in float32, written by one kernel. Parts begin at addresses that products read well."""
    counts = [up(math.prod(size), 64) for size in sizes]
    parts = p.q.new_zeros(sum(counts), dtype=torch.float32).split(counts)
    return [part[: math.prod(size)].view(size) for part, size in zip(parts, sizes)]


def backward(grads: Tensors, *arguments: object) -> List[Tensor]:
    """The gradient of each differentiable tensor that is there; the schema of ``headloom::composed_attention_backward``."""
    *call, kept, wanted = arguments
    p = KernelArguments(*call)  # type: ignore[arg-type]
    lse: Tensor = kept[0]  # type: ignore[index]
    bias: Optional[Tensor] = call[11]  # type: ignore[assignment]
    chunks = list(p.chunks()) if p.q.numel() > 0 and p.S > 0 else []
    once = all_keys_at_once(p, chunks)
    sizes = [] if once else [OfKeys.size(p, p.Gk, p.D), OfKeys.size(p, p.Gv, p.E)]
    memory = iter(zeros(p, [*sizes, *MixGradients.sizes(p.pre, p), *MixGradients.sizes(p.post, p)]))
    k: Tensor = call[1]  # type: ignore[assignment]
    v: Tensor = call[2]  # type: ignore[assignment]
    dk, dv = (OfKeys(p, x.new_empty(x.shape).transpose(1, 2) if once else next(memory), once) for x in (k, v))
    pre, post = (MixGradients(mix, p, memory) for mix in (p.pre, p.post))
    delta = torch.empty_like(lse)
    # Each query's is written once, but those of the halo of a convolution are added to.
    halo = p.pre_conv is not None or p.post_conv is not None
    dq = p.q.new_zeros(p.q.shape) if halo or p.S == 0 else p.q.new_empty(p.q.shape)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    grad_out = grads[0]
    assert grad_out is not None
    for own, weighed, scored in chunks:
        if scored.keys == 0:
            dq[:, own.queries].zero_()
            continue
        queries, keys, values, of_out = p.inputs(scored, own, grad_out)
        raw = p.scores(queries, keys, scored)
        scores = convolved_scores(p, lse, raw, scored, weighed)
        weights = p.maps(weighed)
        mix_maps(p, weighed, lse, p.pre, scores, weights, "weights")
        before = weights  # what enters the mix after softmax
        if p.post_conv is not None:
            before = p.maps_of(p.post_conv.apply(weights, weighed, own), own)
            hide(p, own, lse, before)
        grad_maps = p.maps(own)
        p.multiply_keys(grad_maps, of_out, values, own)
        composed = p.maps(own)
        of_weights, found = mix_backward(p, own, lse, post, before, grad_maps, out=composed)
        of_values = add_transposed(dv, own, composed, of_out)
        if p.post_conv is not None:
            grad_maps = p.maps_of(p.post_conv.backward(weights, grad_maps, weighed, own), weighed)
            hide(p, weighed, lse, grad_maps)
            # Rows of the halo have a part of their gradient here and the rest in the chunk before. All that follows is linear
            # in it.
            found = by_place((weights.float() * grad_maps.float())[:, :, : weighed.rows, : weighed.keys].sum(-1, keepdim=True))
        assert found is not None
        of_delta = of_rows(delta.transpose(1, 2)[..., None], weighed, found, add=False)
        sum_up(of_delta, *of_weights, of_values)
        of_weights, _ = mix_backward(p, weighed, lse, pre, scores, grad_maps, weights=weights, delta=delta)
        if p.pre_conv is not None:
            grad_maps = p.maps_of(p.pre_conv.backward(raw, grad_maps, scored, weighed), scored)
            hide(p, scored, lse, grad_maps, p.ahead)
        part = torch.empty_like(queries)
        p.multiply_maps(part, grad_maps, keys, own, p.scale)
        of_keys = add_transposed(dk, scored, grad_maps, queries, p.scale)
        sum_up(*of_weights, of_keys, of_rows(dq, scored, by_place(part), add=halo))
        if dbias is not None:
            add_bias_gradient(dbias, grad_maps[:, :, : scored.rows, : own.keys], scored)
    places: List[Tuple[Optional[Tensor], Optional[Tensor]]] = [
        (p.q, dq),
        *zip((k, v), (dk.total, dv.total) if once else of_type((dk.total, k), (dv.total, v))),
        *mix_gradients(call[3:5], (pre, post)),  # type: ignore[arg-type]
        convolution_gradient(call[7], p.pre_conv),  # type: ignore[arg-type]
        convolution_gradient(call[8], p.post_conv),  # type: ignore[arg-type]
        (bias, dbias),
    ]
    return wanted_gradients(places, wanted)  # type: ignore[arg-type]


def mix_gradients(given: Sequence[Tensors], totals: Sequence[MixGradients]) -> List[Tuple[Optional[Tensor], Optional[Tensor]]]:
    """The seven tensors of each mix beside their gradients."""
    places: List[Tuple[Optional[Tensor], Optional[Tensor]]] = []
    for mix, found in zip(given, unpacked(given, totals)):
        places += zip(mix, found) if mix else [(None, None)] * 7
    return places


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
