"""Decoding of models in Python: states, and what is generated with them."""

import copy
import io
import pickle
import threading
import warnings

import headloom
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from model_support import DECODERS, LENGTH, OTHERS, SHAPE, VOCABULARY, decoder, layer, make, tokens
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


@pytest.fixture(params=DECODERS)
def writer(request):
    """A model whose texts vary."""
    model = make(request.param).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(8)
    return model


def test_extend_equals_the_whole(writer):
    x = tokens(2, 12)
    whole = writer(x)
    state = headloom.State()
    pieces = [writer.extend(piece, state) for piece in x.split([5, 1, 1, 3, 2], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole.detach(), atol=1e-3, rtol=1e-3)
    assert state.position == 12 and state.bytes > 0
    for rows in (["a"], [2**70], [[0], [1, 2]]):
        with pytest.raises(TypeError, match="rows is .*, expected the numbers"):
            state.select(rows)
    swapped = state.select([1, 0, 1])
    more = tokens(2, 1)
    torch.testing.assert_close(
        writer.extend(more[[1, 0, 1]], swapped, last=True), writer.extend(more, state)[[1, 0, 1]], atol=1e-4, rtol=1e-4
    )


def copies(state):
    """The same state by every way there is."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), torch.load(file, weights_only=False)


def expect_same_end(model, state, others):
    """Each goes on by itself as the first does."""
    more = tokens(2, 3)
    expected = model.extend(more, state)
    for other in others:
        assert torch.equal(model.extend(more, other), expected)
        assert other.position == state.position and other.bytes == state.bytes


def test_states_are_copied_and_saved(writer):
    x, state = tokens(2, 9), headloom.State()
    expect_same_end(writer, headloom.State(), copies(headloom.State()))  # nothing was read yet
    writer.extend(x, state)
    expect_same_end(writer, state, copies(state))


@pytest.mark.parametrize("cache, dtype", [("window:5", None), ("sinks:6", None), ("tova:5", "int8")])
def test_states_that_forget_are_copied_and_saved(cache, dtype):
    model, state = decoder().eval(), headloom.State(cache, dtype)
    model.extend(tokens(2, 9), state)
    expect_same_end(model, state, copies(state))
    expect_same_end(model, state, copies(state))  # they go on in memory that has been moved in


@pytest.mark.parametrize("cache", ["window:5", "sinks:6"])
def test_a_prompt_beyond_the_model_s_length_is_read_in_pieces(cache):
    """So that attention reaches no further than the length that the model was built for."""
    length, budget = 12, int(cache.split(":")[1])
    model, prompt = decoder(max_length=length).eval(), tokens(1, 40)
    for tokens_of_prompt in (length, 40):
        state, expected = headloom.State(cache), []
        piece = tokens_of_prompt if tokens_of_prompt <= length else length - budget
        for part in prompt[:, :tokens_of_prompt].split(piece, 1):
            logits = model.extend(part, state)
        for _ in range(6):
            expected.append(logits[:, -1].argmax(-1))
            logits = model.extend(expected[-1].unsqueeze(1), state)
        written = model.generate(prompt[:, :tokens_of_prompt], 6, temperature=0, cache=cache)
        assert written[0, tokens_of_prompt:].tolist() == [int(token) for token in expected]


@pytest.mark.parametrize("cache", ["full", "window:5", "sinks:6", "tova:5"])
@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")])
def test_tensors_without_numbers_go_through_a_state(cache, mode):
    with mode():
        model, state = decoder().eval(), headloom.State(cache)
        for length in (9, 1, 1):
            logits = model.extend(torch.zeros(2, length, dtype=torch.int64), state)
            assert logits.shape == (2, length, VOCABULARY)


def test_saved_states_belong_to_their_model():
    state = headloom.State()
    decoder().extend(tokens(2, 5), state)
    other = headloom.model(width=16, depth=1, vocabulary=VOCABULARY, layer=[layer()])
    with pytest.raises(ValueError, match="begun by a model of another configuration"):
        other.extend(tokens(2, 1), copy.deepcopy(state))
    (texts, numbers, tensors), name = state._state.__getstate__()
    for damaged, match in [
        ((texts, [7] + numbers[1:], tensors), "in format 7 by another version, expected format 2"),
        ((texts[:-1], numbers, tensors), "damaged"),
        ((texts, numbers + [1], tensors), "damaged"),
        ((texts, numbers, tensors[:-1]), "damaged"),
    ]:
        kind = type(state._state)
        with pytest.raises(ValueError, match=f"^state: .*{match}"):
            kind.__setstate__(kind.__new__(kind), (damaged, name))


@pytest.mark.parametrize("mixer", [{"type": "synthesizer", "heads": 4}, {"type": "aft", "form": "local"}])
def test_a_state_is_as_it_was_after_too_many_tokens(mixer):
    model = decoder(max_length=12, layer=[layer(), {"mixer": mixer}], position={"type": "none"}).eval()
    x, state = tokens(2, 12), headloom.State()
    model.extend(x[:, :10], state)
    with pytest.raises(ValueError, match="has weights for 12 positions .*, but the sequence has 15"):
        model.extend(x[:, :5], state)
    assert state.position == 10
    torch.testing.assert_close(model.extend(x[:, 10:], state), model(x)[:, 10:])


MIXERS_WITH_STATES = ["mha", "retention", "gla", "aft", "performer", "mamba", "rwkv"]


@pytest.mark.parametrize("mixer, cache_dtype", [("mha", "int8"), *((mixer, None) for mixer in MIXERS_WITH_STATES)])
def test_a_state_goes_on_in_the_types_in_which_it_began(mixer, cache_dtype):
    model = decoder(layer=[layer(mixer)]).eval()
    x, state = tokens(), headloom.State(cache_dtype=cache_dtype)
    model.extend(x, state)
    copies_of_it = [state, copy.deepcopy(state), state.select(range(len(x)))]
    for kept in copies_of_it:
        with pytest.raises(TypeError, match="^model: the state was begun in another type, .*BFloat16, expected .*, Float[.]$"):
            copy.deepcopy(model).to(torch.bfloat16).extend(x[:, :1], kept)
        with pytest.raises(TypeError, match="than this call's Float under autocast to BFloat16, expected"):
            with torch.autocast("cpu", torch.bfloat16):
                model.extend(x[:, :1], kept)
    expected = model.extend(x[:, :1], headloom.State(cache_dtype=cache_dtype)).shape
    assert all(model.extend(x[:, :1], kept).shape == expected for kept in copies_of_it)  # as they were
    state = headloom.State(cache_dtype=cache_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        model.extend(x, state)
        model.extend(x[:, :1], state)
    with pytest.raises(TypeError, match="than this call's Float, expected .* Float under autocast to BFloat16[.]$"):
        model.extend(x[:, :1], state)


class NoRoomFor(TorchDispatchMode):
    """Fails at products with so many outputs."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if operation == torch.ops.headloom.linear_fused.default and out[0].shape[-1] == self.outputs:
            raise RuntimeError("no room")
        return out


def test_a_state_that_was_read_in_part_is_refused():
    wide = {"mixer": {"type": "mha", "heads": 4}, "channel": {"type": "mlp", "hidden": 333}}
    model, x, state = decoder(layer=[layer("mamba", "none"), wide]).eval(), tokens(), headloom.State()
    model.extend(x, state)
    with pytest.raises(RuntimeError, match="no room"), NoRoomFor(333):
        model.extend(x[:, :1], state)
    for kept in (state, copy.deepcopy(state)):
        with pytest.raises(ValueError, match="failed after layers had begun to read its tokens.*expected a new state"):
            model.extend(x[:, :1], kept)


def test_a_state_whose_logits_failed_is_refused():
    model, x, state = decoder().eval(), tokens(), headloom.State()
    with pytest.raises(RuntimeError, match="no room"), NoRoomFor(VOCABULARY):
        model.extend(x, state)
    torch.testing.assert_close(model.extend(x, state), model(x))  # had not begun
    with pytest.raises(RuntimeError, match="no room"), NoRoomFor(VOCABULARY):
        model.extend(x, state)
    with pytest.raises(ValueError, match="an earlier call of this state failed"):
        model.extend(x, state)


def test_a_state_of_inference_mode_goes_on_outside_of_it():
    model, x = decoder(max_length=400), tokens(1, 140)
    state = headloom.State()
    with torch.inference_mode():
        model.extend(x[:, :100], state)
        model.extend(x[:, 100:101], state)
    for first, last in [(101, 103), (103, 140)]:
        out = model.extend(x[:, first:last], state)
    torch.testing.assert_close(out[:, -1], model(x)[:, -1], atol=1e-4, rtol=1e-4)


def test_generating_records_no_gradients():
    def pack(x):
        raise AssertionError("a gradient would be computed")

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        assert decoder().generate(tokens(1, 3), 4, temperature=0.7).shape == (1, 7)


def test_threads_take_turns_with_a_state():
    model, x, state = decoder(max_length=None).eval(), tokens(), headloom.State()
    model.extend(x, state)
    problems = []

    def read():
        try:
            for _ in range(40):
                model.extend(x[:, :1], state)
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems and state.position == LENGTH + 160


def test_keys_and_values_in_int8():
    model, x = decoder().eval(), tokens(2, 12)
    exact, small = headloom.State(), headloom.State(cache_dtype="int8")
    whole = model.extend(x, exact)
    error = (model.extend(x, small) - whole).norm() / whole.norm()
    assert 0 < error < 0.1
    assert small.bytes < exact.bytes
    written = model.generate(x, 4, temperature=0, cache_dtype="int8")
    assert written.shape == (2, 16) and torch.equal(written[:, :12], x)


@pytest.mark.parametrize("position", ["rope", "alibi", "none"])
def test_a_model_without_a_longest_sequence_rereads_nothing(position):
    torch.manual_seed(0)
    model = headloom.model(width=16, depth=1, vocabulary=VOCABULARY, init_std=0.5, position={"type": position}, layer=[layer()])
    assert "max_length" not in model.config or model.config["max_length"] is None
    x = tokens(1, 250)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = model.eval().generate(x, 20, temperature=0)
    with torch.no_grad():
        assert torch.equal(y[:, 250:], model(y)[:, 249:-1].argmax(-1))


def test_outgrowing_the_longest_sequence_is_said():
    model = decoder().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(tokens(1, 20), 5, temperature=0)
        model.generate(tokens(2, 24), 1, temperature=0)
    for length, new in ((20, 6), (30, 1)):
        with pytest.warns(UserWarning, match="outgrown the 24 positions .* newest 12 tokens") as said:
            model.generate(tokens(1, length), new, temperature=0)
        assert len(said) == 1


def test_generate_is_the_greedy_continuation(writer):
    x = tokens(2, 5)
    y = x
    with torch.no_grad():
        for _ in range(8):
            y = torch.cat([y, writer(y)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(writer.generate(x, 8, temperature=0), y)
    assert torch.equal(writer.generate(x[0], 8, temperature=0), y[0])


def translator():
    """An encoder-decoder whose texts vary."""
    model = make("encoder_decoder").eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(4)
    return model


def test_an_encoder_decoder_extends():
    model, x, source, lengths = translator(), tokens(2, 12), tokens(2, 7), torch.tensor([7, 4])
    whole = model(x, source=source, source_lengths=lengths)
    state = headloom.State()
    first = model.extend(x[:, :5], state, source=source, source_lengths=lengths)
    pieces = [first] + [model.extend(piece, state) for piece in x[:, 5:].split([1, 4, 2], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole.detach(), atol=1e-3, rtol=1e-3)
    more = tokens(2, 1)
    swapped = state.select([1, 0])
    torch.testing.assert_close(model.extend(more[[1, 0]], swapped), model.extend(more, state)[[1, 0]], atol=1e-4, rtol=1e-4)
    for wrong, match in [
        (lambda: model.extend(x, state, source=source), "the state has begun"),
        (lambda: model.extend(x, headloom.State()), "needs a source"),
        (lambda: model.extend(x, headloom.State(), source=source[:1]), r"source has shape \[1, 7\], expected \[2, S\]"),
        (lambda: model.extend(x, headloom.State(), source=source + VOCABULARY), "source has the token"),
        (lambda: decoder().extend(x, headloom.State(), source=source), "reads no source"),
    ]:
        with pytest.raises(ValueError, match=match):
            wrong()


def test_an_encoder_decoder_answers():
    model, start = translator(), torch.tensor([1])
    sources = [tokens(1, n)[0] for n in (7, 3)]
    answers = model.generate(torch.stack([start, start]), 8, temperature=0, source=sources)
    for source, answer in zip(sources, answers):
        y = start
        for _ in range(8):
            y = torch.cat([y, model(y[None], source=source[None])[0, -1:].argmax(-1)])
        assert torch.equal(answer, y)
        assert torch.equal(model.generate(start, 8, temperature=0, source=source), y)
    assert torch.equal(model.generate(start, 8, temperature=0, source=sources[0], cache="tova:50"), answers[0])
    both = model.generate(start, 8, seed=1, source=sources[0], num_samples=2)
    assert torch.equal(both[1], model.generate(start, 8, seed=2, source=sources[0]))
    for given, match in [
        (None, "needs a source"),
        (sources, "2 sources for 1 prompts"),
        (sources[0][:0], "a source has shape"),
        (sources[0] + VOCABULARY, "the source has the token"),
        (tokens(1, 25)[0], "a source has 25 tokens, expected at most max_source_length = 24"),
    ]:
        with pytest.raises(ValueError, match=match):
            model.generate(start, 2, source=given)
    with pytest.raises(TypeError, match="a source is 5 .int."):
        model.generate(start, 2, source=5)
    with pytest.raises(ValueError, match="reads no source"):
        decoder().generate(start, 2, source=sources[0])


def test_an_encoder_decoder_answers_with_text():
    table = {**SHAPE, "layer": [layer()], **OTHERS["encoder_decoder"], "vocabulary": 256}
    model = headloom.model(**table, tokenizer="bytes").eval()
    whole = model.generate("a", 6, seed=1, source="the source")
    assert whole.startswith("a") and "".join(model.stream("a", 6, seed=1, source="the source")) == whole[1:]
    assert model.generate(["a", "a"], 6, temperature=0, source=["x", "a longer one"]) == [
        model.generate("a", 6, temperature=0, source=text) for text in ("x", "a longer one")
    ]


def test_sampling_follows_seeds():
    model, x = decoder(), tokens(2, 4)
    one = model.generate(x, 6, temperature=1.0, seed=4, num_samples=3)
    assert one.shape == (6, 10) and torch.equal(one[:, :4], x.repeat_interleave(3, 0))
    assert torch.equal(one, model.generate(x, 6, temperature=1.0, seed=4, num_samples=3))
    # Sample i of a prompt draws with seed + i, whatever stands beside it.
    assert torch.equal(one[1], model.generate(x[0], 6, temperature=1.0, seed=5))
    torch.manual_seed(1)
    first = model.generate(x, 6)
    torch.manual_seed(1)
    assert torch.equal(first, model.generate(x, 6))
    assert not torch.equal(first, model.generate(x, 6))
    assert torch.equal(model.generate(x, 6, top_k=1, seed=1), model.generate(x, 6, temperature=0))


def test_stop_tokens_fill_up():
    model, x = decoder(), tokens(1, 4)
    free = model.generate(x, 12, temperature=1.0, seed=2, num_samples=4)
    stop = int(free[0, 6])
    found = model.generate(x, 12, temperature=1.0, seed=2, num_samples=4, stop=stop)
    end = int((free[0, 4:] == stop).nonzero()[0]) + 5
    assert torch.equal(found[0, :end], free[0, :end])
    assert (found[0, end:] == stop).all()
