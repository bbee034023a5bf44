"""The documentation's examples run as they stand, and its generated page is current."""

import contextlib
import io
import os
import pathlib
import re
import subprocess

import headloom
import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python.md"
BINARY = pathlib.Path(os.environ.get("HEADLOOM_BINARY", ROOT / "build" / "bin" / "headloom"))
needs_binary = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")


def headloom_prints(*arguments):
    return subprocess.run([str(BINARY), *map(str, arguments)], capture_output=True, text=True, check=True, cwd=ROOT).stdout


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


@needs_binary
def test_configuration_of_readme_runs(tmp_path):
    (config,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "config.toml").write_text(config)
    corpus = tmp_path / "my" / "texts"
    corpus.mkdir(parents=True)
    (corpus / "a.txt").write_text("what the weaver knows " * 400)
    run = tmp_path / "run"
    small = [f"--set={key}" for key in ("train.steps=2", "train.batch=2", "task.length=32", "model.max_length=32")]
    done = subprocess.run(
        [str(BINARY), "train", "config.toml", "--out", str(run), *small], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
