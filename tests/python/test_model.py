"""Whole models inside ordinary PyTorch code: a fresh one, one of a run, one of a Hugging Face folder."""

import copy
import io
import json
import pickle
import warnings

import headloom
import pytest
import torch
import torch._dynamo.testing
from model_support import ATTENTION, KINDS, LENGTH, SHAPE, VOCABULARY, WIDTH, decoder, inputs, layer, make, tokens
from torch.func import functional_call


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)
    torch.compiler.reset()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# --- As a module ---------------------------------------------------------------------------------


def test_gives_logits_and_gradients_to_every_parameter(kind):
    model = make(kind)
    args, named = inputs(kind)
    logits = model(*args, **named)
    wide = {"vit": (2, 5), "label": (2, 3), "tags": (2, LENGTH, 4), "span": (2, LENGTH, 2)}
    assert logits.shape == wide.get(kind, (2, LENGTH, VOCABULARY))
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_trains_with_a_torch_optimiser(kind):
    model = make(kind)
    args, named = inputs(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    *places, classes = model(*args, **named).shape
    targets = torch.randint(min(classes, 3), places)
    losses = []
    for _ in range(45 if classes == 2 else 15):
        loss = torch.nn.functional.cross_entropy(model(*args, **named).flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_state_dict_copies_and_pickles(kind):
    model = make(kind)
    args, named = inputs(kind)
    expected = model(*args, **named)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    other = make(kind)
    assert not torch.equal(other(*args, **named), expected)
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(other(*args, **named), expected)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(same(*args, **named), expected)
        with torch.no_grad():
            next(same.parameters()).add_(1)
    assert torch.equal(model(*args, **named), expected)


def test_functional_call(kind):
    model = make(kind)
    args, named = inputs(kind)
    params = {n: p.detach() for n, p in model.named_parameters()}
    # Without gradients another path of the same computation may run.
    torch.testing.assert_close(functional_call(model, params, args, named), model(*args, **named))


@pytest.mark.parametrize("kind", ["tied", "dcmha", "balanced"])
def test_ensembles(kind):
    several = [make(kind).eval() for _ in range(2)]
    args, named = inputs(kind)
    params, buffers = torch.func.stack_module_state(several)
    at_once = torch.func.vmap(lambda p, b: functional_call(several[0], (p, b), args, named))(params, buffers)
    expected = torch.stack([model(*args, **named) for model in several])
    torch.testing.assert_close(at_once, expected, atol=1e-4, rtol=1e-4)


def test_transforms_say_that_they_cannot_count_the_experts_load():
    model = make("balanced")
    args, _ = inputs("balanced")
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters):
        return functional_call(model, parameters, args).square().mean()

    with pytest.raises(ValueError, match=r"bias_speed.*torch\.func.*model\.eval\(\)"):
        torch.func.grad(loss)(parameters)
    model.eval()
    found = torch.func.grad(loss)(parameters)
    loss(dict(model.named_parameters())).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_autocast_and_narrow_parameters():
    model, x = decoder(), tokens()
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, atol=0.05, rtol=0.05)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(model.to(torch.bfloat16)(x).float(), expected, atol=0.05, rtol=0.05)


def test_weights_follow_the_seed_and_calls_draw_none():
    torch.manual_seed(5)
    first = decoder()
    torch.manual_seed(5)
    second, third = decoder(), decoder()
    x = tokens()
    before = torch.random.get_rng_state()
    assert torch.equal(first(x), second(x))
    assert not torch.equal(first(x), third(x))
    first.generate(x[0], 3, temperature=0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_dropout_follows_the_mode():
    model, x = decoder(dropout=0.5), tokens()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_tied_weights_are_one_parameter():
    model = decoder()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in model.state_dict().values())
    assert "embedding" in model.state_dict() and "head.weight" not in model.state_dict()
    assert "head.weight" in decoder(tied=False).state_dict()


def test_auxiliary_loss_of_experts():
    model, x = make("experts"), tokens()
    logits, balance = model(x, auxiliary=True)
    assert torch.equal(logits, model(x)) and balance.dim() == 0 and balance > 0
    balance.backward()
    assert model.layer0.channel.gate.weight.grad.abs().sum() > 0
    assert decoder()(x, auxiliary=True)[1] == 0


