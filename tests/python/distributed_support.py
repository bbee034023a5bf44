"""What the tests of several processes share: small configurations, and ways to start the processes."""

import contextlib
import functools
import os
import pathlib
import random
import socket
import subprocess
import sys

from cli_support import BINARY, ENVIRONMENT, headloom, run


def model(mixer, channel='{ type = "swiglu", hidden = 16 }', extra="", block='{ type = "sequential" }'):
    return f"""
[model]
width = 16
depth = 2
{extra}
[[model.layer]]
block = {block}
mixer = {mixer}
channel = {channel}
"""


@functools.cache
def has_gloo():
    """Whether the program can train on several processes at all."""
    done = run("train", "none.toml", "--processes", 2)
    return "built without" not in done.stderr


def train_together(folder, config, out, processes, *options, **how):
    return headloom("train", config, "--out", out, "--processes", processes, *options, cwd=folder, **how)


def free_port():
    """A port that no outgoing connection takes before it is opened: those have 32768 and above."""
    while True:
        port = random.randrange(10000, 20000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


# How launchers tell a process its place. The last three leave it open where the processes meet.
LAUNCHERS = {
    "torchrun": lambda rank, size, port: {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port
    },
    "Open MPI": lambda rank, size, port: {
        "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_SIZE": size, "PMIX_NAMESPACE": f"job{port}"
    },
    "MPICH": lambda rank, size, port: {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALNRANKS": size},
    "Slurm": lambda rank, size, port: {
        "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size, "SLURM_JOB_ID": port, "SLURM_STEP_NODELIST": "localhost"
    },
}  # fmt: skip


def start_rank(launcher, rank, size, port, arguments, cwd, command=(str(BINARY),), **environment):
    """One process as a launcher would start it."""
    variables = {name: str(value) for name, value in {**LAUNCHERS[launcher](rank, size, port), **environment}.items()}
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=cwd,
        env={**ENVIRONMENT, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said_by_ranks(script, *arguments):
    """What two ranks of a Python script write, both of which must succeed."""
    port, command = free_port(), (sys.executable, script)
    path = os.pathsep.join(sys.path)
    processes = [start_rank("torchrun", rank, 2, port, arguments, None, command, PYTHONPATH=path) for rank in range(2)]
    said = ["".join(process.communicate(timeout=120)) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return said


def finish(processes, seconds=60):
    """Exit codes, and the sentences that all of them wrote."""
    codes, said = [], []
    for process in processes:
        _, err = process.communicate(timeout=seconds)
        assert "frame #" not in err, err
        codes.append(process.returncode)
        said += [line.removeprefix("headloom: ") for line in err.splitlines() if line.startswith("headloom: ")]
    return codes, said


def torchrun_command(number, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(number), "--master-port", str(free_port())]
    return [*command, *options, "--no-python", str(BINARY)]


def torchrun(folder, number, *arguments):
    command = [*torchrun_command(number), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


def ranks_of(parent):
    """The process numbers of the ranks that a launcher has started, in their order."""
    found = {}
    for child in pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        variables = pathlib.Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found[next(int(v[5:]) for v in variables if v.startswith(b"RANK="))] = int(child)
    return [found[rank] for rank in sorted(found)]
