"""rotary on NVIDIA GPUs, by Triton: pairs of a head's dimensions, turned by their position's angles
(``src/ops/positionwise/op.h``).

``forward`` and ``backward`` have the schemas of ``headloom::rotary_fused`` and ``_backward``.
"""

from __future__ import annotations

from typing import List, Optional, Sequence

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from headloom.gpu.gradients import wanted_gradients

# Places of a program's tile, which its threads hold in registers.
PLACES = 2048


@triton.jit  # type: ignore[untyped-decorator]
def kernel(
    x, cos, sin, y, of_batch, of_position, of_head, table_of_batch, tiles, rows, heads, width, pairs,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """M heads of one sequence. Each place reads the other one of its pair too. The backward turns the other way."""
    b = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * M + tl.arange(0, M)
    column = tl.arange(0, N)
    position, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    turns = column < 2 * pairs
    if INTERLEAVED:
        pair, second = column // 2, column % 2 == 1
        other = tl.where(second, column - 1, column + 1)
    else:
        second = column >= pairs
        pair = tl.where(second, column - pairs, column)
        other = tl.where(second, pair, column + pairs)
    there = (row < rows)[:, None] & (column < width)[None, :]
    turned = there & turns[None, :]
    source = x + (b * of_batch + position * of_position + head * of_head)[:, None]
    angle = (b * table_of_batch + position * pairs)[:, None] + pair[None, :]
    value = tl.load(source + column[None, :], there, 0).to(tl.float32)
    partner = tl.load(source + other[None, :], turned, 0).to(tl.float32)
    c = tl.load(cos + angle, turned, 0)
    s = tl.load(sin + angle, turned, 0)
    if BACKWARD:
        s = -s
    out = value * c + partner * tl.where(second[None, :], s, -s)
    out = tl.where(turns[None, :], out, value)
    place = (b * rows + row)[:, None] * width + column[None, :]
    tl.store(y + place, out.to(y.dtype.element_ty), there)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, back: bool) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel() == 0:
        return y
    B, T, H, width = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    pairs = cos.shape[-1]
    N = triton.next_power_of_2(width)
    M = max(1, PLACES // N)
    tiles = -(-T * H // M)
    kernel[(B * tiles,)](
        x, cos.contiguous(), sin.contiguous(), y, *x.stride()[:3], T * pairs if cos.dim() == 3 else 0,
        tiles, T * H, H, width, pairs, INTERLEAVED=interleaved, BACKWARD=back, M=M, N=N, num_warps=4,
    )  # fmt: skip
    return y


def forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, training: bool) -> List[Tensor]:
    return [turned(x, cos, sin, interleaved, back=False)]


def backward(
    grads: Sequence[Optional[Tensor]], x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, kept: Sequence[Tensor], wanted: int
) -> List[Tensor]:
    assert grads[0] is not None
    return wanted_gradients([(x, turned(grads[0], cos, sin, interleaved, back=True))], wanted)
