"""The operator from Python: the formula of each term, gradients, and PyTorch's machinery around it."""

import math

import headloom
import pytest
import torch
from headloom import HeadMix, composed_attention

B, T, S, H, D, R = 2, 4, 6, 4, 3, 2


def draw(*shape, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64)


def qkv(keys=H, values=H, e=5):
    return draw(B, T, H, D), draw(B, S, keys, D), draw(B, S, values, e)


def dynamic(groups=1, static=None):
    return HeadMix(
        static=static,
        q_down=draw(B, T, R, H),
        q_up=draw(B, T, R, H),
        q_gate=draw(B, T, H),
        k_down=draw(B, S, R, H),
        k_up=draw(B, S, R, H),
        k_gate=draw(B, S, H),
        groups=groups,
    )


def mixed(maps, mix):
    """The formula of HeadMix, one output map at a time; maps [B, H, T, S]."""
    if mix is None:
        return maps
    heads, groups = maps.shape[1], mix.groups
    size = heads // groups
    if mix.static is not None and mix.static.dim() == 2 and mix.static.shape[0] != mix.static.shape[1]:
        return torch.einsum("bhts,hn->bnts", maps, mix.static)
    out = []
    for n in range(heads):
        run = slice(n // size * size, n // size * size + size)
        x = maps[:, run]
        if mix.static is None:
            y = maps[:, n]
        else:
            matrix = mix.static[n // size] if mix.static.dim() == 3 else mix.static[run, run]
            y = torch.einsum("bhts,h->bts", x, matrix[:, n % size])
        if mix.q_down is not None:
            y = y + torch.einsum("bhts,btrh,btr->bts", x, mix.q_down[..., run], mix.q_up[..., n])
        if mix.q_gate is not None:
            y = y + maps[:, n] * mix.q_gate[:, :, n].unsqueeze(2)
        if mix.k_down is not None:
            y = y + torch.einsum("bhts,bsrh,bsr->bts", x, mix.k_down[..., run], mix.k_up[..., n])
        if mix.k_gate is not None:
            y = y + maps[:, n] * mix.k_gate[:, :, n].unsqueeze(1)
        out.append(y)
    return torch.stack(out, 1)


def expected(q, k, v, pre=None, post=None, visible=None):
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    maps = torch.einsum("bthd,bshd->bhts", q, keys) / math.sqrt(q.shape[-1])
    maps = mixed(maps, pre).masked_fill(~visible, -math.inf)
    maps = mixed(torch.softmax(maps, -1), post)
    values = v.repeat_interleave(maps.shape[1] // v.shape[2], 2)
    return torch.einsum("bhts,bshe->bthe", maps, values)


def causal(window=S):
    distance = torch.arange(T).unsqueeze(1) + S - T - torch.arange(S)
    return (distance >= 0) & (distance < window)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


def test_dynamic_mixes_before_and_after_softmax():
    q, k, v = qkv()
    pre, post = dynamic(static=draw(H, H)), dynamic()
    torch.testing.assert_close(
        composed_attention(q, k, v, pre, post), expected(q, k, v, pre, post, causal())
    )


def test_groups_keep_composition_inside():
    q, k, v = qkv(keys=2, values=1)
    pre, post = dynamic(groups=2, static=draw(2, 2, 2)), dynamic(groups=2)
    torch.testing.assert_close(
        composed_attention(q, k, v, pre, post, window=2), expected(q, k, v, pre, post, causal(2))
    )


def test_rectangular_mixes_change_the_number_of_maps():
    q, k, v = qkv(keys=1, values=2)
    pre, post = HeadMix(static=draw(H, 6)), HeadMix(static=draw(6, 2))
    out = composed_attention(q, k, v, pre, post)
    assert out.shape == (B, T, 2, 5)
    torch.testing.assert_close(out, expected(q, k, v, pre, post, causal()))


def test_nothing_composed_is_plain_attention():
    q, k, v = qkv()
    plain = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    )
    torch.testing.assert_close(composed_attention(q, k, v, causal=False), plain.transpose(1, 2))
    torch.testing.assert_close(composed_attention(q, k, v, HeadMix(), causal=False), plain.transpose(1, 2))


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scores_may_have_any_scale(scale):
    """PyTorch's own kernel gives NaN where it hides keys of a causal square by itself."""
    q, k, v = (draw(2, 5, 2, 4) for _ in range(3))
    hidden = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
    weights = (scale * torch.einsum("bthd,bshd->bhts", q, k) + hidden).softmax(-1)
    expected = torch.einsum("bhts,bshd->bthd", weights, v)
    torch.testing.assert_close(composed_attention(q, k, v, scale=scale), expected)
    fused = composed_attention(q.float(), k.float(), v.float(), scale=scale)
    torch.testing.assert_close(fused, expected.float(), atol=1e-5, rtol=1e-5)


def test_a_kernel_has_a_gradient_of_zeros_where_there_is_nothing():
    for type in (torch.float32, torch.float64):
        q = torch.randn(0, 5, 2, 4, dtype=type)
        kernel = torch.randn(2, 3, 3, dtype=type, requires_grad=True)
        composed_attention(q, q, q, pre_conv=kernel).sum().backward()
        assert kernel.grad is not None and not kernel.grad.any()


def test_a_centre_tap_is_no_convolution():
    q, k, v = qkv()
    kernel = torch.zeros(H, 3, 5, dtype=torch.float64)
    kernel[:, -1, 2] = 1
    torch.testing.assert_close(
        composed_attention(q, k, v, pre_conv=kernel, post_conv=kernel), composed_attention(q, k, v)
    )


MASKS = {
    "window": dict(window=3),
    "lengths": dict(lengths=torch.tensor([6, 3])),
    "documents": dict(documents=torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]])),
    "mask": dict(mask=torch.arange(S).remainder(3).ne(1).expand(T, S)),
    "bias": dict(bias=torch.linspace(-1, 1, H * T * S, dtype=torch.float64).view(H, T, S)),
    "bidirectional": dict(causal=False, scale=0.3),
}