def test_loss_is_the_cross_entropy_of_the_logits(kind):
    model = make(kind)
    args, named = inputs(kind)
    if kind == "span":
        with pytest.raises(ValueError, match="the loss of spans is over the positions of a context"):
            model.loss(*args, tokens(), **named)
        return
    if kind == "balanced":  # a call moves nothing, so the two calls see the same experts
        model.eval()
    logits, extra = model(*args, **named, auxiliary=True)
    targets = torch.randint(logits.shape[-1], logits.shape[:-1])
    if targets.dim() == 2:
        targets[:, 3:5] = -100
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
    expected = expected + extra if model.training else expected
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = model.loss(*args, targets, **named)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for p, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(p.grad, gradient, atol=1e-6, rtol=1e-4)
    with pytest.raises(ValueError, match=r"model: targets has shape \[2, 0\] and type"):
        model.loss(*args, torch.zeros(2, 0, dtype=torch.int64), **named)
    with pytest.raises(IndexError):
        model.loss(*args, torch.full_like(targets, logits.shape[-1]), **named)
    with pytest.raises(TypeError, match="targets must be"):
        model.loss(*args, [1], **named)


# Each way in which layers are put together; test_mixers.py compiles every mixer.
@pytest.mark.parametrize(
    "kind",
    ["tied", "learned positions", "experts", "balanced", "simplified", "encoder", "label", "auto_encoder", "encoder_decoder", "vit"],
)
def test_sizes_that_change_are_compiled_once(kind):
    model = make(kind, depth=1)  # another layer is the same again, and compiling takes seconds
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    if kind == "balanced":  # a call moves nothing, so the two calls see the same experts
        model.eval()
    for batch, length in [(6, 9), (7, 10), (5, 12)]:
        args, named = inputs(kind, batch, length)
        results = compiled(*args, **named), model(*args, **named)
        torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
        of = list(model.parameters())
        for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), of, allow_unused=True) for y in results), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert counter.frame_count == 1


