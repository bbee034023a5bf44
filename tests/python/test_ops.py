"""headloom.ops: every operator has a typed, documented function."""

import inspect

import headloom
import pytest
import torch

# Operators of the modules and models, which nobody else is to call.
INTERNAL = {
    "balance_channel_mixer",
    "balance_model",
    "channel_mixer",
    "channel_mixer_rows",
    "channel_mixer_tensors",
    "analyze",
    "extend",
    "load",
    "mixer",
    "mixer_rows",
    "mixer_tensors",
    "model",
    "model_spec",
    "model_tensors",
    "keep_freed_memory",
    "preset_rows",
    "record",
    "redraw_mixer",
    "redraw_model",
    "save",
}


def composite():
    """Operators made of others: the public ones. Kernels are registered for backends."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    return {name.split("::")[1] for name in names if name.startswith("headloom::")}


def test_every_operator_has_a_function():
    assert composite() - INTERNAL == set(headloom.ops.__all__)
    assert INTERNAL <= composite()


def test_functions_say_what_the_operators_take():
    for name in headloom.ops.__all__:
        function, packet = getattr(headloom.ops, name), getattr(torch.ops.headloom, name)
        signature = inspect.signature(function)
        assert "Args:" in function.__doc__ and packet.__doc__ == function.__doc__
        assert all(p.annotation is not p.empty for p in signature.parameters.values())
        assert signature.return_annotation is not signature.empty
        if name == "composed_attention":  # its mixes are lists of tensors to the operator
            continue
        schema = {a.name: a.default_value for a in packet.default._schema.arguments}
        given = {p.name: None if p.default is p.empty else p.default for p in signature.parameters.values()}
        assert list(schema.items()) == list(given.items())


def test_functions_call_the_operators():
    torch.manual_seed(1)

    def x(*shape):
        return torch.randn(shape)

    ops = headloom.ops
    q, k, v = x(2, 5, 3, 4), x(2, 5, 3, 4), x(2, 5, 3, 6)
    gamma = torch.tensor([0.5, 0.9, 1.0])
    recurrent = ops.retention(q, k, v, gamma, form="recurrent")
    torch.testing.assert_close(ops.retention(q, k, v, gamma), recurrent)
    decay = gamma.log()[:, None].expand_as(q)
    torch.testing.assert_close(ops.gated_linear_attention(q, k, v, decay), recurrent)
    k, v, wide = x(2, 5, 4), x(2, 5, 4), torch.zeros(4)
    simple = ops.aft(torch.full_like(k, 1e4), k, v)[0]
    torch.testing.assert_close(ops.wkv(k, v, wide, wide)[0], simple)
    shifted = ops.token_shift(k, torch.tensor([[0.0] * 4, [1.0] * 4]))
    torch.testing.assert_close(shifted[0][:, 1:], k[:, :-1])
    torch.testing.assert_close(shifted[1], k)
    y, state = ops.causal_conv1d(k, torch.tensor([[2.0, 1.0]] * 4))
    torch.testing.assert_close(y[:, 1:], k[:, 1:] + 2 * k[:, :-1])
    torch.testing.assert_close(state, k[:, -1:])
    still = torch.full((4, 1), -1e9)  # forgets at once
    y, state = ops.selective_scan(k, torch.ones_like(k), still, torch.ones(4, 1), torch.ones(4, 1))
    torch.testing.assert_close(y, k)
    up, down = x(3, 8, 4), x(3, 4, 4)
    chosen = torch.tensor([[0], [2]])
    mixed = ops.moe(k[0, :2], up, down, chosen, torch.ones(2, 1))
    gate, linear = (up[2] @ k[0, 1]).chunk(2)
    torch.testing.assert_close(mixed[1], down[2] @ (torch.nn.functional.silu(gate) * linear))
    normed = ops.gated_norm(k, v, torch.full((2, 5), 1e-6))
    torch.testing.assert_close(normed, torch.nn.functional.silu(v) * torch.nn.functional.rms_norm(k, (4,), eps=1e-6))
    torch.testing.assert_close(ops.rms_norm(k, wide + 2), 2 * torch.nn.functional.rms_norm(k, (4,), eps=1e-6))
    quarter = torch.ones(5, 2)  # a turn by 90 degrees
    turned = ops.rotary(k.unsqueeze(2), 0 * quarter, quarter).squeeze(2)
    torch.testing.assert_close(turned, torch.cat((-k[..., 2:], k[..., :2]), -1))
    torch.testing.assert_close(ops.gelu_tanh(k), torch.nn.functional.gelu(k, approximate="tanh"))
    torch.testing.assert_close(ops.swiglu(k), torch.nn.functional.silu(k[..., :2]) * k[..., 2:])
    weight = torch.tensor([[1, -2, 3, 127], [0, 5, 0, 0]], dtype=torch.int8)
    scale = torch.tensor([0.5, 2.0])
    torch.testing.assert_close(ops.linear(k, weight, scale), k @ (weight * scale.unsqueeze(1)).T)
    chosen, scores = torch.tensor([3, -100, 0, 1, 1]), k[0] @ down[1].T
    loss, best = ops.linear_cross_entropy(k[0], down[1], chosen)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(scores, chosen, reduction="sum"))
    assert best.tolist() == [s if t != -100 else -1 for s, t in zip(scores.argmax(-1).tolist(), chosen.tolist())]
    # Two groups of 32 inputs, the second of 8: elements e and e + 16 of a group share a byte.
    four = torch.randint(-8, 8, (3, 2, 32), generator=torch.Generator().manual_seed(0))
    four[:, 1, 8:] = 0
    halves = (four + 8).view(3, 2, 2, 2, 8)  # group, the byte's half, h, j
    packed = (halves[:, :, 0] + 16 * halves[:, :, 1]).transpose(1, 2).reshape(3, 32).to(torch.uint8)
    scales = torch.tensor([[0.5, 2.0], [-1.0, 0.25], [1.0, 4.0]], dtype=torch.bfloat16)
    inputs = x(2, 40)
    stands_for = (four * scales.float().unsqueeze(-1)).flatten(1)[:, :40]
    torch.testing.assert_close(ops.linear(inputs, packed, scales), inputs @ stands_for.T)
    hidden, w2 = x(1, 2, 6), x(1, 1, 6, 8)  # a side, a group; rank 2, two heads
    both = (torch.nn.functional.gelu(hidden) @ w2[0, 0]).unflatten(-1, (4, 2))
    down, up = ops.dynamic_weights(hidden, w2, 2)
    torch.testing.assert_close(down, torch.nn.functional.rms_norm(both[:, :, :2], (2,), eps=1e-6))
    torch.testing.assert_close(up, both[:, :, 2:])
    q = x(2, 5, 3, 4)
    plain = torch.nn.functional.scaled_dot_product_attention(*[t.transpose(1, 2) for t in (q, q, q)], is_causal=True)
    torch.testing.assert_close(ops.composed_attention(q, q, q), plain.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("expert", [-1, 2])
def test_experts_that_do_not_exist_are_refused(dtype, expert):
    x, up, down, weight = (torch.ones(*size, dtype=dtype) for size in [(3, 4), (2, 6, 4), (2, 4, 3), (3, 1)])
    with pytest.raises(IndexError, match=f"moe: choice has the expert {expert}, expected one of 0 to 1."):
        headloom.ops.moe(x, up, down, torch.tensor([[0], [expert], [1]]), weight)


def test_gradients_of_the_loss_survive_what_reads_them_twice():
    """What the forward kept becomes the gradients only where nothing reads it again."""
    torch.manual_seed(3)
    hidden, weight, bias = torch.randn(9, 16), torch.randn(40, 16), torch.randn(40)
    targets = torch.randint(40, (9,))
    targets[2] = -100
    inputs = [t.requires_grad_() for t in (hidden, weight, bias)]

    def gradients(factor, times=1):
        loss = factor * headloom.ops.linear_cross_entropy(hidden, weight, targets, bias)[0]
        return [torch.autograd.grad(loss, inputs, retain_graph=i + 1 < times) for i in range(times)]

    scores = torch.nn.functional.linear(hidden, weight, bias)
    expected = torch.autograd.grad(3 * torch.nn.functional.cross_entropy(scores, targets, reduction="sum"), inputs)
    kept = []
    found = [*gradients(3.0), *gradients(3.0, times=3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t, t.clone())) or t, lambda t: t):
        found += gradients(3.0)
    assert kept and all(torch.equal(t, before) for t, before in kept)
    for gradient in found:
        for a, b in zip(gradient, expected):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
            assert not a.requires_grad
    # Without a target nothing has a part, whatever the loss's gradient is.
    targets.fill_(-100)
    for factor in (float("inf"), float("nan")):
        assert all((g == 0).all() for g in gradients(factor)[0])


@pytest.mark.parametrize("form", ["simple", "local", "full", "conv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_keys_of_aft_lie_any_distance_apart(form, dtype):
    """Softmax in float64 is the formula; later keys are larger by thousands, and then smaller."""
    torch.manual_seed(3)
    T, C, H = 63, 6, 2
    q, k, v = (torch.randn(2, T, C).to(dtype) for _ in range(3))
    # In steps that every type has. Positions by twos share a key's size, so that each sees more than one key.
    steps = torch.cat((torch.arange(T // 3), torch.arange(T - T // 3).flip(0))) // 2 * 1024.0
    k = (k.mul(2).round() / 2 + 0).clamp(-2, 2) if dtype == torch.bfloat16 else k
    k = (k + steps[:, None].to(dtype)).requires_grad_()
    leaves = [q.requires_grad_(), k, v.requires_grad_()]
    w = torch.zeros(T, T, C, dtype=torch.float64)
    bias = None
    if form != "simple":
        bias = torch.randn(*{"local": (T, 5), "full": (T, T), "conv": (H, 5)}[form]).requires_grad_()
        leaves.append(bias)
        t, s = torch.meshgrid(torch.arange(T), torch.arange(T), indexing="ij")
        column, inside = (4 - t + s).clamp(0, 4), ((t - s).abs() < 5)[..., None]
        wide = bias.double()
        if form == "full":
            w = wide[..., None].expand(T, T, C)
        elif form == "local":
            w = torch.where(inside, wide[t, column][..., None], 0.0).expand(T, T, C)
        else:
            w = torch.where(inside, wide[:, column].permute(1, 2, 0), 0.0).repeat_interleave(C // H, -1)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)[..., None]
    scores = (k.double()[:, None] + w).masked_fill(hidden, -torch.inf)
    expected = torch.sigmoid(q.double()) * (scores.softmax(2) * v.double()[:, None]).sum(2)
    y = headloom.ops.aft(q, k, v, form=form, bias=bias)[0]
    factor = torch.randn(y.shape)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float64: 1e-10}[dtype]
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)
    found = torch.autograd.grad((y * factor).sum(), leaves)
    right = torch.autograd.grad((expected * factor).sum(), leaves)
    for a, b in zip(found, right):
        assert a.isfinite().all()
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("form", ["full", "local"])
def test_w_of_aft_may_cancel_keys(form):
    """Keys and w are large, and their sums are not: nothing of either is lost before they meet."""
    torch.manual_seed(0)
    T, C = 48, 8
    q, v = torch.randn(2, 1, T, C)
    k = torch.randn(1, T, C)
    k[:, ::2] -= 3000
    w = torch.randn(T, T)
    w[:, ::2] += 3000
    bias = w
    if form == "local":  # column i is for s = t - (T - 1) + i
        bias = torch.stack([torch.cat((torch.zeros(T - 1 - t), w[t, : t + 1])) for t in range(T)])
    y = headloom.ops.aft(q, k, v, form=form, bias=bias)[0]
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)[..., None]
    scores = (k.double()[:, None] + w.double()[..., None]).masked_fill(hidden, -torch.inf)
    expected = torch.sigmoid(q.double()) * (scores.softmax(2) * v.double()[:, None]).sum(2)
    torch.testing.assert_close(y.double(), expected, atol=3e-6, rtol=0)
