"""Several processes train one model, and something goes wrong: one sentence from one of them, and nothing is lost."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from cli_support import BINARY, ENVIRONMENT, TEXT, files, headloom, refused, wait_for, weights
from distributed_support import finish, free_port, has_gloo, model, ranks_of, start_rank, torchrun_command, train_together
from torch.distributed import PrefixStore, TCPStore

pytestmark = [
    pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built"),
    pytest.mark.skipif(BINARY.exists() and not has_gloo(), reason="this Headloom was built without gloo"),
]
HOST = socket.gethostname()
TASK = """
[task]
type = "copy"
symbols = 8
count = 6
eval_sequences = 4
[train]
steps = 240
batch = 4
warmup = 4
eval_every = 120
checkpoint_every = 40
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failures")
    (folder / "x.toml").write_text(model('{ type = "mha", heads = 2 }', extra="dropout = 0.1") + TASK)
    return folder


def sentences(text):
    assert "frame #" not in text, text
    return [line.removeprefix("headloom: ") for line in text.splitlines() if line.startswith("headloom: ")]


@pytest.fixture(scope="module")
def accidents(place):
    """Trainings that something happens to after their first checkpoint, side by side because most of the time they wait.

    Of each the numbers of its processes, its exit code, what it said and how long it went on after the accident. Those of torchrun, which
    takes long to start, come first.
    """
    ours, processes, torchrun = [str(BINARY)], "--processes 2", "--resume --timeout 60"
    agent = torchrun_command(1, "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--max-restarts", "3")
    agent[agent.index("--master-port") : agent.index("--master-port") + 2] = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    signals = {
        "agents": (agent, torchrun, 0, signal.SIGKILL),
        "restarted": (torchrun_command(2, "--max-restarts", "2"), torchrun, 1, signal.SIGKILL),
        "killed-0": (ours, processes, 0, signal.SIGKILL),
        "killed-1": (ours, processes, 1, signal.SIGKILL),
        "hangs": (ours, f"{processes} --timeout 2", 1, signal.SIGSTOP),
        "interrupted": (ours, processes, None, signal.SIGINT),
    }
    train_together(place, "x.toml", "whole", 2)
    running, found = {}, {}
    with contextlib.ExitStack() as left:
        # The first of two agents; the second is one of those above.
        first = [*agent, "train", "x.toml", "--out", "agents", *torchrun.split()]
        said_first = left.enter_context(open(place / "first-agent", "w+"))
        other = subprocess.Popen(first, cwd=place, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=said_first)
        left.callback(other.kill)
        for name, (command, options, rank, number) in signals.items():
            process, ranks = started(place, name, *options.split(), command=command)
            left.callback(process.kill)
            os.kill(process.pid if rank is None else ranks[rank], number)
            running[name] = process, ranks, time.time()
        while running:
            for name, (process, ranks, began) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                text = process.stderr.read()
                seconds, said = time.time() - began, sentences(text)
                if name == "agents":
                    assert other.wait(timeout=60) == 0
                    text += (place / "first-agent").read_text()
                found[f"first steps of {name}"] = [int(step) for step in re.findall(r" parameters, step (\d+) of ", text)]
                assert not any(pathlib.Path(f"/proc/{rank}").exists() for rank in ranks)
                found[name] = ranks, process.returncode, said, seconds
            time.sleep(0.05)
    return found


def saved(run):
    """Whether there is a checkpoint. The first one is soon removed: the two newest and the best are kept."""
    return any(run.glob("checkpoints/step-*"))


def started(place, out, *arguments, command):
    """A training that has saved its first checkpoint, and the numbers of its processes."""
    process = subprocess.Popen(
        [*command, "train", "x.toml", "--out", out, *map(str, arguments)],
        cwd=place, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: saved(place / out), process)
    assert process.poll() is None, process.communicate()
    return process, ranks_of(process.pid)


