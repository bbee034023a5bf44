"""Every kind of model and task on the command line, from training to evaluation."""

import json
import shutil

import pytest
import torch
from cli_support import BINARY, MODEL, headloom, make_place, refused

from headloom import load

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("kinds"))


KINDS = {
    "masked": ("kind = 'encoder'", "type = 'masked_text'\npaths = ['corpus.txt']\nlength = 16\neval_tokens = 256"),
    "label": ("kind = 'encoder'", "type = 'classify_text'\nlength = 16\neval_sequences = 16"),
    "pairs": ("kind = 'encoder'", "type = 'classify_pairs'\neval_sequences = 16"),
    "tags": ("kind = 'encoder'", "type = 'tag_text'\nlength = 16\neval_sequences = 16"),
    "span": ("kind = 'encoder'", "type = 'find_span'\neval_sequences = 16"),
    "sequence": ("kind = 'encoder_decoder'", "type = 'sequence'\nsymbols = 6\ncount = 4\neval_sequences = 16"),
    "images": ("kind = 'vit'", "type = 'images'\nsize = 8\neval_sequences = 16"),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_from_training_to_evaluation(place, tmp_path, name):
    kind, task = KINDS[name]
    config = MODEL.replace("width = 16", "width = 16\n" + kind) + f"[task]\n{task}\n[train]\nsteps = 4\nbatch = 4\neval_every = 2\n"
    (place / f"{name}.toml").write_text(config)
    run = tmp_path / "run"
    headloom("train", f"{name}.toml", "--out", run, cwd=place)
    result = json.loads(headloom("eval", run, "--json", "--logits", tmp_path / "l.safetensors", cwd=place).stdout)
    assert result["loss"] > 0 and result["target_tokens"] > 0 and 0 <= result["accuracy"] <= 1
    shown = headloom("eval", run, cwd=place).stdout
    assert "accuracy" in shown
    # A perplexity is of tokens.
    tokens = name in ("masked", "sequence")
    assert ("perplexity" in shown) == ("perplexity" in result) == tokens
    described = json.loads(headloom("describe", f"{name}.toml", "--json", cwd=place).stdout)
    assert sum(part["parameters"] for part in described["parts"]) == described["parameters"] > 0
    safetensors = pytest.importorskip("safetensors.numpy")
    written = safetensors.load_file(tmp_path / "l.safetensors")
    logits = written["logits"]
    # All that the model was given.
    model = load(run)
    given = {key: torch.from_numpy(written[key]) for key in ("lengths", "documents", "segments", "source", "source_lengths") if key in written}
    with torch.no_grad():
        again = model(torch.from_numpy(written["images" if name == "images" else "tokens"]), **given)
    torch.testing.assert_close(again, torch.from_numpy(logits))
    assert logits.shape[0] == 4 and logits.ndim == (2 if name in ("label", "pairs", "images") else 3)
    if name != "sequence":
        assert "which writes nothing" in refused("generate", run, "--prompt", "a", cwd=place)
        return
    for option in ("--cache window:2", "--cache-dtype int8", "--piece 2"):
        message = refused("eval", run, *option.split(), cwd=place)
        assert message.startswith(f'{option}: a model of kind "encoder_decoder" reads its input at once'), message
    answer = headloom("generate", run, "--prompt", "3 1 2", "--temperature", 0, cwd=place).stdout.split()
    assert len(answer) <= 5 and all(0 <= int(token) < 8 for token in answer)
    samples = headloom("generate", run, "--prompt", "3 1 2", "--samples", 2, "--cache", "tova:9", cwd=place).stdout
    assert samples.count("--- sample") == 2
    assert "expected a source of 1 to 4" in refused("generate", run, "--prompt", "3 1 2 3 1", cwd=place)
    assert "expected a source of 1 to 4" in refused("generate", run, cwd=place)


def test_classes_of_folders_keep_their_names(tmp_path):
    """Not their places among the folders that happen to be there."""
    shades = {"black": 0, "grey": 128, "white": 255}
    for name, shade in shades.items():
        for i in range(8):
            image = tmp_path / "all" / name / f"{i}.ppm"
            image.parent.mkdir(parents=True, exist_ok=True)
            image.write_bytes(b"P6 4 4 255\n" + bytes([shade, i, 0]) * 16)
    model = MODEL.replace("width = 16", "width = 16\nkind = 'vit'")
    (tmp_path / "c.toml").write_text(
        model + "[task]\ntype = 'images'\nsize = 4\npath = 'all'\n[train]\nsteps = 200\nbatch = 8\nlr = 0.01\n"
    )
    headloom("train", "c.toml", "--out", "run", cwd=tmp_path)
    assert "labels = ['black', 'grey', 'white']" in (tmp_path / "run/config.toml").read_text()
    shutil.copytree(tmp_path / "all", tmp_path / "two")
    shutil.rmtree(tmp_path / "two/black")

    def accuracy(folder):
        settings = ("--set", f"task.path='{folder}'", "--set", "task.held_out=1")
        return json.loads(headloom("eval", "run", *settings, "--json", cwd=tmp_path).stdout)["accuracy"]

    assert accuracy("all") == accuracy("two") == 1
    (tmp_path / "two/grey").rename(tmp_path / "two/gray")
    message = "'two/gray' is a class that is not among labels = black, grey, white."
    assert message in refused("eval", "run", "--set", "task.path='two'", cwd=tmp_path)
    (tmp_path / "all/black").rename(tmp_path / "all/zero")
    message = refused("train", "run", "--resume", "--set", "train.steps=201", cwd=tmp_path)
    assert "is a class that is not among labels = black, grey, white." in message


def test_a_task_of_another_kind_is_refused(place, tmp_path):
    message = refused("train", "text.toml", "--out", tmp_path / "run", "--set", "model.kind=encoder", cwd=place)
    assert message == "'model.kind' is \"encoder\", but the task text asks for the next token, expected \"decoder\"."
    message = refused("describe", "text.toml", "--set", "model.pool=mean", cwd=place)
    assert "unknown key 'model.pool'" in message


def test_big_presets_are_described_without_being_built(tmp_path):
    presets = json.loads(headloom("list", "presets", "--json", cwd=tmp_path).stdout)["presets"]
    assert {"bert-base", "ViT-S/16", "DCViT-S/16", "gptj-6b", "transformer-base"} <= {p["name"] for p in presets}
    for name, keys, millions in [
        ("gptj-6b", "", 6050.9),
        ("bert-base", "vocabulary = 30522", 109.5),
        ("deepseek_moe-16b", "", 16375.7),
        ("pythia-12b", "", 11846.1),
        ("rwkv-14b", "", 14148.6),
        ("ViT-S/16", "", 21.97),
    ]:
        (tmp_path / "model.toml").write_text(f"[model]\npreset = '{name}'\n{keys}\n")
        length = [] if "ViT" in name else ["--length", 512]
        done = headloom("describe", "model.toml", "--json", *length, cwd=tmp_path)
        assert json.loads(done.stdout)["parameters"] / 1e6 == pytest.approx(millions, rel=2e-3), name
    # The last one has patches in place of a length.
    assert refused("describe", "model.toml", "--length", 512, cwd=tmp_path).startswith("--length: the sequence of a vit is the patches")