def test_a_tied_table_gets_one_gradient_of_its_two():
    """Rows of few tokens are added to the matrix of the scores: the same as by two matrices, however it is asked for."""
    model = headloom.model(width=32, depth=1, vocabulary=97)
    x, y = torch.tensor([[3, 5, 3, 96, 3]]), torch.tensor([[5, 3, 96, 3, 0]])
    table = next(p for p in model.parameters() if p.shape[0] == 97)
    logits = model(x)
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()), table)
    loss = model.loss(x, y)
    for _ in range(2):  # what is kept for a second time is not changed by the first
        (found,) = torch.autograd.grad(loss, table, retain_graph=True)
        assert found.layout == torch.strided
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    seen = []
    handle = table.register_hook(seen.append)
    for _ in range(2):  # added up in .grad
        model.loss(x, y).backward()
    handle.remove()
    torch.testing.assert_close(table.grad, 2 * expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(seen[0], expected, atol=1e-6, rtol=1e-4)
    (found,) = torch.autograd.grad(loss, table, create_graph=True)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    (second,) = torch.autograd.grad(found.square().sum(), table)
    assert second.isfinite().all() and second.abs().sum() > 0


def test_the_gradient_of_an_embedding_is_one_however_it_is_asked_for():
    model, x = decoder(layer=[layer("talking_heads")]), tokens()
    name, table = next((n, p) for n, p in model.named_parameters() if "embedding" in n)

    def loss(table):
        return functional_call(model, {name: table}, (x,)).square().mean()

    def equals(found, expected):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)

    expected = torch.func.grad(loss)(table.detach())  # a transform takes PyTorch's own embedding
    equals(torch.autograd.grad(loss(table), table)[0], expected)
    value = loss(table)
    both = torch.autograd.grad(torch.stack([value, 2 * value]), table, torch.eye(2), is_grads_batched=True)[0]
    equals(both, torch.stack([expected, 2 * expected]))
    (found,) = torch.autograd.grad(loss(table), table, create_graph=True)
    equals(found, expected)
    assert torch.autograd.grad(found.square().sum(), table)[0].abs().sum() > 0
    direction = torch.randn_like(expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(table.detach(), direction)
        tangent = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
        wanting = torch.autograd.forward_ad.make_dual(table, direction)  # both kinds at once
        again = torch.autograd.forward_ad.unpack_dual(loss(wanting)).tangent
    for found in (tangent, again):
        torch.testing.assert_close(found, (expected * direction).sum(), atol=1e-5, rtol=1e-4)


def test_loss_compiles_without_breaks():
    model, x = make("tied"), tokens(length=LENGTH + 1)
    expected = model.loss(x[:, :-1], x[:, 1:])
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = torch.compile(lambda a, b: model.loss(a, b), backend="aot_eager", fullgraph=True)(x[:, :-1], x[:, 1:])
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for p, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(p.grad, gradient, atol=1e-5, rtol=1e-4)


def test_loss_under_autocast():
    model, x = make("tied"), tokens(length=LENGTH + 1)
    exact = model.loss(x[:, :-1], x[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(x[:, :-1], x[:, 1:])
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, atol=2e-2, rtol=0)


def test_its_parts_are_there_for_reading():
    model, x = decoder(), torch.randn(1, 3, SHAPE["width"])
    parts = dict(model.named_modules())
    assert {"layer0", "layer0.mixer", "layer0.channel"} <= set(parts)
    assert dict(parts["layer0.mixer"].named_parameters()).keys() == {"qkv.weight", "output.weight"}
    mixer = headloom.mixer("mha", width=SHAPE["width"], **ATTENTION)
    mixer.load_state_dict(parts["layer0.mixer"].state_dict())
    with pytest.raises(NotImplementedError, match="headloom.mixer and headloom.channel_mixer make single layers"):
        model.layer0.mixer(x)
    for register in (
        model.layer0.register_forward_hook,
        model.layer0.mixer.register_forward_pre_hook,
        model.layer0.register_full_backward_hook,
        model.layer0.register_full_backward_pre_hook,
    ):
        with pytest.warns(UserWarning, match="never fires"):
            register(lambda *_: None)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.register_forward_hook(lambda *_: seen.append("model"))
        mixer.register_forward_hook(lambda *_: seen.append("mixer"))
    model(tokens())
    mixer(x)
    assert seen == ["model", "mixer"]


@pytest.mark.parametrize("change", ["prune", "prune twice", "weight_norm", "spectral_norm"])
def test_parameters_that_a_hook_of_torch_computes(change):
    model = decoder()
    part, x = model.layer0.mixer.output, tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such a hook fires, so that nothing warns of it
        warnings.filterwarnings("ignore", message=".*deprecated", category=FutureWarning)
        if change == "weight_norm":
            torch.nn.utils.weight_norm(part, "weight")
        elif change == "spectral_norm":
            torch.nn.utils.spectral_norm(part, "weight")
        else:
            for _ in change.split():
                torch.nn.utils.prune.l1_unstructured(part, "weight", 0.5)
    trained = dict(part.named_parameters())
    assert "weight" not in trained
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        before = {name: value.detach().clone() for name, value in trained.items()}
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        assert all(not torch.equal(value, before[name]) for name, value in trained.items())
    # Calls that no forward hook sees have the weights as they now are.
    model.eval()
    torch.testing.assert_close(model.extend(x, headloom.State()), model(x).detach())
    if change.startswith("prune"):
        assert (part.weight == 0).float().mean() > 0.4


def test_lengths_documents_and_segments():
    model = make("encoder")
    x, lengths = tokens(), torch.tensor([4, 9])
    changed = x.clone()
    changed[0, 4:] = 1
    torch.testing.assert_close(model(x, lengths=lengths)[0, :4], model(changed, lengths=lengths)[0, :4])
    assert not torch.equal(model(x), model(x, segments=torch.ones_like(x)))
    with pytest.raises(ValueError, match="segments has ids from 0 to 2, expected 0 to 1"):
        model(x, segments=torch.arange(x.numel()).view_as(x) % 3)
    with pytest.raises(ValueError, match="the input has segments, but the model has no embeddings"):
        make("tags")(x, segments=torch.zeros_like(x))
    packed = decoder(position={"type": "none"})
    documents = torch.tensor([[0] * 4 + [1] * 5] * 2)
    parts = torch.cat([packed(x[:, :4]), packed(x[:, 4:])], 1)
    torch.testing.assert_close(packed(x, documents=documents), parts)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(widht=3), "widht.*did you mean 'model.width'"),
        (dict(layer=[{"mixer": {"type": "dcmah"}}]), "dcmah"),
        (dict(vocabulary=None), "'model.vocabulary' is not set"),
        (dict(layer=[{"mixer": {"type": "mha", "heads": 5}}]), "heads is 5"),
        (dict(dropout=2.0), "dropout"),
        (dict(position="alibi"), r"'model.position' is a string, expected a table such as \{ type = \"alibi\" \}"),
    ],
)
def test_errors_name_the_option(options, words):
    with pytest.raises(ValueError, match=words):
        decoder(**options)