# docs/distributed.md promises 10 seconds, and 10 more than --timeout where a process hangs. A busy machine takes longer.
SLACK = 15


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_is_killed(accidents, victim):
    ranks, code, said, seconds = accidents[f"killed-{victim}"]
    assert (code, said) == (1, [
        f"rank {victim} on host {HOST} (process {ranks[victim]}) was killed by signal 9; all ranks end. "
        "Go on from the last checkpoint with --resume."
    ])  # fmt: skip
    assert seconds < 10 + SLACK


def test_a_process_hangs(accidents):
    ranks, code, said, seconds = accidents["hangs"]
    assert code == 1 and len(said) == 1, said
    assert said[0].startswith(f"rank 1 on host {HOST} (process {ranks[1]}) no longer answers: it was killed, or it hangs."), said
    assert seconds < 12 + SLACK


def test_torchrun_goes_on_after_a_process_was_killed(place, accidents):
    ranks, code, said, _ = accidents["restarted"]
    assert code == 0
    assert all(f"rank 1 on host {HOST} (process {ranks[1]})" in sentence for sentence in said), said  # or torchrun ends rank 0 first
    first, again = accidents["first steps of restarted"]
    assert first == 0 < again < 240
    assert weights(place / "restarted", 240) == weights(place / "whole", 240)


def test_interrupted_processes_save(place, accidents):
    _, code, said, seconds = accidents["interrupted"]
    assert code == 1 and len(said) == 1 and said[0].startswith("interrupted; step "), said
    assert said[0].endswith(f" Go on with: {BINARY} train interrupted --resume --processes 2"), said
    assert (place / f"interrupted/checkpoints/step-{said[0].split()[2]}").exists()
    assert seconds < 10 + SLACK


@pytest.mark.parametrize("works", [True, False])
def test_slurm_announces_the_end_of_a_job(place, works):
    """Slurm's own command is played by a script, as there is no Slurm here."""
    port, out, tools = free_port(), f"announced-{works}", place / f"tools-{works}"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tools}/asked\nexit {0 if works else 1}\n')
    (tools / "scontrol").chmod(0o755)
    arguments = ["train", "x.toml", "--out", out, "--set", "train.steps=100000"]
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    two = [start_rank("Slurm", rank, 2, port, arguments, place, **path) for rank in range(2)]
    while not saved(place / out) and two[0].poll() is None:
        time.sleep(0.01)
    for process in two:
        process.send_signal(signal.SIGUSR1)
    codes, said = finish(two)
    assert codes == [1, 1] and said[0].startswith("interrupted; step "), said
    assert (place / out / f"checkpoints/step-{said[0].split()[2]}").exists()
    failed = [f"'scontrol requeue {port}' failed; submit the job again to go on."]
    assert said[1:] == [f"requeuing the job: scontrol requeue {port}"] + ([] if works else failed)
    assert (tools / "asked").read_text() == f"requeue {port}\n"


def test_without_slurm_sigusr1_interrupts(place):
    process, _ = started(place, "announced", "--processes", 2, "--set", "train.steps=100000", command=[str(BINARY)])
    process.send_signal(signal.SIGUSR1)
    said = sentences(process.communicate(timeout=60)[1])
    assert process.returncode == 1 and len(said) == 1 and said[0].startswith("interrupted; step "), said


def test_the_process_is_gone_where_the_others_meet(place):
    """Rank 0, of those that were not started by torchrun, or our own launcher: each of those that are left says so."""
    port = free_port()
    arguments = ["train", "x.toml", "--out", "met", "--set", "train.steps=100000"]
    two = [start_rank("MPICH", rank, 2, port, arguments, place) for rank in range(2)]
    process, ranks = started(place, "orphans", "--processes", 2, "--set", "train.steps=100000", command=[str(BINARY)])
    while not saved(place / "met") and two[0].poll() is None:
        time.sleep(0.01)
    began = time.time()
    process.kill()
    two[0].kill()
    codes, said = finish(two)
    after = ", which was killed or has ended; go on from the last checkpoint with --resume."
    assert (codes, said) == ([-9, 1], [f"rank 1 on host {HOST} has lost rank 0{after}"])
    said = sentences(process.communicate(timeout=60)[1])  # ends with the last rank
    assert sorted(said) == [f"rank {rank} on host {HOST} has lost the launcher{after}" for rank in range(2)]
    assert time.time() - began < 10 + SLACK


