"""Import and export of Hugging Face folders: logits equal to those of `transformers` on tiny random models."""

import json
import random
import re

import pytest
import torch
from cli_support import run as command
from cli_support import weights
from headloom import load
from headloom import model as new_model
from interop_support import COMMON, LLAMA, MARK, compare_with, headloom, llama, logits_of, refused, saved, shaken, transformers
from safetensors.torch import load_file, save_file

pytestmark = MARK


def llama3_rope():
    return {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }


def gpt2(**options):
    config = transformers.GPT2Config(**COMMON, n_positions=64, n_embd=32, n_layer=2, n_head=4, **options)
    return transformers.GPT2LMHeadModel(config)


def gpt_neox(**options):
    config = transformers.GPTNeoXConfig(
        **COMMON,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=80,
        max_position_embeddings=64,
        **options,
    )
    return transformers.GPTNeoXForCausalLM(config)


def gptj():
    config = transformers.GPTJConfig(**COMMON, n_positions=64, n_embd=32, n_layer=2, n_head=2, rotary_dim=8)
    return transformers.GPTJForCausalLM(config)


def mistral(**options):
    return transformers.MistralForCausalLM(transformers.MistralConfig(**{**LLAMA, **options}))


def qwen2(**options):
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**LLAMA, **options}))


def qwen3(**options):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**LLAMA, "head_dim": 12, **options}))


def mixtral(**options):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**LLAMA, **experts, **options}))


def qwen3_moe(**options):
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 12}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**LLAMA, **experts, **options}))


def diffllama(**options):
    return transformers.DiffLlamaForCausalLM(
        transformers.DiffLlamaConfig(**{**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4, **options})
    )


def rwkv():
    # Rescaling for half precision is not the model's business.
    config = transformers.RwkvConfig(
        **COMMON, hidden_size=32, num_hidden_layers=3, context_length=64, attention_hidden_size=32, rescale_every=0
    )
    return transformers.RwkvForCausalLM(config)


def mamba():
    config = transformers.MambaConfig(**COMMON, hidden_size=32, num_hidden_layers=2, state_size=8, tie_word_embeddings=True)
    return transformers.MambaForCausalLM(config)


WINDOW = "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CAUSAL = {
    "gpt2": gpt2,
    "gpt2-inner": lambda: gpt2(n_inner=56, activation_function="relu", layer_norm_epsilon=1e-3),
    "gpt2-untied": lambda: gpt2(tie_word_embeddings=False),
    "gpt_neox": gpt_neox,
    "gpt_neox-sequential": lambda: gpt_neox(use_parallel_residual=False, hidden_act="gelu_new"),
    "gptj": gptj,
    "llama": llama,
    "llama-biased": lambda: llama(attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3, tie_word_embeddings=True),
    "llama-head_dim": lambda: llama(head_dim=12, num_key_value_heads=1),
    "llama-llama3": lambda: llama(rope_parameters=llama3_rope()),
    "llama-linear": lambda: llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}),
    "llama-yarn": lambda: llama(rope_parameters=YARN),
    "qwen2-yarn": lambda: qwen2(rope_parameters={**YARN, "attention_factor": 1.5, "beta_fast": 8.0, "beta_slow": 2.0}),
    "qwen3-yarn": lambda: qwen3(rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}),
    "mistral": lambda: mistral(sliding_window=5),
    "mistral-global": lambda: mistral(sliding_window=None),
    "qwen2": qwen2,
    "qwen2-windows": lambda: qwen2(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": lambda: qwen3(tie_word_embeddings=True),
    "qwen3-windows": lambda: qwen3(use_sliding_window=True, sliding_window=5, layer_types=[WINDOW, "full_attention", WINDOW]),
    "mixtral": mixtral,
    "mixtral-window": lambda: mixtral(sliding_window=5, num_experts_per_tok=1),
    "qwen3_moe": lambda: qwen3_moe(norm_topk_prob=True),
    "qwen3_moe-some": lambda: qwen3_moe(mlp_only_layers=[1], use_sliding_window=True, sliding_window=5),
    "qwen3_moe-step": lambda: qwen3_moe(decoder_sparse_step=2),
    "diffllama": diffllama,
    "diffllama-plain": lambda: diffllama(num_key_value_heads=8),
    "rwkv": rwkv,
    "mamba": mamba,
}


