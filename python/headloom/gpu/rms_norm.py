"""rms_norm on NVIDIA GPUs, by Triton: a norm of each row's values, scaled (``src/ops/positionwise/op.h``).

``forward`` and ``backward`` have the schemas of ``headloom::rms_norm_fused`` and ``_backward``.
"""

from __future__ import annotations

from typing import List, Optional, Sequence

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from headloom.gpu.gradients import wanted_gradients

# Places of a program's tile, which its threads hold in registers.
PLACES = 2048
# Programs of a backward at most. Each sums up the scale's gradient over its own rows, and their number must not depend on the
# card, so that the result does not.
SHARES = 512


@triton.jit  # type: ignore[untyped-decorator]
def kernel(
    x, scale, y, grad_x, shares, of_outer, of_inner, inner, rows, width, eps,
    BACKWARD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """M rows at a time, of x [rows / inner, inner, width]. Forward: y. Backward: grad_x, from the gradient of y in its place,
    and the program's share of the scale's gradient: shares [programs, width]."""
    column = tl.arange(0, N)
    if scale is None:
        factor = tl.full([N], 1, tl.float32)
    else:
        factor = tl.load(scale + column, column < width, 0).to(tl.float32)
    total = tl.zeros([M, N], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, M), tl.num_programs(0)):
        row = tile * M + tl.arange(0, M)
        there = (row < rows)[:, None] & (column < width)[None, :]
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        source = x + ((row // inner).to(tl.int64) * of_outer + (row % inner).to(tl.int64) * of_inner)[:, None]
        value = tl.load(source + column[None, :], there, 0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        # Rows that are not there have an infinite one where eps is 0.
        normed = tl.where(there, value * inverse, 0)
        if BACKWARD:
            dy = tl.load(y + place, there, 0).to(tl.float32)
            dnormed = dy * factor[None, :]
            along = tl.sum(dnormed * normed, 1)[:, None] / width
            dx = inverse * (dnormed - normed * along)
            tl.store(grad_x + place, dx.to(grad_x.dtype.element_ty), there)
            if shares is not None:
                total += dy * normed
        else:
            tl.store(y + place, (normed * factor[None, :]).to(y.dtype.element_ty), there)
    if shares is not None:
        share = shares + tl.program_id(0) * width + column
        tl.store(share, tl.sum(total, 0), column < width)


def run(
    x: Tensor, scale: Optional[Tensor], eps: float, y: Tensor, *, grad_x: Optional[Tensor] = None, sums: bool = False
) -> Optional[Tensor]:
    """Into y, or with `grad_x` from y's gradient into it. With `sums` also the scale's gradient, in float32."""
    width = x.shape[-1]
    rows = x.numel() // width
    if rows == 0:
        return x.new_zeros((width,), dtype=torch.float32) if sums else None
    # Heads of queries are a part of the rows of a product, which is read as it lies.
    x = x.flatten(0, -3) if x.dim() > 2 else x.reshape(1, rows, width)
    if x.stride(2) != 1:
        x = x.contiguous()
    N = triton.next_power_of_2(width)
    M = max(1, PLACES // N)
    tiles = -(-rows // M)
    programs = tiles if grad_x is None else min(tiles, SHARES)
    shares = x.new_empty((programs, width), dtype=torch.float32) if sums else None
    kernel[(programs,)](
        x, None if scale is None else scale.contiguous(), y, grad_x, shares, x.stride(0), x.stride(1), x.shape[1], rows, width, eps,
        BACKWARD=grad_x is not None, M=M, N=N, num_warps=max(4, 4 * N // PLACES),
    )  # fmt: skip
    return None if shares is None else shares.sum(0)


def forward(x: Tensor, scale: Optional[Tensor], eps: float, training: bool) -> List[Tensor]:
    y = x.new_empty(x.shape)
    run(x, scale, eps, y)
    return [y]


def backward(
    grads: Sequence[Optional[Tensor]], x: Tensor, scale: Optional[Tensor], eps: float, kept: Sequence[Tensor], wanted: int
) -> List[Tensor]:
    assert grads[0] is not None
    grad_x = x.new_empty(x.shape)
    sums = scale is not None and wanted & 2 != 0
    grad_scale = run(x, scale, eps, grads[0].contiguous(), grad_x=grad_x, sums=sums)
    return wanted_gradients(((x, grad_x), (scale, scale if grad_scale is None else grad_scale)), wanted)
