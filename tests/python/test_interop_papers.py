"""Import of the checkpoints of papers: logits equal to references of the published conventions."""

import json
import math
import pathlib

import pytest
import torch
from interop_support import MARK, compare_with, refused
from safetensors.torch import load_file

pytestmark = MARK


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


def dcformer_reference(w, windows):
    def reference(tokens):
        x = w["tok_embeddings.weight"][tokens]
        for i in range(3):
            layer = f"layers.{i}."
            normed = rms(x, w[layer + "attention_norm.weight"], 1e-5)
            x = x + dc_attention(w, normed, layer + "attention.", 4, windows[i], 500000.0, 8, True)
            normed = rms(x, w[layer + "ffn_norm.weight"], 1e-5)
            ffn = layer + "feed_forward."
            h = torch.nn.functional.silu(normed @ w[ffn + "w1.weight"].T) * (normed @ w[ffn + "w3.weight"].T)
            if ffn + "mg.weight" in w:
                gate = (normed @ w[ffn + "mg.weight"].T).softmax(-1)
                h = (h.unflatten(-1, (6, -1)) * gate[..., None]).flatten(-2)
            x = x + h @ w[ffn + "w2.weight"].T
        return rms(x, w["norm.weight"], 1e-5) @ w["output.weight"].T

    return reference


def dcformer_weights(gate):
    names = dc_names(bias=False)
    for i in range(3):
        names[f"layers.{i}.feed_forward.w3.weight"] = (48, 32)
        if gate:
            names[f"layers.{i}.feed_forward.mg.weight"] = (6, 32)
    return dc_weights(names)


def test_dcformer(tmp_path, text):
    w = dcformer_weights(gate=True)
    config = {**DC, "model_type": "dcformer", "use_qk_norm": True, "window_size": 7, "mgate": True, "mgate_dim": 6}
    compare_with(dcformer_reference(w, [7, None, 7]), config, w, tmp_path, text)


def test_dcformer_as_published(tmp_path, text):
    """pytorch_model.bin in half precision with everything that the published code saves."""
    w = {name: tensor.half().float() for name, tensor in dcformer_weights(gate=False).items()}
    published = {name: tensor.half() for name, tensor in w.items()}
    for i in range(3):
        projection = f"layers.{i}.attention.dyn_w_proj."
        published[projection + "qkw_m"] = torch.zeros(4, 16, 16)
        for side in ("pre", "post"):
            published[f"{projection}{side}_proj.w"] = torch.eye(4).expand(1, 4, 4).half()
    config = {**DC, "model_type": "dcformer", "use_qk_norm": True, "window_size": None, "window_type": None}
    compare_with(dcformer_reference(w, [None] * 3), config, published, tmp_path, text, "pytorch_model.bin")
    published["layers.1.attention.dyn_w_proj.pre_proj.w"] = torch.ones(1, 4, 4)
    torch.save(published, tmp_path / "theirs/pytorch_model.bin")
    assert "layers.1.attention.dyn_w_proj.pre_proj.w' is not the identity" in refused(tmp_path / "theirs", tmp_path)


def test_dcformer_trained_by_its_pytorch_code(tmp_path, text):
    """The merged copies alone were trained; queries, keys and values are apart."""
    w = dcformer_weights(gate=False)
    saved_names = dict(w)
    for i in range(3):
        attention = f"layers.{i}.attention."
        dynamic = attention + "dyn_w_proj."
        saved_names[dynamic + "dw_m"] = torch.cat([w[dynamic + "dw1"].flatten(1), w[dynamic + "dd"].flatten(1)], 1)
        saved_names[dynamic + "qkw_m"] = w[dynamic + "qkw"].reshape(4, 16, 16)
        for name in ("dw1", "dd", "qkw"):
            saved_names[dynamic + name] = torch.zeros_like(w[dynamic + name])
        for name, rows in zip(("wq", "wk", "wv"), saved_names.pop(attention + "wqkv.weight").chunk(3), strict=True):
            saved_names[f"{attention}{name}.weight"] = rows.clone()
    config = {**DC, "model_type": "dcformer", "use_qk_norm": True, "window_type": "LGLL"}
    compare_with(dcformer_reference(w, [256, None, 256]), config, saved_names, tmp_path, text)


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


