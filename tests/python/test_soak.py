"""The campaigns of tools/soak, a few cases each, so that the script stays whole."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("HEADLOOM_BINARY", ROOT / "build" / "bin" / "headloom"))
pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")
CAMPAIGNS = ["kills", "ranks", "files", "data", "requests", "locks", "memory"]


def soak(*arguments):
    done = subprocess.run([sys.executable, str(ROOT / "tools/soaking"), *arguments], capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout, done.stderr


def test_a_few_cases_of_every_campaign(tmp_path):
    code, out, err = soak("--minutes", "0.1", "--seed", "1", "--keep", str(tmp_path))
    assert code == 0, out + err
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*CAMPAIGNS, "soak"], out
    found = re.fullmatch(r"soak: (\d+) cases, 0 failures, seed 1, \d+\.\d minutes", lines[-1])
    assert found and int(found[1]) >= len(CAMPAIGNS), lines[-1]


def test_a_failure_is_told_kept_and_repeated(tmp_path, monkeypatch):
    """A program that always dies is noticed."""
    program = tmp_path / "headloom"
    program.write_text("#!/bin/sh\necho 'std::bad_alloc' >&2\nkill -SEGV $$\n")
    program.chmod(0o755)
    monkeypatch.setenv("HEADLOOM_BINARY", str(program))
    code, out, err = soak("--minutes", "0.01", "--seed", "7", "--only", "memory", "--keep", str(tmp_path / "kept"))
    assert code == 1 and "soak: 0 cases, 1 failures, seed 7" in out, out + err
    assert "FAILED memory:" in out and "again: tools/soak --seed 7 --only memory" in out
    assert (tmp_path / "kept/seed-7-memory/train.toml").exists()