@pytest.mark.parametrize("kind", CAUSAL)
def test_causal_models_there_and_back(kind, tmp_path, text):
    model = saved(CAUSAL[kind], tmp_path / "theirs")
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "run")
    ours = logits_of(tmp_path / "run", text)
    tokens = ours["tokens"][:2]
    with torch.no_grad():
        theirs = model(tokens).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours["logits"][:2], theirs, atol=1e-4, rtol=0)

    headloom("export", tmp_path / "run", "--out", tmp_path / "back", *(["--as", kind.split("-")[0]]))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(back) is type(model)
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [kind for kind in CAUSAL if not kind.startswith("gpt2")])
def test_models_without_a_longest_length(kind, tmp_path):
    """Nothing limits the length of a model without learned positions, so that it need not name one."""
    saved(CAUSAL[kind], tmp_path / "theirs")
    imported = load(tmp_path / "theirs")
    config = {key: value for key, value in imported.config.items() if key != "max_length"}
    ours = new_model(config)
    assert "max_length" not in ours.config
    ours.load_state_dict(imported.state_dict())
    ours.save(tmp_path / "run")
    family = kind.split("-")[0]
    # One that many families express is written as the first of them.
    said = headloom("export", tmp_path / "run", "--out", tmp_path / "first")
    assert f"({'llama' if kind == 'mistral-global' else family}, " in said
    headloom("export", tmp_path / "run", "--out", tmp_path / "back", "--as", family)
    usual = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {usual.get(key) for key in ("max_position_embeddings", "context_length", "n_positions")} - {None} <= {1024, 2048}
    tokens = torch.randint(0, 300, (2, 100), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = ours.eval()(tokens)
        for folder in ("first", "back"):
            theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
            torch.testing.assert_close(theirs(tokens).logits, expected, atol=1e-4, rtol=0)
            torch.testing.assert_close(load(tmp_path / folder)(tokens), expected, atol=1e-5, rtol=0)


def test_a_llama_whose_heads_do_not_divide_its_width_is_a_mistral(tmp_path):
    """transformers refuses such a LLaMA, and takes such a Mistral."""
    layer = {"mixer": {"type": "mha", "heads": 3, "head_dim": 8}, "channel": {"type": "swiglu", "hidden": 24}}
    ours = new_model(width=20, depth=1, vocabulary=300, max_length=32, tied=False, layer=[layer]).eval()
    ours.save(tmp_path / "run")
    assert "(mistral, " in headloom("export", tmp_path / "run", "--out", tmp_path / "back")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    tokens = torch.randint(0, 300, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=0)
    message = headloom("export", tmp_path / "run", "--out", tmp_path / "never", "--as", "llama", code=2)
    assert "model.width is 20 and model.layer.0.mixer.heads is 3, expected a width that is a multiple of the heads." in message


def test_the_nearest_family_of_a_model_without_a_longest_length(tmp_path):
    new_model("transformer++-tiny", width=32, depth=1, vocabulary=300, position={"type": "alibi"}).save(tmp_path / "run")
    message = headloom("export", tmp_path / "run", "--out", tmp_path / "never", code=2)
    assert "(the nearest) or any other architecture: model.position.type is 'alibi', expected '" in message
    assert "max_length" not in message


def test_the_norm_of_rwkv_s_output_has_an_epsilon_of_its_own(tmp_path, text):
    saved(rwkv, tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_norm_epsilon": 0.001}))
    message = refused(tmp_path / "theirs", tmp_path, code=2)
    assert message == f"headloom: {path}: 'layer_norm_epsilon' is 0.001, expected 1e-05.\n"
    layer = {"mixer": {"type": "rwkv"}, "channel": {"type": "rwkv_channel"}}
    norms = {"norm": "layer_norm", "norm_eps": 1e-3, "embedding_norm": True}
    ours = new_model(width=32, depth=2, vocabulary=300, position={"type": "none"}, **norms, max_length=64, layer=[layer])
    ours.save(tmp_path / "run")
    message = headloom("export", tmp_path / "run", "--out", tmp_path / "back", "--as", "rwkv", code=2)
    assert "model.norm_eps is 0.001, expected 1e-05." in message


@pytest.mark.parametrize("key, value, said", [
    ("hidden_size", 10**12, "makes 'width' 1000000000000, more than the "),
    ("hidden_size", 32.0, "'hidden_size' is 32.0, expected an integer"),
])
def test_a_width_that_cannot_be_is_named(tmp_path, key, value, said):
    saved(llama, tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert said in refused(tmp_path / "theirs", tmp_path, code=2)


def test_a_rotation_larger_than_a_head_is_named(tmp_path):
    saved(gptj, tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    for changed, said in [({"rotary_dim": 32}, "'rotary_dim' is 32, expected"), ({"rotary_dim": None}, "'rotary_dim' is 64 where absent, expected")]:
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        message = refused(tmp_path / "theirs", tmp_path, code=2)
        assert message == f"headloom: {path}: {said} 1 to 16, the size of a head.\n"


def imported_without(make, keys, tmp_path):
    """The [model] of what is imported without some keys of its configuration."""
    saved(make, tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in keys}))
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "run")
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11 and newer
    return tomllib.loads((tmp_path / "run" / "config.toml").read_text())["model"]


def test_keys_that_a_file_does_not_have(tmp_path):
    """They are what transformers takes for them."""
    keys = ("sliding_window", "max_position_embeddings", "num_key_value_heads", "layer_types")
    model = imported_without(lambda: mistral(num_attention_heads=16, num_key_value_heads=8, head_dim=4), keys, tmp_path / "mistral")
    mixer = model["layer"][0]["mixer"]
    assert (model["max_length"], mixer["window"], mixer["kv_heads"]) == (131072, 4096, 8)
    keys = ("sliding_window", "max_position_embeddings", "num_key_value_heads", "rope_parameters", "num_local_experts", "num_experts_per_tok")
    model = imported_without(lambda: mixtral(num_attention_heads=16, num_key_value_heads=8, num_local_experts=8), keys, tmp_path / "mixtral")
    mixer, channel = model["layer"][0]["mixer"], model["layer"][0]["channel"]
    assert (model["max_length"], "window" in mixer, mixer["kv_heads"], model["position"]["base"]) == (131072, False, 8, 1e6)
    assert (channel["routed"], channel["active"]) == (8, 2)
    keys = ("head_dim", "num_key_value_heads", "max_position_embeddings", "rope_parameters", "use_sliding_window", "layer_types")
    model = imported_without(lambda: qwen3(num_attention_heads=32, num_key_value_heads=32, head_dim=128), keys, tmp_path / "qwen3")
    mixer = model["layer"][0]["mixer"]
    assert (model["max_length"], mixer["head_dim"], mixer["kv_heads"], model["position"]["base"]) == (32768, 128, 32, 1e4)
    wide = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=300, expand=3)
    model = imported_without(lambda: transformers.MambaForCausalLM(wide), ("intermediate_size",), tmp_path / "mamba")
    assert model["layer"][0]["mixer"]["expand"] == 3


