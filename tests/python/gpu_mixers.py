"""The operators beside composed attention, against their definition: our kernels and flash-linear-attention's in Triton's
interpreter, mamba-ssm by the reference that it comes with. test_gpu.py runs this file in a process of its own, because the
interpreter is chosen when Triton is imported. The kernels take the CPU's dispatch key here."""

import builtins
import importlib.util
import sys
import types
from functools import partial

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


def dynamic_weights(B, L, S, groups, heads, rank, inner, wide=1):
    """heads: of a group. wide: of how many parts of a row hidden is one."""
    hidden = 2 * normal(B, L, wide * S * groups * inner)[..., : S * groups * inner]
    return [hidden, normal(S, groups, inner, 2 * rank * heads), rank]


def rms_norm(*size, scale=True, eps=1e-6, wide=1, turned=False):
    """wide: of how many parts of a row x is one. turned: whether the values of a row lie apart."""
    *rows, width = size
    x = normal(*rows, wide * width)[..., :width]
    return [x.mT.contiguous().mT if turned else x, normal(width) if scale else None, eps]


def rotary(B, T, H, D, pairs, interleaved=False, by_row=False, wide=1):
    """by_row: whether each sequence has angles of its own. wide: of how many parts of a head x is one."""
    angle = 7 * normal(*((B, T) if by_row else (T,)), pairs)
    return [normal(B, T, H, wide * D)[..., :D], angle.cos(), angle.sin(), interleaved]


def swiglu(*size, turned=False):
    """turned: whether the values of a row lie apart."""
    x = 3 * normal(*size)
    return [x.mT.contiguous().mT if turned else x]


DIFFERENTIABLE = {
    **{name: f.differentiable for name, f in FUNCTIONS.items()},
    "aft": (0, 1, 2, 4, 8), "gated_norm": (0, 1), "dynamic_weights": (0, 1), "rms_norm": (0, 1), "rotary": (0,), "swiglu": (0,),
}  # fmt: skip
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
    "dynamic_weights, one position": (dynamic_weights, 1, 1, 4, 1, 12, 2, 48),
    "dynamic_weights, one head": (dynamic_weights, 1, 1, 1, 1, 1, 1, 1),
    "dynamic_weights, groups": (dynamic_weights, 2, 63, 2, 3, 5, 1, 10),
    "dynamic_weights, rows beyond a tile": (dynamic_weights, 1, 200, 3, 2, 64, 3, 36),
    "dynamic_weights, a part of the rows of a product": (dynamic_weights, 3, 7, 4, 1, 6, 2, 24, 2),
    "dynamic_weights, no rows": (dynamic_weights, 0, 3, 4, 1, 2, 2, 8),
    "dynamic_weights, nothing hidden": (dynamic_weights, 1, 2, 2, 1, 20, 2, 0),
    "rms_norm": (rms_norm, 2, 63, 6, 20),
    "rms_norm, no scale": (partial(rms_norm, scale=False), 200, 128),
    "rms_norm, one row, eps of 0": (partial(rms_norm, eps=0.0), 1, 64),
    "rms_norm, rows beyond a tile": (rms_norm, 3, 5000),
    "rms_norm, one vector": (rms_norm, 20),
    "rms_norm, a part of the rows of a product": (partial(rms_norm, wide=3), 2, 63, 6, 20),
    "rms_norm, values apart": (partial(rms_norm, turned=True), 2, 63, 20),
    "rms_norm, no rows": (rms_norm, 0, 3, 8),
    **{f"rotary, {order}": (partial(rotary, interleaved=order == "interleaved"), 2, 63, 6, 20, 10) for order in ("halves", "interleaved")},
    **{f"rotary, {order}, a part of a head": (partial(rotary, interleaved=order == "interleaved"), 2, 7, 3, 128, 17)
       for order in ("halves", "interleaved")},
    "rotary, angles of each sequence": (partial(rotary, by_row=True), 2, 200, 3, 64, 32),
    "rotary, one position": (partial(rotary, by_row=True, interleaved=True), 3, 1, 6, 64, 32),
    "rotary, a part of the rows of a product": (partial(rotary, wide=3), 2, 63, 6, 20, 7),
    "rotary, no positions": (rotary, 2, 0, 3, 8, 4),
    "swiglu": (swiglu, 2, 63, 40),
    "swiglu, one unit": (swiglu, 200, 2),
    "swiglu, rows beyond a tile": (swiglu, 1, 2 * 1030),
    "swiglu, values apart": (partial(swiglu, turned=True), 2, 63, 12),
    "swiglu, no rows": (swiglu, 0, 3, 8),
    **{f"causal_conv1d, {T} positions, {taps} taps, {x}": (causal_conv1d, T, taps, x, x, x)
       for T, taps in ((1, 4), (63, 4), (200, 4), (2, 8), (70, 8), (5, 1)) for x in (False, True)},
    "causal_conv1d, SiLU without a bias": (causal_conv1d, 63, 4, False, True),
    "causal_conv1d, a state without SiLU": (causal_conv1d, 63, 3, True, False, True),
    "causal_conv1d, a part of the rows of a product": (causal_conv1d, 63, 4, True, True, False, 2),
    **{f"{f.__name__}, {T} positions, {x}": (f, T, x) for f in (retention, gated_linear_attention, wkv) for T in (1, 80) for x in (False, True)},
    **{f"selective_scan, {x}, {maps}": (selective_scan, 30, x, maps)
       for x in (False, True) for maps in ("by position", "by position and group", "constant")},
}  # fmt: skip


