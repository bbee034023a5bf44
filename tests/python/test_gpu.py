"""The kernels for NVIDIA GPUs, without a GPU: in Triton's interpreter, compiled ahead of time, and under their dispatch key."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

import headloom
import headloom.gpu

ROOT = Path(__file__).resolve().parents[2]
TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not TRITON, reason="Triton is not installed (pip install triton)")
# Those of older versions fail with NumPy 2.
needs_interpreter = pytest.mark.skipif(
    not TRITON or tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) < (3, 9),
    reason="Triton is not installed, or its interpreter is older than 3.9",
)


def run(*command, folder, **environment):
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT / "bench")])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_interpreter
def test_equal_the_reference_in_the_interpreter():
    """The interpreter is chosen when Triton is imported: the tests of gpu_interpreter.py have a process of their own."""
    file = Path(__file__).with_name("gpu_interpreter.py")
    run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file), folder=ROOT, TRITON_INTERPRET="1")


@needs_interpreter
def test_other_operators_equal_the_definition():
    """Those of flash-linear-attention and mamba-ssm where they are installed."""
    file = Path(__file__).with_name("gpu_mixers.py")
    run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file), folder=ROOT, TRITON_INTERPRET="1")


@needs_triton
def test_fit_into_a_multiprocessor(tmp_path):
    """At most 255 registers, nothing spilled, shared memory of the card: each mix at the size of Xiao et al. (2024).

    The script ends with an error otherwise. docs/gpu.md has its table."""
    mixes = ["none", "query-wise, R 1", "dcmha, R 2", "rank 4", "static", "static and R 2"]
    command = [str(ROOT / "bench/gpu_resources.py"), "--heads", "32", "--mixes", *mixes]
    table = run(*command, folder=tmp_path, TRITON_CACHE_DIR=str(tmp_path), TRITON_DEFAULT_FP_FUSION="1")
    for card in ("sm_80", "sm_90", "sm_100"):
        for mix in mixes:
            # Forward: to scores and to composed weights; backward: weights, and two mixes in reverse.
            assert sum(line.startswith(f"| {card} ") and f"| {mix} |" in line for line in table.splitlines()) >= 5


@needs_triton
def test_other_operators_fit_into_a_multiprocessor(tmp_path):
    command = [str(ROOT / "bench/gpu_resources.py"), "--operators", "--dtypes", "float32", "bfloat16"]
    table = run(*command, folder=tmp_path, TRITON_CACHE_DIR=str(tmp_path), TRITON_DEFAULT_FP_FUSION="1")
    for kernel in ("sums", "carry", "rows", "keys"):
        assert f" {kernel}_kernel" in table
    for name in ("gated_norm", "dynamic_weights", "rms_norm", "rotary", "swiglu"):
        assert f"| {name}" in table


def composed(backend=None, dtype=torch.bfloat16, heads=4, T=17, batch=2, values=16, **arguments):
    """A call on tensors of a GPU that have no memory. What runs is the operator's fake kernel."""
    with FakeTensorMode(), torch.no_grad():
        q, v = (torch.empty(batch, T, heads, size, device="cuda", dtype=dtype) for size in (16, values))
        weights = torch.empty(batch, T, 1, heads, device="cuda", dtype=dtype)
        mix = headloom.HeadMix(q_down=weights, q_up=weights)
        given = {"post": mix, **{k: make() for k, make in arguments.items()}}
        return headloom.composed_attention(q, q, v, **given, backend=backend)


@pytest.mark.skipif(TRITON, reason="Triton is installed")
def test_without_triton_the_reference_runs_and_says_why():
    assert composed().shape == (2, 17, 4, 16)
    with pytest.raises(NotImplementedError, match=r"need Python and Triton \(pip install triton\)"):
        composed("fused")


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_operator_takes_the_kernels(dtype):
    out = composed("fused", dtype)
    assert (out.shape, out.dtype, out.device.type) == ((2, 17, 4, 16), dtype, "cuda")


