"""What a wrong call of a module says: the mixer or model, the argument, what it is and what it should be."""

import copy

import headloom
import numpy
import pytest
import torch
from headloom._scoring import log_likelihoods
from torch.func import functional_call

WIDTH, VOCABULARY = 32, 40


def token_mixer(name):
    options = {"heads": 4} if "heads" in headloom.mixers()[name].options else {}
    causal = name not in ("fnet", "linformer")
    return headloom.mixer(name, WIDTH, causal=causal, max_length=16, **options)


def model(**options):
    shape = dict(width=WIDTH, depth=2, vocabulary=VOCABULARY, max_length=24)
    return headloom.model(**{**shape, "layer": [{"mixer": {"type": "dcmha", "heads": 4}}], **options})


def tokens(batch=2, length=7):
    return torch.randint(VOCABULARY, (batch, length))


def ids(*sizes):
    return torch.zeros(*sizes, dtype=torch.int64)


def said(error, call):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    # Torch puts the C++ stack after the sentence where it is told to.
    assert "\n" not in message.partition("\nException raised from")[0] and message.endswith("."), message
    return message


X = torch.randn(2, 8, WIDTH)
NONE = torch.zeros(2, 0, WIDTH)


@pytest.mark.parametrize("name", [name for name in headloom.mixers()])
def test_every_token_mixer_names_itself_and_x(name):
    layer, begin = token_mixer(name), f"mixer '{name}': x must "
    for x, words in [
        (torch.randn(2, 8, 16), f"be [B, T, width = {WIDTH}]; it is [2, 8, 16]."),
        (torch.randn(8, WIDTH), f"be [B, T, width = {WIDTH}]; it is [8, {WIDTH}]."),
        (NONE, f"have at least one position (T of [B, T, width]); it is [2, 0, {WIDTH}]."),
        (torch.zeros(2, 8, WIDTH, dtype=torch.int64), "be of a floating type; it is Long."),
    ]:
        assert said(ValueError, lambda: layer(x)) == begin + words
    assert said(TypeError, lambda: layer([[1.0]])) == begin + "be a tensor; it is [[1.0]] (list); torch.tensor(x) makes one."
    assert said(TypeError, lambda: layer(X.numpy())).endswith("; torch.from_numpy(x) makes one.")
    assert said(TypeError, lambda: layer(None)) == begin + "be a tensor; it is None (NoneType)."
    layer(X)  # a failed call leaves no trace


@pytest.mark.parametrize("name", [name for name in headloom.channel_mixers()])
def test_every_channel_mixer_names_itself_and_x(name):
    layer = headloom.channel_mixer(name, WIDTH)
    words = f"channel_mixer '{name}': x must be [B, T, width = {WIDTH}]; it is [2, 8, 16]."
    assert said(ValueError, lambda: layer(torch.randn(2, 8, 16))) == words
    assert "at least one position" in said(ValueError, lambda: layer(NONE))
    assert said(TypeError, lambda: layer(X.numpy())).startswith(f"channel_mixer '{name}': x must be a tensor")
    assert "documents must be [B, T] = [2, 8]; it is [2, 7]." in said(ValueError, lambda: layer(X, ids(2, 7)))
    layer(X)


