"""Import and export of Hugging Face folders: logits equal to those of `transformers` on tiny random models."""

import json
import os
import pathlib
import random
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("HEADLOOM_BINARY", ROOT / "build" / "bin" / "headloom"))
pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

COMMON = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


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


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **options}))


def mistral(**options):
    return transformers.MistralForCausalLM(transformers.MistralConfig(**{**LLAMA, **options}))


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
    "mistral": lambda: mistral(sliding_window=5),
    "mistral-global": lambda: mistral(sliding_window=None),
    "diffllama": diffllama,
    "diffllama-plain": lambda: diffllama(num_key_value_heads=8),
    "rwkv": rwkv,
    "mamba": mamba,
}


def headloom(*arguments, code=0):
    done = subprocess.run([str(BINARY), *map(str, arguments)], env=ENVIRONMENT, capture_output=True, timeout=120)
    message = done.stderr.decode(errors="replace")
    written = done.stdout.decode(errors="replace")
    assert done.returncode == code, written + message
    return written if code == 0 else message


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng = random.Random(1)
    path.write_bytes(bytes(rng.randrange(1, 256) for _ in range(6000)))
    return path


def shaken(model):
    """Norms, biases and decays away from where they start, so that a mixed-up one shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def saved(make, folder):
    torch.manual_seed(2)
    model = shaken(make())
    model.save_pretrained(folder)
    return model


def logits_of(run, text, *more):
    out = run / "logits.safetensors"
    headloom("eval", run, "--set", f"task.paths=['{text}']", "--set", "task.length=40", "--sequences", 1, "--logits", out, *more)
    return load_file(out)


@pytest.fixture(scope="module")
def known():
    return headloom("list")


@pytest.mark.parametrize("kind", CAUSAL)
def test_causal_models_there_and_back(kind, tmp_path, text, known):
    if kind == "mamba" and "mamba" not in known:
        pytest.skip("there is no mamba")
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


def test_bert(tmp_path, text):
    def make():
        config = transformers.BertConfig(
            vocab_size=300,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=64,
        )
        return transformers.BertForMaskedLM(config)

    model = saved(make, tmp_path / "theirs")
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "run")
    ours = logits_of(tmp_path / "run", text)
    with torch.no_grad():
        theirs = model(ours["tokens"]).logits
    torch.testing.assert_close(ours["logits"], theirs, atol=1e-4, rtol=0)
    headloom("export", tmp_path / "run", "--out", tmp_path / "back")
    back = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        torch.testing.assert_close(back(ours["tokens"]).logits, theirs, atol=1e-5, rtol=0)


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


def rms(x, scale=None, eps=1e-6):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if scale is None else y * scale


def rotated(x, base, rotary):
    """x [B, T, H, D], halves of its first `rotary` dimensions paired."""
    half = rotary // 2
    angle = torch.outer(torch.arange(x.shape[1]), base ** (-torch.arange(half) / half))[:, None]
    a, b = x[..., :half], x[..., half:rotary]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), x[..., rotary:]], -1)


def dc_attention(w, x, prefix, heads, window, base, rotary, qk_norm):
    """DCMHA by the published names: every branch, before and after softmax."""
    batch, length, width = x.shape
    q, k, v = (x @ w[prefix + "wqkv.weight"].T + w.get(prefix + "wqkv.bias", 0)).view(batch, length, 3, heads, -1).unbind(2)
    if qk_norm:
        q, k = rms(q, w[prefix + "q_norm.scale"]), rms(k, w[prefix + "k_norm.scale"])
    q, k = rotated(q, base, rotary), rotated(k, base, rotary)
    hidden = torch.nn.functional.gelu(torch.einsum("btc,cgjk->btjk", x, w[prefix + "dyn_w_proj.dw1"]))
    projections = torch.einsum("btjk,gjkih->btjih", hidden, w[prefix + "dyn_w_proj.qkw"])
    down, up = projections.chunk(2, -2)
    down = rms(down)
    gates = torch.tanh(torch.einsum("btc,cgm->btm", x, w[prefix + "dyn_w_proj.dd"])).chunk(4, -1)

    def composed(maps, query, key):  # maps [B, H, T, S]
        out = maps
        for j, (down_label, up_label, gate_label) in ((query, ("btih", "btig", "bth")), (key, ("bsih", "bsig", "bsh"))):
            inner = torch.einsum(f"bhts,{down_label}->bits", maps, down[:, :, j])
            out = out + torch.einsum(f"bits,{up_label}->bgts", inner, up[:, :, j])
            out = out + torch.einsum(f"bhts,{gate_label}->bhts", maps, gates[j])
        return out

    scores = composed(torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5, 0, 1)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (distance < (window or length))
    weights = composed(scores.masked_fill(~visible, float("-inf")).softmax(-1), 2, 3)
    y = torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)
    return y @ w[prefix + "wo.weight"].T + w.get(prefix + "wo.bias", 0)


DC = {"block_size": 64, "vocab_size": 300, "n_layer": 3, "n_head": 4, "dim": 32, "intermediate_size": 48}


def dc_weights(names):
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in names.items():
        value = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * value if "norm" in name and not name.endswith("bias") else 0.2 * value
    return weights


def dc_names(bias):
    width, heads, hidden = DC["dim"], DC["n_head"], DC["intermediate_size"]
    names = {"tok_embeddings.weight": (300, width), "output.weight": (300, width), "norm.weight": (width,)}
    for i in range(DC["n_layer"]):
        layer = f"layers.{i}."
        for norm in ("attention_norm", "ffn_norm"):
            names[f"{layer}{norm}.weight"] = (width,)
        names[layer + "attention.wqkv.weight"] = (3 * width, width)
        names[layer + "attention.wo.weight"] = (width, width)
        names[layer + "attention.q_norm.scale"] = names[layer + "attention.k_norm.scale"] = (width // heads,)
        names[layer + "attention.dyn_w_proj.dw1"] = (width, 1, 4, 4 * heads)
        names[layer + "attention.dyn_w_proj.qkw"] = (1, 4, 4 * heads, 4, heads)
        names[layer + "attention.dyn_w_proj.dd"] = (width, 1, 4 * heads)
        names[layer + "attention.dyn_w_proj.dw_m"] = (width, 20 * heads)
        names[layer + "feed_forward.w1.weight"] = (hidden, width)
        names[layer + "feed_forward.w2.weight"] = (width, hidden)
    if bias:
        for name in [n for n in names if n.endswith("weight") and not n.startswith(("tok", "output"))]:
            names[name[:-6] + "bias"] = names[name][:1]
    return names


def compare_with(reference, config, weights, tmp_path, text):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "theirs/model.safetensors", {"format": "pt"})
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "run")
    ours = logits_of(tmp_path / "run", text)
    with torch.no_grad():
        theirs = reference(ours["tokens"][:2])
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours["logits"][:2], theirs, atol=1e-4, rtol=0)


def test_dcformer(tmp_path, text):
    names = dc_names(bias=False)
    for i in range(3):
        names[f"layers.{i}.feed_forward.w3.weight"] = (48, 32)
        names[f"layers.{i}.feed_forward.mg.weight"] = (6, 32)
    w = dc_weights(names)

    def reference(tokens):
        x = w["tok_embeddings.weight"][tokens]
        for i in range(3):
            layer = f"layers.{i}."
            normed = rms(x, w[layer + "attention_norm.weight"], 1e-5)
            x = x + dc_attention(w, normed, layer + "attention.", 4, 7 if i % 2 == 0 else None, 500000.0, 8, True)
            normed = rms(x, w[layer + "ffn_norm.weight"], 1e-5)
            ffn = layer + "feed_forward."
            h = torch.nn.functional.silu(normed @ w[ffn + "w1.weight"].T) * (normed @ w[ffn + "w3.weight"].T)
            gate = (normed @ w[ffn + "mg.weight"].T).softmax(-1)
            x = x + (h.unflatten(-1, (6, -1)) * gate[..., None]).flatten(-2) @ w[ffn + "w2.weight"].T
        return rms(x, w["norm.weight"], 1e-5) @ w["output.weight"].T

    config = {**DC, "model_type": "dcformer", "use_qk_norm": True, "window_size": 7, "mgate": True, "mgate_dim": 6}
    compare_with(reference, config, w, tmp_path, text)


def test_dcpythia(tmp_path, text):
    w = dc_weights(dc_names(bias=True))

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def norm(x, name):
        return torch.nn.functional.layer_norm(x, (32,), w[name + ".weight"], w[name + ".bias"])

    def reference(tokens):
        x = w["tok_embeddings.weight"][tokens]
        for i in range(3):
            layer = f"layers.{i}."
            normed = norm(x, layer + "attention_norm")
            attention = dc_attention(w, normed, layer + "attention.", 4, 5 if i % 2 == 0 else None, 10000.0, 4, True)
            h = torch.nn.functional.gelu(linear(norm(x, layer + "ffn_norm"), layer + "feed_forward.w1"))
            x = x + attention + linear(h, layer + "feed_forward.w2")
        return norm(x, "norm") @ w["output.weight"].T

    config = {**DC, "model_type": "dcpythia", "use_qk_norm": True, "window_size": 5, "rotary_pct": 0.5}
    compare_with(reference, config, w, tmp_path, text)


class Experts(torch.nn.Module):
    """DeepSeekMoE's experts, under its names."""

    def __init__(self, width, hidden, routed, shared, active):
        super().__init__()
        mlp = transformers.models.llama.modeling_llama.LlamaMLP

        def make(size):
            return mlp(transformers.LlamaConfig(**{**LLAMA, "hidden_size": width, "intermediate_size": size}))

        self.gate = torch.nn.Linear(width, routed, bias=False)
        self.experts = torch.nn.ModuleList([make(hidden) for _ in range(routed)])
        self.shared_experts = make(shared * hidden)
        self.active = active

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(self.active).indices, 1.0) * scores
        return self.shared_experts(x) + sum(chosen[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))