def swiglu(w, x, ffn):
    h = torch.nn.functional.silu(x @ w[ffn + "w1.weight"].T) * (x @ w[ffn + "w3.weight"].T)
    return h @ w[ffn + "w2.weight"].T


def interleaved(x, base):
    """x [B, T, H, D], neighbours paired."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    angle = torch.outer(torch.arange(x.shape[1]), base ** (-torch.arange(pairs.shape[-1]) / pairs.shape[-1]))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2)


def shell(w, tokens, depth, attention):
    """The decoder around both: RMS norms, SwiGLU, an output of its own or tied."""
    x = w["tok_embeddings.weight"][tokens]
    for i in range(depth):
        layer = f"layers.{i}."
        x = x + attention(rms(x, w[layer + "attention_norm.weight"], 1e-5), layer + "attention.", i)
        x = x + swiglu(w, rms(x, w[layer + "ffn_norm.weight"], 1e-5), layer + "feed_forward.")
    return rms(x, w["norm.weight"], 1e-5) @ w.get("output.weight", w["tok_embeddings.weight"]).T


def shell_names(width, depth, hidden):
    names = {"tok_embeddings.weight": (300, width), "norm.weight": (width,)}
    for i in range(depth):
        layer = f"layers.{i}."
        names[layer + "attention_norm.weight"] = names[layer + "ffn_norm.weight"] = (width,)
        names[layer + "feed_forward.w1.weight"] = names[layer + "feed_forward.w3.weight"] = (hidden, width)
        names[layer + "feed_forward.w2.weight"] = (width, hidden)
    return names


def convolved(maps, kernel):
    """A kernel [H, 1, q, k] over maps [B, H, T, S] whose future is 0: the current query last, keys on both sides."""
    _, _, queries, keys = kernel.shape
    padded = torch.nn.functional.pad(maps, (keys // 2, keys // 2, queries - 1, 0))
    return torch.nn.functional.conv2d(padded, kernel, groups=kernel.shape[0])


def mta_attention(w, x, prefix, heads, groups, factor=1.0):
    """Multi-token attention: what of it there is shows in the names."""
    q, k, v = ((x @ w[f"{prefix}w{n}.weight"].T).unflatten(-1, (count, -1)) for n, count in (("q", heads), ("k", groups), ("v", groups)))
    q, k = interleaved(q, 100000.0), interleaved(k, 100000.0)
    k, v = (t.repeat_interleave(heads // groups, 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)

    def one(name, maps, fill, f):
        return f(maps, w[prefix + name]).masked_fill(future, fill) if prefix + name in w else maps

    scores = one("mta_kernel", scores.masked_fill(future, 0.0), 0.0, convolved)
    scores = one("wpsm.weight", scores, 0.0, lambda maps, mix: torch.einsum("bhts,gh->bgts", maps, mix))
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    weights = one("mta_kernel_after_sm", weights, 0.0, convolved)
    weights = one("wposm.weight", weights, 0.0, lambda maps, mix: torch.einsum("bhts,gh->bgts", maps, mix))

    def grouped(maps, mix):  # [group, in, out]
        return torch.einsum("bcits,cio->bcots", maps.unflatten(1, (mix.shape[0], -1)), mix).flatten(1, 2)

    weights = one("head_kernel", weights, 0.0, grouped)
    o = torch.einsum("bhts,bshd->bthd", weights, v)
    if prefix + "subln.weight" in w:
        o = rms(o, w[prefix + "subln.weight"], 1e-5) * factor
    if prefix + "gate.weight" in w:
        o = o * torch.sigmoid(o @ w[prefix + "gate.weight"].T + w[prefix + "gate.bias"])
    return o.flatten(2) @ w[prefix + "wo.weight"].T


def mta_case(mta):
    """params.json as Lingua writes it, and names and shapes of what it saves."""
    width, heads, groups, dim, depth = 32, 4, 2, 8, 3
    defaults = {
        "use_mta": False,
        "query_kernel_size": 1,
        "key_kernel_size": 1,
        "pad_key": "both",
        "mta_layers": None,
        "after_sm_query_kernel_size": None,
        "after_sm_key_kernel_size": None,
        "head_kernel_size": None,
        "group_norm": False,
        "layer_norm_rescale": False,
        "curse_norm": False,
        "pre_sm_linear_head": False,
        "post_sm_linear_head": False,
        "add_gating": False,
        "gate_1d": True,
    }
    mta = {**defaults, **mta}
    model = {
        "dim": width,
        "n_layers": depth,
        "head_dim": None,
        "n_heads": heads,
        "n_kv_heads": groups,
        "ffn_dim_multiplier": 1.0,
        "multiple_of": 16,
        "norm_eps": 1e-5,
        "rope_theta": 100000,
        "max_seqlen": 64,
        "mta": mta,
        "dropout": 0.0,
        "vocab_size": 300,
        "weight_tying": True,
        "sliding_window": None,
    }
    names = shell_names(width, depth, 96)
    with_kernels = range(depth) if mta["mta_layers"] is None else [int(i) for i in mta["mta_layers"].split(",")]
    for i in range(depth):
        prefix = f"layers.{i}.attention."
        names[prefix + "wq.weight"] = names[prefix + "wo.weight"] = (width, width)
        names[prefix + "wk.weight"] = names[prefix + "wv.weight"] = (groups * dim, width)
        if mta["use_mta"]:
            for name, before in (("mta_kernel", ""), ("mta_kernel_after_sm", "after_sm_")):
                size = mta[before + "query_kernel_size"], mta[before + "key_kernel_size"]
                if None not in size and i in with_kernels:
                    names[prefix + name] = (heads, 1, *size)
            if mta["pre_sm_linear_head"]:
                names[prefix + "wpsm.weight"] = (heads, heads)
            if mta["post_sm_linear_head"]:
                names[prefix + "wposm.weight"] = (heads, heads)
            if size := mta["head_kernel_size"]:
                names[prefix + "head_kernel"] = (heads // size, size, size)
        if mta["group_norm"]:
            names[prefix + "subln.weight"] = (dim,)
        if mta["add_gating"]:
            names[prefix + "gate.weight"] = (1 if mta["gate_1d"] else dim, dim)
            names[prefix + "gate.bias"] = (1 if mta["gate_1d"] else dim,)
    return {"name": "test", "steps": 3, "model": model}, names


MTA = {
    "released": {
        "use_mta": True,
        "pre_sm_linear_head": True,
        "query_kernel_size": 6,
        "key_kernel_size": 11,
        "head_kernel_size": 4,
        "after_sm_query_kernel_size": 6,
        "after_sm_key_kernel_size": 11,
        "mta_layers": "1,2",
        "group_norm": True,
        "add_gating": True,
    },
    "paper": {
        "use_mta": True,
        "query_kernel_size": 3,
        "key_kernel_size": 5,
        "head_kernel_size": 2,
        "mta_layers": "2",
        "group_norm": True,
        "layer_norm_rescale": True,
    },
    "talking_heads": {"use_mta": True, "query_kernel_size": None, "pre_sm_linear_head": True, "post_sm_linear_head": True},
    "one_by_one": {"use_mta": True, "head_kernel_size": 4},
    "gated": {"add_gating": True, "gate_1d": False},
    "baseline": {},
}


@pytest.mark.parametrize("kind", MTA)
def test_multi_token_attention(kind, tmp_path, text):
    params, names = mta_case(MTA[kind])
    w = dc_weights(names)
    rescaled = params["model"]["mta"]["layer_norm_rescale"]

    def reference(tokens):
        def attention(x, prefix, layer):
            factor = 0.2 + 0.6 * math.exp(-0.3 * layer) if rescaled else 1.0
            return mta_attention(w, x, prefix, 4, 2, factor)

        return shell(w, tokens, 3, attention)

    # What distributed checkpoints become: the model beside the optimiser, the tied output twice.
    model = {**w, "output.tied_module.weight": w["tok_embeddings.weight"]}
    optimizer = {"state": {"norm.weight": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "fused": None}]}
    compare_with(reference, params, {"model": model, "optim": optimizer}, tmp_path, text, "consolidated.pth", "params.json")


def diff_attention(w, x, prefix, heads, groups, layer, pairing):
    q = interleaved((x @ w[prefix + "q_proj.weight"].T).unflatten(-1, (2 * heads, -1)), 10000.0)
    k = interleaved((x @ w[prefix + "k_proj.weight"].T).unflatten(-1, (2 * groups, -1)), 10000.0)
    v = (x @ w[prefix + "v_proj.weight"].T).unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 2)
    if pairing == "pair":  # head i has the key maps 2g and 2g + 1
        k = k.unflatten(2, (groups, 2)).repeat_interleave(heads // groups, 2).flatten(2, 3)
    else:
        k = k.repeat_interleave(heads // groups, 2)
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    first, second = scores.masked_fill(future, float("-inf")).softmax(-1).unflatten(1, (heads, 2)).unbind(2)
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    products = [(w[f"{prefix}lambda_q{i}"] @ w[f"{prefix}lambda_k{i}"]).exp() for i in (1, 2)]
    weights = first - (products[0] - products[1] + start) * second
    o = rms(torch.einsum("bhts,bshd->bthd", weights, v), w.get(prefix + "subln.weight"), 1e-5) * (1 - start)
    return o.flatten(2) @ w[prefix + "out_proj.weight"].T


@pytest.mark.parametrize("pairing,scale", [("pair", True), ("repeat", True), ("pair", False)])
def test_differential_transformer(pairing, scale, tmp_path, text):
    width, heads, groups, depth = 48, 4, 2, 3
    names = {**shell_names(width, depth, 40), "output.weight": (300, width)}
    for i in range(depth):
        prefix = f"layers.{i}.attention."
        names[prefix + "q_proj.weight"] = names[prefix + "out_proj.weight"] = (width, width)
        names[prefix + "k_proj.weight"] = names[prefix + "v_proj.weight"] = (width // 2, width)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            names[prefix + name] = (width // heads // 2,)
        if scale:
            names[prefix + "subln.weight"] = (width // heads,)
    w = dc_weights(names)
    params = {
        "dim": width,
        "n_layers": depth,
        "n_heads": heads,
        "n_kv_heads": groups,
        "hidden_dim": 40,
        "vocab_size": 300,
        "norm_eps": 1e-5,
        "max_seq_len": 64,
        **({} if pairing == "pair" else {"pairing": pairing}),
        **({} if scale else {"subln_scale": False}),
    }
    def attention(x, prefix, layer):
        return diff_attention(w, x, prefix, heads, groups, layer, pairing)

    compare_with(lambda tokens: shell(w, tokens, depth, attention), params, w, tmp_path, text, "consolidated.00.pth", "params.json")
    (tmp_path / "theirs" / "params.json").write_text(json.dumps(params | {"pairng": "repeat"}))
    assert "params.json: there is no key 'pairng'; did you mean 'pairing'?" in refused(tmp_path / "theirs", tmp_path, code=2)


GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"


def test_references_equal_the_authors_code():
    """The references above, with tensors that the authors' own code gave."""
    g = load_file(GOLDEN / "mta_layer_gqa.safetensors")
    torch.testing.assert_close(mta_attention(g, g["x"], "", 6, 2), g["out"], atol=1e-4, rtol=1e-4)
    g = load_file(GOLDEN / "diff_attn_gqa.safetensors")
    for pairing, out in (("pair", "out_flash"), ("repeat", "out_naive")):
        ours = diff_attention(g, g["x"], "", 6, 3, 3, pairing)
        torch.testing.assert_close(ours, g[out], atol=1e-4, rtol=1e-4)
    g = load_file(GOLDEN / "dcmha_layer_window7.safetensors")
    names = {"wqkv": "wqkv.weight", "wo": "wo.weight", "q_norm_scale": "q_norm.scale", "k_norm_scale": "k_norm.scale"}
    w = {names.get(name, f"dyn_w_proj.{name}"): tensor for name, tensor in g.items()}
    # The recorded window of 7 keeps 8 keys.
    ours = dc_attention(w, g["x"], "", 6, 8, 500000.0, 12, True)
    torch.testing.assert_close(ours, g["out"], atol=1e-4, rtol=1e-4)
