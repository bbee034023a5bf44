"""What every operator makes of arguments at the edge: wrong ones, empty ones, huge ones, strided ones."""

import sys
from contextlib import contextmanager

import headloom
import pytest
import torch
from headloom import HeadMix
from headloom.ops import composed_attention
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

SIZES = dict(B=2, T=5, S=7, H=4, D=3, E=6, C=8, W=3, N=2, K=2, R=2)


def operators(**change):
    """Each operator's name, its tensors by argument, its other arguments."""
    n = {**SIZES, **change}
    torch.manual_seed(1)

    def x(*shape):
        """A tensor of sizes by name or number; HH is H x 2 and so on."""
        return torch.randn([n[s] if isinstance(s, str) else s for s in shape])

    def ids(*shape):
        return torch.zeros([n[s] for s in shape], dtype=torch.int64)

    lengths = torch.arange(n["B"]) % (n["T"] + 1)
    aft = dict(q=x("B", "T", "C"), k=x("B", "T", "C"), v=x("B", "T", "C"))
    long = n["T"] + 2
    yield "composed_attention", dict(q=x("B", "T", "H", "D"), k=x("B", "S", "H", "D"), v=x("B", "S", "H", "E")), {}
    yield (
        "composed_attention",
        dict(
            q=x("B", "T", "H", "D"),
            k=x("B", "S", "H", "D"),
            v=x("B", "S", "H", "E"),
            pre_conv=x("H", 2, 3),
            post_conv=x("H", 2, 3),
            bias=x("H", "T", "S"),
            lengths=torch.arange(n["B"]) + 3,
            documents=ids("B", "S"),
            mask=torch.ones(n["T"], n["S"], dtype=torch.bool),
        ),
        dict(window=4, scale=0.5),
    )
    yield "retention", dict(
        q=x("B", "T", "H", "D"),
        k=x("B", "T", "H", "D"),
        v=x("B", "T", "H", "E"),
        gamma=torch.full((n["H"],), 0.9),
        state=x("B", "H", "D", "E"),
        documents=ids("B", "T"),
    ), dict(chunk=16)
    yield "gated_linear_attention", dict(
        q=x("B", "T", "H", "D"),
        k=x("B", "T", "H", "D"),
        v=x("B", "T", "H", "E"),
        log_decay=-x("B", "T", "H", "D").abs(),
        state=x("B", "H", "D", "E"),
        documents=ids("B", "T"),
    ), dict(chunk=16)
    yield "wkv", dict(
        k=x("B", "T", "C"),
        v=x("B", "T", "C"),
        rate=x("C").abs(),
        bonus=x("C"),
        receptance=x("B", "T", "C"),
        state=torch.stack((x("B", "C"), x("B", "C").abs() + 1, x("B", "C")), 1),
        documents=ids("B", "T"),
    ), {}
    yield "token_shift", dict(x=x("B", "T", "C"), mix=x(2, "C"), last=x("B", "C"), documents=ids("B", "T")), {}
    yield "aft", dict(aft), dict(form="simple")
    yield "aft", dict(aft, lengths=lengths), dict(form="simple", causal=False)
    yield "aft", dict(aft, bias=x(long, "W"), documents=ids("B", "T")), dict(form="local", offset=2)
    yield "aft", dict(aft, bias=x(long, 5), lengths=lengths), dict(form="local", causal=False)
    yield "aft", dict(aft, bias=x(long, long), lengths=lengths), dict(form="full", causal=False)
    yield "aft", dict(aft, bias=x(2, 5), lengths=lengths), dict(form="conv", causal=False)
    yield "aft", dict(aft, bias=x(2, "W"), documents=ids("B", "T")), dict(form="conv")
    yield "aft", dict(aft, bias=x(long, long), documents=ids("B", "T")), dict(form="full", offset=2)
    yield "selective_scan", dict(
        u=x("B", "T", "C"),
        delta=x("B", "T", "C"),
        A=-x("C", "N").abs(),
        B=x("B", "T", "N"),
        C=x("B", "T", 2, "N"),
        D=x("C"),
        z=x("B", "T", "C"),
        delta_bias=x("C"),
        state=x("B", "C", "N"),
        documents=ids("B", "T"),
    ), dict(delta_softplus=True)
    yield "causal_conv1d", dict(
        x=x("B", "T", "C"), weight=x("C", 4), bias=x("C"), state=x("B", 3, "C"), documents=ids("B", "T")
    ), dict(silu=True)
    yield "moe", dict(
        x=x("T", "C"), up=x(3, 10, "C"), down=x(3, "C", 5), choice=ids("T", "K"), weight=x("T", "K")
    ), {}
    yield "gated_norm", dict(x=x("B", "T", "E"), gate=x("B", "T", "E"), eps=torch.full((n["T"],), 1e-6)), {}
    yield "linear", dict(x=x("B", "C"), weight=x("E", "C"), bias=x("E")), {}
    yield "linear", dict(
        x=x("B", "C"), weight=torch.ones(n["E"], n["C"], dtype=torch.int8), scale=torch.rand(n["E"])
    ), {}
    yield "linear_cross_entropy", dict(
        hidden=x("B", "C"), weight=x("E", "C"), targets=ids("B"), bias=x("E")
    ), {}
    yield "linear", dict(
        x=x("B", "C"),
        weight=torch.zeros(n["E"], 16 * (-(-n["C"] // 32)), dtype=torch.uint8),
        scale=torch.rand(n["E"], -(-n["C"] // 32), dtype=torch.bfloat16),
    ), {}
    yield "dynamic_weights", dict(hidden=x("B", "T", 2 * 1 * 6), w2=x(2, 1, 6, 2 * n["R"] * n["H"])), dict(rank=n["R"])
    yield "rms_norm", dict(x=x("B", "T", "C"), scale=x("C")), {}
    yield "rotary", dict(x=x("B", "T", "H", "E"), cos=x("T", "W"), sin=x("T", "W")), {}
    yield "swiglu", dict(x=x("B", "T", "C")), {}
    yield "gelu_tanh", dict(x=x("B", "T", "C")), {}


def changed(t):
    """What a tensor may wrongly be, by a word for it."""
    yield "without its last dimension", t[..., 0]
    yield "with one more dimension", t.unsqueeze(0)
    for i in range(t.dim()):
        yield f"longer in dimension {i}", torch.cat((t, t.narrow(i, 0, 1)), i)
        yield f"shorter in dimension {i}", t.narrow(i, 0, t.size(i) - 1)
        yield f"empty in dimension {i}", t.narrow(i, 0, 0)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.complex64):
        yield f"of {dtype}", t.to(dtype)
    yield "on another device", t.to("meta")
    for layout in layouts(t):
        yield "of another layout", layout


def layouts(t):
    """The values of t in tensors that are not dense."""
    yield t.to_sparse()
    if t.dim() > 1:
        rows = list(t)
        yield torch.nested.nested_tensor(rows)
        yield torch.nested.nested_tensor(rows, layout=torch.jagged)


def refused_by_name(name, call):
    """Calls, and where it raises asks for one sentence of the operator's own."""
    try:
        return call()
    except (ValueError, TypeError, NotImplementedError, IndexError) as error:
        text = str(error).split("\n")[0]
        assert text.startswith(f"{name}: ") and text.endswith("."), text
        return None


CASES = [pytest.param(*case, id=f"{case[0]}-{i}") for i, case in enumerate(operators())]


@pytest.mark.parametrize("name, tensors, others", CASES)
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_wrong_tensors_are_refused_by_name(name, tensors, others, backend):
    function = getattr(headloom.ops, name)
    assert function(**tensors, **others, backend=backend) is not None
    for argument, t in tensors.items():
        for what, wrong in changed(t):
            # A jagged tensor answers for every function of this name itself.
            if name == "rms_norm" and wrong.layout == torch.jagged:
                continue
            try:
                taken = refused_by_name(name, lambda: function(**{**tensors, argument: wrong}, **others, backend=backend))
                apart = what == "on another device" and len(tensors) > 1
                never = apart or what == "of another layout" or wrong.dtype in (torch.bool, torch.complex64) and t.dtype != wrong.dtype
                assert taken is None or not never, "is taken"
            except Exception as error:
                raise AssertionError(f"{name} with {argument} {what}") from error


@pytest.mark.parametrize("name, tensors, others", CASES)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_wrong_numbers_are_refused_by_name(name, tensors, others, backend):
    function = getattr(headloom.ops, name)
    numbers = {
        a.name: str(a.type)
        for a in getattr(torch.ops.headloom, name).default._schema.arguments
        if "int" in str(a.type) or "float" in str(a.type) or "str" in str(a.type)
    }
    if name == "composed_attention":
        numbers = {"window": "int", "scale": "float", "conv_padding": "str", "conv_mask": "str", "backend": "str"}
    for argument, kind in numbers.items():
        values = ("", "no such") if "str" in kind else (-1, 0, 1, sys.maxsize, -sys.maxsize - 1)
        for value in values if "float" not in kind else (-1.0, 0.0, float("nan"), float("inf")):
            call = {**tensors, **others, "backend": backend, argument: value}
            try:
                refused_by_name(name, lambda: function(**call))
            except Exception as error:
                raise AssertionError(f"{name} with {argument} = {value!r}") from error


CONSTANTS = ("gamma", "eps", "scale", "cos", "sin")  # for which kernels have no gradient


@pytest.mark.parametrize("name, tensors, others", CASES)
def test_gradients_that_pytorch_does_not_hold_as_they_are(name, tensors, others):
    """Autograd gives gradients that are negated when they are read, and zeros without memory."""
    given = {k: t.detach().requires_grad_(t.is_floating_point() and k not in CONSTANTS) for k, t in tensors.items()}
    wanted = [t for t in given.values() if t.requires_grad]
    out = getattr(headloom.ops, name)(**given, **others)
    out = out[0] if isinstance(out, (tuple, list)) else out
    grad = torch.randn_like(out)

    def gradients(grad):
        return torch.autograd.grad(out, wanted, grad, retain_graph=True, allow_unused=True)

    for held, plain in ((torch._neg_view(-grad), grad), (torch._efficientzerotensor(grad.shape), torch.zeros_like(grad))):
        for found, expected in zip(gradients(held), gradients(plain)):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=False)


def test_a_loss_of_complex_numbers():
    """Its gradient reaches a mixer negated."""
    torch.manual_seed(0)
    layer, x, c = headloom.mixer("talking_heads", width=16, heads=2), torch.randn(1, 5, 16), torch.randn(1, 5, 16, dtype=torch.complex64)

    def gradients(y):
        return torch.autograd.grad((torch.complex(torch.zeros_like(y), y).conj() * c).real.sum(), list(layer.parameters()))

    for found, expected in zip(gradients(layer(x)), gradients(layer(x) * 1.0)):
        torch.testing.assert_close(found, expected)


def test_weights_of_a_mix_that_are_negated_when_they_are_read():
    q = torch.randn(1, 20, 4, 8)
    names = dict(q_down=(1, 20, 2, 4), q_up=(1, 20, 2, 4), q_gate=(1, 20, 4), k_down=(1, 20, 2, 4), k_up=(1, 20, 2, 4), k_gate=(1, 20, 4))
    given = {name: torch.randn(size) for name, size in names.items()}
    plain, held = (HeadMix(**mix) for mix in (given, {name: torch._neg_view(-t) for name, t in given.items()}))
    for place in ("pre", "post"):
        assert torch.equal(composed_attention(q, q, q, **{place: held}), composed_attention(q, q, q, **{place: plain}))


@pytest.mark.parametrize("shut", [-1e10, -1e34])
def test_a_gate_that_is_shut_lets_nothing_through(shut):
    """SiLU and GELU are 0 there, however small or large a number their sigmoid is multiplied by."""
    gate, ones = torch.full((1, 3, 8), shut), torch.ones(1, 3, 8)
    calls = {
        "gelu_tanh": [gate],
        "swiglu": [torch.cat((gate, 1e4 * ones), -1)],
        "gated_norm": [ones, gate, torch.full((3,), 1e-6)],
        "moe": [
            torch.ones(3, 1), torch.tensor([shut] * 4 + [1.0] * 4).view(1, 8, 1), torch.ones(1, 1, 4),
            torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1),
        ],
        "causal_conv1d": [gate, torch.ones(8, 1)],
        "selective_scan": [ones, ones, -torch.ones(8, 2), torch.ones(1, 3, 2), torch.ones(1, 3, 2)],
    }  # fmt: skip
    more = {"causal_conv1d": {"silu": True}, "selective_scan": {"z": gate}}
    for name, tensors in calls.items():
        tensors = [t.clone().requires_grad_(t.is_floating_point() and t.dim() > 1) for t in tensors]  # not eps
        out = getattr(headloom.ops, name)(*tensors, **more.get(name, {}), backend="fused")
        out = out[0] if isinstance(out, tuple) else out
        assert not out.any(), (name, out)
        if name != "gelu_tanh" or shut > -1e19:  # whose slope has the square of x
            gradients = torch.autograd.grad(out.sum(), [t for t in tensors if t.requires_grad])
            assert not any(g.any() for g in gradients), (name, gradients)


@pytest.mark.parametrize("name, tensors, others", CASES)
def test_arguments_of_another_type_are_refused_briefly(name, tensors, others):
    function = getattr(headloom.ops, name)
    schema = getattr(torch.ops.headloom, name).default._schema.arguments
    needed = [a.name for a in schema if str(a.type) == "Tensor"]
    wrong = {a: [t.tolist(), t.float().numpy(), 0.5, "x"] + [None] * (a in needed) for a, t in tensors.items()}
    wrong |= {a: [[value], torch.ones(2), object()] for a, value in others.items()}
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises(TypeError, match=f"^{name}: {argument} must be .*; it is ") as caught:
                function(**{**tensors, **others, argument: value})
            assert len(str(caught.value)) < 150


@pytest.mark.parametrize("name, tensors, others", CASES)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_strided_tensors_are_taken(name, tensors, others, backend):
    function = getattr(headloom.ops, name)
    expected = flat(function(**tensors, **others, backend=backend))
    for argument, t in tensors.items():
        apart = torch.stack((t, t), -1)[..., 0]  # the last dimension with a stride
        turned = t.transpose(0, -1).contiguous().transpose(0, -1)
        gap = torch.full((*t.shape[:-1], 3), float("nan")).to(t.dtype)
        rows_apart = torch.cat((t, gap), -1)[..., : t.shape[-1]]  # what kernels read in place
        for strided in (apart, turned, rows_apart):
            got = flat(function(**{**tensors, argument: strided}, **others, backend=backend))
            torch.testing.assert_close(got, expected, msg=lambda m: f"{name}: {argument}: {m}")


def flat(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


@contextmanager
def poisoned_memory():
    """Memory that nothing writes shows as NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name, tensors, others", CASES)
def test_vmap_is_a_call_for_each(name, tensors, others):
    function = getattr(headloom.ops, name)
    several = {k: torch.stack((t, 0.9 * t)) for k, t in tensors.items() if t.is_floating_point()}
    shared = {k: t for k, t in tensors.items() if k not in several}
    at_once = torch.func.vmap(lambda given: function(**given, **shared, **others))(several)
    for i in range(2):
        expected = function(**{k: t[i] for k, t in several.items()}, **shared, **others)
        results = zip(*[r if isinstance(r, (list, tuple)) else [r] for r in (at_once, expected)])
        for got, wanted in results:
            torch.testing.assert_close(got[i], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name, tensors, others", CASES)
def test_a_batch_of_gradients_is_a_backward_for_each(name, tensors, others):
    leaves = {a: t.clone().requires_grad_(t.is_floating_point()) for a, t in tensors.items()}
    results = [r for r in flat(getattr(headloom.ops, name)(**leaves, **others)) if r.requires_grad]
    wanted = [t for t in leaves.values() if t.requires_grad]
    given = [torch.randn(2, *r.shape, dtype=r.dtype) for r in results]
    at_once = torch.autograd.grad(results, wanted, given, is_grads_batched=True, retain_graph=True, allow_unused=True)
    for i in range(2):
        each = torch.autograd.grad(results, wanted, [g[i] for g in given], retain_graph=True, allow_unused=True)
        for got, expected in zip(at_once, each):
            assert (got is None) == (expected is None)
            if got is not None:
                torch.testing.assert_close(got[i], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name, tensors, others", CASES)
def test_tangents_of_forward_mode_are_those_of_the_gradients(name, tensors, others):
    torch.manual_seed(1)
    function = getattr(headloom.ops, name)
    along = {a: torch.randn_like(t) for a, t in tensors.items() if t.is_floating_point()}
    leaves = {a: t.clone().requires_grad_(a in along) for a, t in tensors.items()}
    # Plain attention is PyTorch's, whose faster kernels have no forward mode.
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        given = {a: forward_ad.make_dual(t, along[a]) if a in along else t for a, t in tensors.items()}
        duals = [forward_ad.unpack_dual(r) for r in flat(function(**given, **others))]
        for i, result in enumerate(flat(function(**leaves, **others))):
            if not result.requires_grad:
                continue
            weights = torch.randn_like(result)
            wanted = [t for a, t in leaves.items() if a in along]
            grads = torch.autograd.grad(result, wanted, weights, retain_graph=True, allow_unused=True)
            parts = torch.cat([(g * along[a]).flatten().double() for a, g in zip(along, grads) if g is not None])
            # Gradients of a weight's scales of four bits are bfloat16.
            tolerance = 1e-3 + (4e-3 if "scale" in tensors else 1e-4) * parts.abs().sum().item()
            torch.testing.assert_close((duals[i].tangent * weights).sum().double(), parts.sum(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("size", ["B", "T", "S", "H", "D", "E", "C", "N", "K"])
def test_what_is_empty_leaves_nothing_unwritten(size):
    for name, tensors, others in operators(**{size: 0}):
        function = getattr(headloom.ops, name)
        found = {}
        for backend in (None, "reference"):
            leaves = {a: t.clone().requires_grad_(t.is_floating_point()) for a, t in tensors.items()}
            with poisoned_memory():
                results = refused_by_name(name, lambda: function(**leaves, **others, backend=backend))
                if results is None:
                    continue
                results = flat(results)
                loss = sum(r.double().square().sum() + r.double().sum() for r in results)
                if loss.requires_grad:
                    loss.backward()
            found[backend] = [r.detach() for r in results] + [
                torch.zeros_like(t) if t.grad is None else t.grad for t in leaves.values() if t.requires_grad
            ]
        assert len(found) in (0, 2), f"{name} with {size} = 0 is refused by one backend only"
        if found:
            torch.testing.assert_close(
                found[None],
                found["reference"],
                rtol=1e-4,
                atol=1e-3,
                msg=lambda m: f"{name}{others} with {size} = 0: {m}",
            )


@pytest.mark.parametrize("T, S", [(0, 5), (5, 0), (0, 0)])
def test_gradients_of_composed_attention_without_queries_or_keys(T, S):
    def x(*shape):
        return torch.randn(shape, requires_grad=True)

    mixes = [
        HeadMix(x(4, 4), x(2, T, 2, 4), x(2, T, 2, 4), x(2, T, 4), x(2, S, 2, 4), x(2, S, 2, 4), x(2, S, 4))
        for _ in range(2)
    ]
    q, k, v, conv = x(2, T, 4, 3), x(2, S, 4, 3), x(2, S, 4, 3), x(4, 2, 3)
    with poisoned_memory():
        out = composed_attention(q, k, v, *mixes, pre_conv=conv, post_conv=conv, backend="fused")
        out.sum().backward()
        defined = composed_attention(q, k, v, *mixes, pre_conv=conv, post_conv=conv, backend="reference")
    assert out.shape == defined.shape == (2, T, 4, 3) and not out.any() and not defined.any()
    leaves = [q, k, v, conv] + [t for m in mixes for t in vars(m).values() if isinstance(t, torch.Tensor)]
    assert all(t.grad is not None and not t.grad.any() for t in leaves)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T, S", [(1, 40), (40, 40), (40, 9), (20, 300)])
def test_the_largest_window_is_none(causal, T, S):
    torch.manual_seed(1)
    q, k, v = torch.randn(2, T, 4, 3), torch.randn(2, S, 4, 3), torch.randn(2, S, 4, 3)
    mix = HeadMix(static=torch.randn(4, 4))
    for post in (None, mix):
        expected = composed_attention(q, k, v, post=post, causal=causal)
        for backend in (None, "fused", "reference"):
            for window in (sys.maxsize, sys.maxsize - 1, 2**62, S + T):
                leaves = [t.clone().requires_grad_() for t in (q, k, v)]
                got = composed_attention(*leaves, post=post, causal=causal, window=window, backend=backend)
                torch.testing.assert_close(got, expected)
                got.sum().backward()
                assert all(t.grad.isfinite().all() for t in leaves)


def test_a_mix_is_a_head_mix():
    q = torch.randn(1, 3, 4, 2)
    for argument in ("pre", "post"):
        with pytest.raises(TypeError, match=f"composed_attention: {argument} is a Tensor, expected a headloom.HeadMix"):
            composed_attention(q, q, q, **{argument: torch.eye(4)})
        with pytest.raises(TypeError, match=rf"composed_attention: {argument}.q_gate must be a tensor; it is \[\[1.0\]\]"):
            composed_attention(q, q, q, **{argument: HeadMix(q_gate=[[1.0]])})


def test_rates_out_of_range_are_refused():
    k, zero = torch.randn(1, 3, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"wkv: rate is -5 for channel 2, expected at least 0: exp\(time_decay\)"):
        headloom.ops.wkv(k, k, torch.tensor([0.0, 1.0, -5.0, 0.0]), zero)
    q = torch.randn(1, 3, 2, 4)
    for bad in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"retention: gamma is {bad:g} for head 1, expected more than 0"):
            headloom.ops.retention(q, q, q, torch.tensor([0.9, bad]))


@pytest.mark.parametrize("form, columns", [("simple", None), ("local", 5), ("full", 6), ("conv", 5)])
def test_aft_of_an_empty_sequence_is_zero(form, columns):
    torch.manual_seed(1)
    bias = None if columns is None else torch.randn(2 if form == "conv" else 6, columns)
    lengths = torch.tensor([0, 4])
    found = {}
    for backend in (None, "reference"):
        leaves = [torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        leaves = [t.requires_grad_() for t in leaves]
        out = headloom.ops.aft(*leaves, form=form, bias=bias, causal=False, lengths=lengths, backend=backend)[0]
        assert not out[0].any() and out[1].all()
        found[backend] = [out, *torch.autograd.grad(out.square().sum(), leaves)]
        assert not found[backend][1][0].any() and not found[backend][3][0].any()
    torch.testing.assert_close(found[None], found["reference"])
