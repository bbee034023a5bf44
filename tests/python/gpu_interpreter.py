"""The Triton kernels in Triton's interpreter, on tensors of the CPU. test_gpu.py runs this file in a process of its own,
because the interpreter is chosen when Triton is imported."""

import math

import pytest
import torch
from torch import Tensor

import cuda_emulation
import headloom  # noqa: F401: loads the operators
from headloom.gpu import composed_attention as gpu
from headloom.gpu import mixes

TENSORS = ("static", "q_down", "q_up", "q_gate", "k_down", "k_up", "k_gate")


def mix(B, T, S, H, rank_q=0, rank_k=0, gates=False, static=False, groups=1):
    """The operator's list of a mix, and its groups. Weights are small, so that no map becomes large."""
    n = H // groups
    shapes = dict.fromkeys(TENSORS)
    if static:
        shapes["static"] = (groups, n, n) if groups > 1 else (n, n)
    if rank_q:
        shapes["q_down"] = shapes["q_up"] = (B, T, rank_q, H)
    if rank_k:
        shapes["k_down"] = shapes["k_up"] = (B, S, rank_k, H)
    if gates:
        shapes["q_gate"], shapes["k_gate"] = (B, T, H), (B, S, H)
    return [None if s is None else torch.randn(s) / math.sqrt(n) for s in shapes.values()], groups


def poisoned(size, dtype, device=None):
    return torch.full(size, float("nan") if dtype.is_floating_point else 85, dtype=dtype, device=device)


class Case:
    """Tensors of a call and the call's settings, in the operator's order."""

    def __init__(self, B=1, T=11, S=11, H=2, D=20, E=12, Gk=None, Gv=None, pre=None, post=None, **settings):
        torch.manual_seed(1)
        self.q = torch.randn(B, T, H, D)
        self.k = torch.randn(B, S, Gk or H, D)
        self.v = torch.randn(B, S, Gv or H, E)
        self.pre, self.pre_groups = mix(B, T, S, H, **pre) if pre else ([], 1)
        self.post, self.post_groups = mix(B, T, S, H, **post) if post else ([], 1)
        self.bias = settings.get("bias")
        self.pre_conv, self.post_conv = settings.get("pre_conv"), settings.get("post_conv")
        self.settings = settings
        self.grad = torch.randn(B, T, H, E)

    def tensors(self):
        return [
            t
            for t in (self.q, self.k, self.v, *self.pre, *self.post, self.pre_conv, self.post_conv, self.bias)
            if t is not None
        ]

    def arguments(self, convert=lambda t: t):
        def one(t):
            return None if t is None else convert(t)

        o = self.settings
        return [
            one(self.q),
            one(self.k),
            one(self.v),
            [one(t) for t in self.pre],
            [one(t) for t in self.post],
            self.pre_groups,
            self.post_groups,
            one(self.pre_conv),
            one(self.post_conv),
            o.get("padding", "both"),
            o.get("conv_mask", "double"),
            one(self.bias),
            o.get("causal", True),
            o.get("window"),
            o.get("lengths"),
            o.get("documents"),
            o.get("mask"),
            o.get("scale"),
        ]

    def kernels(self, dtype=torch.float32):
        """The output, and the gradients of all tensors, by the kernels."""
        arguments = self.arguments(lambda t: t.to(dtype) if t.is_floating_point() else t)
        out, lse = gpu.forward(*arguments, True)
        grads = gpu.backward([self.grad.to(dtype)], *arguments, [lse], (1 << 20) - 1)
        return [out, *grads]

    def reference(self, dtype=torch.float64):
        leaves = {}

        def leaf(t):
            if id(t) not in leaves:
                leaves[id(t)] = t.to(dtype).requires_grad_()
            return leaves[id(t)]

        out = torch.ops.headloom.composed_attention(*self.arguments(leaf), "reference")
        wanted = [leaves[id(t)] for t in self.tensors()]
        return [out.detach(), *torch.autograd.grad(out, wanted, self.grad.to(dtype))]


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Fresh memory is full of NaN: what nobody writes is noticed."""

    def new_empty(self, *size, dtype=None, device=None):
        sizes = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return poisoned(tuple(sizes), dtype or self.dtype, device)

    def empty_like(t, dtype=None, memory_format=None):
        return poisoned(t.shape, dtype or t.dtype)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", empty_like)


@pytest.fixture(autouse=True)
def _large_tiles(monkeypatch):
    """The interpreter's time goes by the number of tiles, not by their size."""
    monkeypatch.setattr(gpu, "tile", lambda mix, backward, roomy: gpu.Tile(16, 64, 4))


