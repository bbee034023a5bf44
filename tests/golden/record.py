#!/usr/bin/env python3
"""Records the tensors of this folder anew, by running the original authors' code.

    tests/golden/record.py --checkout DCFormer=PATH --checkout lingua=PATH ...
    tests/golden/record.py --checkout TOVA=PATH --output FOLDER

PATH is a checkout of the repository that README.md names; the commit is there too. What comes from Hugging Face needs none,
only the package `transformers`. A file whose checkouts are not given is left out. Inputs, parameters and cotangents are those
of the recorded file; outputs, states and gradients are computed anew and compared with the recorded ones. With --output,
inputs and new results are written there, with the checkouts' commits. The exit code is 1 where a result differs by more than
1e-5 of its tensor's largest value. Needs torch, transformers, safetensors and einops.
"""

import argparse
import contextlib
import importlib
import json
import pathlib
import re
import subprocess
import sys
import types
from types import SimpleNamespace
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.func import functional_call

HERE = pathlib.Path(__file__).resolve().parent
TOLERANCE = 1e-5
RECORDERS = {}  # name of the file -> (names of checkouts, function of (tensors, hyperparameters, checkouts))


def recorder(names, *checkouts):
    def add(function):
        RECORDERS.update({name: (checkouts, function) for name in names.split()})
        return function

    return add


# Loading the original code.


