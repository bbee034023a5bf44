"""FlopCounterMode counts what fused operators multiply, forward and backward."""

import headloom
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode


def flops(call, *inputs):
    """Of the forward and of the backward pass."""
    with FlopCounterMode(display=False) as forward:
        out = call()
    out = out if isinstance(out, torch.Tensor) else out[0]
    if not out.requires_grad:
        return forward.get_total_flops(), 0
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    return forward.get_total_flops(), backward.get_total_flops()


def drawn(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_linear():
    x, weight, bias = drawn(2, 5, 24), drawn(40, 24), drawn(40)
    product = 2 * 10 * 24 * 40
    assert flops(lambda: headloom.ops.linear(x, weight, bias=bias, backend="fused"), x, weight, bias) == (product, 2 * product)
    assert flops(lambda: headloom.ops.linear(x, weight.detach(), backend="fused"), x) == (product, product)
    with torch.no_grad():
        assert flops(lambda: headloom.ops.linear(x, weight, backend="fused")) == (product, 0)


@pytest.mark.parametrize("mixed", [False, True])
def test_composed_attention(mixed):
    B, H, T, D = 2, 4, 37, 8
    q, k, v = drawn(B, T, H, D), drawn(B, T, H, D), drawn(B, T, H, D)
    matrix = drawn(H, H)
    mixes = {"pre": headloom.HeadMix(static=matrix)} if mixed else {}
    inputs = (q, k, v, matrix) if mixed else (q, k, v)

    def counted(backend):
        return flops(lambda: headloom.composed_attention(q, k, v, **mixes, backend=backend), *inputs)

    if mixed:
        assert counted("fused") == counted("reference")
        assert counted("fused")[0] > 4 * B * H * T * T * D
    else:
        assert counted("fused") == (4 * B * H * T * T * D, 8 * B * H * T * T * D)


def test_linear_cross_entropy():
    hidden, weight, targets = drawn(20, 16), drawn(300, 16), torch.randint(300, (20,))
    product = 2 * 20 * 16 * 300
    counted = flops(lambda: headloom.ops.linear_cross_entropy(hidden, weight, targets, backend="fused"), hidden, weight)
    assert counted == (product, 2 * product)


def test_experts_count_where_they_run():
    N, C, I, E, active = 10, 16, 24, 4, 2
    x, up, down, weight = drawn(N, C), drawn(E, 2 * I, C), drawn(E, C, I), drawn(N, active)
    choice = torch.tensor([[0, 1]] * N)
    product = 2 * N * active * 3 * C * I
    counted = flops(lambda: headloom.ops.moe(x, up, down, choice, weight, backend="fused"), x, up, down, weight)
    assert counted == (product, 2 * product)


def test_a_model():
    layer = {"mixer": {"type": "dcmha", "heads": 4}, "channel": {"type": "swiglu"}}
    model = headloom.model(width=32, depth=2, vocabulary=40, layer=[layer])
    tokens = torch.randint(40, (2, 16))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counts = {str(key): value for key, value in counter.get_flop_counts()["Global"].items()}
    assert counts["headloom.composed_attention_fused"] > 0 and counts["headloom.composed_attention_backward"] > 0
    assert counts["headloom.linear_fused"] > 0
