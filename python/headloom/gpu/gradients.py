"""What a ``headloom::X_backward`` returns."""

from __future__ import annotations

from typing import Iterable, List, Optional, Tuple

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
            out.append(gradient.to(tensor.dtype).contiguous() if wanted >> bit & 1 else tensor.new_empty(0))
    return out