def cases():
    def conv(heads=1):
        return draw(H, *([heads] if heads > 1 else []), 2, 3, scale=0.5)

    yield "static", lambda: dict(pre=HeadMix(static=draw(H, H)), post=HeadMix(static=draw(H, 8)))
    for term in ("q_down", "q_gate", "k_down", "k_gate"):

        def only(term=term):
            full = dynamic()
            names = [term, term.replace("down", "up")]
            return dict(pre=HeadMix(**{n: getattr(full, n) for n in names}))

        yield term, only
    yield "all terms", lambda: dict(pre=dynamic(static=draw(H, H)), post=dynamic(groups=2))
    yield "convolution", lambda: dict(pre_conv=conv(), post_conv=conv(2), conv_padding="left")
    yield "exact convolution", lambda: dict(pre_conv=conv(2), conv_mask="exact", post=dynamic())
    for name, options in MASKS.items():
        yield name, lambda options=options: dict(pre=HeadMix(static=draw(H, H)), **options)


CASES = dict(cases())


def leaves(q, k, v, options):
    """All floating tensors of a call as a flat list, and the call as a function of them."""
    names = ["static", "q_down", "q_up", "q_gate", "k_down", "k_up", "k_gate"]
    tensors, places = [q, k, v], []
    for side, value in options.items():
        if isinstance(value, HeadMix):
            for name in names:
                if getattr(value, name) is not None:
                    places.append((side, name))
                    tensors.append(getattr(value, name))
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            places.append((side, None))
            tensors.append(value)

    def call(q, k, v, *rest):
        arguments = dict(options)
        fields = {}
        for (side, name), tensor in zip(places, rest):
            if name is None:
                arguments[side] = tensor
            else:
                fields.setdefault(side, {"groups": options[side].groups})[name] = tensor
        arguments.update({side: HeadMix(**terms) for side, terms in fields.items()})
        return composed_attention(q, k, v, **arguments)

    return call, tensors


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    call, tensors = leaves(*qkv(keys=2, values=2, e=2), CASES[name]())
    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in tensors])


@pytest.mark.parametrize("name", ["all terms", "exact convolution", "lengths"])
def test_opcheck(name):
    q, k, v = (t.float() for t in qkv())
    options = CASES[name]()
    pre = headloom.attention._tensors(options.pop("pre", None), "pre")
    post = headloom.attention._tensors(options.pop("post", None), "post")
    groups = 2 if name == "all terms" else 1
    single = lambda t: t.float().requires_grad_() if t is not None and t.is_floating_point() else t
    torch.library.opcheck(
        torch.ops.headloom.composed_attention,
        (q.requires_grad_(), k, v, [single(t) for t in pre], [single(t) for t in post], 1, groups),
        {n: single(o) if isinstance(o, torch.Tensor) else o for n, o in options.items()},
    )