def test_errors_of_presets():
    with pytest.raises(ValueError, match="did you mean 'dcformer\\+\\+-tiny'"):
        headloom.model("dcformer++-tinny", vocabulary=256)
    assert "dcformer++-tiny" in headloom.presets()


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda m: m(torch.tensor([[1, VOCABULARY]])), f"token {VOCABULARY}.*0 to {VOCABULARY - 1}"),
        (lambda m: m(torch.tensor([[-1, 3]])), "token -1"),
        (lambda m: m(torch.tensor([1, 2])), r"\[2\].*expected integers \[B, T\]"),
        (lambda m: m(torch.randn(2, 3)), "Float.*expected integers"),
        (lambda m: m(tokens(), lengths=torch.tensor([1])), r"lengths must be \[B\] = \[2\]; it is \[1\]"),
        (lambda m: m(tokens(), documents=torch.zeros(2, 3, dtype=torch.int64)), r"documents must be \[B, T\] = \[2, 9\]; it is \[2, 3\]"),
        (lambda m: m(tokens(), source=tokens()), "reads no source"),
        (lambda m: m.generate(tokens(), 3, temperature=-1.0), "temperature is -1.0"),
        (lambda m: m.generate(torch.zeros(0, dtype=torch.int64), 3), "at least one token"),
        (lambda m: m.generate("text"), "no tokenizer"),
        (lambda m: m.generate(tokens().to("meta"), 3), "the prompt is on meta, expected tokens with values"),
        (lambda m: m.generate(tokens(), 3, num_samples=0), "num_samples is 0"),
        (lambda m: m.generate(tokens(), 3, stop="x"), "no tokenizer"),
        (lambda m: m.generate(tokens(), -1), "max_new_tokens is -1"),
        (lambda m: m.extend(tokens()[:, :0], headloom.State()), "at least one position"),
        (lambda m: m("text"), "'text' .str.; model.encode"),
        (lambda m: m.generate([1, 2]), "a prompt is 1 .int., expected text or a tensor"),
        (lambda m: m.generate(5), "a prompt is 5 .int."),
        (lambda m: m.generate(tokens(), 3, stop=b"x"), "stop is b'x' .bytes."),
        (lambda m: m.generate(tokens(), 3, stop=None), "stop is None .NoneType., expected texts and tokens"),
        (lambda m: m.generate(tokens(), 3, stop=True), "stop is True .bool., expected texts and tokens"),
        (lambda m: m.generate(tokens(), 3, stop=[3, 999]), "stop has the token 999, expected one of the vocabulary's 0 to "),
    ],
)
def test_errors_of_inputs(call, words):
    model = decoder()
    with pytest.raises((ValueError, TypeError), match=words):
        call(model)
    model(tokens())  # a failed call leaves no trace


def test_kinds_that_do_not_write_say_so():
    with pytest.raises(ValueError, match="encoder.*expected a decoder"):
        make("encoder").generate(tokens(), 3)
    with pytest.raises(ValueError, match="reads source, but got none"):
        make("encoder_decoder")(tokens())


def test_mha_of_a_config_is_a_copy():
    model = decoder()
    assert model.config["width"] == WIDTH and model.config["layer"][0]["mixer"]["type"] == "mha"
    other = headloom.model(model.config, depth=3)
    assert other.config["depth"] == 3 and "layer2.mixer.qkv.weight" in other.state_dict()
    other = headloom.model(model.config)
    other.load_state_dict(model.state_dict())
    x = tokens()
    assert torch.equal(model(x), other(x))


# --- Text ----------------------------------------------------------------------------------------