@pytest.mark.parametrize(
    "named, words",
    [
        (dict(lengths=torch.tensor([3])), "lengths must be [B] = [2]; it is [1]."),
        (dict(lengths=torch.tensor([3.0, 2.0])), "lengths must be int64 (torch.long); it is Float."),
        (dict(lengths=torch.tensor([3, 9])), "lengths must be from 0 to the 8 positions that there are; one is 9."),
        (dict(lengths=torch.tensor([-1, 9])), "lengths must be from 0 to the 8 positions that there are; one is -1."),
        (dict(documents=ids(2, 7)), "documents must be [B, T] = [2, 8]; it is [2, 7]."),
        (dict(documents=ids(2, 8).int()), "documents must be int64 (torch.long); it is Int."),
        (dict(memory=torch.randn(2, 5, 16)), f"memory must be [B, T, width = {WIDTH}]; it is [2, 5, 16]."),
        (dict(memory=torch.randn(3, 5, WIDTH)), "memory must have the 2 sequences of x, on cpu; it has 3 on cpu."),
        (dict(memory=NONE), "memory must have at least one position"),
        (dict(memory=X, lengths=torch.tensor([3, 9])), "the memory's lengths must be from 0 to the 8 positions"),
        (dict(memory=X, documents=ids(2, 8)), "documents are of x's own positions, expected none beside a memory."),
        (dict(memory=X.double()), "x is Float, but memory is Double; expected one type"),
        (dict(lengths=torch.tensor([1, 2]).to("meta")), "lengths must be on cpu as the input is; it is on meta."),
    ],
)
def test_what_goes_with_x_is_named(named, words):
    layer = token_mixer("dcmha")
    message = said(ValueError, lambda: layer(X, **named))
    assert message.startswith("mixer 'dcmha': ") and words in message
    layer(X)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_dense_are_named():
    rows = [torch.randn(8, WIDTH), torch.randn(8, WIDTH)]
    nested = "is a nested tensor, expected a dense one, as torch.nested.to_padded_tensor() makes it."
    sparse = "has the layout Sparse, expected a dense tensor, as to_dense() makes it."
    layer = token_mixer("dcmha")
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor(rows, layout=layout)
        assert f"mixer 'dcmha': x {nested}" == said(ValueError, lambda: layer(x))
        texts = torch.nested.nested_tensor(list(tokens()), layout=layout)
        assert f"model: tokens {nested}" == said(ValueError, lambda: model()(texts))
    assert f"mixer 'dcmha': x {sparse}" == said(ValueError, lambda: layer(X.to_sparse()))
    assert f"mixer 'dcmha': documents {sparse}" == said(ValueError, lambda: layer(X, documents=ids(2, 8).to_sparse()))
    assert f"model: tokens {sparse}" == said(ValueError, lambda: model()(tokens().to_sparse()))
    assert f"model: the prompt {sparse}" == said(ValueError, lambda: model().generate(tokens()[0].to_sparse(), 2))


def test_wrong_types_beside_x_are_named():
    layer = token_mixer("mha")
    assert "mixer 'mha': lengths must be a tensor; it is [3, 2] (list)" in said(TypeError, lambda: layer(X, lengths=[3, 2]))
    assert "memory must be a tensor; it is 'm' (str)." in said(TypeError, lambda: layer(X, memory="m"))
    assert "rwkv does not read a memory" in said(ValueError, lambda: token_mixer("rwkv")(X, memory=X))


def test_a_parameter_that_was_taken_away_is_named():
    without = model()
    without.layer0.mixer.qkv.weight = None
    message = said(ValueError, lambda: without(tokens()))
    assert message == "model: parameter 'layer0.mixer.qkv.weight' is None, expected a tensor."


def test_types_and_devices_that_differ_are_named():
    layer = token_mixer("mha")
    message = said(ValueError, lambda: layer(X.double()))
    assert message == (
        "mixer 'mha': x is Double, but parameter 'qkv.weight' is Float; expected one type (.to(dtype) converts), or "
        "torch.autocast."
    )
    message = said(ValueError, lambda: layer(X.to("meta")))
    assert message == "mixer 'mha': x is on meta, but the parameters are on cpu; expected one device."
    mixed = model()
    mixed.layer0.mixer.qkv.to(torch.bfloat16)
    message = said(ValueError, lambda: mixed(tokens()))
    assert "model: parameter 'embedding' is Float, but parameter 'layer0.mixer.qkv.weight' is BFloat16" in message
    assert said(ValueError, lambda: mixed.generate(tokens(), 2)) == message
    with torch.autocast("cpu", torch.bfloat16):
        layer(X.half())
        mixed(tokens())
        message = said(ValueError, lambda: layer(X.double()))
    assert message.endswith("expected one type (.to(dtype) converts), as autocast leaves Double alone.")