def test_an_rwkv_of_one_layer_is_not_written(tmp_path):
    layer = '[[model.layer]]\nmixer = { type = "rwkv" }\nchannel = { type = "rwkv_channel" }\n'
    task = '[task]\ntype = "copy"\neval_sequences = 2\n[train]\nsteps = 1\nbatch = 2\n'
    (tmp_path / "x.toml").write_text(f"[model]\nwidth = 16\ndepth = 1\n{layer}{task}")
    headloom("train", tmp_path / "x.toml", "--out", tmp_path / "run")
    message = headloom("export", tmp_path / "run", "--as", "rwkv", "--out", tmp_path / "folder", code=2)
    assert "rwkv: model.depth is 1, expected at least 2: " in message


def test_an_encoder_without_segments_is_no_bert(tmp_path):
    (tmp_path / "a.txt").write_text("some words of a text " * 200)
    task = f'[task]\ntype = "masked_text"\npaths = ["{tmp_path}/a.txt"]\nlength = 24\neval_tokens = 240\n[train]\nsteps = 1\nbatch = 2\n'
    (tmp_path / "x.toml").write_text(f'[model]\npreset = "bert-tiny"\nwidth = 32\nsegments = 0\n{task}')
    headloom("train", tmp_path / "x.toml", "--out", tmp_path / "run")
    message = headloom("export", tmp_path / "run", "--as", "bert", "--out", tmp_path / "folder", code=2)
    assert "model.segments is 0, expected at least 1" in message
    assert not (tmp_path / "folder").exists()


