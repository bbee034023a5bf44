"""What ./run and ./test set up is recognised the next time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def folder(interpreter, *extra):
    script = 'source tools/setup.sh; python_requirements+=("${@:2}"); torch_folder "$1" all'
    done = subprocess.run(["bash", "-c", script, "bash", interpreter, *extra], cwd=ROOT,
                          capture_output=True, text=True)
    return done.stdout.strip()


def test_an_interpreter_that_has_everything_is_taken_as_it_is():
    assert folder(sys.executable) == os.path.dirname(torch.__file__)


def test_an_interpreter_that_lacks_a_package_is_not():
    assert folder(sys.executable, "no-such-package") == ""


def test_run_can_only_build(tmp_path):
    shutil.copy(ROOT / "run", tmp_path / "run")
    for name in ["tools", "configs"]:
        (tmp_path / name).mkdir()
    (tmp_path / "configs/quickstart.toml").write_text("")
    (tmp_path / "tools/setup.sh").write_text('set_up() { echo set up; }\nbuild() { echo "build $*"; }\n')

    def run(*arguments):
        return subprocess.run([tmp_path / "run", *arguments], cwd="/", capture_output=True, text=True)

    assert (run("--build").returncode, run("--build").stdout) == (0, "set up\nbuild headloom\n")
    for more in [("--json",), ("--text", "/"), (tmp_path / "configs/quickstart.toml",)]:
        done = run("--build", *more)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("--build compares nothing, so nothing else goes with it.")
