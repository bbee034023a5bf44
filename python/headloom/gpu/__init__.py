"""Kernels for NVIDIA GPUs: in Triton (``pip install triton``) and in CUDA, and those of flash-linear-attention and mamba-ssm where these
packages are installed.

Importing this package registers them under the CUDA dispatch key of Headloom's operators. They are loaded by the first call.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Callable, List, Tuple

import torch
from torch import Tensor

# Which package has an operator's kernels.
PACKAGES = {
    "composed_attention": "triton",
    "aft": "triton",
    "gated_norm": "triton",
    "dynamic_weights": "triton",
    "rms_norm": "triton",
    "rotary": "triton",
    "swiglu": "triton",
    "retention": "fla",
    "gated_linear_attention": "fla",
    "wkv": "fla",
    "causal_conv1d": "fla",
    "selective_scan": "mamba_ssm",
}


def _kernels(name: str) -> Tuple[Callable[..., List[Tensor]], Callable[..., List[Tensor]]]:
    """Forward and backward."""
    if PACKAGES[name] == "triton":
        module = import_module("headloom.gpu." + name)
        return module.forward, module.backward
    from headloom.gpu import libraries

    return partial(libraries.forward, name), partial(libraries.backward, name)


def register(library: torch.library.Library, name: str, **options: bool) -> None:
    """Registers an operator's kernels under the dispatch key of a library."""

    def call(which: int, *arguments: object) -> List[Tensor]:
        # Kernels start on PyTorch's current GPU, which may be another than that of the tensors.
        with torch.cuda.device_of(next(x for x in arguments if isinstance(x, Tensor))):
            return _kernels(name)[which](*arguments)

    library.impl(name + "_fused", partial(call, 0), **options)
    library.impl(name + "_backward", partial(call, 1), **options)


def usable(package: str) -> bool:
    """An older flash-linear-attention has not all of the functions that ``libraries`` calls. On AMD's GPUs, which PyTorch's ROCm
    build calls "cuda" too, nothing was tried, and Triton's kernels have instructions of NVIDIA's."""
    if torch.version.hip is not None:
        return False
    if package == "fla":
        try:
            return tuple(int(n) for n in version("flash-linear-attention").split(".")[:2]) >= (0, 6)
        except (PackageNotFoundError, ValueError):
            pass  # a copy without a version that can be read
    return find_spec(package) is not None


_library = torch.library.Library("headloom", "IMPL", "CUDA")
for _name, _package in PACKAGES.items():
    if usable(_package):
        register(_library, _name)
