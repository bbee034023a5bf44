"""Kernels for NVIDIA GPUs, for which Triton must be installed: ``pip install 'headloom[gpu]'``.

Importing this package puts them behind the CUDA dispatch key of Headloom's operators. Triton is loaded by the first call.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import List, Optional

import torch
from torch import Tensor


def _forward(*arguments: object) -> List[Tensor]:
    from headloom.gpu import composed_attention

    return composed_attention.forward(*arguments)


def _backward(grads: List[Optional[Tensor]], *arguments: object) -> List[Tensor]:
    from headloom.gpu import composed_attention

    return composed_attention.backward(grads, *arguments)


if find_spec("triton") is not None:
    _library = torch.library.Library("headloom", "IMPL", "CUDA")
    _library.impl("composed_attention_fused", _forward)
    _library.impl("composed_attention_backward", _backward)