def test_a_window_of_the_longest_length_limits_what_is_longer(tmp_path):
    saved(lambda: mistral(sliding_window=64, max_position_embeddings=64), tmp_path / "theirs")
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "run")
    headloom("export", tmp_path / "run", "--out", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


def test_layers_of_which_some_have_a_window_are_refused(tmp_path):
    saved(lambda: mistral(sliding_window=5), tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"layer_types": ["sliding_attention", "full_attention"]}))
    said = "'layer_types' is \"full_attention\", expected a list of 'sliding_attention' alone."
    assert said in refused(tmp_path / "theirs", tmp_path, code=2)
    path.write_text(json.dumps(config | {"layer_types": ["sliding_attention"] * 2}))
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "run")


@pytest.mark.parametrize("make, changed, said", [
    (qwen3, {"rms_norm_eps": 1e-5}, "'rms_norm_eps' is 1e-05, expected 1e-06."),
    (qwen3, {"attention_bias": True}, "'attention_bias' is true, expected false."),
    (qwen3_moe, {"attention_bias": True}, "'attention_bias' is true, expected false."),
    (qwen2, {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention"]}, "'layer_types' is a list of 1, expected a list of 3."),
    (qwen2, {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["x"] * 3},
     "'layer_types.0' is \"x\", expected sliding_attention or full_attention."),
    (qwen2, {"layer_types": ["full_attention", WINDOW, WINDOW]}, "'layer_types' is \"sliding_attention\", expected a list of 'full_attention' alone."),
    (mixtral, {"num_experts": 3}, "'num_local_experts' is 4 and 'num_experts' is 3, which are one key, expected both alike."),
])
def test_what_a_qwen_or_a_mixtral_cannot_have_is_named(tmp_path, make, changed, said):
    saved(make, tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    assert refused(tmp_path / "theirs", tmp_path, code=2) == f"headloom: {path}: {said}\n"


def test_biases_of_queries_keys_and_values_alone(tmp_path):
    """They are an option of every mixer of attention, and zero where training starts."""
    for mixer in ("mha", "dcmha", "differential"):
        layer = {"mixer": {"type": mixer, "heads": 4, "qkv_bias": True}}
        model = new_model(width=32, depth=1, vocabulary=300, max_length=32, layer=[layer])
        biases = [name for name, _ in model.named_parameters() if name.endswith("bias")]
        assert biases == ["layer0.mixer.qkv.bias"] and not model.get_parameter(biases[0]).any()


@pytest.mark.parametrize(
    "make, edits",
    [
        (llama, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        (llama, {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 777.0}, "rope_parameters": None}),
        (llama, {"rope_theta": 777.0, "rope_parameters": {"rope_type": "default"}}),
        (llama, {"rope_theta": 777.0, "rope_parameters": {"type": "linear", "factor": 2.0}}),
        (gpt_neox, {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_pct": 0.5}),
        (gpt_neox, {"rope_parameters": {"partial_rotary_factor": 0.5}, "rotary_emb_base": 777.0}),
        (llama, {"rope_scaling": {}, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}),
        (gpt_neox, {"rope_theta": 777.0, "rope_parameters": None}),
        (llama, {"rope_parameters": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 99.0}}),
        (llama, {"original_max_position_embeddings": 16, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 99.0}}),
        (llama, {"original_max_position_embeddings": 16, "rope_parameters": YARN | {"original_max_position_embeddings": 32}}),
    ],
)
def test_rotary_embeddings_in_every_spelling(make, edits, tmp_path, text):
    """Both spellings beside each other, and values beside the table that they belong to."""
    saved(make, tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text()) | edits
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "run")
    ours = logits_of(tmp_path / "run", text)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    with torch.no_grad():
        theirs = model(ours["tokens"][:2]).logits
    torch.testing.assert_close(ours["logits"][:2], theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["gpt2", "llama-biased", "mamba"])
def test_a_tied_head_that_is_saved_again(kind, tmp_path, text):
    """As PyTorch's files of tied models have it."""
    model = saved(CAUSAL[kind], tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    weights = model.state_dict()
    assert weights["lm_head.weight"].data_ptr() == model.get_input_embeddings().weight.data_ptr()
    torch.save(weights, tmp_path / "theirs" / "pytorch_model.bin")
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "run")
    ours = logits_of(tmp_path / "run", text)
    with torch.no_grad():
        theirs = model(ours["tokens"][:2]).logits
    torch.testing.assert_close(ours["logits"][:2], theirs, atol=1e-4, rtol=0)
    torch.save({**weights, "lm_head.weight": weights["lm_head.weight"] + 1}, tmp_path / "theirs" / "pytorch_model.bin")
    message = headloom("import", tmp_path / "theirs", "--out", tmp_path / "never", code=1)
    assert "tensor 'lm_head.weight' is not the embedding" in message


ENCODER = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def bert(kind, **options):
    config = transformers.BertConfig(**{**ENCODER, "num_attention_heads": 4, **options})
    return getattr(transformers, "BertFor" + kind)(config)


def fnet(kind, **options):
    config = transformers.FNetConfig(**{**ENCODER, "pad_token_id": 0, **options})
    return getattr(transformers, "FNetFor" + kind)(config)


@pytest.mark.parametrize(
    "make",
    [
        lambda: bert("MaskedLM"),
        lambda: bert("MaskedLM", hidden_act="gelu_new"),
        lambda: bert("PreTraining"),
        lambda: fnet("MaskedLM"),
        lambda: fnet("MaskedLM", hidden_act="gelu", type_vocab_size=2, layer_norm_eps=1e-5),
        lambda: fnet("PreTraining"),
    ],
    ids=["bert", "bert-gelu_new", "bert-pretraining", "fnet", "fnet-gelu", "fnet-pretraining"],
)
def test_encoders_of_masked_text(make, tmp_path, text):
    model = saved(make, tmp_path / "theirs")
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "run")
    ours = logits_of(tmp_path / "run", text)

    def logits(of):
        with torch.no_grad():
            out = of(ours["tokens"])
        return out.logits if "logits" in out else out.prediction_logits

    theirs = logits(model)
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours["logits"], theirs, atol=1e-4, rtol=0)
    headloom("export", tmp_path / "run", "--out", tmp_path / "back")
    back = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(logits(back), theirs, atol=1e-5, rtol=0)


