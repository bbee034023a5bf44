"""The example that trains on two processes."""

import os
import pathlib
import re
import subprocess
import sys

import headloom
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "ddp_dcmha.py"
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def started(folder, *launch):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, *launch, str(EXAMPLE), "--steps", "8", "--length", "48", "--save", str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def said(process):
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    return out


def losses(output):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def test_two_processes_learn_what_one_does(tmp_path):
    processes = [started(tmp_path / "two", *LAUNCH), started(tmp_path / "one")]
    try:
        two, one = map(said, processes)
    finally:
        for process in processes:
            process.kill()
    assert "the 2 replicas are equal" in two
    assert losses(two)[-1] < losses(two)[0] - 1
    torch.testing.assert_close(losses(two), losses(one), atol=1e-3, rtol=0)
    ours, theirs = (headloom.load(tmp_path / name).state_dict() for name in ("two", "one"))
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-3, rtol=0)