@needs_triton
def test_the_operator_takes_convolutions():
    made = {"pre_conv": lambda: torch.empty(4, 3, 3, device="cuda", dtype=torch.bfloat16)}
    assert composed("fused", **made, post=lambda: None).shape == (2, 17, 4, 16)


@needs_triton
@pytest.mark.parametrize(
    "reason, arguments",
    [
        ("nothing is composed", {"post": lambda: None}),
        (
            "changes the number of maps",
            {"post": lambda: headloom.HeadMix(static=torch.empty(4, 8, device="cuda", dtype=torch.bfloat16))},
        ),
        (
            "have different groups",
            {
                "pre": lambda: headloom.HeadMix(
                    q_gate=torch.empty(2, 17, 4, device="cuda", dtype=torch.bfloat16), groups=2
                )
            },
        ),
        ("float32, float16 and bfloat16 only", {"dtype": torch.float64}),
        ("more than 64 heads", {"heads": 65}),
        ("fewer than 16 queries", {"T": 15}),
        ("a head has no values", {"values": 0}),
        ("more sequences than a launch has blocks", {"batch": 16384}),
    ],
)
def test_what_the_kernels_do_not_take_is_said(reason, arguments):
    plain = {k: arguments[k] for k in ("dtype", "heads", "T", "batch", "values") if k in arguments}
    made = {k: v for k, v in arguments.items() if k not in plain}
    with pytest.raises(NotImplementedError, match=reason):
        composed("fused", **plain, **made)
    assert composed(**plain, **made).shape[:2] == (plain.get("batch", 2), plain.get("T", 17))


@needs_triton
def test_the_choice_binds_no_graph_to_one_length():
    """Compiled for any number of queries and sequences, a call asks for no more than whether there are many or few."""
    environment = ShapeEnv()
    any_size = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2 + [DimDynamic.STATIC] * 2)
    example = torch.empty(3, 100, 4, 16, device="meta")
    with FakeTensorMode(shape_env=environment) as mode, torch.no_grad():
        sizes = mode.from_tensor(example, symbolic_context=any_size, source=ConstantSource("q")).shape
        q, gate = on_gpu(*sizes), on_gpu(*sizes[:3])
        assert headloom.composed_attention(q, q, q, post=headloom.HeadMix(q_gate=gate)).shape[:2] == sizes[:2]
        assert headloom.ops.aft(q.flatten(2), q.flatten(2), q.flatten(2))[0].shape[:2] == sizes[:2]
    assert not [guard.expr for guard in environment.guards if "Eq" in str(guard.expr) or "Ne" in str(guard.expr)]
    assert all(size.node.maybe_as_int() is None for size in sizes[:2])


@needs_triton
def test_compiles_for_cards_before_ampere(tmp_path):
    """They have no instruction that makes two values 16 bits wide."""
    code = (
        "import torch, gpu_resources as g\n"
        "from headloom.gpu import composed_attention as gpu\n"
        "gpu.capability = g.of_card(75)\n"
        "for dtype in (torch.float16, torch.bfloat16):\n"
        "    found = g.launches(g.shape(1, 64, 2, 16, *['query-wise, R 1'] * 2, dtype), True)\n"
        "    mixes = {x.name(): x for x in found if x.name().startswith('mix')}\n"
        "    assert len(mixes) == 3\n"
        "    for x in mixes.values(): g.compiled(x, 75)\n"
    )
    run("-c", code, folder=tmp_path, TRITON_CACHE_DIR=str(tmp_path))


def on_gpu(*size, dtype=torch.float32):
    return torch.empty(size, device="cuda", dtype=dtype)


def narrow(*size):
    return on_gpu(*size, dtype=torch.bfloat16)


def double(*size):
    return on_gpu(*size, dtype=torch.float64)


def documents():
    return {"documents": on_gpu(2, 7, dtype=torch.long)}


