"""Operators of the mixers without attention, against their definition: our kernels and flash-linear-attention's in Triton's
interpreter, mamba-ssm by the reference that it comes with. test_gpu.py runs this file in a process of its own, because the
interpreter is chosen when Triton is imported. The kernels take the CPU's dispatch key here."""

import builtins
import importlib.util
import sys
import types

import pytest
import torch
from gpu_interpreter import _poisoned_memory  # noqa: F401: a fixture

import headloom  # noqa: F401: loads the operators
import headloom.gpu
from headloom.gpu.libraries import FUNCTIONS


def of_interpreter():
    """What the interpreter lacks: blocks of a scalar comparison, which it makes of integers."""
    import numpy
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def splat(self, block, scalar):
        return TensorHandle(numpy.full(block.shape, scalar.data.item(0), scalar.data.dtype), scalar.dtype.scalar)

    InterpreterBuilder.create_splat = splat


def of_interpreter_for_fla():
    """What it lacks besides: timings to choose a configuration by, and loops whose variables are tensors."""
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
    of_interpreter()
    if importlib.util.find_spec("fla") is not None:
        of_interpreter_for_fla()
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


def causal_conv1d(T, taps, bias=False, silu=False, state=False, wide=1):
    """wide: of how many parts of a row x is one."""
    return [normal(2, T, wide * 20)[..., :20], normal(20, taps), normal(20) if bias else None, silu,
            normal(2, taps - 1, 20) if state else None, None]  # fmt: skip