@contextlib.contextmanager
def absent(*names, **attributes):
    """Stands in for packages that the original code imports but that the recorded functions do not use."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = lambda key: mock.MagicMock()
        for key, value in attributes.items():
            setattr(module, key, value)
        sys.modules[name] = module
    yield
    for name in names:
        del sys.modules[name]


def load(path, *edits):
    """The module in a file. Each edit (old, new) changes its source and must find `old`."""
    source = path.read_text()
    for old, new in edits:
        if old not in source:
            raise SystemExit(f"{path} does not contain `{old}`; is it the commit that README.md names?")
        source = source.replace(old, new)
    module = types.ModuleType("original_" + path.stem)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def package(path, name):
    """The module `name` of a package below a folder."""
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
    return importlib.import_module(name)


# Gradients.


def leaves(t, prefix="grad."):
    """The recorded inputs with those that have a recorded gradient as leaves of a new graph."""
    return {name: value.clone().requires_grad_(prefix + name in t) for name, value in t.items()}


def gradients(scalar, given, prefix="grad."):
    wanted = {name: value for name, value in given.items() if value.requires_grad}
    values = torch.autograd.grad(scalar, list(wanted.values()))
    return {prefix + name: value for name, value in zip(wanted, values)}


def run_module(module, t, *more, prefix="grad.", x="x", pick=lambda out: out):
    """Output and gradients of a module, which takes its parameters from the recorded tensors."""
    given = leaves(t, prefix)
    parameters = {name: given[name] for name, _ in module.named_parameters() if name in given}
    out = pick(functional_call(module, parameters, (given[x], *more)))
    return out, gradients((out * t["cotangent"]).sum(), given, prefix)


# Dynamically composable multi-head attention.


def dcformer(checkouts):
    folder = checkouts["DCFormer"] / "pytorch" / "dcformer"
    package(folder, "configuration_dcformer")
    return load(folder / "modeling_dcformer.py", ("probs = probs.to(torch.bfloat16)", "probs = probs.to(torch.float32)"))


@recorder("dcmha_core_full dcmha_core_sw_window7", "DCFormer")
def dcmha_core(t, hyper, checkouts):
    code = dcformer(checkouts)
    given = leaves(t)
    window = hyper["window"]
    length = hyper["Tq"]
    mask = torch.ones(length, length).tril().bool() if window is None else code.make_window_mask(length, window)
    sides = ("qw1", "qw2", "kw1", "kw2", "qdd", "kdd")
    pre, post = ([given.get(side + "_sw")] + [given[f"{side}_{name}"] for name in sides] for side in ("pre", "post"))
    q = given["q"] * hyper["D"] ** -0.5
    out = code._atten_context(q, given["k"], given["v"], mask, pre, post, dtype=torch.float32)
    logits = code._cross_head_proj(q @ given["k"].transpose(-2, -1), *pre)
    return {
        "mask": mask.to(torch.uint8),
        "out": out,
        "logits_after_pre": logits,
        **gradients((out * t["cotangent"]).sum(), given),
    }


def dynamic_weights(width, heads):
    return dict(
        config=SimpleNamespace(dim=width),
        num_heads=heads,
        query_input_dim=width,
        dynamic_squeeze_ratio=heads // 2,
        dynamic_w_hidden_dim=4 * heads,
        dtype=torch.float32,
    )


@recorder("dcmha_dynproj_h6", "DCFormer")
def dcmha_dynproj(t, hyper, checkouts):
    code = dcformer(checkouts)
    module = code.DynamicWeightProjection(**dynamic_weights(hyper["E"], hyper["H"]))
    given = leaves(t)
    parameters = {name: given[name] for name in ("dw1", "qkw", "dd")}
    pre, post, key_maps = functional_call(module, parameters, (given["x"],))
    names = ("qw1", "qw2", "kw1", "kw2", "qdd", "kdd")
    # The third dimension is the group; there is one.
    out = {f"pre_{name}": value.squeeze(2) for name, value in zip(names, pre)}
    out |= {f"post_{name}": value.squeeze(2) for name, value in zip(names, post)}
    out["KW"] = key_maps
    return {**out, **gradients(sum((value * t["cotangent." + name]).sum() for name, value in out.items()), given)}


@recorder("dcmha_layer_window7", "DCFormer")
def dcmha_layer(t, hyper, checkouts):
    code = dcformer(checkouts)
    config = SimpleNamespace(
        dim=hyper["E"],
        n_head=hyper["H"],
        n_local_heads=hyper["H"],
        head_dim=hyper["D"],
        is_training=True,
        use_dcmha=True,
        q_chunk_size=hyper["q_chunk_size"],
        torch_dtype=torch.float32,
        use_qk_norm=hyper["qk_norm"],
        query_wise=False,
        window_type=None,
        window_size=hyper["window"],
        block_size=hyper["T"],
    )
    module = code.DCMHAttention(config, hyper["lidx"], use_sw=hyper["use_sw"])
    # Its constructor makes the weights' projection in bfloat16.
    module.dyn_w_proj = code.DynamicWeightProjection(**dynamic_weights(hyper["E"], hyper["H"]))
    given = leaves(t)
    parameters = {
        "wqkv.weight": given["wqkv"],
        "wo.weight": given["wo"],
        "q_norm.scale": given["q_norm_scale"],
        "k_norm.scale": given["k_norm_scale"],
        # Merged copies of the recorded parameters; training runs through these alone.
        "dyn_w_proj.dw_m": torch.cat([given["dw1"].flatten(1), given["dd"].flatten(1)], dim=1),
        "dyn_w_proj.qkw_m": given["qkw"].reshape(4, 4 * hyper["H"], -1),
    }
    rope = code.precompute_freqs_cis(hyper["T"], hyper["D"], hyper["rope_base"], dtype=torch.float32)
    mask = code.make_window_mask(hyper["T"], hyper["window"])[None, None]
    out = functional_call(module, parameters, (given["x"], rope, mask))
    return {"out": out, **gradients((out * t["cotangent"]).sum(), given)}


# Differential attention.


def rotate_interleaved(x, cos, sin, interleaved):
    """What the original Triton kernel computes: pairs (x[2i], x[2i + 1]) of x [B, T, H, D] are rotated."""
    assert interleaved
    cos, sin = cos[:, None], sin[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def softmax_attention(q, k, v, causal):
    """What flash-attn computes: q [B, T, H, D]; head h reads key-value head h // (H / Hkv)."""
    assert causal
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)))
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:]).triu(1).bool()
    return (scores.masked_fill(future, float("-inf")).softmax(-1) @ v).transpose(1, 2)