def test_norms_by_their_older_names(tmp_path, text):
    """bert-base-uncased has them."""
    saved(lambda: bert("MaskedLM"), tmp_path / "theirs")
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "run")
    file = tmp_path / "theirs/model.safetensors"
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {re.sub(r"LayerNorm\.\w+$", lambda found: older[found[0]], name): t for name, t in load_file(file).items()}
    assert sum(name.endswith(".gamma") for name in renamed) == 6
    save_file(renamed, file)
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "again")
    assert weights(tmp_path / "again", 0) == weights(tmp_path / "run", 0)


@pytest.mark.parametrize("make", [bert, fnet])
def test_encoders_of_labels(make, tmp_path):
    model = saved(lambda: make("SequenceClassification", num_labels=3), tmp_path / "theirs")
    run, texts = tmp_path / "run", tmp_path / "texts"
    texts.mkdir()
    rng = random.Random(2)
    for name in "abc":
        (texts / name).write_bytes(bytes(rng.randrange(1, 256) for _ in range(1000)))
    headloom("import", tmp_path / "theirs", "--out", run)
    out = run / "logits.safetensors"
    headloom("eval", run, "--set", f"task.path='{texts}'", "--set", "task.length=40", "--logits", out)
    ours = load_file(out)
    assert ours["tokens"].shape[0] > 2 and ours["logits"].shape[1] == 3
    # The last piece of each file is shorter than the others.
    whole = ours["tokens"][:, -1] != 0
    with torch.no_grad():
        theirs = model(ours["tokens"][whole]).logits
    torch.testing.assert_close(ours["logits"][whole], theirs, atol=1e-4, rtol=0)
    headloom("export", run, "--out", tmp_path / "back")
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        torch.testing.assert_close(back(ours["tokens"][whole]).logits, theirs, atol=1e-5, rtol=0)


def conll(rng, tags):
    """Sentences of one-byte words."""
    sentence = lambda: "".join(f"{rng.choice('abcdefgh')} {rng.choice(tags)}\n" for _ in range(rng.randrange(3, 16)))
    return "\n".join(sentence() for _ in range(40))


def squad(rng):
    def paragraph():
        words = [rng.choice(["warp", "weft", "loom", "heddle", "shed"]) for _ in range(rng.randrange(4, 7))]
        place = rng.randrange(len(words))
        answer = {"text": words[place], "answer_start": len(" ".join(words[:place])) + (place > 0)}
        return {"context": " ".join(words), "qas": [{"id": "q", "question": "which one?", "answers": [answer]}]}

    return json.dumps({"version": "1.1", "data": [{"paragraphs": [paragraph() for _ in range(40)]}]})


