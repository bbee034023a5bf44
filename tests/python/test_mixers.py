"""Every mixer of the registry inside ordinary PyTorch code."""

import copy
import io
import math
import pickle
import threading
import warnings

import headloom
import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call

WIDTH, LENGTH = 32, 7
CHANNELS = list(headloom.channel_mixers())
NAMES = [*headloom.mixers(), *CHANNELS]
# Options under which a mixer uses all that it has; the others take their defaults.
OPTIONS = {
    "mha": dict(kv_heads=2, qk_norm=True, window=4),
    "talking_heads": dict(pre=True, post=True),
    "dcmha": dict(static="add", groups=2),
    "moe": dict(routed=4, active=2, shared=1, hidden=16, balance=0.1),
    "multi_token": dict(conv_layers="all", pre_conv=True, post_conv=True, pre_mix="all", gate="full"),
}


def make(name, **shape):
    if name in CHANNELS:
        return headloom.channel_mixer(name, WIDTH, **shape, **OPTIONS.get(name, {}))
    options = {"heads": 4, **OPTIONS.get(name, {})}
    known = headloom.mixers()[name].options
    options = {k: v for k, v in options.items() if k in known}
    try:
        return headloom.mixer(name, WIDTH, **shape, **options)
    except ValueError as error:  # mixers of whole sequences say so
        if "but the model is causal" not in str(error):
            raise
        return headloom.mixer(name, WIDTH, causal=False, **shape, **options)


def inputs(batch=2, length=LENGTH):
    return torch.randn(batch, length, WIDTH)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(11)
    torch.compiler.reset()  # all mixers compile the same forward: together they would pass the limit


@pytest.fixture(params=NAMES)
def layer(request):
    return make(request.param)


@pytest.fixture(params=[name for name in NAMES if next(make(name).parameters(), None) is not None])
def trained(request):
    """A layer with parameters."""
    return make(request.param)


def test_listed():
    assert "mha" in NAMES
    info = headloom.mixers()["mha"]
    assert info.source and info.options["heads"].type.startswith("integer") and info.options["heads"].default == "8"


def test_weights_follow_the_seed():
    torch.manual_seed(5)
    first = make("mha")
    torch.manual_seed(5)
    second, third = make("mha"), make("mha")
    assert torch.equal(first.qkv.weight, second.qkv.weight)
    assert not torch.equal(first.qkv.weight, third.qkv.weight)


def test_a_call_draws_no_random_numbers(layer):
    x, before = inputs(), torch.random.get_rng_state()
    layer(x)
    assert torch.equal(before, torch.random.get_rng_state())


