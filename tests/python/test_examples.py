"""The programs of examples/ that look at trained runs."""

import os
import pathlib
import runpy
import subprocess
import sys

import pytest
from cli_support import BINARY, ENVIRONMENT, headloom

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUN = """
task = { type = "find_block", blocks = 8, block_letters = 5, query_letters = 2, eval_sequences = 8 }
model = { width = 16, depth = 1 }
train = { steps = 2, batch = 2, eval_every = 2 }
"""


def call(name, monkeypatch, *arguments):
    """Runs the program in this process, which has imported torch."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", ["cache_budgets", "find_block_errors"])
def test_without_runs_they_say_how_they_are_called(name, monkeypatch):
    with pytest.raises(SystemExit) as caught:
        call(name, monkeypatch)
    assert f"python examples/{name}.py runs/" in caught.value.code  # is written to standard error


@pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")
def test_errors_of_find_block(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.toml").write_text(RUN)
    headloom("train", "config.toml", "--out", "run", cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    call("find_block_errors", monkeypatch, "run")
    said = capsys.readouterr().out.splitlines()
    shares = [float(line.split("%")[0]) for line in said if " of " in line and "%" in line[:8]]
    # Untrained, it fails everywhere; every part of the sequences is counted.
    assert min(shares) > 99 and "100.0% of   3000  all sequences" in said
    assert sum(int(line.split()[2]) for line in said if "other blocks" in line) == 3000


@pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")
def test_cache_budgets(tmp_path):
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "config.toml").write_text(
        """
        task = { type = "text", paths = ["text"], length = 128, eval_tokens = 256 }
        model = { width = 16, depth = 1 }
        train = { steps = 2, batch = 2, eval_every = 2 }
        """
    )
    headloom("train", "config.toml", "--out", "run", cwd=tmp_path)
    headloom("train", "config.toml", "--out", "other", "--set", "train.steps=30", "--set", "train.lr=0.05", cwd=tmp_path)
    environment = {**ENVIRONMENT, "PATH": f"{BINARY.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, str(ROOT / "examples" / "cache_budgets.py"), "run", "other"]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0].startswith("2 models, sequences of 128 tokens.")
    # A row for each share and policy.
    assert [line.split()[1] for line in said[1:4]] == ["tova:64", "window:64", "sinks:64"] and len(said) == 13
    grown = []
    for line in said[1:]:
        mean, least, most = (float(number) for number in line.split("grows by ")[1].translate(str.maketrans("(to)", "    ")).split())
        assert abs(mean - (least + most) / 2) < 2e-4
        grown.append(most - least)
    assert max(grown) > 0
