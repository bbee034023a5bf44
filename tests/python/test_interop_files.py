"""Files of checkpoints: what is not read is named, damage gives a sentence, nothing is copied."""

import json
import os
import pathlib
import random
import subprocess
import time
import zipfile

import cli_support
import pytest
import torch
from cli_support import BINARY, ENVIRONMENT, TEXT
from headloom import load
from interop_support import COMMON, MARK, headloom, llama, refused, saved, transformers
from safetensors.torch import load_file, save_file

pytestmark = MARK


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("damage")
    saved(llama, path / "whole")
    saved(lambda: llama(num_hidden_layers=1), path / "small")
    return path


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
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "dynamic" in message("dynamic", rope_parameters=dynamic)
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    assert "'rope_parameters.truncate' is false, expected true." in message("yarn", rope_parameters={**yarn, "truncate": False})
    assert "'position.beta_fast' is 1, expected more than beta_slow = 1." in message("fast", rope_parameters={**yarn, "beta_fast": 1})
    for key in ("rope_parameters", "rope_scaling"):
        for i, (value, shown) in enumerate([("yarn", '"yarn"'), ([1], "an array"), (7, "7"), (False, "false")]):
            assert f"config.json: '{key}' is {shown}, expected a table." in message(f"{key}{i}", **{key: value})
    assert "'architectures' is \"Bert\", expected a table or a list." in message("text", model_type="bert", architectures="Bert")
    assert "'depth' 2000000000" in message("depth", num_hidden_layers=2000000000)
    assert "'vocabulary' 900000000" in message("vocabulary", vocab_size=900000000)
    for key, value in [("num_hidden_layers", -1), ("max_position_embeddings", 0), ("vocab_size", -3), ("num_attention_heads", 0)]:
        assert f"config.json: '{key}' is {value}, expected at least 1 " in message(key, **{key: value})
    assert "config.json: model.layer[0].mixer (mha): kv_heads is 3" in message("groups", num_attention_heads=4, num_key_value_heads=3)
    assert "config.json: 'model.norm_eps' is -1.0, expected " in message("eps", rms_norm_eps=-1)
    assert "'is_causal' is false, expected true" in message("both_ways", is_causal=False)
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


def test_keys_by_their_other_names(tmp_path):
    """`transformers` maps hidden_size to n_embd, and so on, for these classes."""
    sizes = {"n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2}
    saved(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**COMMON, **sizes)), tmp_path / "theirs")
    others = {other: sizes[key] for other, key in transformers.GPT2Config.attribute_map.items()}
    assert len(others) == len(sizes)
    changed(tmp_path / "theirs", tmp_path / "other", **dict.fromkeys(sizes), **others)
    for name in ("theirs", "other"):
        headloom("import", tmp_path / name, "--out", tmp_path / f"{name}-run")
    configurations = [(tmp_path / f"{name}-run" / "config.toml").read_text() for name in ("theirs", "other")]
    assert configurations[0] == configurations[1]
    message = refused(changed(tmp_path / "theirs", tmp_path / "both", hidden_size=64), tmp_path, code=2)
    assert "'hidden_size' is 64 and 'n_embd' is 32" in message


def test_a_model_that_no_architecture_has(tmp_path):
    """The nearest one is named, and what is in its way."""
    (tmp_path / "corpus.txt").write_text("to be or not to be " * 200)
    task = TEXT.replace('{ type = "mha", heads = 2 }', '{ type = "mamba" }').replace("corpus.txt", str(tmp_path / "corpus.txt"))
    (tmp_path / "x.toml").write_text(task)
    headloom("train", tmp_path / "x.toml", "--out", tmp_path / "run", "--set", "train.steps=1")
    message = headloom("export", tmp_path / "run", "--out", tmp_path / "folder", code=2).strip()
    assert "cannot be written as mamba (the nearest) or any other architecture: model.position.type is 'rope', expected 'none'; model.layer" in message, message
    assert message.endswith(".") and not message.endswith("..") and not (tmp_path / "folder").exists()
    # The architecture that it names has a model with those changes, whatever else has its default.
    task = task.replace("depth = 2", 'depth = 2\nposition = { type = "none" }')
    (tmp_path / "y.toml").write_text(task.replace('{ type = "swiglu", hidden = 16 }', '{ type = "none" }'))
    headloom("train", tmp_path / "y.toml", "--out", tmp_path / "plain", "--set", "train.steps=1")
    assert headloom("export", tmp_path / "plain", "--out", tmp_path / "folder").startswith(f"{tmp_path}/folder (mamba, ")