def pairs(rng):
    text = lambda: "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(3, 16)))
    return "".join(f"{text()}\t{text()}\t{rng.choice(['no', 'yes'])}\n" for _ in range(40))


@pytest.mark.parametrize("make", [bert, fnet])
@pytest.mark.parametrize("goal", ["TokenClassification", "QuestionAnswering", "SequenceClassification"])
def test_encoders_of_tags_spans_and_pairs(make, goal, tmp_path):
    names = {0: "O", 1: "B-X", 2: "I-X"}
    options = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    if goal == "QuestionAnswering":
        options = {}
    if goal == "SequenceClassification":
        options = {"num_labels": 2}
    model = saved(lambda: make(goal, type_vocab_size=2, **options), tmp_path / "theirs")
    run, data, rng = tmp_path / "run", tmp_path / "data", random.Random(5)
    headloom("import", tmp_path / "theirs", "--out", run)
    settings = ["--set", f"task.path='{data}'", "--set", "task.length=40"]
    if goal == "TokenClassification":
        data.write_text(conll(rng, ["I-X", "O"]))
        assert "labels = ['O', 'B-X', 'I-X']" in (run / "config.toml").read_text()
    elif goal == "QuestionAnswering":
        data.write_text(squad(rng))
    else:
        data.write_text(pairs(rng))
        settings = ["--set", f"task={{type='classify_pairs', path='{data}', length=40, labels=['no', 'yes']}}"]
    settings += ["--set", "task.held_out=1.0"]
    out = run / "logits.safetensors"
    headloom("eval", run, *settings, "--logits", out)
    ours = load_file(out)
    assert ("segments" in ours) == (goal != "TokenClassification") and ours["tokens"].shape[0] > 10
    real = torch.arange(40) < ours["lengths"][:, None]
    inputs = {"input_ids": ours["tokens"], "token_type_ids": ours.get("segments")}
    if make is bert:  # FNet reads padding as it reads text
        inputs["attention_mask"] = real
    kept = slice(None) if goal == "SequenceClassification" else real

    def logits(of):
        with torch.no_grad():
            out = of(**inputs)
        return (torch.stack([out.start_logits, out.end_logits], -1) if goal == "QuestionAnswering" else out.logits)[kept]

    theirs = logits(model)
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours["logits"][kept], theirs, atol=1e-4, rtol=0)

    headloom("export", run, "--out", tmp_path / "back")
    back = getattr(transformers, "AutoModelFor" + goal).from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(logits(back), theirs, atol=1e-5, rtol=0)
    if goal == "TokenClassification":
        assert back.config.id2label == names and back.config.label2id == options["label2id"]


@pytest.mark.parametrize("goal, task", [
    ("TokenClassification", "type='tag_text', path='{}', length=24"),
    ("QuestionAnswering", "type='find_span'"),
    ("MaskedLM", "type='masked_text', paths=['{}'], length=24"),
])  # fmt: skip
def test_what_is_trained_here_runs_there(goal, task, tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    data.write_text(conll(random.Random(7), ["A", "B", "C"]))
    config = f"[model]\npreset = 'bert-tiny'\nwidth = 32\n[task]\n{task.format(data).replace(', ', chr(10))}\n"
    (tmp_path / "c.toml").write_text(config + "[train]\nsteps = 3\nbatch = 4\n")
    headloom("train", tmp_path / "c.toml", "--out", run)
    headloom("eval", run, "--logits", run / "logits.safetensors")
    ours = load_file(run / "logits.safetensors")
    headloom("export", run, "--out", tmp_path / "back")
    back = getattr(transformers, "AutoModelFor" + goal).from_pretrained(tmp_path / "back").eval()
    real = torch.arange(ours["tokens"].shape[1]) < ours["lengths"][:, None] if "lengths" in ours else ours["tokens"] >= 0
    with torch.no_grad():
        out = back(ours["tokens"], attention_mask=real, token_type_ids=ours.get("segments"))
    theirs = torch.stack([out.start_logits, out.end_logits], -1) if goal == "QuestionAnswering" else out.logits
    torch.testing.assert_close(ours["logits"][real], theirs[real], atol=1e-4, rtol=0)
    if goal == "TokenClassification":
        assert back.config.id2label == {0: "A", 1: "B", 2: "C"}


def test_vit(tmp_path):
    def make():
        config = transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=32,
            patch_size=8,
            num_labels=10,
        )
        return transformers.ViTForImageClassification(config)

    model = saved(make, tmp_path / "theirs")
    run = tmp_path / "run"
    headloom("import", tmp_path / "theirs", "--out", run)
    headloom("eval", run, "--sequences", 1, "--logits", run / "logits.safetensors")
    ours = load_file(run / "logits.safetensors")
    with torch.no_grad():
        theirs = model(ours["images"]).logits
    torch.testing.assert_close(ours["logits"], theirs, atol=1e-4, rtol=0)
    headloom("export", run, "--out", tmp_path / "back")
    back = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        torch.testing.assert_close(back(ours["images"]).logits, theirs, atol=1e-5, rtol=0)


