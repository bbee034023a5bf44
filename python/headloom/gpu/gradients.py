"""What a ``headloom::X_backward`` returns."""

from __future__ import annotations

from typing import Iterable, List, Optional, Tuple

import torch
from torch import Tensor


def wanted_gradients(places: Iterable[Tuple[Optional[Tensor], Optional[Tensor]]], wanted: int) -> List[Tensor]:
    """The gradient of each differentiable tensor that is there, in its type; empty where it is not wanted.

    Args:
        places: the operator's differentiable tensors in their order, None where absent, each with its gradient.
        wanted: a bit for each of them.
    """
    out = []
    for bit, (tensor, gradient) in enumerate(places):
        if tensor is not None:
            assert gradient is not None
            # What changes its type has its new layout by the same kernel.
            found = gradient.to(tensor.dtype, memory_format=torch.contiguous_format) if wanted >> bit & 1 else tensor.new_empty(0)
            out.append(found.contiguous())
    return out