def test_an_encoder_is_nearest_to_an_encoder(tmp_path):
    (tmp_path / "corpus.txt").write_text("to be or not to be " * 200)
    task = TEXT.replace("width = 16", 'width = 16\nkind = "encoder"').replace('"text"', '"masked_text"')
    (tmp_path / "x.toml").write_text(task.replace("corpus.txt", str(tmp_path / "corpus.txt")))
    headloom("train", tmp_path / "x.toml", "--out", tmp_path / "run", "--set", "train.steps=1")
    message = headloom("export", tmp_path / "run", "--out", tmp_path / "folder", code=2)
    assert "cannot be written as bert (the nearest)" in message, message
    # Whatever other kinds lack, the kind is named.
    message = headloom("export", tmp_path / "run", "--out", tmp_path / "folder", "--as", "vit", code=2)
    assert message.endswith("cannot be written as vit: model.kind is 'encoder', expected 'vit'.\n"), message


def test_a_kind_that_no_architecture_has(tmp_path):
    (tmp_path / "x.toml").write_text(
        '[model]\nkind = "auto_encoder"\nwidth = 16\ndepth = 1\n[task]\ntype = "compression"\neval_sequences = 2\n[train]\nsteps = 1\nbatch = 2\n'
    )
    headloom("train", tmp_path / "x.toml", "--out", tmp_path / "run")
    message = headloom("export", tmp_path / "run", "--out", tmp_path / "folder", code=2)
    assert message.endswith("(the nearest) or any other architecture: model.kind is 'auto_encoder', expected 'decoder'.\n"), message


def test_a_tokenizer_that_cannot_be_used_is_not_left_out(tmp_path):
    (tmp_path / "corpus.txt").write_text("to be or not to be " * 200)
    (tmp_path / "x.toml").write_text(TEXT.replace("corpus.txt", str(tmp_path / "corpus.txt")))
    headloom("train", tmp_path / "x.toml", "--out", tmp_path / "run", "--set", "train.steps=1")
    headloom("export", tmp_path / "run", "--out", tmp_path / "hub")
    hub, out = tmp_path / "hub", tmp_path / "imported"
    (hub / "tokenizer.json").write_text("{")
    said = headloom("import", hub, "--out", out, code=1)
    assert f"{hub}/tokenizer.json: is not JSON" in said and "move the file to another folder" in said
    assert not out.exists()
    # The other one is used where it is there, and named.
    headloom("vocabulary", tmp_path / "corpus.txt", "--size", 270, "--out", hub / "tokenizer.model")
    done = cli_support.headloom("import", hub, "--out", out)
    assert f"The tokenizer is {hub}/tokenizer.model: {hub}/tokenizer.json: is not JSON" in done.stderr
    assert "tokenizer.model)" in done.stdout and (out / "tokenizer.model").exists()
    for name in ("tokenizer.json", "tokenizer.model"):
        (hub / name).unlink()
    assert "Text is read as bytes: " in cli_support.headloom("import", hub, "--out", tmp_path / "bytes").stderr


