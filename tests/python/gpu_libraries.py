"""Operators whose kernels other packages have, for the definition: flash-linear-attention in Triton's interpreter, mamba-ssm by
the reference that it comes with. test_gpu.py runs this file in a process of its own, because the interpreter is chosen when
Triton is imported. The kernels take the CPU's dispatch key here."""

import builtins
import importlib.util
import sys
import types

import pytest
import torch

import headloom  # noqa: F401: loads the operators
import headloom.gpu


def of_interpreter():
    """What the interpreter lacks: timings to choose a configuration by, and loops whose variables are tensors."""
    import triton.language as tl
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import interpreter_builder

    Autotuner.do_bench = property(lambda self: lambda call, quantiles=None: [0.0, 0.0, 0.0])
    import fla.ops.gla
    import fla.ops.rwkv4
    import fla.ops.simple_gla  # noqa: F401

    def loop(*bounds):
        numbers = builtins.range(*(int(b) for b in bounds))
        inside = getattr(interpreter_builder, "grid_idx", None) is not None
        return (tl.full((), i, tl.int32) for i in numbers) if inside else numbers

    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            module.range = loop


def of_mamba():
    """Its kernels are a library of a GPU."""
    sys.modules["selective_scan_cuda"] = types.ModuleType("selective_scan_cuda")
    from mamba_ssm.ops import selective_scan_interface as interface

    interface.selective_scan_fn = interface.selective_scan_ref


@pytest.fixture(scope="module", autouse=True)
def library():
    library = torch.library.Library("headloom", "IMPL", "CPU")
    for name, package in headloom.gpu.PACKAGES.items():
        if importlib.util.find_spec(package) is not None and name != "composed_attention":
            headloom.gpu.register(library, name, allow_override=True)
    if importlib.util.find_spec("fla") is not None:
        of_interpreter()
    if importlib.util.find_spec("mamba_ssm") is not None:
        of_mamba()
    return library


def normal(*size):
    return torch.randn(size)


def positive(*size):
    return torch.rand(size) + 0.1


def retention(T, state):
    return [normal(2, T, 3, 20), normal(2, T, 3, 20), normal(2, T, 3, 12), torch.tensor([0.9, 0.99, 1.0]),
            normal(2, 3, 20, 12) if state else None, None, "chunkwise", 64]  # fmt: skip


def gated_linear_attention(T, state):
    decay = torch.nn.functional.logsigmoid(normal(2, T, 3, 20)) / 16
    return [normal(2, T, 3, 20), normal(2, T, 3, 20), normal(2, T, 3, 12), decay,
            normal(2, 3, 20, 12) if state else None, None, "chunkwise", 16]  # fmt: skip


def wkv(T, state):
    before = torch.stack([normal(2, 20), positive(2, 20), normal(2, 20)], 1)
    return [normal(2, T, 20), normal(2, T, 20), positive(20), normal(20), normal(2, T, 20) if state else None,
            before if state else None, None]  # fmt: skip


def selective_scan(T, full, maps="by position"):
    of_map = {"by position": (2, T, 4), "by position and group": (2, T, 2, 4), "constant": (6, 4)}[maps]
    optional = [normal(6), normal(2, T, 6), normal(6)] if full else [None] * 3
    return [normal(2, T, 6), normal(2, T, 6), -positive(6, 4), normal(*of_map), normal(*of_map), *optional, full, None, None]


CASES = {
    **{f"{f.__name__}, {T} positions, {x}": (f, T, x) for f in (retention, gated_linear_attention, wkv) for T in (1, 80) for x in (False, True)},
    **{f"selective_scan, {x}, {maps}": (selective_scan, 30, x, maps) for x in (False, True) for maps in ("by position", "by position and group", "constant")},
}  # fmt: skip


def compare(function, call, wants_state):
    """Outputs, and the gradients of all that has one."""
    from headloom.gpu.libraries import FUNCTIONS

    name = function.__name__
    operator = getattr(torch.ops.headloom, name)
    found = []
    for backend in ("fused", "reference"):
        given = list(call)
        for i in FUNCTIONS[name].differentiable:
            given[i] = None if call[i] is None else call[i].clone().requires_grad_()
        out, state = operator(*given, backend)
        torch.manual_seed(2)
        loss = (out * torch.randn(out.shape)).sum()
        if wants_state:
            loss = loss + (state * torch.randn(state.shape)).sum()
        leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
        found.append([out, state, *torch.autograd.grad(loss, leaves, allow_unused=True)])
    for i, (x, y) in enumerate(zip(*found, strict=True)):
        if x is None or y is None:
            assert (x is None or not x.any()) and (y is None or not y.any()), i
            continue
        assert x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous(), i
        scale = max(1.0, y.abs().max().item())
        torch.testing.assert_close(x, y, rtol=0, atol=3e-5 * scale, msg=lambda m: f"tensor {i}: {m}")


@pytest.mark.parametrize("wants_state", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case, wants_state):
    function, *how = CASES[case]
    if importlib.util.find_spec(headloom.gpu.PACKAGES[function.__name__]) is None:
        pytest.skip(f"{headloom.gpu.PACKAGES[function.__name__]} is not installed")
    torch.manual_seed(1)
    compare(function, function(*how), wants_state)