def aft(T, W=None, state=False, documents=False, offset=0, scale=1.0, C=20, some=False):
    """"local" with a window of W, or "simple".

    Args:
        documents: their length. They begin within tiles and within the few positions that a program has at a time.
        some: whether every third key is minus infinity.
    """
    ring = (W or 1) - 1
    before = None
    if state:
        # The oldest place of the ring is empty.
        keys = torch.cat((torch.full((2, 1, C), -1e38), normal(2, ring, C)), 1)[:, :ring]
        before = torch.cat((normal(2, 1, C), positive(2, 1, C), normal(2, 1, C), keys, normal(2, ring, C)), 1)
        if state == "empty":
            before[:, :3] = torch.tensor([0, 0, -1e38]).unsqueeze(1)
    ids = torch.randint(0, 2, (2, T // documents + 1)).repeat_interleave(documents, 1)[:, :T].contiguous() if documents else None
    k = scale * normal(2, T, C)
    if some:
        k[:, ::3] = -torch.inf
    return [normal(2, T, C), k, normal(2, T, C), "local" if W else "simple",
            normal(T + offset, W) if W else None, True, None, ids, before, offset]  # fmt: skip


def gated_norm(*size):
    return [normal(*size), normal(*size), positive(*size[-2:-1])]


DIFFERENTIABLE = {name: f.differentiable for name, f in FUNCTIONS.items()} | {"aft": (0, 1, 2, 4, 8), "gated_norm": (0, 1)}
CASES = {
    "aft, simple": (aft, 40),
    "aft, simple, one position": (aft, 1),
    "aft, simple, state and documents": (aft, 70, None, True, 9),
    "aft, simple, documents of whole tiles": (aft, 70, None, True, 32),
    "aft, simple, keys far apart": (aft, 40, None, True, 9, 0, 100.0),
    "aft, simple, keys of minus infinity": (aft, 40, None, False, False, 0, 1.0, 20, True),
    "aft, local": (aft, 40, 5),
    "aft, local, two tiles of channels": (aft, 33, 3, False, False, 0, 1.0, 140),
    "aft, local, window of 1": (aft, 40, 1, True),
    "aft, local, a window over all": (aft, 20, 25, True),
    "aft, local, a window over two tiles": (aft, 36, 34, True, 33, 7),
    "aft, local, state": (aft, 40, 6, True, False, 3),
    "aft, local, documents": (aft, 70, 6, False, 9, 3),
    "aft, local, documents and state": (aft, 40, 12, True, 9, 3),
    "aft, local, documents of whole tiles": (aft, 40, 3, False, 32),
    "aft, local, documents shorter than the window": (aft, 40, 6, True, 2, 3),
    "aft, local, keys of minus infinity": (aft, 40, 4, True, 9, 0, 1.0, 20, True),
    "aft, local, one position and its state": (aft, 1, 4, True, False, 9),
    "aft, local, a state with empty sums": (aft, 2, 17, "empty", 9),
    "aft, local, keys far apart": (aft, 40, 5, True, 9, 0, 100.0),
    "gated_norm": (gated_norm, 2, 3, 5, 20),
    "gated_norm, one row": (gated_norm, 1, 128),
    "gated_norm, rows beyond a tile": (gated_norm, 3, 5000),
    "gated_norm, no rows": (gated_norm, 0, 3, 8),
    **{f"causal_conv1d, {T} positions, {taps} taps, {x}": (causal_conv1d, T, taps, x, x, x)
       for T, taps in ((1, 4), (63, 4), (200, 4), (2, 8), (70, 8), (5, 1)) for x in (False, True)},
    "causal_conv1d, SiLU without a bias": (causal_conv1d, 63, 4, False, True),
    "causal_conv1d, a state without SiLU": (causal_conv1d, 63, 3, True, False, True),
    "causal_conv1d, a part of the rows of a product": (causal_conv1d, 63, 4, True, True, False, 2),
    **{f"{f.__name__}, {T} positions, {x}": (f, T, x) for f in (retention, gated_linear_attention, wkv) for T in (1, 80) for x in (False, True)},
    **{f"selective_scan, {x}, {maps}": (selective_scan, 30, x, maps) for x in (False, True) for maps in ("by position", "by position and group", "constant")},
}  # fmt: skip


def compare(function, call, wants_state):
    """Outputs, and the gradients of all that has one."""
    name = function.__name__
    operator = getattr(torch.ops.headloom, name)
    found = []
    for backend in ("fused", "reference"):
        given = list(call)
        for i in DIFFERENTIABLE[name]:
            given[i] = None if call[i] is None else call[i].detach().requires_grad_()
        results = operator(*given, backend)
        out, *state = (results,) if isinstance(results, torch.Tensor) else results
        torch.manual_seed(2)
        loss = (out * torch.randn(out.shape)).sum()
        if wants_state and state:
            loss = loss + (state[0] * torch.randn(state[0].shape)).sum()
        leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
        found.append([out, *state, *torch.autograd.grad(loss, leaves, allow_unused=True)])
    for i, (x, y) in enumerate(zip(*found, strict=True)):
        if x is None or y is None:
            assert (x is None or not x.any()) and (y is None or not y.any()), i
            continue
        assert x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous(), i
        empty = y <= -1e37  # places of a state
        assert torch.equal(empty, x <= -1e37), i
        x, y = x.masked_fill(empty, 0), y.masked_fill(empty, 0)
        scale = max(1.0, y.abs().max().item()) if y.numel() else 1.0
        torch.testing.assert_close(x, y, rtol=0, atol=3e-5 * scale, msg=lambda m: f"tensor {i}: {m}")


def installed(case):
    """A case's operator, what makes the call, and how."""
    function, *how = CASES[case]
    name = function.__name__
    package = headloom.gpu.PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return name, function, how


def with_gradients(name, call, operator):
    """The output, and the gradients of its sum."""
    given = list(call)
    for i in DIFFERENTIABLE[name]:
        given[i] = None if call[i] is None else call[i].detach().requires_grad_()
    results = operator(*given)
    out = results if isinstance(results, torch.Tensor) else results[0]
    leaves = [given[i] for i in DIFFERENTIABLE[name] if given[i] is not None]
    return [out.detach(), *torch.autograd.grad(out.float().sum(), leaves)]


@pytest.mark.parametrize(
    "case", ["aft, simple", "aft, local", "gated_norm, one row", "causal_conv1d, 63 positions, 4 taps, True"]
)
def test_float16_errs_like_its_rounding(case):
    """By the operator of the kernels, because on the CPU the operator itself does not take float16 to them."""
    torch.manual_seed(1)
    name, function, how = installed(case)
    in_float32 = {"aft": (4, 8), "gated_norm": (2,), "causal_conv1d": (1, 2)}[name]
    plain = [x if i in in_float32 or not isinstance(x, torch.Tensor) else x.half() for i, x in enumerate(function(*how))]
    exact = [x.double() if isinstance(x, torch.Tensor) else x for x in plain]
    operator = getattr(torch.ops.headloom, name)
    found = [
        with_gradients(name, plain, lambda *given: getattr(torch.ops.headloom, name + "_fused")(*given, True)),
        with_gradients(name, plain, lambda *given: operator(*given, "reference")),
        with_gradients(name, exact, lambda *given: operator(*given, "reference")),
    ]
    for x, y, z in zip(*found, strict=True):
        assert (x - z).norm() <= 2 * (y - z).norm() + 1e-5 * z.norm()


@pytest.mark.parametrize("last", [40, 30], ids=["one document", "two documents"])
@pytest.mark.parametrize("place", [1, 2], ids=["key", "value"])
def test_nan_reaches_those_who_read_it(place, last):
    """aft: the queries from a NaN on, in its channel and document, and the state; no earlier one and no other channel. Keys
    that these queries do not see keep their gradients."""
    torch.manual_seed(1)
    call = aft(40, 5)
    call[7] = (torch.arange(40) >= last).long().expand(2, 40).contiguous()
    call[place][0, 20, 3] = float("nan")
    leaves = [x.requires_grad_() for x in call[:3]]
    out, state = torch.ops.headloom.aft(*call, "fused")
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[0, 20:last, 3] = True
    assert torch.equal(out.isnan(), touched)
    assert state.isnan().any(1).nonzero().tolist() == ([[0, 3]] if last == 40 else [])
    touched[0, :last, 3] = True
    for x in torch.autograd.grad(out.sum(), leaves):
        assert not x[~touched].isnan().any()


@pytest.mark.parametrize("place", [(0, 0, 40, 3), (1, 3, 2), (2, 3), (4, 0, 1, 3)], ids=["x", "weight", "bias", "state"])
def test_nan_is_where_the_definition_has_it(place):
    """causal_conv1d: in the output, the state and all gradients."""
    name, function, how = installed("causal_conv1d, 63 positions, 4 taps, True")
    torch.manual_seed(1)
    call = function(*how)
    argument, *where = place
    call[argument][tuple(where)] = float("nan")
    operator = getattr(torch.ops.headloom, name)
    found = [
        [operator(*call, backend)[1], *with_gradients(name, call, lambda *given, b=backend: operator(*given, b))]
        for backend in ("fused", "reference")
    ]
    assert found[0][1].isnan().any()
    for x, y in zip(*found, strict=True):
        assert torch.equal(x.isnan(), y.isnan())


@pytest.mark.parametrize("wants_state", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case, wants_state):
    _, function, how = installed(case)
    torch.manual_seed(1)
    compare(function, function(*how), wants_state)
