"""The Triton kernels in Triton's interpreter, on tensors of the CPU. test_gpu.py runs this file in a process of its own,
because the interpreter is chosen when Triton is imported."""

import math

import pytest
import torch
from torch import Tensor

import headloom  # noqa: F401: loads the operators
from headloom.gpu import composed_attention as gpu

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


def poisoned(*size, **options):
    return torch.full(*size, float("nan"), **options)


class Case:
    """Tensors of a call and the call's settings, in the operator's order."""

    def __init__(self, B=2, T=17, S=17, H=6, D=20, E=12, Gk=None, Gv=None, pre=None, post=None, **settings):
        torch.manual_seed(1)
        self.q = torch.randn(B, T, H, D)
        self.k = torch.randn(B, S, Gk or H, D)
        self.v = torch.randn(B, S, Gv or H, E)
        self.pre, self.pre_groups = mix(B, T, S, H, **pre) if pre else ([], 1)
        self.post, self.post_groups = mix(B, T, S, H, **post) if post else ([], 1)
        self.bias = settings.get("bias")
        self.settings = settings
        self.grad = torch.randn(B, T, H, E)

    def tensors(self):
        return [
            t for t in (self.q, self.k, self.v, *self.pre, *self.post, self.bias) if t is not None
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
            None,
            None,
            "both",
            "double",
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
        arguments = self.arguments(lambda t: t.to(dtype))
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
        return poisoned(tuple(sizes), dtype=dtype or self.dtype, device=device or self.device)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda t, **o: poisoned(t.shape, dtype=o.get("dtype", t.dtype)))


def compare(case, tolerance=2e-5):
    found, expected = case.kernels(), case.reference()
    assert len(found) == len(expected)
    for i, (x, y) in enumerate(zip(found, expected)):
        assert x.shape == y.shape, i
        error = (x.double() - y).abs().max().item()
        assert error <= tolerance * max(1.0, y.abs().max().item()), (i, error)


DCMHA = {"rank_q": 2, "rank_k": 2, "gates": True}

CASES = {
    "plain": lambda: Case(),
    "query-wise before softmax": lambda: Case(pre={"rank_q": 1}),
    "query-wise after softmax": lambda: Case(post={"rank_q": 1}),
    "key-wise on both sides": lambda: Case(pre={"rank_k": 1}, post={"rank_k": 2}),
    "gates alone": lambda: Case(pre={"gates": True}, post={"gates": True}),
    "dcmha": lambda: Case(pre=DCMHA, post=DCMHA),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    compare(CASES[name]())