class Experts(torch.nn.Module):
    """DeepSeekMoE's experts, under its names."""

    def __init__(self, width, hidden, routed, shared, active, adds_up, scaling):
        super().__init__()
        mlp = transformers.models.llama.modeling_llama.LlamaMLP

        def make(size):
            return mlp(transformers.LlamaConfig(**{**LLAMA, "hidden_size": width, "intermediate_size": size}))

        self.gate = torch.nn.Linear(width, routed, bias=False)
        self.experts = torch.nn.ModuleList([make(hidden) for _ in range(routed)])
        self.shared_experts = make(shared * hidden)
        self.active, self.adds_up, self.scaling = active, adds_up, scaling

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(self.active).indices, 1.0) * scores
        chosen = self.scaling * (chosen / chosen.sum(-1, keepdim=True) if self.adds_up else chosen)
        return self.shared_experts(x) + sum(chosen[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))


@pytest.mark.parametrize("adds_up, scaling", [(False, 1.0), (True, 2.5)])
def test_deepseek(tmp_path, text, adds_up, scaling):
    torch.manual_seed(4)
    model = llama(num_key_value_heads=4)
    for layer in model.model.layers[1:]:
        layer.mlp = Experts(32, 16, routed=6, shared=2, active=2, adds_up=adds_up, scaling=scaling)
    shaken(model)
    config = {
        **LLAMA,
        "num_key_value_heads": 4,
        "model_type": "deepseek",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 16,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "norm_topk_prob": adds_up,
        "routed_scaling_factor": scaling,
    }
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    compare_with(lambda tokens: model(tokens).logits, config, weights, tmp_path, text)


