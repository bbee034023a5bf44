"""gated_norm on NVIDIA GPUs, by Triton: a norm of each row's values, times a swish gate (``src/ops/gated_norm/op.h``).

``forward`` and ``backward`` have the schemas of ``headloom::gated_norm_fused`` and ``_backward``.
"""

from __future__ import annotations

from typing import List, Optional, Sequence

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from headloom.gpu.gradients import wanted_gradients

# Places of a program's tile, which its threads hold in registers.
PLACES = 4096


@triton.jit  # type: ignore[untyped-decorator]
def kernel(
    x, gate, eps, grad, y, grad_x, grad_gate, rows, width, BACKWARD: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):  # type: ignore[no-untyped-def]
    """M rows. Forward: y. Backward: grad_x and grad_gate, from grad."""
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    column = tl.arange(0, N)
    there = (row < rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    value = tl.load(x + place, there, 0).to(tl.float32)
    swish = tl.load(gate + place, there, 0).to(tl.float32)
    sigmoid = tl.sigmoid(swish)
    mean = tl.sum(value * value, 1) / width
    scale = tl.rsqrt(mean + tl.load(eps + row, row < rows, 1))[:, None]
    normed = value * scale
    if BACKWARD:
        dy = tl.load(grad + place, there, 0).to(tl.float32)
        dnormed = dy * swish * sigmoid
        along = tl.sum(dnormed * normed, 1)[:, None] / width
        dx = scale * (dnormed - normed * along)
        dgate = dy * normed * sigmoid * (1 + swish * (1 - sigmoid))
        tl.store(grad_x + place, dx.to(grad_x.dtype.element_ty), there)
        tl.store(grad_gate + place, dgate.to(grad_gate.dtype.element_ty), there)
    else:
        tl.store(y + place, (swish * sigmoid * normed).to(y.dtype.element_ty), there)


def run(x: Tensor, gate: Tensor, eps: Tensor, *, grad: Optional[Tensor] = None, out: Sequence[Tensor]) -> None:
    """Into `out`: y, or with `grad` the gradients of x and gate."""
    if x.numel() == 0:
        return
    width = x.shape[-1]
    N = triton.next_power_of_2(width)
    M = max(1, PLACES // N)
    places = [None, *out] if grad is not None else [*out, None, None]
    rows = x.numel() // width
    # A longer row has as many places a thread.
    warps = max(4, 4 * N // PLACES)
    kernel[(-(-rows // M),)](
        x.contiguous(),
        gate.contiguous(),
        eps.contiguous(),
        grad if grad is None else grad.contiguous(),
        *places,
        rows,
        width,
        BACKWARD=grad is not None,
        M=M,
        N=N,
        num_warps=warps,
    )


def forward(x: Tensor, gate: Tensor, eps: Tensor, training: bool) -> List[Tensor]:
    y = x.new_empty(x.shape)
    run(x, gate, eps, out=[y])
    return [y]


def backward(
    grads: Sequence[Optional[Tensor]], x: Tensor, gate: Tensor, eps: Tensor, kept: Sequence[Tensor], wanted: int
) -> List[Tensor]:
    out = [x.new_empty(x.shape), x.new_empty(x.shape)]
    run(x, gate, eps, grad=grads[0], out=out)
    return wanted_gradients(zip((x, gate), out), wanted)