@pytest.fixture
def speaker():
    """A model of bytes that repeats "hello wörld. "."""
    text = ("hello wörld. " * 12).encode()
    data = torch.tensor(list(text))
    model = headloom.model(width=32, depth=1, tokenizer="bytes", max_length=64, layer=[layer()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        starts = torch.randint(len(data) - 33, (8,))
        batch = torch.stack([data[i : i + 33] for i in starts])
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5
    return model.eval()


def test_text(speaker):
    written = speaker.generate("hello w", 20, temperature=0)
    assert written == ("hello wörld. " * 3).encode()[:27].decode(errors="replace")
    assert "".join(speaker.stream("hello w", 20, temperature=0)) == written[len("hello w") :]
    assert speaker.generate("hello w", 40, temperature=0, stop=["rld"]) == "hello wö"
    assert list(speaker.stream("hello w", 40, temperature=0, stop=["rld", "zz"])) == ["ö"]
    assert speaker.generate(["hello w", "rld. "], 3, temperature=0) == ["hello wör", "rld. hel"]
    samples = speaker.generate("hello", 12, num_samples=3, seed=1)
    assert len(samples) == 3 and all(s.startswith("hello") for s in samples)
    assert speaker.decode(speaker.encode("wörld")) == "wörld"
    assert speaker.generate("", 4, seed=1) == speaker.generate("", 4, seed=1)


def test_tokenizer():
    tokenizer = headloom.Tokenizer("bytes")
    assert tokenizer.vocabulary == 256 and tokenizer.end_token == 0 and tokenizer.start_token is None
    assert tokenizer.encode("aé").tolist() == [97, 195, 169]
    assert tokenizer.decode(torch.tensor([97, 195])) == "a\ufffd"
    for wrong in ([97.5], torch.tensor([97.5])):
        with pytest.raises(TypeError, match=r"a token is 97.5 \(float\), expected a whole number."):
            tokenizer.decode(wrong)
    assert pickle.loads(pickle.dumps(tokenizer)).decode([104]) == "h"
    with pytest.raises(ValueError, match="the tokenizer is 'wordpiece'"):
        headloom.Tokenizer("wordpiece")
    with pytest.raises(FileNotFoundError, match="nothing.json"):
        headloom.Tokenizer("nothing.json")


def test_a_tokenizer_stays_the_same_in_another_folder(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    for name, text in ("a", "the loom"), ("b", "zzzz"):
        (tmp_path / name).mkdir()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=262, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator([text] * 9, trainer)
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    monkeypatch.chdir(tmp_path / "a")
    model = headloom.model(width=32, depth=1, max_length=8, tokenizer="tokenizer.json")
    expected, pickled = model.encode("the loom").tolist(), pickle.dumps(model)
    monkeypatch.chdir(tmp_path / "b")
    assert headloom.Tokenizer("tokenizer.json").encode("the loom").tolist() != expected
    assert pickle.loads(pickled).encode("the loom").tolist() == expected
    model.save(tmp_path / "run")
    assert headloom.load(tmp_path / "run").encode("the loom").tolist() == expected


# --- Files ---------------------------------------------------------------------------------------


def test_save_and_load(kind, tmp_path):
    model = make(kind)
    args, named = inputs(kind)
    model.save(tmp_path / "run")
    back = headloom.load(tmp_path / "run")
    assert not back.training and back.config == model.config
    assert torch.equal(back(*args, **named), model.eval()(*args, **named))
    with pytest.raises(ValueError, match="already holds a run"):
        model.save(tmp_path / "run")


@pytest.mark.parametrize("of_bytes", [True, False])
def test_an_encoder_decoder_keeps_its_tokenizer(tmp_path, of_bytes):
    name = "bytes"
    if not of_bytes:
        tokenizers = pytest.importorskip("tokenizers")
        letters = tokenizers.models.BPE({"<s>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")])
        tokenizer = tokenizers.Tokenizer(letters)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        name = str(tmp_path / "tokenizer.json")
    model = headloom.model("transformer-tiny", tokenizer=name, max_length=64)
    model.save(tmp_path / "run")
    back = headloom.load(tmp_path / "run")
    assert back.encode("ab").tolist() == model.encode("ab").tolist()
    said = [one.generate("a", 4, source="b", temperature=0) for one in (back, model.eval())]
    assert said[0] == said[1]


def test_an_encoder_decoder_of_numbers_reads_no_text(tmp_path):
    make("encoder_decoder").save(tmp_path / "run")
    assert headloom.load(tmp_path / "run").tokenizer is None


def test_what_it_saved_it_can_speak(speaker, tmp_path):
    speaker.save(tmp_path / "run")
    back = headloom.load(tmp_path / "run")
    assert back.generate("hello", 9, temperature=0) == speaker.generate("hello", 9, temperature=0)


def test_load_names_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        headloom.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere.json: cannot be read"):
        headloom.Tokenizer(tmp_path / "nowhere.json")
    with pytest.raises(FileNotFoundError, match="nowhere.toml: there is no such file"):
        headloom.compare(tmp_path / "nowhere.toml")
    with pytest.raises(TypeError, match=r"folder is 3 \(int\), expected a path"):
        headloom.load(3)
    with pytest.raises(RuntimeError, match="neither config.toml, as a run has, nor config.json"):
        headloom.load(tmp_path)
    model = decoder()
    model.save(tmp_path / "run")
    with pytest.raises(ValueError, match="no checkpoint '7'"):
        headloom.load(tmp_path / "run", checkpoint=7)
    weights = tmp_path / "run/checkpoints/step-0/model.safetensors"
    (tmp_path / "model.safetensors").write_bytes(weights.read_bytes())
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(RuntimeError, match="truncated or damaged"):
        headloom.load(tmp_path / "run")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard"}))
    with pytest.raises(ValueError, match="unheard"):
        headloom.load(tmp_path)


def test_bytes_are_read_only_where_the_vocabulary_has_room(tmp_path):
    decoder(vocabulary=61).save(tmp_path / "few")
    few = headloom.load(tmp_path / "few")
    assert few.tokenizer is None
    with pytest.raises(ValueError, match="no tokenizer: set model.tokenizer .* of its 61 tokens"):
        few.generate("text")
    assert few.generate(tokens(), 3).shape == (2, LENGTH + 3)
    decoder(vocabulary=256).save(tmp_path / "bytes")
    assert headloom.load(tmp_path / "bytes").tokenizer.name == "bytes"


@pytest.mark.parametrize("goal", ["TokenClassification", "QuestionAnswering"])
def test_hugging_face_folders_of_encoders(goal, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    theirs = getattr(transformers, "BertFor" + goal)(config).eval()
    theirs.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="The model reads no text: .* has neither tokenizer.json nor"):
        ours = headloom.load(tmp_path)
    x, lengths = tokens(), torch.tensor([5, LENGTH])
    segments = (torch.arange(LENGTH) > 3).long().expand(2, LENGTH)
    real = torch.arange(LENGTH) < lengths[:, None]
    with torch.no_grad():
        out = theirs(x, attention_mask=real, token_type_ids=segments)
        logits = ours(x, lengths=lengths, segments=segments)
    wanted = torch.stack([out.start_logits, out.end_logits], -1) if goal == "QuestionAnswering" else out.logits
    assert logits.shape == (2, LENGTH, 2)
    torch.testing.assert_close(logits[real], wanted[real], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hugging_face_folders(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    common = dict(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)
    if name == "llama":
        config = transformers.LlamaConfig(
            **common, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
        )
        theirs = transformers.LlamaForCausalLM(config)
    else:
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, n_embd=32, n_layer=2, n_head=4))
    theirs.eval().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="The model reads no text: .* has neither tokenizer.json nor"):
        ours = headloom.load(tmp_path)
    x = tokens()
    torch.testing.assert_close(ours(x), theirs(x).logits, atol=1e-4, rtol=0)
    expected = theirs.generate(x, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    assert ours.tokenizer is None
    assert torch.equal(ours.generate(x, 6, temperature=0), expected)


def test_cross_attention_rotates_nothing():
    """So that its heads may have an odd size."""
    odd = {**layer(), "cross": {"type": "mha", "heads": 2, "head_dim": 5}}
    given, rest = inputs("encoder_decoder")
    assert make("encoder_decoder", layer=[odd])(*given, **rest).isfinite().all()


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
def test_outputs_start_alike_with_stretched_positions(scaling):
    model = make("tied", equal_init=True, position={"type": "rope", "scaling": scaling, "factor": 2.0})
    assert model(tokens()).isfinite().all()