def as_torch_file(source, target, shards=1):
    """The folder `source` with its weights as torch.save writes them."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    weights = load_file(source / "model.safetensors")
    if shards == 1:
        torch.save(weights, target / "pytorch_model.bin")
        return
    placed = {}
    for i in range(shards):
        names = sorted(weights)[i::shards]
        file = f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        torch.save({name: weights[name] for name in names}, target / file)
        placed.update(dict.fromkeys(names, file))
    (target / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


@pytest.mark.parametrize("shards", [1, 3])
def test_pytorch_files_are_read_as_safetensors_are(shards, folder, tmp_path):
    as_torch_file(folder / "whole", tmp_path / "theirs", shards)
    headloom("import", folder / "whole", "--out", tmp_path / "a")
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "b")
    a, b = (load_file(tmp_path / run / "checkpoints/step-0/model.safetensors") for run in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("shards, prefix", [(1, "module."), (3, "module."), (1, "_orig_mod."), (1, "module._orig_mod.")])
def test_the_prefix_of_distributed_or_compiled_training_is_removed(shards, prefix, folder, tmp_path):
    """DistributedDataParallel puts `module.` before every name, torch.compile puts `_orig_mod.` there."""
    config = (folder / "small/config.json").read_text()
    weights = load_file(folder / "small/model.safetensors")
    for name, before in [("plain", ""), ("wrapped", prefix)]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        save_file({before + key: tensor for key, tensor in weights.items()}, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        as_torch_file(tmp_path / name, tmp_path / f"{name}-pt", shards)
        headloom("import", tmp_path / f"{name}-pt", "--out", tmp_path / f"{name}-run")
    a, b = (load_file(tmp_path / f"{name}-run/checkpoints/step-0/model.safetensors") for name in ("plain", "wrapped"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    with pytest.warns(UserWarning, match="Text is read as bytes"):
        loaded = dict(load(tmp_path / "wrapped-pt").named_parameters())
    assert all(torch.equal(loaded[name], a[name]) for name in loaded)
    # Only where every name has it.
    mixed = {("" if key == "model.norm.weight" else "module.") + key: tensor for key, tensor in weights.items()}
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/config.json").write_text(config)
    torch.save(mixed, tmp_path / "mixed/pytorch_model.bin")
    assert "the nearest name is 'module.model.embed_tokens.weight'" in refused(tmp_path / "mixed", tmp_path)


def test_pytorch_files_of_every_kind(folder, tmp_path):
    theirs = tmp_path / "theirs"
    as_torch_file(folder / "small", theirs)
    weights = load_file(folder / "small/model.safetensors")
    headloom("import", theirs, "--out", tmp_path / "expected")
    expected = load_file(tmp_path / "expected/checkpoints/step-0/model.safetensors")

    def read_back(content, name, **options):
        torch.save(content, theirs / "pytorch_model.bin", **options)
        headloom("import", theirs, "--out", tmp_path / name)
        return load_file(tmp_path / name / "checkpoints/step-0/model.safetensors")

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "small")
    doubles = {name: torch.nn.Parameter(tensor.double()) for name, tensor in weights.items()}
    turned = {name: tensor.T.contiguous().T if tensor.dim() == 2 else tensor for name, tensor in weights.items()}
    pool = torch.cat([tensor.flatten() for tensor in weights.values()])
    sizes = [tensor.numel() for tensor in weights.values()]
    views = {n: part.view_as(t) for (n, t), part in zip(weights.items(), pool.split(sizes), strict=True)}
    for number, content in enumerate(
        [
            model.state_dict(),
            {"model": weights, "epoch": 3},
            {"state_dict": doubles, "lr": 0.1},
            {"best_val_loss": torch.tensor(1.0), "model": weights},
            turned,
            views,
        ]
    ):
        ours = read_back(content, f"run{number}")
        assert all(torch.equal(ours[name], expected[name]) for name in expected)
    for protocol in (3, 4):
        ours = read_back(weights, f"protocol{protocol}", pickle_protocol=protocol)
        assert all(torch.equal(ours[name], expected[name]) for name in expected)


class Harmful:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_pytorch_files_that_do_more_are_refused(folder, tmp_path):
    theirs = tmp_path / "theirs"
    as_torch_file(folder / "small", theirs)
    file = theirs / "pytorch_model.bin"
    weights = load_file(folder / "small/model.safetensors")

    def message(content, **options):
        torch.save(content, file, **options)
        return refused(theirs, tmp_path)

    marker = tmp_path / "marker"
    assert "posix.mkdir" in message({**weights, "x": Harmful(marker)})
    assert not marker.exists()
    assert "LlamaForCausalLM" in message(llama(num_hidden_layers=1))
    assert "PyTorch 1.6 or newer" in message(weights, _use_new_zipfile_serialization=False)
    assert "a tensor that is negated or conjugated when it is read" in message({n: torch._neg_view(t) for n, t in weights.items()})
    assert "torch._utils._rebuild_sparse_tensor" in message({"x": torch.eye(3).to_sparse()})
    assert "has no tensors" in message({"x": 3})
    assert "no dictionary" in message([torch.ones(3)])
    assert "repeats" in message({**weights, "model.norm.weight": torch.ones(1).expand(32)})

    torch.save(weights, file)
    source = zipfile.ZipFile(file)
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    whole = file.read_bytes()
    file.write_bytes(packed.read_bytes())
    assert "is compressed" in refused(theirs, tmp_path)
    for size in (0, 1, 21, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert "pytorch_model.bin: " in refused(theirs, tmp_path)
    file.unlink()
    assert "pytorch_model.bin" in refused(theirs, tmp_path)


def test_weights_are_mapped_not_copied(tmp_path):
    """Memory of its own beside the model's, which is the files' size, stays small."""
    torch.manual_seed(1)
    model = gpt2_of(width=512, layers=8)
    megabytes = sum(p.numel() for p in model.parameters()) * 4 / 2**20
    assert megabytes > 90
    model.save_pretrained(tmp_path / "safetensors")
    as_torch_file(tmp_path / "safetensors", tmp_path / "torch")
    idle = peak_memory("list")
    for kind in ("safetensors", "torch"):
        peak = peak_memory("import", tmp_path / kind, "--out", tmp_path / f"run-{kind}")
        assert peak - idle < 1.3 * megabytes, (kind, peak, idle, megabytes)


def gpt2_of(width, layers):
    config = transformers.GPT2Config(**COMMON, n_positions=64, n_embd=width, n_layer=layers, n_head=8)
    return transformers.GPT2LMHeadModel(config)


def peak_memory(*arguments):
    """Most of the process's own memory, in MiB: without the pages of files, which the system can drop."""
    process = subprocess.Popen([str(BINARY), *map(str, arguments)], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        try:
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        peak = max([peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))])
        time.sleep(0.002)
    assert process.wait() == 0
    return peak / 1024


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
    assert "file of the same folder" in with_map(**{"model.ghost": "../x.safetensors"})
    assert "file of the same folder" in with_map(**{"model.ghost": 3})
    index.write_text("[" * 100000)
    assert "nested deeper than 64 levels" in refused(sharded, tmp_path)
    index.write_text("{}")
    assert "weight_map" in refused(sharded, tmp_path)
    index.write_text(json.dumps(whole))
    (sharded / first).unlink()
    assert first in refused(sharded, tmp_path)