@pytest.mark.parametrize("accident", [signal.SIGKILL, signal.SIGSTOP])
def test_the_process_is_gone_while_it_writes_its_part(place, accident):
    """Of two, so that nobody else waits for it: rank 0 needs its file for the checkpoint."""
    port, out = free_port(), f"writes-{accident}"
    arguments = ["train", "x.toml", "--out", out, "--timeout", 2, "--set", 'train.shard="optimizer"', "--set", "train.steps=1"]
    large = ["--set", "model.width=768", "--set", "train.batch=2", "--set", "train.eval_sequences=1"]
    two = [start_rank("torchrun", rank, 2, port, [*arguments, *large], place) for rank in range(2)]
    while not any((place / out).glob("checkpoints/*")) and two[0].poll() is None:
        time.sleep(0.001)
    began = time.time()
    os.kill(two[1].pid, accident)
    code = two[0].wait(timeout=60)
    assert time.time() - began < 12 + SLACK
    two[1].kill()
    _, said = finish(two)
    assert code == 1 and len(said) == 1, said
    assert said[0].startswith(f"rank 0 on host {HOST} has lost rank 1") or " no longer answers" in said[0], said


@pytest.mark.parametrize("steps", [40, 240])
def test_the_disk_of_one_process_is_full(place, steps):
    """At the end of the training, where rank 0 waits for the others' parts, and amid it."""
    port, out = free_port(), f"full-{steps}"
    arguments = ["train", "x.toml", "--out", out, "--set", 'train.shard="optimizer"', "--set", f"train.steps={steps}"]
    little = ["sh", "-c", "trap '' XFSZ; ulimit -f 1; exec \"$@\"", "sh", str(BINARY)]
    began = time.time()
    codes, said = finish([start_rank("torchrun", r, 2, port, arguments, place, **({"command": little} if r else {})) for r in range(2)])
    assert 0 not in codes and len(said) == 1, said
    assert said[0].startswith(f"rank 1 on host {HOST}: the checkpoint of step 40 could not be saved: "), said
    assert "File too large" in said[0] and said[0].endswith(" There is no earlier checkpoint."), said
    assert time.time() - began < 10 + SLACK


def both(place, first, second, launcher="torchrun", **environments):
    """What two processes say that are started with different arguments or environments."""
    port = free_port()
    processes = [
        start_rank(launcher, rank, 2, port, ["train", *given], place, **environments.get(f"rank{rank}", {}))
        for rank, given in enumerate([first, second])
    ]
    codes, said = finish(processes)
    assert 0 not in codes
    assert len(said) == 1, said
    return said[0]


def test_processes_that_differ(place):
    x = ["x.toml", "--out", "differ"]
    assert "the configuration" in both(place, x, [*x, "--set", "train.lr=0.5"])
    said = both(place, x, x, rank1={"OMP_NUM_THREADS": "2"})
    assert said == (
        f"rank 1 on host {HOST} has the number of threads 2, but rank 0 on host {HOST} has 1; set OMP_NUM_THREADS alike."
    )
    said = both(place, x, x, rank1={"HEADLOOM_PRODUCTS": "aten"})
    assert f'rank 1 on host {HOST} has the variable HEADLOOM_PRODUCTS as "aten", but rank 0' in said
    assert not (place / "differ").exists()


