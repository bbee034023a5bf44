"""What ./run and ./test set up is recognised the next time."""

import os
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