def compare(case, tolerance=2e-5):
    found, expected = case.kernels(), case.reference()
    assert len(found) == len(expected)
    for i, (x, y) in enumerate(zip(found, expected)):
        assert x.shape == y.shape, i
        largest = max(1.0, y.abs().max().item()) if y.numel() else 1.0
        torch.testing.assert_close(x.double(), y, rtol=0, atol=tolerance * largest, msg=lambda m: f"tensor {i}: {m}")


DCMHA = {"rank_q": 2, "rank_k": 2, "gates": True}
LENGTHS = torch.tensor([3, 9])
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3], [5] * 11])


def kernel(*size):
    return torch.randn(size) / math.sqrt(math.prod(size[1:]))


CASES = {
    "plain": lambda: Case(),
    "query-wise before softmax": lambda: Case(pre={"rank_q": 1}),
    "query-wise after softmax": lambda: Case(post={"rank_q": 1}),
    "key-wise on both sides": lambda: Case(pre={"rank_k": 1}, post={"rank_k": 2}),
    "gates alone": lambda: Case(pre={"gates": True}, post={"gates": True}),
    "dcmha": lambda: Case(B=2, H=6, pre=DCMHA, post=DCMHA),
    "rank 4": lambda: Case(B=1, pre={"rank_q": 4}, post={"rank_k": 4}),
    "static matrices": lambda: Case(B=2, H=3, pre={"static": True}, post={"static": True}),
    "groups": lambda: Case(H=6, pre={**DCMHA, "groups": 2}, post={**DCMHA, "static": True, "groups": 2}),
    "grouped keys": lambda: Case(B=2, H=6, post={"rank_q": 1}, Gk=2, Gv=3),
    "one query": lambda: Case(T=1, S=1, pre=DCMHA, post=DCMHA),
    "more keys than queries": lambda: Case(T=5, S=63, H=2, pre={"rank_q": 1}),
    "more queries than keys": lambda: Case(T=11, S=5, pre={"rank_k": 1}, post={"rank_q": 1}),
    "bidirectional": lambda: Case(pre=DCMHA, causal=False),
    "window": lambda: Case(T=40, S=40, H=2, pre={"rank_q": 1}, post={"rank_k": 1}, window=7),
    "bidirectional window": lambda: Case(T=40, S=40, H=2, post={"rank_q": 1}, window=3, causal=False),
    "window wider than all": lambda: Case(post={"rank_q": 1}, window=1 << 40),
    "lengths": lambda: Case(B=2, pre={"rank_k": 1}, lengths=LENGTHS, causal=False),
    "length 0": lambda: Case(B=2, post={"rank_k": 1}, lengths=torch.tensor([0, 2])),
    "documents": lambda: Case(B=2, T=9, pre={"rank_q": 1}, documents=DOCUMENTS),
    "mask": lambda: Case(B=2, pre={"rank_q": 1}, mask=torch.rand(2, 1, 11, 11) < 0.6),
    "bias": lambda: Case(post={"rank_q": 1}, bias=torch.randn(2, 1, 11)),
    "scale": lambda: Case(B=1, post={"rank_q": 1}, scale=0.7),
    "convolution before softmax": lambda: Case(B=2, pre_conv=kernel(2, 3, 5)),
    "convolution after softmax": lambda: Case(B=2, post_conv=kernel(2, 3, 5)),
    "convolutions of groups and mixes": lambda: Case(
        H=4, pre_conv=kernel(4, 2, 2, 3), post_conv=kernel(4, 4, 4, 3), pre={"rank_q": 1}, post={"static": True}
    ),
    "exact convolution": lambda: Case(
        B=2, pre_conv=kernel(2, 4, 3), post_conv=kernel(2, 2, 1), conv_mask="exact", post={"rank_k": 1}, padding="left"
    ),
    "exact convolution wider than the window": lambda: Case(
        T=20, S=23, pre_conv=kernel(2, 6, 3), conv_mask="exact", window=3, padding="right"
    ),
    "bidirectional convolution": lambda: Case(
        T=20, S=20, pre_conv=kernel(2, 3, 3), post_conv=kernel(2, 2, 3), conv_mask="exact", causal=False, window=4
    ),
    "convolutions of documents": lambda: Case(
        B=2, T=9, pre_conv=kernel(2, 3, 3), post_conv=kernel(2, 3, 3), documents=DOCUMENTS, conv_mask="exact"
    ),
    "convolutions and lengths": lambda: Case(B=2, pre_conv=kernel(2, 2, 3), post_conv=kernel(2, 2, 3), lengths=LENGTHS),
    "convolution and bias": lambda: Case(T=5, S=30, pre_conv=kernel(2, 6, 11), bias=torch.randn(2, 1, 30)),
    "kernel larger than the maps": lambda: Case(T=2, S=3, pre_conv=kernel(2, 6, 11), post_conv=kernel(2, 6, 11)),
    "no queries": lambda: Case(T=0, pre={"rank_q": 1}),
    "no keys": lambda: Case(S=0, pre={"rank_q": 1}, causal=False),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    compare(CASES[name]())


def by_threes(p):
    return (p.parts(first, min(first + 3, p.T)) for first in range(0, p.T, 3))


def test_chunks_add_up(monkeypatch):
    """Three chunks of queries, of which the first sees no key, in tiles of the real size."""
    monkeypatch.undo()
    monkeypatch.setattr(gpu.KernelArguments, "chunks", by_threes)
    compare(Case(B=1, T=8, S=5, H=4, pre={"rank_q": 1, "static": True}, post={"rank_k": 1, "gates": True}))


@pytest.mark.parametrize(
    "case",
    [
        lambda: Case(B=2, T=270, S=290, H=2, pre=DCMHA, post={"static": True}),
        lambda: Case(B=1, T=260, S=200, H=2, post={"rank_q": 1}, pre_conv=kernel(2, 3, 5), conv_mask="exact"),
        lambda: Case(B=1, T=200, S=260, H=4, Gk=2, Gv=4, pre={"rank_k": 1}, bias=torch.randn(4, 200, 260)),
        lambda: Case(B=1, T=192, S=192, H=2, pre_conv=kernel(2, 3, 5), conv_mask="exact"),
    ],
    ids=["more keys", "more queries and a convolution", "grouped keys and a bias", "an exact convolution"],
)
def test_products_leave_out_what_is_not_seen(monkeypatch, case):
    """Memory there is full of NaN. Two chunks, each with several bands."""
    monkeypatch.setattr(gpu, "BAND", 64)
    monkeypatch.setattr(gpu, "KEY_BAND", 128)
    monkeypatch.setattr(gpu.KernelArguments, "chunks", lambda p: (p.parts(first, min(first + 192, p.T)) for first in range(0, p.T, 192)))
    compare(case())


def test_weights_are_read_as_they_are_strided():
    """As parts of larger tensors, and with one value for all tokens."""
    case = Case(B=2, pre=DCMHA, post={"rank_k": 1})
    for mix in case.pre, case.post:
        mix[:] = [None if x is None else torch.stack([x, x], -1)[..., 0] for x in mix]
    case.pre[2] = case.pre[2][:, :1].expand(-1, 11, -1, -1)
    assert not any(x.is_contiguous() for mix in (case.pre, case.post) for x in mix if x is not None)
    compare(case)


@pytest.mark.parametrize("together", [3, 2], ids=["all together", "two and one"])
@pytest.mark.parametrize(
    "case",
    [
        lambda: Case(B=2, T=150, S=150, pre=DCMHA, post=DCMHA, window=20),
        lambda: Case(B=2, T=150, S=150, pre={"static": True}, post={"rank_k": 1}, window=60, lengths=torch.tensor([149, 9])),
        lambda: Case(T=150, S=170, post={"rank_k": 1, "gates": True}, window=3, causal=False),
        lambda: Case(T=150, S=11, pre={"rank_k": 1}, post={"rank_q": 1}, window=20),
        lambda: Case(B=1, T=450, S=40, H=2, pre={"rank_k": 1}, window=150),
        lambda: Case(T=130, S=130, H=4, Gk=2, Gv=1, pre={"rank_k": 1}, window=64, documents=torch.arange(130)[None] // 50),
    ],
    ids=["dcmha", "static and lengths", "bidirectional", "few keys", "few keys of a long window", "grouped keys and documents"],
)
def test_chunks_of_a_window_are_taken_together(monkeypatch, case, together):
    """Three chunks of queries, of which the last lies in part beyond the sequence, as the first one's keys do."""
    case = case()
    B, T, H, _ = case.q.shape
    monkeypatch.setattr(gpu, "BAND", 64)
    # The least memory for maps that holds so many.
    rows = [parts.own for parts in gpu.KernelArguments(*case.arguments()).chunks()]
    assert [chunk.chunks for chunk in rows] == [3]
    monkeypatch.setattr(gpu, "MAPS", together * B * H * rows[0].step * gpu.up(rows[0].keys, gpu.COLUMNS) * 4)
    assert [parts.own.chunks for parts in gpu.KernelArguments(*case.arguments()).chunks()] == ([3] if together == 3 else [2, 1])
    compare(case)


@pytest.mark.parametrize("window", [None, 64, 100, 1000, 1900])
def test_maps_of_a_chunk_take_no_more_than_their_memory(monkeypatch, window):
    """Whatever the window is. Chunks have each query once."""
    case = Case(B=1, T=1000, S=1000, H=2, post={"rank_q": 1}, window=window)
    monkeypatch.setattr(gpu, "MAPS", 1 << 20)
    arguments = gpu.KernelArguments(*case.arguments())
    end = 0
    for parts in arguments.chunks():
        chunk = parts.own
        assert chunk.first == end
        end = chunk.last + (chunk.chunks - 1) * chunk.step
        assert arguments.maps(chunk).numel() * 4 <= gpu.MAPS
    assert 1000 <= end < 1064 + (window or 0)


@pytest.mark.parametrize("conv_mask", ["double", "exact"])
def test_convolutions_reach_over_chunks(monkeypatch, conv_mask):
    """Each chunk of three queries reads scores of up to five earlier ones, and adds to their gradients."""
    monkeypatch.setattr(gpu.KernelArguments, "chunks", by_threes)
    both = {"pre_conv": kernel(2, 3, 3), "post_conv": kernel(2, 4, 3), "conv_mask": conv_mask}
    compare(Case(B=2, T=11, S=11, pre=DCMHA, post={"static": True}, bias=torch.randn(2, 11, 11), **both))
    compare(Case(B=1, T=14, S=14, post={"rank_q": 1}, window=4, **both))
    compare(Case(B=1, T=14, S=14, post_conv=kernel(2, 4, 3), conv_mask=conv_mask))


@pytest.mark.parametrize(
    "case",
    [
        lambda: Case(B=1, pre=DCMHA, post={**DCMHA, "static": True}),
        lambda: Case(B=1, pre_conv=kernel(2, 3, 5), post_conv=kernel(2, 3, 5), post={"static": True}),
        lambda: Case(B=1, T=40, S=40, H=6, pre={"rank_q": 4, "rank_k": 4, "gates": True}),
    ],
    ids=["mixes", "convolutions", "rank 4"],
)
def test_float16_errs_like_its_rounding(case):
    case = case()
    expected = case.reference()
    for x, y, z in zip(case.kernels(torch.float16), case.reference(torch.float16), expected):
        norm = z.norm()
        assert (x - z).norm() <= 1.3 * (y - z).norm() + 1e-4 * norm


@pytest.mark.parametrize(
    "case",
    [
        CASES["dcmha"],
        CASES["lengths"],
        CASES["bidirectional window"],
        CASES["convolutions of groups and mixes"],
        CASES["documents"],
        lambda: Case(T=150, S=150, pre={"rank_q": 1}, post={"rank_k": 1}, window=60, lengths=torch.tensor([149])),
    ],
    ids=["dcmha", "lengths", "bidirectional window", "convolutions", "documents", "chunks of a window"],
)
def test_the_kernels_in_cuda_err_like_their_rounding(monkeypatch, case):
    """Emulated on the CPU, with what surrounds them in Triton's interpreter. test_gpu_mixes.py tests them one by one."""
    cuda_emulation.install(monkeypatch)
    started = []
    run = mixes.run
    monkeypatch.setattr(mixes, "run", lambda name, *given: started.append(name) or run(name, *given))
    case = case()
    expected = case.reference()
    for x, y, z in zip(case.kernels(torch.float16), case.reference(torch.float16), expected, strict=True):
        norm = z.norm()
        assert (x - z).norm() <= 1.5 * (y - z).norm() + 5e-4 * norm
    assert {"mix", "mix_backward"} == set(started)


def test_nan_in_means_nan_out():
    """A key's NaN reaches the queries that see it. Sums over the heads carry it to all heads, and to no earlier query."""
    case = Case(B=1, pre={"rank_q": 1})
    case.k[0, 5, 1, 3] = float("nan")
    out = case.kernels()[0]
    assert out[0, 5:].isnan().all()
    assert out[0, :5].isfinite().all()


def test_results_do_not_depend_on_the_tiles(monkeypatch):
    """Sums over heads are the same for any tile; sums over keys differ by rounding."""
    case = Case(B=1, H=2, pre=DCMHA, post=DCMHA)
    found = case.kernels()
    monkeypatch.setattr(gpu, "tile", lambda mix, backward, roomy: gpu.Tile(8, 8, 4))
    for x, y in zip(found, case.kernels(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    # In 16 bits a thread adds up rows of its own before tensor cores sum the rest.
    found = []
    for rows in (16, 32):
        monkeypatch.setattr(gpu, "tile", lambda mix, backward, roomy, rows=rows: gpu.Tile(rows, 32, 2))
        found.append(case.kernels(torch.float16))
    for x, y in zip(*found, strict=True):
        assert (x.float() - y.float()).norm() <= 1e-3 * y.float().norm()


def test_serves_the_operator():
    """Schemas, autograd formula and gradients: the kernels take the CPU's dispatch key and serve the operator itself.

    This is the last test of the file, because the key stays theirs."""
    library = torch.library.Library("headloom", "IMPL", "CPU")
    calls = []

    def forward(*arguments):
        calls.append("forward")
        return gpu.forward(*arguments)

    def backward(*arguments):
        calls.append("backward")
        return gpu.backward(*arguments)

    library.impl("composed_attention_fused", forward, allow_override=True)
    library.impl("composed_attention_backward", backward, allow_override=True)
    case = Case(B=1, pre=DCMHA, post={"rank_k": 1})
    case.k.requires_grad_()
    case.pre[2].requires_grad_()
    wanted = [case.k, case.pre[2]]
    found = torch.ops.headloom.composed_attention(*case.arguments(), "fused")
    expected = torch.ops.headloom.composed_attention(*case.arguments(), "reference")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, wanted, case.grad), torch.autograd.grad(expected, wanted, case.grad)
    )
    assert calls == ["forward", "backward"]
