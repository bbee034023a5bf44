"""swiglu on NVIDIA GPUs, by Triton: SiLU of a row's first half, times the second (``src/ops/positionwise/op.h``).

``forward`` and ``backward`` have the schemas of ``headloom::swiglu_fused`` and ``_backward``.
"""

from __future__ import annotations

from typing import List, Optional, Sequence

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from headloom.gpu.gradients import wanted_gradients

# Places of a program's tile, which its threads hold in registers, and the most of a row.
PLACES, COLUMNS = 2048, 1024


@triton.jit  # type: ignore[untyped-decorator]
def kernel(
    x, y, grad_x, rows, width, BACKWARD: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):  # type: ignore[no-untyped-def]
    """M rows. Forward: y. Backward: grad_x, from the gradient of y in its place."""
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    column = tl.program_id(1) * N + tl.arange(0, N)
    there = (row < rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    of_gate = place + row[:, None] * width
    of_value = of_gate + width
    gate = tl.load(x + of_gate, there, 0).to(tl.float32)
    value = tl.load(x + of_value, there, 0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    if BACKWARD:
        dy = tl.load(y + place, there, 0).to(tl.float32)
        dgate = dy * value * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(grad_x + of_gate, dgate.to(grad_x.dtype.element_ty), there)
        tl.store(grad_x + of_value, (dy * gate * sigmoid).to(grad_x.dtype.element_ty), there)
    else:
        tl.store(y + place, (gate * sigmoid * value).to(y.dtype.element_ty), there)


def run(x: Tensor, y: Tensor, *, grad_x: Optional[Tensor] = None) -> None:
    """Into y, or with `grad_x` from y's gradient into it."""
    if y.numel() == 0:
        return
    width = y.shape[-1]
    rows = y.numel() // width
    N = min(triton.next_power_of_2(width), COLUMNS)
    M = PLACES // N
    kernel[(-(-rows // M), -(-width // N))](
        x.contiguous(), y, grad_x, rows, width, BACKWARD=grad_x is not None, M=M, N=N, num_warps=4
    )


def forward(x: Tensor, training: bool) -> List[Tensor]:
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    run(x, y)
    return [y]


def backward(grads: Sequence[Optional[Tensor]], x: Tensor, kept: Sequence[Tensor], wanted: int) -> List[Tensor]:
    assert grads[0] is not None
    grad_x = x.new_empty(x.shape)
    run(x, grads[0].contiguous(), grad_x=grad_x)
    return wanted_gradients([(x, grad_x)], wanted)