def test_processes_that_share_out_the_layers_take_the_same_products(tmp_path):
    """What both compute has to be the same bit for bit, though one knows another route to be the fastest."""
    (tmp_path / "text.txt").write_text("heads of a layer read words " * 200)
    task = '[task]\ntype = "text"\npaths = ["text.txt"]\nlength = 64\n'
    train = "[train]\nsteps = 20\nbatch = 8\nwarmup = 2\neval_sequences = 2\n"
    wide = model('{ type = "mha", heads = 2 }').replace("width = 16", "width = 64")
    (tmp_path / "x.toml").write_text(wide + task + train)
    measures = {"HEADLOOM_PRODUCTS": "", "XDG_CACHE_HOME": str(tmp_path / "0")}
    headloom("train", "x.toml", "--out", "alone", "--set", "train.steps=1", cwd=tmp_path, env={**ENVIRONMENT, **measures})
    (known,) = (tmp_path / "0/headloom").glob("products-*")
    machine, *routes = known.read_text().splitlines()
    assert routes
    for rank, route in enumerate(["blocked", "aten"]):
        file = tmp_path / f"{rank}/headloom" / known.name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([machine, *(f"{route} {line.split(' ', 1)[1]}" for line in routes), ""]))
    port, together = free_port(), ["train", "x.toml", "--out", "together", "--set", "train.tensor_parallel=2"]
    two = [
        start_rank("torchrun", rank, 2, port, together, tmp_path, **{**measures, "XDG_CACHE_HOME": tmp_path / str(rank)})
        for rank in range(2)
    ]
    assert finish(two)[0] == [0, 0]
    state = json.loads((tmp_path / "together/checkpoints/step-20/state.json").read_text())
    assert file.read_text().count("aten ") == len(routes) and file.read_text().count("\n") == 1 + len(routes)  # nothing was timed
    assert state["product_routes_of_ranks"] == [state["product_routes"]] and set(state["product_routes"].values()) == {"blocked"}


def test_processes_that_share_out_the_layers_have_the_same_instructions(place):
    arguments = ["train", "x.toml", "--out", "unlike", "--set", "train.tensor_parallel=2"]
    port, least = free_port(), {"ATEN_CPU_CAPABILITY": "default"}
    codes, said = finish([start_rank("torchrun", rank, 2, port, arguments, place, **(least if rank else {})) for rank in range(2)])
    assert 0 not in codes and len(said) == 1, said
    assert "'train.tensor_parallel' is 2, and of its processes the first has " in said[0]
    assert said[0].endswith(" and number 2 has DEFAULT, expected the same instruction set."), said
    assert not (place / "unlike").exists()


def test_agents_of_torchrun_count_their_restarts_each_for_itself(place, accidents):
    """Of two agents, as on two machines, the one whose rank was killed counts a restart and the other does not."""
    _, code, said, _ = accidents["agents"]
    assert code == 0 and not any("has not come" in sentence for sentence in said), said
    steps = accidents["first steps of agents"]
    assert len(steps) == 2 and min(steps) == 0 and max(steps) >= 40, steps
    assert weights(place / "agents", 240) == weights(place / "whole", 240)


