"""Recurrences and short filters as PyTorch operators: schemas, fake tensors, autograd, torch.compile."""

import headloom  # noqa: F401  loads the operators
import pytest
import torch
from torch.func import grad

B, T, C = 2, 7, 5
OPS = torch.ops.headloom


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def calls(dtype=torch.float32):
    torch.manual_seed(11)
    sequence = [draw(B, T, C, dtype=dtype) for _ in range(3)]
    documents = torch.tensor([0, 0, 0, 4, 4, 1, 1]).expand(B, T)
    rates = [torch.rand(C, dtype=dtype).requires_grad_(), draw(C, dtype=dtype)]
    band, mix = draw(T, 3, dtype=dtype), draw(3, C, dtype=dtype)
    N = 3
    A = -torch.rand(C, N, dtype=dtype)
    scan = (*sequence[:2], A.requires_grad_(), draw(B, T, N, dtype=dtype), draw(B, T, N, dtype=dtype))
    scan_state, filters = draw(B, C, N, dtype=dtype), draw(C, 4, dtype=dtype)
    heads = [draw(B, T, 2, size, dtype=dtype) for size in (3, 3, 4)]
    decay = torch.rand(B, T, 2, 3, dtype=dtype).neg().requires_grad_()
    gamma = torch.tensor([0.5, 0.9], dtype=dtype)
    return {
        "wkv": (OPS.wkv.default, (*sequence[:2], *rates), {}),
        "wkv, all": (OPS.wkv.default, (*sequence[:2], *rates, sequence[2], draw(B, 3, C, dtype=dtype), documents), {}),
        "token_shift": (OPS.token_shift.default, (sequence[0], mix, draw(B, C, dtype=dtype), documents), {}),
        "aft simple": (OPS.aft.default, (*sequence,), {}),
        "aft local": (OPS.aft.default, (*sequence, "local", band), dict(documents=documents)),
        "aft full": (OPS.aft.default, (*sequence, "full", draw(T, T, dtype=dtype)), dict(documents=documents)),
        "aft full, both ways": (OPS.aft.default, (*sequence, "full", draw(T, T, dtype=dtype)), dict(causal=False)),
        "aft conv": (OPS.aft.default, (*sequence, "conv", draw(1, 3, dtype=dtype)), {}),
        "aft conv, both ways": (OPS.aft.default, (*sequence, "conv", draw(1, 3, dtype=dtype)), dict(causal=False)),
        "selective_scan": (OPS.selective_scan.default, scan, dict(delta_softplus=True)),
        "selective_scan, all": (
            OPS.selective_scan.default,
            (*scan, draw(C, dtype=dtype), sequence[2], draw(C, dtype=dtype), True, scan_state, documents),
            {},
        ),
        "gated_linear_attention": (OPS.gated_linear_attention.default, (*heads, decay), {}),
        "gated_linear_attention, all": (
            OPS.gated_linear_attention.default,
            (*heads, decay, draw(B, 2, 3, 4, dtype=dtype), documents),
            dict(chunk=3),
        ),
        "causal_conv1d": (OPS.causal_conv1d.default, (sequence[0], filters), {}),
        "causal_conv1d, all": (
            OPS.causal_conv1d.default,
            (sequence[0], filters, draw(C, dtype=dtype), True, draw(B, 3, C, dtype=dtype), documents),
            {},
        ),
        "retention": (OPS.retention.default, (*heads, gamma), {}),
        "retention, all": (OPS.retention.default, (*heads, gamma, draw(B, 2, 3, 4, dtype=dtype), documents), dict(chunk=3)),
    }


NAMES = list(calls())


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    op, arguments, options = calls()[name]
    torch.library.opcheck(op, arguments, options)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    op, arguments, options = calls(torch.float64)[name]

    def output(*x):  # of the state returned, the exponent is a constant to gradients
        y = op(*x, **options)
        return y if isinstance(y, list) else y[0]

    assert torch.autograd.gradcheck(output, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_is_the_same(name):
    torch.compiler.reset()
    op, arguments, options = calls()[name]

    def loss(*x):
        y = op(*x, **options)
        return sum(t.square().sum() for t in (y if isinstance(y, list) else y[:1]))

    leaves = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]
    expected = torch.autograd.grad(loss(*arguments), leaves)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for got, wanted in zip(torch.autograd.grad(compiled(*arguments), leaves), expected):
        torch.testing.assert_close(got, wanted)


def test_transforms_take_the_reference():
    op, (k, *others), _ = calls()["wkv"]

    def loss(k):
        return op(k, *others)[0].square().sum()

    torch.testing.assert_close(grad(loss)(k), torch.autograd.grad(loss(k), k)[0])