@pytest.mark.parametrize("turn", [lambda t: t.t(), lambda t: t[:-1], lambda t: t.flatten(), lambda t: t.unsqueeze(0)])
def test_parameters_of_another_shape_are_named(turn):
    for module, name, args in [
        (token_mixer("mha"), "qkv.weight", (X,)),
        (token_mixer("rwkv"), "mix", (X,)),
        (headloom.channel_mixer("swiglu", WIDTH), "down.weight", (X,)),
        (model(), "embedding", (tokens(),)),
        (model(), "layer1.channel.up.weight", (tokens(),)),
    ]:
        parameters = dict(module.named_parameters())
        whole = list(parameters[name].shape)
        other = turn(parameters[name].detach())
        what = module._what()
        words = f"{what}: parameter '{name}' must be {whole}; it is {list(other.shape)}."
        assert said(ValueError, lambda: functional_call(module, {**parameters, name: other}, args)) == words
        changed = copy.deepcopy(module)
        *path, last = name.split(".")
        owner = changed.get_submodule(".".join(path))
        setattr(owner, last, torch.nn.Parameter(other.clone()))
        assert said(ValueError, lambda: changed(*args)) == words
    writer = model()
    writer.embedding = torch.nn.Parameter(writer.embedding[1:].detach())
    for call in (lambda: writer.extend(tokens(), headloom.State()), lambda: writer.generate(tokens(), 2)):
        assert "model: parameter 'embedding' must be [40, 32]; it is [39, 32]." == said(ValueError, call)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda m: m([[1, 2]]), TypeError, "model: inputs must be a tensor; it is [[1, 2]] (list); torch.tensor(inputs)"),
        (lambda m: m(numpy.zeros((2, 3), int)), TypeError, "torch.from_numpy(inputs) makes one."),
        (lambda m: m("text"), TypeError, "it is 'text' (str); model.encode makes tokens of a text."),
        (lambda m: m(None), TypeError, "inputs must be a tensor; it is None"),
        (lambda m: m(tokens(), lengths=[1, 2]), TypeError, "model: lengths must be a tensor; it is [1, 2] (list)"),
        (lambda m: m(tokens()[:, :0]), ValueError, "model: tokens has shape [2, 0], expected at least one position."),
        (lambda m: m(tokens(), lengths=torch.tensor([1, 8])), ValueError, "lengths must be from 0 to the 7 positions"),
        (lambda m: m(tokens(), source_lengths=ids(2)), ValueError, 'kind "decoder" reads no source_lengths, but got some.'),
        (lambda m: m(tokens().to("meta")), ValueError, "tokens is on meta, but the parameters are on cpu"),
        (lambda m: m(tokens(1, 25)), ValueError, "24 learned positions (model.max_length), but the sequence has 25 tokens."),
        (lambda m: m.extend(tokens(), None), TypeError, "model: state must be a headloom.State; it is None (NoneType)."),
        (lambda m: m.extend([1], headloom.State()), TypeError, "model: tokens must be a tensor; it is [1] (list)"),
        (lambda m: m.extend(torch.randn(2, 3), headloom.State()), ValueError, "type Float, expected integers [B, n]"),
        (lambda m: m.extend(tokens()[0], headloom.State()), ValueError, "shape [7] and type Long, expected integers [B, n]"),
        (lambda m: m.extend(tokens() + VOCABULARY, headloom.State()), ValueError, "expected one of the vocabulary's 0 to 39."),
        (lambda m: m.extend(-1 - tokens(), headloom.State()), ValueError, "expected one of the vocabulary's 0 to 39."),
        (lambda m: m.extend(tokens(), headloom.State("windoe:3")), ValueError, 'the cache policy is "windoe:3"'),
        (lambda m: headloom.State(3), TypeError, "cache is 3 (int), expected a text"),
        (lambda m: m.generate(numpy.zeros(3, int)), TypeError, "expected text or a tensor of tokens."),
        (lambda m: m.generate([tokens()]), TypeError, "tokens of several are one tensor [B, T]."),
        (lambda m: m.generate(torch.randn(4), 2), ValueError, "model: the prompt has shape [1, 4] and type Float"),
        (lambda m: m.generate(tokens(), "5"), TypeError, "max_new_tokens is '5' (str), expected a whole number"),
        (lambda m: m.generate(tokens(), 5.5), TypeError, "max_new_tokens is 5.5 (float), expected a whole number"),
        (lambda m: m.generate(tokens(), 2, temperature="hot"), TypeError, "temperature is 'hot' (str), expected a number"),
        (lambda m: m.generate(tokens(), 2, temperature=float("nan")), ValueError, "temperature is nan, expected 0"),
        (lambda m: m.generate(tokens(), 2, temperature=float("inf")), ValueError, "temperature is inf, expected 0"),
        (lambda m: m.generate(tokens(), 2, top_k=2.5), TypeError, "top_k is 2.5 (float), expected 0"),
        (lambda m: m.generate(tokens(), 2, top_p=1.5), ValueError, "top_p is 1.5, expected 0 to 1."),
        (lambda m: m.generate(tokens(), 2, repetition_penalty=0), ValueError, "repetition_penalty is 0, expected more than 0."),
        (lambda m: m.generate(tokens(), 2, seed=2**64), ValueError, "expected a whole number of 64 bits."),
        (lambda m: m.generate(tokens(), 2, cache=512), TypeError, "cache is 512 (int), expected a text"),
        (lambda m: m.generate(tokens(), 2, cache_dtype=8), TypeError, 'cache_dtype is 8 (int), expected None or "int8"'),
        (lambda m: headloom.State(cache_dtype="int3"), ValueError, 'held in "int3", expected int8'),
        (lambda m: m.decode(tokens()), ValueError, "the model has no tokenizer"),
        (lambda m: headloom.model(5), TypeError, "config is 5 (int), expected a preset's name or a table."),
        (lambda m: headloom.model(width=2**70), ValueError, "'width' is 1180591620717411303424, expected a number below 2**63."),
        (
            lambda m: headloom.model(layer=[{"mixer": {"type": "mha", "heads": {1}}}]),
            TypeError,
            "'layer[0].mixer.heads' is {1} (set), expected a number",
        ),
        (lambda m: headloom.Tokenizer("bytes").encode(5), TypeError, "text is 5 (int), expected text or bytes."),
        (lambda m: headloom.Tokenizer("bytes").decode(tokens()), ValueError, "tokens has shape [2, 7], expected [n]."),
        (lambda m: headloom.Tokenizer("bytes").decode(torch.tensor([1.0])), TypeError, "a token is 1.0 (float), expected a whole"),
        (lambda m: headloom.Tokenizer("bytes").piece(1.5), TypeError, "token is 1.5 (float), expected a whole number."),
    ],
)
def test_calls_of_models(call, error, words):
    own = model(position={"type": "learned"})
    assert words in said(error, lambda: call(own))
    own(tokens())  # a failed call leaves no trace


