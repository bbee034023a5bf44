"""The documentation's examples run as they stand, its generated page is current, and pages name what the code has."""

import contextlib
import io
import pathlib
import re

import headloom
import pytest
import torch
import cli_support

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "python.md"
needs_binary = pytest.mark.skipif(not cli_support.BINARY.exists(), reason=f"{cli_support.BINARY} is not built")


def headloom_prints(*arguments):
    return cli_support.headloom(*arguments, cwd=ROOT).stdout


def test_examples(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)  # the page loads runs/text
    torch.manual_seed(0)
    headloom.model(width=16, depth=1, tokenizer="bytes", max_length=64).save("runs/text")
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(examples) >= 6
    names = {}
    for example in examples:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(example, names)
    assert names["loss"] < 2  # from log(256) = 5.5
    assert headloom.load("runs/mine").generate("the loom", 4, temperature=0) == "the loom and"
    assert names["theirs"](torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 64)


@needs_binary
def test_reference_page_is_what_list_prints():
    begin = "<!-- made by: build/bin/headloom list --markdown -->\n"
    page = (ROOT / "docs" / "reference.md").read_text()
    assert begin in page
    assert page.split(begin)[1].strip() == headloom_prints("list", "--markdown").strip(), (
        "docs/reference.md is out of date: replace what follows its marker by the output of headloom list --markdown"
    )


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@needs_binary
def test_configuration_of_readme_runs(tmp_path):
    (config,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "config.toml").write_text(config)
    corpus = tmp_path / "my" / "texts"
    corpus.mkdir(parents=True)
    (corpus / "a.txt").write_text("what the weaver knows " * 400)
    run = tmp_path / "run"
    small = [f"--set={key}" for key in ("train.steps=2", "train.batch=2", "task.length=32", "model.max_length=32")]
    cli_support.headloom("train", "config.toml", "--out", run, *small, cwd=tmp_path)


# Options that together bring out all parameters of a mixer; each with the page that names them.
NORMED = {"heads": 4, "qk_norm": True}
PARTS = {
    "mha": ("mha", [NORMED]),
    "talking_heads": ("talking_heads", [{**NORMED, "pre": True, "post": True}]),
    "dcmha": ("dcmha", [{**NORMED, "static": "add"}, {**NORMED, "static": "add", "groups": 2}]),
    "differential": ("differential", [NORMED]),
    "multi_token": (
        "multi_token",
        [
            {**NORMED, "conv_layers": "all", "pre_conv": True, "post_conv": True, "pre_mix": mix, "gate": gate, "conv_heads": c}
            for mix, gate, c in [("all", "full", 1), ("groups", "head", 2)]
        ],
    ),
    "retention": ("retention", [{"heads": 4}]),
    "rwkv": ("rwkv", [{}]),
    "rwkv_channel": ("rwkv", [{}]),
    "fnet": ("fnet", [{}]),
    "linformer": ("linformer", [{"heads": 4, "sharing": sharing} for sharing in ("none", "headwise")]),
    "shaped": ("simplified", [{"heads": 4}]),
    "aft": ("aft", [{"form": "local"}, {"form": "full"}, {"form": "full", "factor": 3}]),
    "mamba": ("mamba", [{}]),
    "gla": ("gla", [{}]),
    "performer": ("performer", [{"heads": 4}]),
    "synthesizer": (
        "synthesizer",
        [{"heads": 4, "scores": ["dense", "random", "factorized_dense", "factorized_random", "dot_product"]}],
    ),
    "moe": ("moe", [{"routed": 4, "active": 2, "shared": 1, "bias_speed": 0.1}]),
    "mlp": (None, [{}]),
    "swiglu": (None, [{"gate_groups": 4}]),
}


def build(name, options):
    if name in headloom.channel_mixers():
        return headloom.channel_mixer(name, 32, **options)
    return headloom.mixer(name, 32, causal=name not in ("fnet", "linformer"), **options)


def documented(page):
    """The names of a page's table, each with the numbers of dimensions of the shapes beside it."""
    section = (DOCS / "mechanisms" / f"{page}.md").read_text().partition("## Parameters")[2].partition("\n## ")[0]
    found = {}
    for names, shapes in re.findall(r"^\| (`[^|]*) \| ([^|]*\[[^|]*) \|", section, re.M):
        for name in re.findall(r"`([^`]+)`", names):
            found[name] = {shape.count(",") + 1 for shape in re.findall(r"\[([^\]]+)\]", shapes)}
    return found


def test_every_mixer_is_documented():
    assert set(PARTS) == {*headloom.mixers(), *headloom.channel_mixers()}


@pytest.mark.parametrize("page", sorted({page for page, _ in PARTS.values() if page}))
def test_pages_name_the_parameters(page):
    found = {}
    for name, (where, variants) in PARTS.items():
        for options in variants if where == page else []:
            for key, value in build(name, options).state_dict().items():
                found.setdefault(key, set()).add(value.dim())
    named = documented(page)
    assert set(named) == set(found)
    assert {name: named[name] & dims for name, dims in found.items()} == found