def fused_arguments():
    """Leaves q, k, v and the arguments that follow them, with every kind of gradient."""
    q, k, v = (t.float().requires_grad_() for t in qkv())
    pre = [t if t is None else t.float().requires_grad_() for t in headloom.attention._tensors(dynamic(), "pre")]
    kernel = draw(H, 2, 3, scale=0.5).float().requires_grad_()
    bias = draw(H, T, S).float().requires_grad_()
    lengths = torch.tensor([6, 5])
    rest = (pre, [], 1, 1, kernel, None, "both", "double", bias, True, 4, lengths, None, None, None)
    return (q, k, v), rest


def test_opcheck_fused():
    """The operators that hold the fused kernels, by themselves."""
    inputs, rest = fused_arguments()
    torch.library.opcheck(torch.ops.headloom.composed_attention_fused, (*inputs, *rest, True))
    with torch.no_grad():
        out, lse = torch.ops.headloom.composed_attention_fused(*inputs, *rest, True)
    everything = (1 << 20) - 1  # a bit for q, k, v, seven tensors of each mix, two kernels and the bias
    # It has no derivative of its own: the gradient of a gradient is the definition's.
    detached = lambda x: torch.utils._pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, x)
    for wanted in (everything, everything >> 1):
        torch.library.opcheck(
            torch.ops.headloom.composed_attention_backward,
            detached(([torch.randn_like(out)], *inputs, *rest, [lse], wanted)),
        )


@pytest.mark.parametrize("composed", [True, False])
def test_fused_compiles_with_its_gradients(composed):
    """Forward and backward in one graph each, whatever the length."""
    compiled = torch.compile(
        lambda *a: composed_attention(*a[:3], HeadMix(static=a[3]) if composed else None, window=9),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for length in (33, 48, 70):
        tensors = [torch.randn(1, length, H, D).requires_grad_() for _ in range(3)]
        tensors.append(torch.randn(H, H).requires_grad_())
        used = tensors if composed else tensors[:3]
        results = []
        for backend in (None, "reference"):
            if backend is None:
                out = compiled(*tensors)
            else:
                mix = HeadMix(static=tensors[3]) if composed else None
                out = composed_attention(*tensors[:3], mix, window=9, backend=backend)
            results.append([out, *torch.autograd.grad(out.sin().sum(), used)])
        torch.testing.assert_close(*results, atol=2e-4, rtol=2e-4)


def test_gradients_of_gradients():
    """The fused operator's second and third derivatives, which come from the reference."""
    torch.manual_seed(5)
    q, k, v = (t.float().requires_grad_() for t in qkv())
    results = []
    for backend in ("fused", "reference"):
        out = composed_attention(q, k * q.mean(), v, backend=backend)
        (first,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), q, create_graph=True)
        results.append([first, second, *torch.autograd.grad(second.sin().sum(), (q, k, v))])
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["all terms", "convolution", "documents"])
def test_compiles_without_breaks(name):
    call, tensors = leaves(*qkv(), CASES[name]())
    torch.testing.assert_close(
        torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors), call(*tensors)
    )


def test_autocast_multiplies_in_bfloat16():
    q, k, v = (t.float().requires_grad_() for t in qkv())
    pre = HeadMix(static=torch.eye(H))
    with torch.autocast("cpu", torch.bfloat16):
        out = composed_attention(q, k, v, pre)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), composed_attention(q, k, v, pre), atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(window=0), ValueError, "window"),
        (dict(conv_padding="middle"), ValueError, "conv_padding"),
        (dict(pre=HeadMix(q_down=torch.zeros(B, T, R, H, dtype=torch.float64))), ValueError, "pre.q_up"),
        (dict(post=HeadMix(static=torch.zeros(H, H))), TypeError, "post.static"),
        (dict(mask=torch.zeros(T, S)), TypeError, "mask"),
        (dict(pre_conv=torch.zeros(H, 2, 4, dtype=torch.float64)), ValueError, "pre_conv"),
        (dict(backend="fast"), ValueError, "backend"),
    ],
)
def test_errors_name_the_argument(options, error, words):
    with pytest.raises(error, match=words):
        composed_attention(*qkv(), **options)