def test_shards_old_spellings_bfloat16_and_a_tokenizer(tmp_path, text):
    """A folder as it lies on the hub: several shards, version 4's config.json, tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "theirs"
    torch.manual_seed(3)
    model = shaken(llama(rope_parameters=llama3_rope())).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the weaver threads the heads of the loom"], vocab_size=290, special_tokens=["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    beside = {"tokenizer_config.json": '{"eos_token": "</s>"}', "chat_template.jinja": "{{ messages[0].content }}"}
    for name, content in beside.items():
        (folder / name).write_text(content)

    run = tmp_path / "run"
    headloom("import", folder, "--out", run)
    ours = logits_of(run, text)
    exact = llama(rope_parameters=llama3_rope())  # model's rotary frequencies are bfloat16 too
    exact.load_state_dict(model.float().state_dict())
    model = exact
    with torch.no_grad():
        theirs = model(ours["tokens"][:2]).logits
    torch.testing.assert_close(ours["logits"][:2], theirs, atol=1e-4, rtol=0)

    written = headloom("generate", run, "--prompt", "the weaver", "--tokens", 12, "--temperature", 0)
    ids = tokenizer.encode("the weaver").ids
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    assert written.rstrip("\n").startswith(tokenizer.decode(expected).rstrip("\ufffd").rstrip("\n"))
    assert "paths" in headloom("eval", run, code=2)

    headloom("export", run, "--out", tmp_path / "back")
    # How a chat is spelled goes with the tokenizer.
    for name, content in beside.items():
        assert (run / name).read_text() == (tmp_path / "back" / name).read_text() == content
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert loaded("the loom", add_special_tokens=False)["input_ids"] == tokenizer.encode("the loom").ids
    # Tokens that the model does not have.
    wide = folder / "tokenizer.json"
    table = json.loads(wide.read_text())
    first = 1 + max(table["model"]["vocab"].values())
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
    table["added_tokens"] += [{"id": i, "content": f"<{i}>", **flags} for i in range(first, 305)]
    wide.write_text(json.dumps(table))
    told = command("import", folder, "--out", tmp_path / "wide").stderr
    assert f"{wide} has 305 tokens, and the model only 300: a text that has one of the others is refused." in told
    message = headloom("generate", tmp_path / "wide", "--prompt", "the <302>", code=2)
    assert "the text has '<302>', token 302 of the tokenizer, but the model has only the tokens 0 to 299." in message


def test_bert_with_its_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.BertWordPieceTokenizer()
    sentence = "The weaver threads the heads of the loom. "
    words.train_from_iterator([sentence * 5], vocab_size=120, show_progress=False)
    words.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    model = saved(lambda: bert("MaskedLM", vocab_size=120), theirs)
    words.save(str(theirs / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(sentence * 60)
    headloom("import", theirs, "--out", run)
    ours = logits_of(run, tmp_path / "text.txt")
    ids = words.encode(sentence * 3, add_special_tokens=False).ids
    masked = ours["tokens"] == words.token_to_id("[MASK]")
    assert masked.any() and (ours["tokens"][:, 0] == 2).all() and (ours["tokens"][:, -1] == 3).all()
    assert set(ours["targets"][masked].tolist()) <= set(ids)
    with torch.no_grad():
        torch.testing.assert_close(ours["logits"], model(ours["tokens"]).logits, atol=1e-4, rtol=0)
    headloom("export", run, "--out", tmp_path / "back")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert loaded(sentence, add_special_tokens=False)["input_ids"] == words.encode(sentence, add_special_tokens=False).ids


def test_words_and_answers_are_those_of_its_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    pieces = tokenizers.BertWordPieceTokenizer()
    sentence = "The weaver's loom (of 1990s oak) threads 12,5 heads. "
    pieces.train_from_iterator([sentence * 5], vocab_size=90, show_progress=False)
    pieces.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    for goal in ("TokenClassification", "QuestionAnswering"):
        theirs, run = tmp_path / goal, tmp_path / f"run-{goal}"
        saved(lambda: bert(goal, vocab_size=90), theirs)
        pieces.save(str(theirs / "tokenizer.json"))
        headloom("import", theirs, "--out", run)
        headloom("export", run, "--out", tmp_path / f"back-{goal}")
        words = transformers.AutoTokenizer.from_pretrained(tmp_path / f"back-{goal}")
        data = tmp_path / f"data-{goal}"
        settings = ["--set", f"task.path='{data}'", "--set", "task.held_out=1.0", "--set", "task.length=60"]
        if goal == "TokenClassification":
            data.write_text("".join(f"{word}\tLABEL_{i % 2}\n" for i, word in enumerate(sentence.split())))
            headloom("eval", run, *settings, "--logits", tmp_path / "l.safetensors")
            ours = load_file(tmp_path / "l.safetensors")
            there = words(sentence.split(), is_split_into_words=True)
            first, targets = None, []
            for word in there.word_ids():
                targets.append(-100 if word is None or word == first else word % 2)
                first = word
            length = ours["lengths"][0]
            assert ours["tokens"][0, :length].tolist() == there["input_ids"]
            assert ours["targets"][0, :length].tolist() == targets
            continue
        places = [(i, j) for i in range(len(sentence)) for j in (i + 3, i + 9) if sentence[i : i + 1].strip() and j < len(sentence)]
        qas = [{"id": "q", "question": "Of what?", "answers": [{"text": sentence[i:j], "answer_start": i}]} for i, j in places]
        data.write_text(json.dumps({"data": [{"paragraphs": [{"context": sentence, "qas": qas}]}]}))
        headloom("eval", run, *settings, "--logits", tmp_path / "l.safetensors")
        ours = load_file(tmp_path / "l.safetensors")
        there = words("Of what?", sentence, return_offsets_mapping=True)
        length = ours["lengths"][0]
        assert ours["tokens"][0, :length].tolist() == there["input_ids"]
        assert ours["segments"][0, :length].tolist() == there["token_type_ids"]
        wanted = set()
        for i, j in places:
            inside = [
                t
                for t, (begin, end) in enumerate(there["offset_mapping"])
                if there.sequence_ids()[t] == 1 and begin < j and end > i
            ]
            wanted.add((inside[0], inside[-1]))
        assert {tuple(target) for target in ours["targets"].tolist()} <= wanted