@recorder("diff_attn_gqa", "unilm")
def diff_attn(t, hyper, checkouts):
    folder = checkouts["unilm"] / "Diff-Transformer"
    package(folder, "rms_norm")
    rotary = absent("kernel", "kernel.rotary", apply_rotary_emb=rotate_interleaved)
    attention = absent("flash_attn", "flex_head_fa", flash_attn_func=softmax_attention)
    with rotary, attention:
        plain, flash = (load(folder / f"{file}.py") for file in ("multihead_diffattn", "multihead_flashdiff_1"))
    made = {}
    for kind, make in (("naive", plain.MultiheadDiffAttn), ("flash", flash.MultiheadFlashDiff1)):
        module = make(hyper["E"], hyper["depth"], hyper["H"], hyper["Hkv"])
        out, grads = run_module(module, t, (t["cos"], t["sin"]), prefix=f"{kind}.grad.")
        made |= {f"out_{kind}": out, **grads}
    return made


# Multi-token attention.


class Given(torch.nn.Module):
    """Stands in for a projection: gives a recorded tensor whatever the input is."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value.flatten(2)


def multi_token(hyper, checkouts, dim, kv_heads):
    with absent("xformers", "xformers.ops"):
        lingua = package(checkouts["lingua"], "lingua.transformer")
        code = load(
            checkouts["RAM"] / "projects" / "mta" / "mta_transformer.py",
            ('device="cuda"', 'device="cpu"'),
            (".cuda()", ""),
            # Autograd refuses the write into a softmax's result.
            ('scores[mask == float("-inf")] = 0', 'scores = scores.masked_fill(mask == float("-inf"), 0)'),
        )
    args = code.MTATransformerArgs(use_mta=True)
    for name, value in hyper.items():
        if hasattr(args, name):
            setattr(args, name, value)
    module = code.Attention(
        dim=dim,
        head_dim=hyper["D"],
        n_heads=hyper["H"],
        n_kv_heads=kv_heads,
        rope_theta=hyper.get("rope_theta", 10000.0),
        cache_attention_maps=False,
        max_seq_len=hyper["T"],
        mta=args,
        dropout=0.0,
        layer_id=hyper["layer_id"],
    )
    rope = lingua.RotaryEmbedding(hyper.get("rope_theta", 10000.0), hyper["D"], hyper["T"])
    return module, rope(seqlen=hyper["T"])


@recorder("mta_core_pre_both mta_core_post_both_head2", "RAM", "lingua")
def mta_core(t, hyper, checkouts):
    module, rope = multi_token(hyper, checkouts, hyper["H"] * hyper["D"], hyper["H"])
    given = leaves(t)
    module.wq, module.wk, module.wv = (Given(given[name]) for name in "qkv")
    module.wo = torch.nn.Identity()
    parameters = {name: given[name] for name, _ in module.named_parameters() if name in given}
    rope = rope[:1].expand(hyper["T"], -1, -1, -1)  # position 0 everywhere: no rotation
    x = torch.zeros(hyper["B"], hyper["T"], hyper["H"] * hyper["D"])
    out = functional_call(module, parameters, (x, rope))
    return {"out": out, **gradients((out * t["cotangent"]).sum(), given)}


@recorder("mta_layer_gqa", "RAM", "lingua")
def mta_layer(t, hyper, checkouts):
    module, rope = multi_token(hyper, checkouts, hyper["dim"], hyper["Hkv"])
    out, grads = run_module(module, t, rope)
    return {"out": out, **grads}


# Mamba.


@recorder("mamba_scan_full", "mamba")
def mamba_scan(t, hyper, checkouts):
    packages = ("mamba_ssm", "mamba_ssm.utils", "mamba_ssm.ops", "mamba_ssm.ops.triton")
    with absent(*packages, "mamba_ssm.utils.torch", "mamba_ssm.ops.triton.layer_norm"):
        code = load(checkouts["mamba"] / "mamba_ssm" / "ops" / "selective_scan_interface.py")
    given = leaves(t)
    arguments = {name: given[name] for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")}
    out, last = code.selective_scan_ref(**arguments, delta_softplus=True, return_last_state=True)
    scalar = (out * t["cotangent"]).sum() + (last * t["cotangent_last"]).sum()
    return {"out": out, "last_state": last, **gradients(scalar, given)}


@recorder("mamba_mixer_odd")
def mamba_mixer(t, hyper, checkouts):
    from transformers.models.mamba.modeling_mamba import MambaConfig, MambaMixer

    config = MambaConfig(
        hidden_size=hyper["hidden"],
        intermediate_size=hyper["Din"],
        state_size=hyper["N"],
        time_step_rank=hyper["dt_rank"],
        conv_kernel=hyper["conv_kernel"],
        use_conv_bias=hyper["conv_bias"],
        use_bias=hyper["proj_bias"],
    )
    out, grads = run_module(MambaMixer(config, layer_idx=0), t)
    return {"out": out, **grads}


# Retention.


@recorder("retention_odd", "torchscale")
def retention(t, hyper, checkouts):
    with absent("fairscale", "fairscale.nn", "timm", "timm.models", "timm.models.layers"):
        retnet = package(checkouts["torchscale"], "torchscale.architecture.retnet")
    args = SimpleNamespace(
        multiway=False,
        layernorm_eps=hyper["eps"],
        decoder_embed_dim=hyper["E"],
        decoder_retention_heads=hyper["H"],
        recurrent_chunk_size=hyper["chunk"],
    )
    module = retnet.MultiScaleRetention(args, hyper["E"], hyper["V"], hyper["H"])
    positions = retnet.RetNetRelPos(args)
    length = hyper["T"]
    made = {"angle": positions.angle, "decay_log_gamma": positions.decay}
    for form, chunkwise in (("parallel", False), ("chunkwise", True)):
        relative = positions(length, chunkwise_recurrent=chunkwise)
        out, grads = run_module(module, t, relative, chunkwise, prefix=form + ".grad.")
        made |= {f"out_{form}": out, **grads}
    parameters = {name: t[name] for name, _ in module.named_parameters()}
    state, steps = {}, []
    for i in range(length):
        relative = positions(i + 1, activate_recurrent=True)
        steps.append(functional_call(module, parameters, (t["x"][:, i : i + 1], relative, False, state)))
    return {
        **made,
        "out_recurrent": torch.cat(steps, dim=1),
        "final_state_kv": state["prev_key_value"],
        "final_state_scale": state["scale"],
    }


# Linformer, Performer, FNet, talking heads.


@recorder("linformer", "linformer")
def linformer(t, hyper, checkouts):
    code = package(checkouts["linformer"], "linformer.linformer")
    module = code.LinformerSelfAttention(hyper["dim"], hyper["seq_len"], k=hyper["k"], heads=hyper["heads"])
    out, grads = run_module(module, t)
    return {"out": out, **grads}


@recorder("performer_softmax performer_relu", "performer-pytorch")
def performer(t, hyper, checkouts):
    # The authors' JAX code, which this one transcribes, takes the gradient of the largest exponents too.
    edits = [("keepdim=True).detach()", "keepdim=True)")]
    with absent("local_attention", "axial_positional_embedding", "performer_pytorch", "performer_pytorch.reversible"):
        code = load(checkouts["performer-pytorch"] / "performer_pytorch" / "performer_pytorch.py", *edits)
    module = code.SelfAttention(
        hyper["dim"],
        heads=hyper["heads"],
        dim_head=hyper["dim"] // hyper["heads"],
        nb_features=hyper["m"],
        generalized_attention=hyper["kernel"] == "relu",
    )
    module.fast_attention.projection_matrix.copy_(t["features"])
    out, grads = run_module(module, t)
    return {"out": out, **grads}


@recorder("fnet_mix_odd")
def fnet(t, hyper, checkouts):
    from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform

    module = FNetBasicFourierTransform(SimpleNamespace(use_tpu_fourier_optimizations=False))
    out, grads = run_module(module, t, pick=lambda out: out[0])
    return {"out": out, **grads}


@recorder("talking_heads_both", "x-transformers")
def talking_heads(t, hyper, checkouts):
    code = load(checkouts["x-transformers"] / "x_transformers" / "attend.py")
    module = code.Attend(
        heads=hyper["H"],
        causal=hyper["causal"],
        pre_talking_heads=hyper["pre"],
        post_talking_heads=hyper["post"],
        pre_scale_post_talking_heads=hyper["pre_scale_post"],
    )
    given = leaves(t)
    parameters = {name: given[name] for name, _ in module.named_parameters()}
    out, _ = functional_call(module, parameters, tuple(given[name] for name in "qkv"))
    return {"out": out, **gradients((out * t["cotangent"]).sum(), given)}


# RWKV-4.


@recorder("rwkv4_wkv")
def rwkv_wkv(t, hyper, checkouts):
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    def run(given, stop):
        arguments = (given["time_decay"], given["time_first"], given["k"][:, :stop], given["v"][:, :stop])
        return rwkv_linear_attention_cpu(*arguments, return_state=True)

    given = leaves(t)
    out, state = run(given, None)
    _, mid = run(t, hyper["chunk"])
    return {
        "out": out,
        **{f"state_{name}": value for name, value in zip("abm", state)},
        **{f"mid_state_{name}": value for name, value in zip("abm", mid)},
        **gradients((out * t["cotangent"]).sum(), given),
    }


@recorder("rwkv4_timemix_C60 rwkv4_channelmix_C60")
def rwkv_mixing(t, hyper, checkouts):
    from transformers.models.rwkv import modeling_rwkv

    config = SimpleNamespace(
        hidden_size=hyper["C"],
        attention_hidden_size=hyper["attention_hidden"],
        intermediate_size=hyper["intermediate"],
        context_length=hyper["T"],
    )
    time = "time_decay" in t
    module = (modeling_rwkv.RwkvSelfAttention if time else modeling_rwkv.RwkvFeedForward)(config)
    out, grads = run_module(module, t, pick=lambda out: out[0])
    parameters = {name: t[name] for name, _ in module.named_parameters()}
    state = [torch.zeros(hyper["B"], hyper["C"], 1) for _ in range(5)]
    state[4] -= 1e30
    made, pieces = {}, []
    for name, piece in zip(("mid", "final"), (t["x"][:, : hyper["chunk"]], t["x"][:, hyper["chunk"] :])):
        y, state = functional_call(module, parameters, (piece,), {"state": state})
        pieces.append(y)
        for i in (1, 2, 3, 4) if time else (0,):
            made[f"{name}_state{i}"] = state[i][..., 0].clone()
    return {"out": out, "out_2chunks": torch.cat(pieces, dim=1), **made, **grads}


# DeepSeekMoE.


@recorder("deepseek_moe_v2_greedy")
def deepseek_moe(t, hyper, checkouts):
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    config = SimpleNamespace(**hyper, num_experts=hyper["E"], hidden_act="silu", mlp_bias=False, _experts_implementation="eager")
    module = DeepseekV2Moe(config)
    out, grads = run_module(module, t)
    logits, weights, experts = functional_call(module.gate, {"weight": t["gate.weight"]}, (t["x"],))
    experts, order = experts.sort(dim=-1)
    return {
        "out": out,
        "router_logits": logits,
        "topk_idx_sorted": experts,
        "topk_weight": weights.gather(-1, order),
        **grads,
    }


# Simplified transformer blocks.


@recorder("simplified_sas_layer1 simplified_sasp_layer1", "simplified_transformers")
def simplified(t, hyper, checkouts):
    code = load(checkouts["simplified_transformers"] / "simplified_transformers" / "model_utils.py", (".cuda()", ""))
    module = code.myGPT2Block(SimpleNamespace(**hyper), layer_idx=hyper["layer_idx"])
    out, grads = run_module(module, t, pick=lambda out: out[0])
    return {"out": out, **grads}


# Token omission via attention.


@recorder("tova_decode", "TOVA")
def tova(t, hyper, checkouts):
    class Lists:
        """What the cache's base class was when it was written: a list of keys and one of values."""

        def __init__(self):
            self.key_cache, self.value_cache = [], []

    with mock.patch("transformers.cache_utils.DynamicCache", Lists):
        cache = load(checkouts["TOVA"] / "src" / "tova_cache.py").TOVACache(hyper["cache_size"])
    q, k, v = t["q"], t["k"], t["v"]
    batch, heads, length, width = q.shape
    steps = hyper["steps"] + 1
    positions = torch.zeros(batch, 0, dtype=torch.long)
    kept = torch.full((steps, batch, hyper["cache_size"]), -1)
    rows = torch.zeros(steps, batch, heads, length)
    cache.key_cache, cache.value_cache = [k[:, :, :0]], [v[:, :, :0]]
    outs, start = [], 0
    for step in range(steps):
        stop = start + (hyper["prefill"] if step == 0 else 1)
        cache.key_cache[0] = torch.cat([cache.key_cache[0], k[:, :, start:stop]], dim=2)
        cache.value_cache[0] = torch.cat([cache.value_cache[0], v[:, :, start:stop]], dim=2)
        positions = torch.cat([positions, torch.arange(start, stop).expand(batch, -1)], dim=1)
        scores = q[:, :, start:stop] @ cache.key_cache[0].transpose(-2, -1) * width**-0.5
        future = positions[:, None, None, :] > torch.arange(start, stop)[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        outs.append(weights @ cache.value_cache[0])
        rows[step, :, :, : weights.shape[-1]] = weights[:, :, -1]
        before = cache.key_cache[0]
        cache.reduce(0, weights)
        if cache.key_cache[0].shape[2] < before.shape[2]:  # keys are all different, so they tell which were kept
            same = (cache.key_cache[0][:, 0, :, None] == before[:, 0, None]).all(-1)
            positions = positions.gather(1, same.long().argmax(-1))
        kept[step, :, : positions.shape[1]] = positions
        start = stop
    return {"out": torch.cat(outs, dim=2), "kept_positions": kept, "last_rows": rows}


def revision(path):
    """The commit that is checked out, or nothing where git knows none."""
    git = subprocess.run(["git", "-C", str(path), "rev-parse", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() or None


def record(name, checkouts, output):
    """Runs the original code for one file. The largest difference from it, relative to each tensor's largest value."""
    needed, function = RECORDERS[name]
    info = json.loads((HERE / f"{name}.json").read_text())
    recorded = load_file(HERE / f"{name}.safetensors")
    made = {key: value.detach().contiguous() for key, value in function(recorded, info["hyper"], checkouts).items()}
    worst, where, equal = 0.0, "", True
    for key, value in made.items():
        old = recorded[key]
        if value.shape != old.shape or value.dtype != old.dtype:
            raise SystemExit(f"{name}: {key} is {value.dtype} {list(value.shape)}, recorded as {old.dtype} {list(old.shape)}")
        equal = equal and torch.equal(value, old)
        difference = ((value.double() - old.double()).abs().max() / old.double().abs().max().clamp_min(1e-30)).item()
        if not difference <= worst:  # so that NaN counts
            worst, where = difference, key
    missing = [key for key in recorded if key not in made and re.fullmatch(r"out(_\w+)?|.*grad\..*|.*state.*", key)]
    if missing:
        raise SystemExit(f"{name}: not recorded: {', '.join(missing)}")
    print(f"{name}: " + (f"{len(made)} tensors equal bit for bit" if equal else f"differs by {worst:.1e} at most ({where})"))
    if output:
        output.mkdir(parents=True, exist_ok=True)
        if needed:
            info["source"]["commit"] = revision(checkouts[needed[0]])
        if "lingua" in needed:
            info["source"]["lingua"]["commit"] = revision(checkouts["lingua"])
        if not needed:
            info["source"]["release"] = transformers.__version__
        info["torch"] = torch.__version__
        save_file({**recorded, **made}, output / f"{name}.safetensors")
        (output / f"{name}.json").write_text(json.dumps(info, indent=1, ensure_ascii=False) + "\n")
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", action="append", default=[], metavar="NAME=PATH", help="where a repository is checked out")
    parser.add_argument("--output", type=pathlib.Path, help="folder for the new recordings")
    options = parser.parse_args()
    known = {name for needed, _ in RECORDERS.values() for name in needed}
    checkouts = {}
    for option in options.checkout:
        name, _, path = option.partition("=")
        if name not in known:
            parser.error(f"--checkout {option}: no recording needs {name}; those that one needs are {', '.join(sorted(known))}")
        if not pathlib.Path(path).is_dir():
            parser.error(f"--checkout {option}: {path} is not a folder")
        checkouts[name] = pathlib.Path(path).resolve()
    torch.set_num_threads(1)
    worst = 0.0
    for name, (needed, _) in RECORDERS.items():
        if all(checkout in checkouts for checkout in needed):
            difference = record(name, checkouts, options.output)
            worst = difference if not difference <= worst else worst
        else:
            print(f"{name}: left out, needs --checkout of {' and '.join(needed)}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
