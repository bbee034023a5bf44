"""What the tests of several processes share: small configurations, and ways to start the processes."""

import contextlib
import functools
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile

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


# Ranks are forks of a process that has imported the script, because importing torch takes longer than what most ranks do.
RANKS = """
import importlib, os, sys, traceback
script, port, folder, ranks, *arguments = sys.argv[1:]
module = importlib.import_module(script)
module.torch.set_num_threads(1)
for rank in range(int(ranks)):
    if os.fork() == 0:
        said = os.open(f"{folder}/rank-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1), os.dup2(said, 2)
        os.environ.update(RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        code = 1
        try:
            module.as_rank(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)  # gloo's threads and the interpreter's end do not go together
for _ in range(int(ranks)):
    if os.wait()[1] != 0:
        sys.exit("a rank has failed")
"""


def said_by_ranks(script, *arguments, ranks=2):
    """What the ranks write that call as_rank(*arguments) of a script. All of them must succeed."""
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(pathlib.Path(script).parent), *sys.path])}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", RANKS, pathlib.Path(script).stem, str(free_port()), folder, str(ranks), *map(str, arguments)]
        with open(f"{folder}/start", "w") as start:
            process = subprocess.Popen(command, env=environment, stdout=start, stderr=start, start_new_session=True)
        try:
            code = process.wait(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a rank that waits for one that has failed
        said = [path.read_text() for path in sorted(pathlib.Path(folder).iterdir())]
    assert code == 0, "\n".join(said)
    return said[:ranks]


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