@pytest.mark.parametrize("line, what", [(4, "Headloom"), (5, "PyTorch")])
def test_processes_of_other_versions(place, line, what):
    """This process plays rank 1 in the store where they meet, with another version."""
    port = free_port()
    process = start_rank("torchrun", 0, 2, port, ["train", "x.toml", "--out", "versions"], place)
    store = PrefixStore("headloom", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    greeting = store.get("greeting/0").decode().split("\n")
    ours, greeting[line] = greeting[line], "0.0.9"
    store.set("greeting/1", "\n".join(greeting))
    store.set("left/1", "1")  # rank 0 serves the store, and waits for the others before it ends
    assert finish([process]) == ([2], [
        f"rank 1 on host {HOST} has {what} 0.0.9, but rank 0 on host {HOST} has {ours}; install the same one everywhere."
    ])  # fmt: skip
    assert not (place / "versions").exists()


def test_processes_with_other_data(tmp_path):
    places = [tmp_path / "first", tmp_path / "second"]
    for folder, words in zip(places, ["the quick brown fox ", "a lazy dog jumps "], strict=True):
        folder.mkdir()
        (folder / "corpus.txt").write_text(words * 100)
        (folder / "text.toml").write_text(TEXT)
    port = free_port()
    arguments = ["train", "text.toml", "--out", tmp_path / "run"]
    codes, said = finish([start_rank("torchrun", rank, 2, port, arguments, places[rank]) for rank in range(2)])
    assert 0 not in codes and len(said) == 1, said
    assert said[0].startswith(f"rank 1 on host {HOST}: the data are not those of rank 0"), said
    assert not (tmp_path / "run/checkpoints").exists()


def test_wrong_requests(place):
    def refuse(*arguments):
        return refused("train", "x.toml", "--out", "refused", *arguments, cwd=place)

    assert refuse("--processes", 3).endswith(
        "'train.batch' is 4, which 3 processes cannot share equally, expected a multiple of 3."
    )
    assert "expected one of lo" in refuse("--processes", 2, "--interface", "none0")
    for option in (["--interface", "lo"], ["--timeout", "7"]):
        assert refuse(*option) == f"{option[0]} is for several processes, but one trains: leave it out, or say how many with --processes."
    assert "'train.lrr'" in refuse("--processes", 2, "--set", "train.lrr=1")
    assert "'train.device' is \"cuda\"" in refuse("--processes", 2, "--set", 'train.device="cuda"')
    # --device stands in place of the configuration's for every process.
    steps = ["--set", "train.steps=1", "--set", 'train.device="cuda"', "--device", "cpu"]
    train_together(place, "x.toml", "on-the-cpu", 2, *steps)
    assert not (place / "refused").exists()


def test_wrong_variables(place):
    host, two = f"rank 0 on host {HOST}", ["--processes", "2"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wanted = [
            (two, {}, "--processes 2: torchrun has started 2 processes already"),
            ([], {"RANK": 2}, 'the variable RANK is "2", expected a whole number from 0 to 1.'),
            ([], {"WORLD_SIZE": "two"}, 'the variable WORLD_SIZE is "two", expected a whole number from 1 to '),
            (
                [],
                {"MASTER_ADDR": "no.such.host.invalid"},
                f'{host}: MASTER_ADDR, where the ranks meet, is "no.such.host.invalid", which is no',
            ),
            ([], {}, "rank 1 has not come within 1 seconds; are all ranks started?"),
            ([], {"RANK": 1}, f"rank 1 on host {HOST}: nobody answers at 127.0.0.1, port "),
            ([], {"MASTER_PORT": port}, f"{host}: the port {port} is in use; choose another one with MASTER_PORT for all ranks."),
        ]
        common = ["train", "x.toml", "--out", "refused", "--timeout", "1"]
        processes = [start_rank("torchrun", 0, 2, free_port(), common + more, place, **variables) for more, variables, _ in wanted]
        for process, (_, _, sentence) in zip(processes, wanted, strict=True):
            (code,), said = finish([process])
            waits = [f'{host} waits until "no.such.host.invalid" is a known host (MASTER_ADDR)'] if "invalid" in sentence else []
            assert code != 0 and said[:-1] == waits and said[-1].startswith(sentence), said
    assert not (place / "refused").exists()


def test_two_jobs_on_one_folder(place):
    process, ranks = started(place, "shared", "--processes", 2, command=[str(BINARY)])
    said = refused("train", "x.toml", "--out", "shared", "--resume", "--processes", 2, cwd=place, code=1)
    assert f"shared is in use by process {ranks[0]} on host {HOST}" in said
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 1
    before = files(place / "shared")
    assert "already holds a run at step" in refused("train", "x.toml", "--out", "shared", "--processes", 2, cwd=place)
    assert files(place / "shared") == before
