"""What the tests of the command line share: the binary, small configurations and a finished run."""

import functools
import os
import pathlib
import resource
import subprocess
import time

from fork_server import ForkServer

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("HEADLOOM_BINARY", ROOT / "build" / "bin" / "headloom"))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
FORK_SERVER = ROOT / "build" / "lib" / "libheadloom_fork_server.so"

MODEL = """
[model]
width = 16
depth = 2
[[model.layer]]
mixer = { type = "mha", heads = 2 }
channel = { type = "swiglu", hidden = 16 }
"""
TEXT = MODEL + """
[task]
type = "text"
paths = ["corpus.txt"]
length = 16
eval_tokens = 256
[train]
steps = 6
batch = 4
warmup = 2
eval_every = 3
"""
LONG = MODEL.replace("depth = 2", "depth = 2\ndropout = 0.1") + """
[task]
type = "copy"
symbols = 8
count = 8
eval_sequences = 8
[train]
steps = 150
batch = 64
eval_every = 50
"""

COMPARE = """
title = "Small"
seeds = [1, 2]
[model]
width = 16
depth = 2
[[model.layer]]
mixer = { heads = 2 }
channel = { type = "swiglu", hidden = 40 }
[train]
steps = 3
batch = 4
eval_every = 3
[[models]]
name = "mha"
[[models]]
name = "talking"
mixer = { type = "talking_heads" }
[[tasks]]
name = "copy"
task = { type = "copy", symbols = 8, count = 4, eval_sequences = 8 }
"""


@functools.cache
def fork_server(address_space=None):
    server = ForkServer(FORK_SERVER, BINARY, ENVIRONMENT)
    if address_space:  # forks inherit it
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (address_space, address_space))
    return server


def run(*arguments, cwd=None, input=None, timeout=120, address_space=None, **options):
    """Runs the command line to its end; the texts that it wrote are decoded. Other options are subprocess.run's.

    It can have so many bytes of address space, whatever the machine has.
    """
    arguments = [str(argument) for argument in arguments]
    if FORK_SERVER.exists() and not options:
        done = fork_server(address_space).run(arguments, cwd, input, timeout)
    else:
        if address_space:
            options["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
        how = {"env": ENVIRONMENT, **options}
        done = subprocess.run([str(BINARY), *arguments], cwd=cwd, input=input, timeout=timeout, capture_output=True, **how)
    done.stdout, done.stderr = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    return done


def headloom(*arguments, code=0, **options):
    """Runs the command line, which must end with this exit code."""
    done = run(*arguments, **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def refused(*arguments, cwd, code=2, **options):
    """The one line a failed command ends with."""
    done = headloom(*arguments, cwd=cwd, code=code, **options)
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("headloom: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.rstrip().endswith(lines[0]), done.stderr
    return lines[0].removeprefix("headloom: ")


def wait_for(condition, process=None, seconds=60):
    """Until this holds, while the process runs; one for which it does not is killed."""
    end = time.monotonic() + seconds
    while not condition():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > end:
            if process is not None:
                process.kill()
                process.wait()
            raise AssertionError("the process has ended" if ended else f"nothing for {seconds} seconds")
        time.sleep(0.005)


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def weights(run, step):
    return (run / "checkpoints" / f"step-{step}" / "model.safetensors").read_bytes()


def make_place(folder):
    """Fills a folder with a corpus, its configuration and a finished run of it."""
    (folder / "corpus.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    (folder / "text.toml").write_text(TEXT)
    (folder / "long.toml").write_text(LONG)
    done = headloom("train", "text.toml", cwd=folder)
    assert "held-out loss" in done.stdout and "parameters" in done.stderr
    return folder