def test_deepseek(tmp_path, text, known):
    if "moe" not in known.split():
        pytest.skip("there is no moe")
    torch.manual_seed(4)
    model = llama(num_key_value_heads=4)
    for layer in model.model.layers[1:]:
        layer.mlp = Experts(32, 16, routed=6, shared=2, active=2)
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
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert loaded("the loom", add_special_tokens=False)["input_ids"] == tokenizer.encode("the loom").ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("damage")
    saved(llama, path / "whole")
    saved(lambda: llama(num_hidden_layers=1), path / "small")
    return path


def refused(folder, tmp_path, code=1):
    message = headloom("import", folder, "--out", tmp_path / "never", code=code)
    assert message.startswith("headloom: ") and message.count("\n") == 1, message
    return message


def changed(source, target, tensors=None, **config):
    target.mkdir()
    content = json.loads((source / "config.json").read_text())
    for key, value in config.items():
        content.pop(key, None)
        if value is not None:
            content[key] = value
    (target / "config.json").write_text(json.dumps(content))
    weights = load_file(source / "model.safetensors")
    for name, value in (tensors or {}).items():
        weights.pop(name, None)
        if value is not None:
            weights[name] = value
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def test_what_cannot_be_expressed_is_named(folder, tmp_path):
    small = folder / "small"

    def message(name, tensors=None, code=2, **config):
        return refused(changed(small, tmp_path / name, tensors, **config), tmp_path, code)

    assert "'model_type' is \"t5\"" in message("type", model_type="t5")
    assert "'hidden_act'" in message("act", hidden_act="tanh")
    assert "mlp_bias" in message("bias", attention_bias=True)
    assert "'hidden_size'" in message("size", hidden_size=None)
    assert "'hidden_size' is \"many\"" in message("many", hidden_size="many")
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    assert "yarn" in message("yarn", rope_parameters=yarn)
    assert "'depth' 2000000000" in message("depth", num_hidden_layers=2000000000)
    assert "'vocabulary' 900000000" in message("vocabulary", vocab_size=900000000)
    assert "heads" in message("heads", num_attention_heads=3, num_key_value_heads=2, head_dim=None)
    assert "model.norm.weight" in message("missing", {"model.norm.weight": None}, code=1)
    assert "expected [32]" in message("shape", {"model.norm.weight": torch.ones(31)}, code=1)
    assert "floating-point" in message("dtype", {"model.norm.weight": torch.ones(32, dtype=torch.int64)}, code=1)
    assert "model.extra.weight" in message("extra", {"model.extra.weight": torch.ones(3)}, code=1)
    assert "not a folder" in refused(tmp_path / "none", tmp_path)
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(tmp_path / "empty", tmp_path)
    headloom("import", small, "--out", tmp_path / "run")
    assert "already holds a run" in headloom("import", small, "--out", tmp_path / "run", code=2)
    assert "there is no architecture" in headloom("export", tmp_path / "run", "--as", "x", "--out", tmp_path / "x", code=2)
    assert "model.position.type is 'rope', expected 'learned'" in headloom("export", tmp_path / "run", "--as", "gpt2", "--out", tmp_path / "x", code=2)
    assert "not empty" in headloom("export", tmp_path / "run", "--out", small, code=2)