OF_FLA = "those of flash-linear-attention, of which Python must find 0.6.0 or newer"
NO_DOCUMENTS = "has no documents in a batch"
OF_TYPES = "float32, float16 and bfloat16 only"
# Of each operator: a call, what is said without the package, and a case that is not taken with what is said then.
CALLS = {
    "aft": (lambda: [on_gpu(2, 7, 16) for _ in range(3)], "need Python and Triton", lambda: {"causal": False}, "only causal"),
    "gated_norm": (
        lambda: [on_gpu(2, 7, 16) for _ in range(2)] + [on_gpu(7)],
        "need Python and Triton",
        lambda: {"x": on_gpu(2, 7, 9000), "gate": on_gpu(2, 7, 9000)},
        "more than 8192 values",
    ),
    "rms_norm": (
        lambda: [narrow(2, 7, 16), on_gpu(16)],
        "need Python and Triton",
        lambda: {"x": on_gpu(2, 9000), "scale": on_gpu(9000)},
        "more than 8192 values",
    ),
    "dynamic_weights": (
        lambda: [narrow(2, 7, 24), on_gpu(2, 1, 12, 12), 2], "need Python and Triton", lambda: {"hidden": double(2, 7, 24)}, OF_TYPES,
    ),
    "rotary": (
        lambda: [narrow(2, 7, 3, 16), on_gpu(7, 8), on_gpu(7, 8)],
        "need Python and Triton",
        lambda: {"x": double(2, 7, 3, 16), "cos": double(7, 8), "sin": double(7, 8)},
        OF_TYPES,
    ),
    "swiglu": (lambda: [narrow(2, 7, 16)], "need Python and Triton", lambda: {"x": double(2, 7, 16)}, OF_TYPES),
    "retention": (lambda: [narrow(2, 7, 4, 16) for _ in range(3)] + [on_gpu(4)], OF_FLA, documents, NO_DOCUMENTS),
    "gated_linear_attention": (lambda: [narrow(2, 7, 4, 16) for _ in range(4)], OF_FLA, documents, NO_DOCUMENTS),
    "wkv": (
        lambda: [on_gpu(2, 7, 16) for _ in range(2)] + [on_gpu(16) for _ in range(2)], OF_FLA, documents, NO_DOCUMENTS,
    ),
    "causal_conv1d": (
        lambda: [on_gpu(2, 7, 16), on_gpu(16, 4)], OF_FLA, lambda: {"weight": on_gpu(16, 9)}, "more than 8 taps",
    ),
    "selective_scan": (
        lambda: [on_gpu(2, 7, 16) for _ in range(2)] + [on_gpu(16, 4)] + [on_gpu(2, 7, 4) for _ in range(2)],
        "those of mamba-ssm, which Python must find",
        documents,
        NO_DOCUMENTS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_other_operators(name):
    """Where the package is installed it is taken, but for cases it does not have; elsewhere the reference runs and says why."""
    operator = getattr(torch.ops.headloom, name)
    make, missing, other, reason = CALLS[name]
    with FakeTensorMode(), torch.no_grad():
        call = dict(zip((a.name for a in operator.default._schema.arguments), make()))

        def output(**settings):
            result = operator(**{**call, **settings})
            return result if isinstance(result, torch.Tensor) else result[0]

        shape = output(backend="reference").shape
        assert output().shape == shape
        if headloom.gpu.usable(headloom.gpu.PACKAGES[name]):
            assert output(backend="fused").shape == shape
            with pytest.raises(NotImplementedError, match=reason):
                output(**other(), backend="fused")
        else:
            with pytest.raises(NotImplementedError, match=missing):
                output(backend="fused")


def test_scores_of_16_bits_have_whole_rows():
    """cuBLAS multiplies rows of 50257 numbers several times slower than rows of 50264."""
    with FakeTensorMode(), torch.no_grad(), Products() as products:
        for classes, padded in ((50257, 50264), (50264, 50264)):
            hidden, weight = narrow(3, 16), narrow(classes, 16)
            targets = on_gpu(3, dtype=torch.long)
            loss, best = torch.ops.headloom.linear_cross_entropy(hidden, weight, targets, None, "reference")
            assert (loss.shape, loss.dtype, best.shape) == ((), torch.float32, (3,))
            assert products.shapes.pop() == (3, padded)


class Operators(TorchDispatchMode):
    """While it is on, the names of all operators are kept."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@needs_triton
@pytest.mark.parametrize("scale, ours", [(narrow, False), (on_gpu, True), (None, False)], ids=["of the same type", "float32", "none"])
def test_a_norm_that_pytorch_has_in_one_kernel_is_left_to_it(scale, ours):
    with FakeTensorMode(), torch.no_grad(), Operators() as operators:
        headloom.ops.rms_norm(narrow(2, 7, 16), scale and scale(16))
    assert ("rms_norm_fused" in operators.names) == ours


class Products(TorchDispatchMode):
    """While it is on, the shapes of all matrix products are kept."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in ("mm", "addmm"):
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.skipif(not headloom.gpu.usable("fla"), reason="flash-linear-attention is not installed")
def test_products_of_float32_are_not_rounded_unasked():
    """Those of flash-linear-attention are in TF32."""
    with FakeTensorMode(), torch.no_grad():
        heads = on_gpu(2, 7, 4, 16)
        for call in (
            lambda: headloom.ops.retention(heads, heads, heads, on_gpu(4), backend="fused"),
            lambda: headloom.ops.gated_linear_attention(heads, heads, heads, heads, backend="fused"),
        ):
            with pytest.raises(NotImplementedError, match="in TF32, which torch.backends.cuda.matmul.allow_tf32 forbids"):
                call()
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                assert call()[0].shape == heads.shape
            finally:
                torch.backends.cuda.matmul.allow_tf32 = False


@needs_triton
@pytest.mark.parametrize("form, bias", [("full", (7, 7)), ("conv", (2, 3))])
def test_causal_forms_of_aft_without_kernels_are_its_definition(form, bias):
    with FakeTensorMode(), torch.no_grad():
        q = on_gpu(2, 7, 16)
        assert headloom.ops.aft(q, q, q, form=form, bias=on_gpu(*bias))[0].shape == q.shape
        with pytest.raises(NotImplementedError, match='only causal "simple" and "local" are fused'):
            headloom.ops.aft(q, q, q, form=form, bias=on_gpu(*bias), backend="fused")


@needs_triton
def test_aft_of_nothing_is_its_definition():
    with FakeTensorMode(), torch.no_grad():
        for size in ((0, 7, 16), (2, 7, 0)):
            q = on_gpu(*size)
            assert headloom.ops.aft(q, q, q)[0].shape == size
            with pytest.raises(NotImplementedError, match="q is empty"):
                headloom.ops.aft(q, q, q, backend="fused")


@pytest.mark.parametrize("version, taken", [("0.5.9", False), ("0.6.0", True), ("0.10", True), ("1.0", True)])
def test_an_older_flash_linear_attention_is_not_taken(monkeypatch, version, taken):
    monkeypatch.setattr(headloom.gpu, "version", lambda name: version)
    assert headloom.gpu.usable("fla") == taken


def test_gpus_of_amd_have_the_definition(monkeypatch):
    monkeypatch.setattr(headloom.gpu, "version", lambda name: "9.9")
    monkeypatch.setattr(headloom.gpu, "find_spec", lambda name: name)
    assert all(map(headloom.gpu.usable, headloom.gpu.PACKAGES.values()))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not any(map(headloom.gpu.usable, headloom.gpu.PACKAGES.values()))


def test_triton_is_not_loaded_before_it_is_needed():
    """Importing Headloom must not cost Triton's import."""
    code = "import sys, headloom.gpu; assert not any(m.startswith('headloom.gpu.') for m in sys.modules)"
    run("-c", code, folder=ROOT)