def test_numbers_of_numpy_are_numbers():
    assert headloom.model(width=numpy.int64(16), depth=1, vocabulary=9, dropout=numpy.float32(0.5)).config["dropout"] == 0.5
    assert model().generate(tokens(), numpy.int64(2), top_k=numpy.int32(3), temperature=numpy.float32(1)).shape == (2, 9)


def test_tokens_of_any_integer_type():
    own, x = model(), tokens()
    expected = own(x)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(own(x.to(dtype)), expected)


def test_states_that_do_not_fit_are_named_and_stay_as_they_were():
    own = model()
    state = headloom.State()
    assert "it has seen" in said(ValueError, lambda: state.select([0]))
    # A beginning that fails does not begin.
    said(ValueError, lambda: own.extend(tokens() + VOCABULARY, state))
    assert state.position == 0 and state.bytes == 0
    x = tokens()
    first = own.extend(x, state)
    words = "model: tokens has 3 sequences, expected the 2 that the state has seen."
    assert said(ValueError, lambda: own.extend(tokens(3, 1), state)) == words
    other = model(depth=1)
    assert "begun by a model of another configuration" in said(ValueError, lambda: other.extend(x, state))
    assert "its source came with the first" in said(ValueError, lambda: own.extend(x, state, source=x))
    for rows, words in [
        ([2], "rows has 2, expected numbers of the 2 sequences"),
        ([-1], "rows has -1"),
        ([[0]], "rows has shape [1, 1]"),
        ([0.5], "type torch.float32"),
        ([True, False], "type torch.bool"),
        (torch.zeros(0, dtype=torch.int64), "at least one sequence"),
        ([], "at least one sequence"),
    ]:
        assert words in said(ValueError, lambda: state.select(rows))
    for rows in ("a", None, [None]):
        assert said(TypeError, lambda: state.select(rows)).startswith(f"rows is {rows!r} (")
    assert state.position == 7
    torch.testing.assert_close(torch.cat([first, own.extend(x[:, :1], state)], 1), own(torch.cat([x, x[:, :1]], 1)).detach())


