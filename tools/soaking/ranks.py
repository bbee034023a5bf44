"""Kills or stops one of several processes that train one model, at any moment, and lets the training go on."""

import os
import pathlib
import shutil
import signal
import sys
import time

from program import BINARY, Broken, expect, fault, finish, start
from training import last_checkpoint, same_end, train_config

DOC = "SIGKILL or SIGSTOP to one of two or three processes of a training, which torchrun or --resume takes up again"
SHARE = 3
TIMEOUT = 2  # seconds that a process waits for one that hangs
# What docs/distributed.md promises, and time for a busy machine.
KILLED, HUNG, SLACK = 10, TIMEOUT + 10, 20


def ranks_of(parent):
    """The process numbers of the ranks that are there, by rank."""
    found = {}
    try:
        for child in pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            variables = pathlib.Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found.update({int(v[5:]): int(child) for v in variables if v.startswith(b"RANK=")})
    except (FileNotFoundError, ProcessLookupError):  # one that has just ended
        pass
    return found


class Campaign:
    def __init__(self, place):
        self.place, self.made = place, set()
        self.shard = "none"  # what the processes of the present case share out
        train_config(place)

    def undisturbed(self, number):
        """The folder of a run of so many processes that nobody disturbed, made when it is first asked for."""
        whole = self.place / f"whole-{number}-{self.shard}"
        if whole not in self.made:
            expect("preparing", [*self.arguments(whole), "--processes", number], self.place, seconds=300)
            self.made.add(whole)
        return whole

    def arguments(self, out):
        return ["train", "train.toml", "--out", out, "--resume", "--set", "train.batch=12", "--set", f'train.shard="{self.shard}"']

    def case(self, number, random):
        processes = random.choice([2, 3])
        self.shard = random.choice(["none", "optimizer", "parameters"])
        whole, out = self.undisturbed(processes), self.place / "disturbed"
        shutil.rmtree(out, ignore_errors=True)
        if number % 4 == 3:
            what = self.under_torchrun(processes, out, random)
        else:
            what = self.under_headloom(processes, out, random)
        same_end(what, out, whole)
        return what

    def hit(self, process, processes, out, number, random):
        """Sends a signal to one rank, at a random moment. Returns which, or nothing where the training was faster."""
        if random.random() < 0.3:
            time.sleep(random.random() * 0.5)  # while they meet
        else:
            steps = random.randint(0, 50)
            while process.poll() is None and int((last_checkpoint(out) or pathlib.Path("step-0")).name[5:]) < steps:
                time.sleep(0.002)
            time.sleep(random.random() * 0.02)
        rank = random.randrange(processes)
        found = ranks_of(process.pid)
        if process.poll() is not None or rank not in found:
            return None
        try:
            os.kill(found[rank], number)
        except ProcessLookupError:
            return None
        return rank, found[rank]

    def under_headloom(self, processes, out, random):
        kill = random.random() < 0.7
        what = "killed" if kill else "stopped"
        process = start([*self.arguments(out), "--processes", processes, "--timeout", 300 if kill else TIMEOUT], self.place)
        hit = self.hit(process, processes, out, signal.SIGKILL if kill else signal.SIGSTOP, random)
        began = time.monotonic()
        done = finish(process, 120)
        seconds = time.monotonic() - began
        left = [pid for pid in ranks_of(process.pid).values()]
        if done.stopped or left:
            raise Broken(what, f"it did not end, or left {left}: {done.err[-300:]!r}")
        if hit is not None and done.code != 0:
            rank, pid = hit
            said = [line for line in done.err.splitlines() if line.startswith("headloom: ")]
            if done.code != 1 or len(said) != 1 or fault(done.message):
                raise Broken(what, f"rank {rank} (process {pid}) was {what}: code {done.code}, said {done.err[-500:]!r}")
            if f"rank {rank}" not in done.message and "nobody answers" not in done.message:
                raise Broken(what, f"rank {rank} (process {pid}) was {what}, but it says {done.message!r}")
            if seconds > (KILLED if kill else HUNG) + SLACK:
                raise Broken(what, f"it ended {seconds:.1f} seconds after rank {rank} was {what}")
        elif done.code != 0:
            raise Broken(what, f"nobody was hit, but it ended with {done.code}: {done.err[-300:]!r}")
        expect(what, [*self.arguments(out), "--processes", processes], self.place, seconds=120)
        return what if hit is not None else "faster than the signal"

    def under_torchrun(self, processes, out, random):
        what = "restarted by torchrun"
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, "--max-restarts", 4]
        process = start([*command, "--no-python", BINARY, *self.arguments(out)], self.place, binary=sys.executable)
        hits = 0
        for _ in range(2):
            deadline = time.monotonic() + 60
            while len(ranks_of(process.pid)) < processes and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if self.hit(process, processes, out, signal.SIGKILL, random) is None:
                break
            hits += 1
            time.sleep(1)
        done = finish(process, 180)
        if done.code != 0:
            raise Broken(what, f"it ended with {done.code}: {done.err[-1500:]!r}")
        return f"{what} {hits} times"

    def close(self):
        pass