def results_of(name, given, backend):
    """What the operator returns, or its kernels where on the CPU the operator does not take the case to them."""
    operator = getattr(torch.ops.headloom, name)
    if backend == "fused" and (name == "dynamic_weights" or given[0].dtype == torch.float16):
        return getattr(torch.ops.headloom, name + "_fused")(*given, True)[0]
    results = operator(*given, backend)
    if name == "dynamic_weights":
        # In one tensor, as its kernels have them.
        sides = len(results) // 2
        return torch.stack([torch.cat((results[s], results[sides + s]), 2) for s in range(sides)], 2)
    return results


def compare(name, call, wants_state):
    """Outputs, and the gradients of all that has one."""
    found = []
    for backend in ("fused", "reference"):
        given = list(call)
        for i in DIFFERENTIABLE[name]:
            given[i] = None if call[i] is None else call[i].detach().requires_grad_()
        results = results_of(name, given, backend)
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
    name = getattr(function, "func", function).__name__
    package = headloom.gpu.PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return name, function, how


def with_gradients(name, call, backend):
    """The output, and the gradients of its sum."""
    given = list(call)
    for i in DIFFERENTIABLE[name]:
        given[i] = None if call[i] is None else call[i].detach().requires_grad_()
    results = results_of(name, given, backend)
    out = results if isinstance(results, torch.Tensor) else results[0]
    leaves = [given[i] for i in DIFFERENTIABLE[name] if given[i] is not None]
    return [out.detach(), *torch.autograd.grad(out.float().sum(), leaves)]


@pytest.mark.parametrize(
    "case",
    [
        "aft, simple", "aft, local", "gated_norm, one row", "causal_conv1d, 63 positions, 4 taps, True",
        "dynamic_weights, groups", "rms_norm", "rms_norm, no scale", "rotary, halves", "swiglu",
    ],
)  # fmt: skip
def test_float16_errs_like_its_rounding(case):
    torch.manual_seed(1)
    name, function, how = installed(case)
    in_float32 = {"aft": (4, 8), "gated_norm": (2,), "causal_conv1d": (1, 2), "rms_norm": (1,), "rotary": (1, 2)}.get(name, ())
    plain = [x if i in in_float32 or not isinstance(x, torch.Tensor) else x.half() for i, x in enumerate(function(*how))]
    exact = [x.double() if isinstance(x, torch.Tensor) else x for x in plain]
    found = [with_gradients(name, plain, "fused"), with_gradients(name, plain, "reference"), with_gradients(name, exact, "reference")]
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


CONVOLUTION = "causal_conv1d, 63 positions, 4 taps, True"


@pytest.mark.parametrize(
    "case, argument, place",
    [
        (CONVOLUTION, 0, (0, 40, 3)), (CONVOLUTION, 1, (3, 2)), (CONVOLUTION, 2, 3), (CONVOLUTION, 4, (0, 1, 3)),
        ("dynamic_weights, groups", 0, (1, 3, 17)), ("dynamic_weights, groups", 1, (1, 2, 3, 4)),
        ("rms_norm", 0, (1, 3, 2, 7)), ("rms_norm", 1, 3),
        ("rotary, halves, a part of a head", 0, (1, 3, 2, 7)), ("rotary, interleaved", 0, (1, 3, 2, 7)), ("rotary, halves", 2, (3, 7)),
        ("swiglu", 0, (1, 3, 7)), ("swiglu", 0, (1, 3, 27)),
    ],
)  # fmt: skip
def test_nan_is_where_the_definition_has_it(case, argument, place):
    """In the output, the state and all gradients."""
    name, function, how = installed(case)
    torch.manual_seed(1)
    call = function(*how)
    call[argument][place] = float("nan")
    found = []
    for backend in ("fused", "reference"):
        results = results_of(name, call, backend)
        state = [] if isinstance(results, torch.Tensor) else results[1:]
        found.append([*state, *with_gradients(name, call, backend)])
    assert any(x.isnan().any() for x in found[0])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x.isnan(), y.isnan())


@pytest.mark.parametrize("wants_state", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case, wants_state):
    name, function, how = installed(case)
    torch.manual_seed(1)
    compare(name, function(*how), wants_state)


@pytest.mark.parametrize(
    "case",
    [
        "dynamic_weights, groups", "dynamic_weights, a part of the rows of a product", "rms_norm, a part of the rows of a product",
        "rotary, halves", "swiglu, values apart",
    ],
)  # fmt: skip
def test_fake_kernels_and_autograd_formula(case):
    name, function, how = installed(case)
    torch.manual_seed(1)
    call = [x.detach().requires_grad_() if i in DIFFERENTIABLE[name] else x for i, x in enumerate(function(*how))]
    torch.library.opcheck(getattr(torch.ops.headloom, name + "_fused"), (*call, True))


def test_a_program_of_rms_norm_has_many_rows(monkeypatch):
    """Four tiles of rows for three programs, as on a GPU where there are many more."""
    from headloom.gpu import rms_norm as kernels

    monkeypatch.setattr(kernels, "SHARES", 3)
    torch.manual_seed(1)
    compare("rms_norm", rms_norm(200, 64), False)


def test_dynamic_weights_has_a_gradient_of_its_gradient():
    """That of the definition, in the kernels' layout."""
    torch.manual_seed(1)
    *tensors, rank = dynamic_weights(1, 3, 2, 2, 3, 2, 4)
    found = []
    for backend in ("fused", "reference"):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = results_of("dynamic_weights", [*leaves, rank], backend)
        first = torch.autograd.grad((out**3).sum(), leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum((x**2).sum() for x in first), leaves)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