def test_inputs_of_other_kinds_are_named():
    images = headloom.model(
        kind="vit", width=WIDTH, depth=1, classes=3, image={"channels": 3, "height": 8, "width": 8, "patch": 4}
    )
    assert "reads images of 3 x 8 x 8" in said(ValueError, lambda: images(torch.randn(2, 3, 8, 9)))
    assert "model: images must be of a floating type; it is Byte." == said(
        ValueError, lambda: images(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    )
    assert 'kind "vit" reads no lengths' in said(ValueError, lambda: images(torch.randn(2, 3, 8, 8), lengths=ids(2)))
    both = model(kind="encoder_decoder", max_source_length=24)
    assert "source has shape [3, 7], expected [2, S], a row for each row of tokens." in said(
        ValueError, lambda: both(tokens(), source=tokens(3))
    )
    assert 'kind "encoder_decoder" reads no documents' in said(
        ValueError, lambda: both(tokens(), source=tokens(), documents=ids(2, 7))
    )
    assert "source has the token" in said(ValueError, lambda: both(tokens(), source=tokens() + VOCABULARY))
    assert "source_lengths must be from 0 to the 7" in said(
        ValueError, lambda: both(tokens(), source=tokens(), source_lengths=torch.tensor([7, 8]))
    )


# --- The meta device -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, args",
    [
        (model, (ids(2, 7),)),
        (lambda: token_mixer("dcmha"), (X,)),
        (lambda: token_mixer("mamba"), (X,)),
        (lambda: headloom.channel_mixer("moe", WIDTH), (X,)),
    ],
)
def test_meta_modules_hold_no_numbers_until_they_are_given_some(make, args):
    torch.manual_seed(4)
    real = make()
    state = torch.random.get_rng_state()
    with torch.device("meta"):
        empty = make()
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(p.is_meta for p in empty.parameters())
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    # Shapes go through as they do in any module.
    assert empty(*(a.to("meta") for a in args)).is_meta
    assert "on cpu, but the parameters are on meta" in said(ValueError, lambda: empty(*args))
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(real.state_dict())
    torch.testing.assert_close(filled(*args), real(*args))


def test_meta_models_do_not_write():
    with torch.device("meta"):
        empty = model()
    message = said(ValueError, lambda: empty.generate(tokens().tolist() and torch.ones(3, dtype=torch.int64), 2))
    assert "is on meta, expected cpu" in message


def test_default_devices_are_followed():
    there, given = model(), tokens()
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        assert next(model().parameters()).is_meta
        # What belongs to a model, or to nothing yet, is where that is.
        state = headloom.State()
        there.extend(given, state)
        assert there.extend(given[:, :1], state.select([1, 0])).is_cpu
        there.generate(given, 2)
        assert headloom.Tokenizer("bytes").encode("").is_cpu
        assert len(log_likelihoods(there, [([1, 2], [3])])) == 1
    finally:
        torch.set_default_device(before)
    assert next(model().parameters()).is_cpu


def test_a_model_without_values_may_be_larger_than_memory():
    with torch.device("meta"):
        assert sum(p.numel() for p in model(width=1 << 14, depth=256).parameters()) > 1e11  # each of its tensors fits
    assert "parameters in float32" in said(ValueError, lambda: model(width=1 << 14, depth=256))