def test_damaged_shards(folder, tmp_path):
    sharded = tmp_path / "sharded"
    transformers.AutoModelForCausalLM.from_pretrained(folder / "small").save_pretrained(sharded, max_shard_size="20KB")
    index = sharded / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    first = sorted(set(whole["weight_map"].values()))[0]

    def with_map(**changes):
        index.write_text(json.dumps({**whole, "weight_map": {**whole["weight_map"], **changes}}))
        return refused(sharded, tmp_path)

    assert "no tensor 'model.ghost'" in with_map(**{"model.ghost": first})
    assert "is missing" in with_map(**{"model.ghost": "model-9.safetensors"})
    assert "file beside it" in with_map(**{"model.ghost": "../x.safetensors"})
    assert "file beside it" in with_map(**{"model.ghost": 3})
    index.write_text("[" * 100000)
    assert "not a JSON object" in refused(sharded, tmp_path)
    index.write_text("{}")
    assert "weight_map" in refused(sharded, tmp_path)
    index.write_text(json.dumps(whole))
    (sharded / first).unlink()
    assert first in refused(sharded, tmp_path)


def test_random_damage_gives_a_sentence(folder, tmp_path):
    source = folder / "small"
    target = tmp_path / "damaged"
    target.mkdir()
    files = {name: (source / name).read_bytes() for name in ("config.json", "model.safetensors")}
    header = 8 + int.from_bytes(files["model.safetensors"][:8], "little")
    rng = random.Random(7)
    for number in range(40):
        name = rng.choice(["config.json", "model.safetensors", "model.safetensors"])
        damaged = bytearray(files[name])
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(header if name != "config.json" else len(damaged))] = rng.randrange(256)
        if rng.randrange(6) == 0:
            del damaged[rng.randrange(len(damaged)) :]
        for other, content in files.items():
            (target / other).write_bytes(damaged if other == name else content)
        done = subprocess.run(
            [str(BINARY), "import", str(target), "--out", str(tmp_path / f"run{number}")],
            env=ENVIRONMENT,
            capture_output=True,
            timeout=60,
            preexec_fn=lambda: __import__("resource").setrlimit(__import__("resource").RLIMIT_AS, (8 << 30, 8 << 30)),
        )
        assert done.returncode in (0, 1, 2), done
        if done.returncode:
            assert done.stderr.startswith(b"headloom: ") and done.stderr.count(b"\n") == 1, done.stderr
