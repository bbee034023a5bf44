"""dynamic_weights on NVIDIA GPUs: matrix products by PyTorch (cuBLAS), and by Triton what follows them
(``src/ops/dynamic_weights/op.h``).

The products have the weights of one side and group together, [S g, B L, 2 R n], and the result has those of one position,
[B, L, S, 2 R, g n]. One kernel takes them from there to here and norms the first R of the 2 R rows.

``forward`` and ``backward`` have the schemas of ``headloom::dynamic_weights_fused`` and ``_backward``.
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


@triton.jit  # type: ignore[untyped-decorator]
def kernel(
    product, weights, grad, rows, groups, heads,
    BACKWARD: tl.constexpr, RANK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """M rows of heads, of one side and group. Forward: weights, from product. Backward: grad, the gradient of product, from
    that of weights."""
    part = tl.program_id(1)
    side, group = part // groups, part % groups
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.arange(0, N)
    there = (row < rows * 2 * RANK)[:, None] & (column < heads)[None, :]
    position, r = row // (2 * RANK), row % (2 * RANK)
    inner = (part.to(tl.int64) * rows * (2 * RANK) + row)[:, None] * heads + column[None, :]
    outer = ((position.to(tl.int64) * (tl.num_programs(1) // groups) + side) * (2 * RANK) + r) * groups + group
    outer = outer[:, None] * heads + column[None, :]
    normed = (r < RANK)[:, None]
    value = tl.load(product + inner, there, 0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / heads + 1e-6)[:, None]
    if BACKWARD:
        dy = tl.load(weights + outer, there, 0).to(tl.float32)
        along = tl.sum(dy * value * scale, 1)[:, None] / heads
        dx = tl.where(normed, scale * (dy - value * scale * along), dy)
        tl.store(grad + inner, dx.to(grad.dtype.element_ty), there)
    else:
        y = tl.where(normed, value * scale, value)
        tl.store(weights + outer, y.to(weights.dtype.element_ty), there)


def run(product: Tensor, weights: Tensor, groups: int, *, grad: Optional[Tensor] = None) -> None:
    """Into `weights`, or with `grad` from the gradient of the weights into it."""
    if product.numel() == 0:
        return
    parts, rows, _ = product.shape
    rank, heads = weights.shape[3] // 2, weights.shape[4] // groups
    N = triton.next_power_of_2(heads)
    M = max(1, PLACES // N)
    kernel[(-(-rows * 2 * rank // M), parts)](
        product, weights, grad, rows, groups, heads, BACKWARD=grad is not None, RANK=rank, M=M, N=N, num_warps=4
    )


def forward(hidden: Tensor, w2: Tensor, rank: int, training: bool) -> List[Tensor]:
    B, L, _ = hidden.shape
    S, groups, inner, weights = w2.shape
    activated = torch.nn.functional.gelu(hidden).reshape(B * L, S * groups, inner)
    product = torch.bmm(activated.transpose(0, 1), w2.flatten(0, 1))
    out = hidden.new_empty((B, L, S, 2 * rank, groups * (weights // (2 * rank))))
    run(product, out, groups)
    return [out, product, activated.contiguous()] if training else [out]


def backward(
    grads: Sequence[Optional[Tensor]], hidden: Tensor, w2: Tensor, rank: int, kept: Sequence[Tensor], wanted: int
) -> List[Tensor]:
    product, activated = kept
    assert grads[0] is not None
    grad = product.new_empty(product.shape)
    run(product, grads[0].contiguous(), w2.shape[1], grad=grad)
    grad_hidden = hidden.new_empty(hidden.shape)
    grad_w2 = None
    if wanted & 1:
        of_activated = torch.bmm(grad, w2.flatten(0, 1).transpose(1, 2)).transpose(0, 1)
        torch.ops.aten.gelu_backward.grad_input(
            of_activated, hidden.reshape(activated.shape), grad_input=grad_hidden.view(activated.shape)
        )
    if wanted & 2:
        grad_w2 = torch.bmm(activated.permute(1, 2, 0), grad).view(w2.shape)
    return wanted_gradients(((hidden, grad_hidden), (w2, w2 if grad_w2 is None else grad_w2)), wanted)