def test_random_damage_gives_a_sentence(folder, tmp_path):
    source = folder / "small"
    target = tmp_path / "damaged"
    target.mkdir()
    as_torch_file(source, tmp_path / "torch")
    config = (source / "config.json").read_bytes()
    weights = {path.name: path.read_bytes() for path in (source / "model.safetensors", tmp_path / "torch/pytorch_model.bin")}
    header = 8 + int.from_bytes(weights["model.safetensors"][:8], "little")
    # Where the archive's structure is: the pickle at its start, the directory at its end.
    whole = len(weights["pytorch_model.bin"])
    structure = [*range(3000), *range(whole - 2500, whole)]
    rng = random.Random(7)
    for number in range(40):
        kind = rng.choice(sorted(weights))
        for path in target.glob("*"):
            path.unlink()
        files = {"config.json": config, kind: weights[kind]}
        name = rng.choice(["config.json", kind, kind])
        damaged = bytearray(files[name])
        places = range(len(damaged)) if name == "config.json" else range(header) if kind == "model.safetensors" else structure
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.choice(places)] = rng.randrange(256)
        if rng.randrange(6) == 0:
            del damaged[rng.randrange(len(damaged)) :]
        for other, content in files.items():
            (target / other).write_bytes(damaged if other == name else content)
        done = cli_support.run("import", target, "--out", tmp_path / f"run{number}", timeout=60, address_space=8 << 30)
        assert done.returncode in (0, 1, 2), done
        if done.returncode:
            assert done.stderr.startswith("headloom: ") and done.stderr.count("\n") == 1, done.stderr