def test_trains_with_a_torch_optimiser(trained):
    x, target = inputs(), inputs()
    before = copy.deepcopy(trained.state_dict())
    # Decay alone would move a parameter that has no gradient.
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, weight_decay=0)
    losses = []
    for _ in range(20):
        loss = (trained(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in trained.parameters())
    assert all(not torch.equal(before[name], value) for name, value in trained.named_parameters())
    assert all(torch.equal(before[name], value) for name, value in trained.named_buffers())


def test_state_dict_goes_round(trained):
    x = inputs()
    stream = io.BytesIO()
    torch.save(trained.state_dict(), stream)
    stream.seek(0)
    other = pickle.loads(pickle.dumps(trained))
    for p in other.parameters():
        torch.nn.init.zeros_(p)
    assert not torch.equal(other(x), trained(x))
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(other(x), trained(x))
    own = [n for n, _ in trained.named_parameters()] + [n for n, _ in trained.named_buffers()]
    assert sorted(trained.state_dict()) == sorted(own)


def test_deepcopy_is_independent(trained):
    x = inputs()
    expected = trained(x)
    other = copy.deepcopy(trained)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    assert torch.equal(trained(x), expected)
    assert not torch.equal(other(x), expected)


def test_functional_call_and_per_sample_gradients(trained):
    x = inputs(3)
    params = {n: p.detach() for n, p in trained.named_parameters()}
    assert torch.equal(functional_call(trained, params, (x,)), trained(x))

    def loss(params, sample):
        return functional_call(trained, params, (sample.unsqueeze(0),)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    trained(x).square().sum().backward()
    for name, p in trained.named_parameters():
        torch.testing.assert_close(each[name].sum(0), p.grad, atol=1e-4, rtol=1e-4)


def test_ensembles(trained):
    """Several mixers as one, and one mixer on each of several batches."""
    several = [trained, *(copy.deepcopy(trained) for _ in range(2))]
    with torch.no_grad():
        for i, one in enumerate(several):
            for p in one.parameters():
                p.mul_(1 + 0.1 * i)
    params, buffers = torch.func.stack_module_state(several)
    x = inputs()

    def call(params, buffers, x):
        return functional_call(trained, (params, buffers), (x,))

    each = torch.func.vmap(call, in_dims=(0, 0, None))(params, buffers, x)
    torch.testing.assert_close(each, torch.stack([one(x) for one in several]), atol=1e-4, rtol=1e-4)
    batches = torch.stack([inputs() for _ in range(3)])
    each = torch.func.vmap(trained)(batches)
    torch.testing.assert_close(each, torch.stack([trained(x) for x in batches]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_type_is_that_of_all_tensors(dtype):
    torch.set_default_dtype(dtype)
    try:
        for name in NAMES:
            layer = make(name)
            assert {t.dtype for t in layer.state_dict().values()} <= {dtype}, name
            assert layer(inputs()).dtype == dtype, name
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def test_parametrizations_and_wrapped_parts():
    class Twice(torch.nn.Module):
        def forward(self, value):
            return 2 * value

    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):  # as FullyShardedDataParallel does
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    layer = make("mha")
    x = inputs()
    doubled = {n: 2 * p.detach() if n == "output.weight" else p.detach() for n, p in layer.named_parameters()}
    expected = functional_call(layer, doubled, (x,))
    torch.nn.utils.parametrize.register_parametrization(layer.output, "weight", Twice())
    assert torch.equal(layer(x), expected)
    layer.qkv = Wrapped(layer.qkv)
    assert torch.equal(layer(x), expected)


def test_what_nothing_calls_is_told():
    class LowRank(torch.nn.Linear):
        """A weight and a trained change of it, which only its own forward adds."""

        def __init__(self, base):
            super().__init__(*reversed(base.weight.shape), bias=False)
            self.weight = base.weight
            self.change = torch.nn.Parameter(torch.ones_like(base.weight))

    layer = make("mha")
    with pytest.warns(UserWarning, match="the LowRank in the place of the part 'output' is never called, .* nothing uses change;"):
        layer.output = LowRank(layer.output)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.output = torch.nn.Linear(*reversed(layer.output.weight.shape), bias=False)
        layer(inputs())
    layer.output = torch.nn.Identity()
    with pytest.raises(ValueError, match="parameter 'output.weight' is missing in the Identity in its place, expected a tensor"):
        layer(inputs())


def test_a_missing_part_is_named():
    model = headloom.model(width=WIDTH, depth=1, vocabulary=9, layer=[{"mixer": {"type": "mha", "heads": 4}}])
    del model.layer0.mixer.qkv
    with pytest.raises(ValueError, match="model: the part 'qkv' of 'layer0.mixer.qkv.weight' is missing"):
        model(torch.zeros(1, 3, dtype=torch.int64))


def test_gradcheck():
    for name in NAMES:
        layer = make(name).double()
        x = inputs(1, 3).double().requires_grad_()
        names = [n for n, _ in layer.named_parameters()]
        params = [p.detach().requires_grad_() for p in layer.parameters()]

        def call(x, *values):
            return functional_call(layer, dict(zip(names, values)), (x,))

        assert torch.autograd.gradcheck(call, [x, *params], fast_mode=True)


def test_lengths_that_change_are_compiled_once(layer):
    """Without a break, with gradients; tracing leaves nothing behind in the C++ module."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    for batch, length in [(11, 5), (9, 6), (10, 17), (13, 20), (14, 7)]:
        x = inputs(batch, length).requires_grad_()
        results = compiled(x), layer(x)
        torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
        if length in (5, 17):
            of = [x, *layer.parameters()]
            for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), of, allow_unused=True) for y in results), strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name, left", [("performer", "features"), ("mha", "qkv.weight")])
def test_a_tensor_that_was_left_on_meta_is_named(name, left):
    layer = make(name)
    values = {key: t for key, t in layer.state_dict().items() if key != left}
    assert len(values) == len(layer.state_dict()) - 1
    with torch.device("meta"):
        empty = make(name)
    empty.load_state_dict(values, assign=True, strict=False)
    with pytest.raises(ValueError, match=f"'{left}' is on meta(, but .* is on cpu)?; expected one device"):
        empty(inputs(2, 9))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rows", [2, 40], ids=["few rows", "many rows"])
def test_compiles_for_one_size(rows, autocast):
    layer, x = make("dcmha"), inputs(1, rows)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, expected = compiled(x), layer(x)
    assert (y.float() - expected.float()).norm() < (0.05 if autocast else 1e-5) * expected.norm()
    of = list(layer.parameters())
    for ours, theirs in zip(*(torch.autograd.grad(t.float().square().sum(), of) for t in (y, expected)), strict=True):
        assert (ours - theirs).norm() <= (0.05 if autocast else 1e-4) * theirs.norm() + 1e-6


@pytest.mark.parametrize(
    "options",
    [
        *[dict(type="aft", form=form, causal=causal) for form in ("simple", "full", "conv") for causal in (True, False)],
        dict(type="aft", form="local", causal=False),
        dict(type="synthesizer", heads=4, scores=["factorized_dense", "random", "factorized_random", "dot_product"]),
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_lengths_of_position_tables_are_compiled_once(options):
    layer = headloom.mixer(width=WIDTH, max_length=128, **options)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    # These kernels keep sums for each 32 positions; PyTorch takes a single one for a case of its own.
    shorter = [] if options.get("form") == "simple" or (options.get("form"), options.get("causal")) == ("conv", True) else [(4, 20), (5, 7)]
    for batch, length in [(3, 70), (2, 91), *shorter]:
        x, documents = inputs(batch, length), torch.arange(length).expand(batch, length) // 30
        # A trace with gradients takes twice as long, and two of all shall do.
        with torch.set_grad_enabled(options.get("form", "local") == "local"):
            torch.testing.assert_close(compiled(x), layer(x), atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, documents=documents), layer(x, documents=documents), atol=1e-4, rtol=1e-4)
    assert counter.frame_count == 2  # with documents and without


def test_exports_for_any_length(layer):
    sizes = {0: torch.export.Dim("B", max=64), 1: torch.export.Dim("T", max=64)}
    program = torch.export.export(layer.eval(), (inputs(3, 20),), dynamic_shapes={"x": sizes})
    for batch, length in [(5, 31), (2, 3), (1, 1)]:
        x = inputs(batch, length)
        torch.testing.assert_close(program.module()(x), layer(x), atol=1e-4, rtol=1e-4)


# The layer rounds weights for products in passing, and dcmha has a kernel for few rows.
@pytest.mark.parametrize("name", ["mha", "dcmha"])
def test_exports_for_any_length_without_gradients(name):
    layer = make(name).eval().requires_grad_(False)
    sizes = {0: torch.export.Dim("B", max=64), 1: torch.export.Dim("T", max=64)}
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            program = torch.export.export(layer, (inputs(3, 20),), dynamic_shapes={"x": sizes})
            for batch, length in [(5, 31), (1, 1)]:
                x = inputs(batch, length)
                expected = layer(x).float()
                assert (program.module()(x).float() - expected).norm() < (0.05 if dtype is torch.bfloat16 else 1e-5) * expected.norm()


@pytest.mark.parametrize(
    "options",
    [dict(type="aft", form="full"), *[dict(type="synthesizer", heads=4, scores=[scores]) for scores in ("dense", "factorized_random")]],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_exports_for_every_length_of_position_tables(options):
    layer = headloom.mixer(width=WIDTH, max_length=40, **options).eval()
    sizes = {0: torch.export.Dim("B", max=64), 1: torch.export.Dim("T", max=40)}
    program = torch.export.export(layer, (inputs(3, 20),), dynamic_shapes={"x": sizes})
    for batch, length in [(5, 31), (2, 40)]:
        x = inputs(batch, length)
        torch.testing.assert_close(program.module()(x), layer(x), atol=1e-4, rtol=1e-4)


def test_inductor():
    # Without the tables of rotary positions, for which inductor would ask a C++ compiler.
    layer, x = make("mha", position="none"), inputs()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x))


def test_exports(layer):
    x = inputs()
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))


def test_opcheck(layer):
    operator = torch.ops.headloom.mixer if isinstance(layer, headloom.Mixer) else torch.ops.headloom.channel_mixer
    # What "test_aot_dispatch_dynamic" traces, the test of lengths that change compiles.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, (layer.spec, inputs().requires_grad_(), layer._tensors(), True), test_utils=checks)


def test_autocast(trained):
    x = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = trained(x)
    assert y.dtype == torch.bfloat16
    expected = trained(x)
    assert (y.float() - expected).norm() < 0.05 * expected.norm()
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in trained.parameters())


def test_an_empty_batch(layer):
    x = inputs(0).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters())


def test_after_inference_mode(trained):
    x = inputs(1, LENGTH + 2)
    with torch.inference_mode():
        trained(x)
    trained(x).sum().backward()


def test_threads_share_a_spec(layer):
    others = [copy.deepcopy(layer) for _ in range(4)]
    xs = [inputs() for _ in others]
    with torch.no_grad():
        for other in others:
            for p in other.parameters():
                p.add_(0.1 * torch.randn_like(p))
        expected = [other(x) for other, x in zip(others, xs)]
        wrong = []

        def work(i):
            try:
                for _ in range(20):
                    # Gradients are on in a new thread, and products then in another order.
                    if not torch.allclose(others[i](xs[i]), expected[i], atol=1e-5):
                        wrong.append(i)
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(others))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_causal_and_lengths():
    layer, x = make("mha"), inputs()
    later = x.clone()
    later[:, 4:] = 0
    torch.testing.assert_close(layer(later)[:, :4], layer(x)[:, :4])
    whole = make("mha", causal=False)
    lengths = torch.tensor([4, 4])
    torch.testing.assert_close(whole(later, lengths=lengths)[:, :4], whole(x, lengths=lengths)[:, :4])
    assert not torch.allclose(whole(later)[:, :4], whole(x)[:, :4])


def test_documents_and_memory():
    layer, x = make("mha", position="none"), inputs(1)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    parts = torch.cat([layer(x[:, :3]), layer(x[:, 3:])], 1)
    torch.testing.assert_close(layer(x, documents=documents), parts)
    assert headloom.mixer("mha", width=WIDTH, heads=4)(x, memory=inputs(1, 3)).shape == x.shape
    with pytest.raises(ValueError, match="mha: window is 4, but a memory is read as a whole, expected none beside a memory"):
        layer(x, memory=inputs(1, 3))
    with pytest.raises(ValueError, match="fnet: documents are packed in a sequence, all of which it mixes, expected none"):
        headloom.mixer("fnet", width=WIDTH, causal=False)(x, documents=documents)


@pytest.mark.parametrize("heads", [3, 4])
def test_alibi_is_exact_in_float64(heads):
    """Also where the slopes are no powers of two."""
    layer = headloom.mixer("mha", width=12, heads=heads, position="alibi").double()
    x = torch.randn(1, 50, 12, dtype=torch.float64)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (x @ layer.get_parameter("qkv.weight").T).chunk(3, -1))
    slopes = 2 ** (-8 / heads * torch.arange(1, heads + 1, dtype=torch.float64))
    place = torch.arange(50)
    bias = (place[None] - place[:, None]) * slopes[:, None, None]
    bias = bias.masked_fill(place[None] > place[:, None], -math.inf)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    y = y.transpose(1, 2).flatten(2) @ layer.get_parameter("output.weight").T
    torch.testing.assert_close(layer(x), y, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(type="mah"), "mah"),
        (dict(type="mha", heads=5), "heads is 5"),
        (dict(type="mha", haeds=4), "did you mean 'mixer.heads'"),
        (dict(type="mha", heads=2.5), "expected an integer"),
        (dict(type="mha", heads=4, position="rop"), "rope"),
        (dict(type="mha", heads=4, position="learned"), 'mha: position is "learned", which a model adds to its embedding'),
        (dict(type="mha", heads=WIDTH), "rope rotates 1 of the 1 dimensions of a head"),
        (dict(type="multi_token", heads=1), r'mix_heads is 2 \(post_mix is "groups"\), expected a divisor of heads = 1'),
        (dict(type="synthesizer", heads=4, max_length=8, scores="dense", fixed=True), "fixed is true, expected false without random"),
        (dict(type="dcmha", heads=4, pre=False, post=False, static="add"), 'static is "add", expected "off"'),
        (dict(type="aft", form="simple", factor=2), 'factor is 2, expected 0 in the form "simple"'),
        (dict(type="mha", heads=4, position={"type": "none", "scaling": "linear"}), "only rope is stretched"),
    ],
)
def test_errors_name_the_option(arguments, words):
    with pytest.raises(ValueError, match=words):
        headloom.mixer(width=WIDTH, **arguments)


def test_errors_of_channel_mixers():
    for options, words in (
        (dict(type="swigluu"), 'swigluu.*did you mean "swiglu"'),
        (dict(type="swiglu", hiden=4), "did you mean 'channel.hidden'"),
        (dict(type="none"), "'none' is no module"),
    ):
        with pytest.raises(ValueError, match=words):
            headloom.channel_mixer(width=WIDTH, **options)
    assert "none" not in CHANNELS


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_in_training(name):
    with FakeTensorMode():
        layer = make(name, max_length=LENGTH) if name not in CHANNELS else make(name)
        x = inputs().requires_grad_()
        layer(x).sum().backward()
        assert all(isinstance(t, FakeTensor) for t in [*layer.parameters(), x.grad])
        assert x.grad.shape == x.shape and all(p.grad.shape == p.shape for p in layer.parameters())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fnet"])  # which has no parameters
@pytest.mark.parametrize("of_x, of_parameters", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_inputs_have_the_type_of_the_parameters(name, of_x, of_parameters):
    layer = make(name, max_length=LENGTH) if name not in CHANNELS else make(name)
    with pytest.raises(ValueError, match="x is .*, but parameter '.*' is .*; expected one type"):
        layer.to(of_parameters)(inputs().to(of_x))


def test_experts_want_balance():
    layer, x = make("moe"), inputs()
    y, balance = layer(x, auxiliary=True)
    assert torch.equal(y, layer(x)) and balance > 0
    balance.backward()
    assert layer.gate.weight.grad.abs().sum() > 0
    assert make("swiglu")(x, auxiliary=True)[1] == 0


def test_performer_is_its_formula_in_pytorch():
    layer = headloom.mixer("performer", WIDTH, heads=4, features=20, eps=0.01, position="none", causal=False)
    x = 2 * inputs()
    with torch.no_grad():
        layer.qkv.weight.mul_(10)
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in layer.qkv.weight.matmul(x.mT).mT.chunk(3, -1))
    root = 8**-0.25

    def features(z, over):
        exponent = torch.einsum("bhtd,md->bhtm", z * root, layer.features)
        half = (z * root).square().sum(-1, keepdim=True) / 2
        return torch.exp(exponent - half - exponent.amax(over, keepdim=True)) + 0.01

    weights = features(q, -1) @ features(k, (-1, -2)).mT
    o = (weights / weights.sum(-1, keepdim=True)) @ v
    torch.testing.assert_close(layer(x), o.transpose(1, 2).flatten(2) @ layer.output.weight.T)


def test_synthesizer_is_its_formula_in_pytorch():
    layer = headloom.mixer("synthesizer", WIDTH, heads=4, scores=["dense", "random"], max_length=11)
    x = inputs()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    hidden = torch.relu(torch.nn.functional.linear(x, layer.dense_hidden.weight, layer.dense_hidden.bias))
    dense = torch.nn.functional.linear(hidden.unflatten(-1, (4, 8)).transpose(1, 2), layer.dense.weight, layer.dense.bias)
    share = layer.mixture.softmax(0)
    scores = share[0] * dense[..., :LENGTH] + share[1] * layer.random[:, :LENGTH, :LENGTH]
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    v = (x @ layer.value.weight.T).unflatten(-1, (4, 8)).transpose(1, 2)
    o = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x), o @ layer.output.weight.T)


def test_features_are_drawn_again():
    layers = torch.nn.Sequential(*(headloom.mixer("performer", WIDTH, heads=4, redraw=3) for _ in range(2)))
    start = [layer.features.clone() for layer in layers]
    for step in (1, 2, 4):
        headloom.redraw_features(layers, step)
    assert all(torch.equal(layer.features, before) for layer, before in zip(layers, start))
    drawn = torch.random.get_rng_state()
    headloom.redraw_features(layers, 3)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    third = [layer.features.clone() for layer in layers]
    assert not torch.equal(third[0], start[0]) and not torch.equal(third[0], third[1])
    other = copy.deepcopy(layers)
    headloom.redraw_features(other, 6)
    assert not torch.equal(other[0].features, third[0])
    headloom.redraw_features(other, 3)
    assert torch.equal(other[1].features, third[1])
    headloom.redraw_features(other, 3, seed=9)
    assert not torch.equal(other[1].features, third[1])
    # A model's features are drawn as in `headloom train`; what has none stays as it is.
    model = headloom.model(width=WIDTH, depth=2, vocabulary=5, layer=[{"mixer": {"type": "performer", "redraw": 2}}])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    headloom.redraw_features(model, 2)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"layer0.mixer.features", "layer1.mixer.features"}
    headloom.redraw_features(headloom.channel_mixer("moe", WIDTH), 1000)
    headloom.redraw_features(model, torch.tensor(3))
    for wrong in ("3", 3.0, torch.tensor(3.0)):
        with pytest.raises(TypeError, match="step is .*, expected a whole number"):
            headloom.redraw_features(model, wrong)


def test_wrong_shapes_and_counts():
    layer = make("mha")
    with pytest.raises(ValueError, match=r"\[B, T, width = 32\]; it is \[3, 32\]"):
        layer(torch.randn(3, WIDTH))
    with pytest.raises(ValueError, match="params has 0"):
        torch.ops.headloom.mixer(layer.spec, inputs(), [], False)
    layer(inputs())  # a failed call leaves no trace


def test_repr_shows_what_a_mixer_owns_itself():
    shown = repr(headloom.mixer("dcmha", 64, heads=4))
    assert 'width" = 64' in shown and "w2 [4, 1, 16, 16]" in shown and "(w1): (weight [64, 64])" in shown
    shown = repr(headloom.mixer("rwkv", 64))
    assert "mix [3, 64]" in shown and "decay [64]" in shown and "bonus [64]" in shown


def test_a_mixer_outside_a_model_has_its_convolutions():
    names = lambda **options: {n for n, _ in headloom.mixer("multi_token", 64, heads=4, **options).named_parameters()}  # noqa: E731
    assert "pre_conv" in names()
    # One of a model has what its layer has.
    assert "pre_conv" in names(layer=2, depth=4) and "pre_conv" not in names(layer=1, depth=4)
    assert "pre_conv" in names(layer=1, depth=4, conv_layers="all")


@pytest.mark.parametrize("make_one", [lambda **o: headloom.mixer("mha", 64, **o), lambda **o: headloom.channel_mixer("mlp", 64, **o)])
def test_a_layer_is_below_the_depth(make_one):
    make_one(layer=4, depth=5)
    for options in (dict(layer=4), dict(layer=4, depth=1), dict(layer=4, depth=4)):
        with pytest.raises(ValueError, match="'layer' is 4, expected less than the model's depth"):
            make_one(**options)
