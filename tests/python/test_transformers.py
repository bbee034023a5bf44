"""attn_implementation="headloom" inside Hugging Face transformers."""

import copy

import headloom
import pytest
import torch

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

import headloom.transformers  # noqa: E402

COMMON = dict(vocab_size=60, bos_token_id=0, eos_token_id=1, pad_token_id=2)
LLAMA = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def gpt2(**options):
    options = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **options}
    config = transformers.GPT2Config(**COMMON, n_positions=64, n_embd=32, n_layer=2, n_head=4, **options)
    return transformers.GPT2LMHeadModel(config)


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, **LLAMA, **options))


def mistral(**options):
    return transformers.MistralForCausalLM(transformers.MistralConfig(**COMMON, **LLAMA, sliding_window=5, **options))


def qwen3(**options):
    """A window in one of two layers."""
    types = ["sliding_attention", "full_attention"]
    config = transformers.Qwen3Config(
        **COMMON, **LLAMA, head_dim=12, use_sliding_window=True, sliding_window=5, layer_types=types, **options
    )
    return transformers.Qwen3ForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama, "mistral": mistral, "qwen3": qwen3}


def pair(name, reference="sdpa", **options):
    """The same model with their attention and with ours; its weights are large enough for attention to matter."""
    torch.manual_seed(4)
    theirs = MODELS[name](**options)
    with torch.no_grad():
        for p in theirs.parameters():
            if p.dim() > 1:
                p.mul_(6)
    ours = copy.deepcopy(theirs)
    theirs.set_attn_implementation(reference)
    ours.set_attn_implementation("headloom")
    return theirs, ours


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def tokens(batch=2, length=12):
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(1))


def masks_given(monkeypatch):
    """What composed_attention is given as mask in each call."""
    given = []

    def watched(*arguments, **options):
        given.append(options["mask"])
        return headloom.composed_attention(*arguments, **options)

    monkeypatch.setattr(headloom.transformers, "composed_attention", watched)
    return given


@pytest.mark.parametrize("reference", ["sdpa", "eager"])
def test_logits_and_gradients(name, reference, monkeypatch):
    theirs, ours = pair(name, reference)
    given, x = masks_given(monkeypatch), tokens()
    results = [model(x, labels=x) for model in (theirs, ours)]
    torch.testing.assert_close(results[1].logits, results[0].logits, atol=1e-4, rtol=1e-4)
    for result in results:
        result.loss.backward()
    for (parameter, p), q in zip(theirs.named_parameters(), ours.parameters()):
        torch.testing.assert_close(q.grad, p.grad, atol=1e-4, rtol=1e-3, msg=parameter)
    assert given and all(mask is None for mask in given)  # causality and windows need none


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_padding(name, padding_side):
    theirs, ours = pair(name)
    x, mask = tokens(), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    if padding_side == "right":
        mask = mask.flip(1)
    real = mask.bool()
    expected = theirs.eval()(x, attention_mask=mask).logits
    torch.testing.assert_close(ours.eval()(x, attention_mask=mask).logits[real], expected[real], atol=1e-4, rtol=1e-4)


def test_packed_sequences(name):
    theirs, ours = pair(name)
    x, positions = tokens(1), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    expected = theirs.eval()(x, position_ids=positions).logits
    torch.testing.assert_close(ours.eval()(x, position_ids=positions).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name, cache):
    theirs, ours = pair(name)
    x, mask = tokens(), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3] = 0
    options = dict(max_new_tokens=9, min_new_tokens=9, do_sample=False, disable_compile=True)
    options["cache_implementation"] = None if cache == "dynamic" else "static"
    for attention_mask in (torch.ones_like(mask), mask):
        expected = theirs.generate(x, attention_mask=attention_mask, **options)
        assert torch.equal(ours.generate(x, attention_mask=attention_mask, **options), expected)


def test_a_cache_read_in_pieces(name):
    """Several queries after cached keys: the keys' end is aligned with the queries'."""
    _, ours = pair(name)
    x = tokens()
    with torch.no_grad():
        whole = ours.eval()(x).logits
        cache = transformers.DynamicCache(config=ours.config)
        pieces = [ours(piece, past_key_values=cache).logits for piece in x.split([5, 4, 3], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-4, rtol=1e-4)


def test_compiles(name):
    torch.compiler.reset()
    theirs, ours = pair(name)
    x = tokens()
    compiled = torch.compile(ours.eval(), backend="aot_eager")
    torch.testing.assert_close(compiled(x).logits, theirs.eval()(x).logits, atol=1e-4, rtol=1e-4)


def test_not_causal():
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    torch.manual_seed(4)
    theirs = transformers.BertModel(config).eval()
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation("headloom")
    x, mask = tokens(), torch.ones(2, 12, dtype=torch.int64)
    mask[1, 9:] = 0
    for options in ({}, {"attention_mask": mask}):
        expected = theirs(x, **options).last_hidden_state
        torch.testing.assert_close(ours(x, **options).last_hidden_state, expected, atol=1e-5, rtol=1e-4)


def test_windows_are_told_from_other_patterns():
    from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

    def skips(pattern, length, keys=None, **options):
        keys = keys or length
        offsets = dict(q_offset=keys - length)
        mask = headloom.transformers.attention_mask(1, length, keys, **offsets, mask_function=pattern, **options)
        return mask is None or getattr(mask, "_headloom_window", None) == options.get("local_size", 0)

    assert skips(sliding_window_causal_mask_function(4), 9, local_size=4)
    assert skips(sliding_window_causal_mask_function(4), 3, 9, local_size=4)
    assert not skips(sliding_window_causal_mask_function(4), 9)
    assert not skips(sliding_window_causal_mask_function(4), 9, local_size=5)
    assert not skips(chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)), 9, local_size=4)
    assert not skips(lambda b, h, q, k: k >= 0, 9)


def test_a_model_that_does_not_tell_of_its_window():
    """Nor whether it is causal: then its masks say both, or it is refused."""
    common = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    config = transformers.PhimoeConfig(**common, num_key_value_heads=2, num_local_experts=2, sliding_window=5)
    model, x = transformers.PhimoeForCausalLM(config).eval(), tokens()
    results = []
    for name in ("sdpa", "headloom"):
        model.set_attn_implementation(name)
        results.append(model(x).logits)
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="needs to know whether Linear is causal, but it has no is_causal"):
        headloom.transformers.attention(torch.nn.Linear(1, 1), *[torch.randn(1, 2, 3, 4)] * 3, None)


def test_refusals():
    x = tokens()
    with pytest.raises(ValueError, match="dropout of the weights, but it is 0.5"):
        pair("gpt2", attn_pdrop=0.5)[1].train()(x)
    _, ours = pair("llama")
    with pytest.raises(ValueError, match="reads boolean masks"):
        ours(x, attention_mask=torch.zeros(2, 1, 12, 12))
    with pytest.raises(ValueError, match="softcap"):
        headloom.transformers.attention(ours, *[torch.randn(1, 2, 3, 4)] * 3, None, softcap=30.0)
    indices = torch.zeros(1, 3, 1, dtype=torch.int64)
    refused = {"s_aux": torch.zeros(2), "sinks": torch.zeros(2), "position_bias": torch.zeros(1, 2, 3, 3), "indices": indices}
    for name, value in refused.items():
        with pytest.raises(ValueError, match=f"has no {name}; expected a model that does not use it"):
            headloom.transformers.attention(ours, *[torch.randn(1, 2, 3, 4)] * 3, None, **{name: value})
