"""Several processes on one folder: one works, the others say who it is."""

import re
import shutil
import socket
import time

from program import Broken, expect, finish, judge, start
from training import compare_config, same_end, train_config

DOC = "two to four trainings or comparisons on one folder: one works, the others name it; a killed one's lock is no obstacle"
SHARE = 2
IN_USE = re.compile(r"in use by process (\d+) on host (\S+?)[.;,)\s]")


class Campaign:
    def __init__(self, place):
        self.place = place
        train_config(place)
        compare_config(place)
        self.made = set()

    def whole(self, command):
        folder = self.place / f"whole-{command}"
        if command not in self.made:
            expect("preparing", [command, f"{command}.toml", "--out", folder], self.place, seconds=300)
            self.made.add(command)
        return folder

    def case(self, number, random):
        command = ["train", "compare"][number % 2]
        whole, out = self.whole(command), self.place / "shared"
        shutil.rmtree(out, ignore_errors=True)
        arguments = [command, f"{command}.toml", "--out", out]
        resumed = [*arguments, "--resume"] if command == "train" else arguments
        way = ["at once", "later", "after a kill"][number // 2 % 3]
        what = f"{command} {way}"
        if way == "after a kill":
            first = start(arguments, self.place)
            self.wait_for_metrics(first, out, what)
            first.kill()
            finish(first, 60)
            done = finish(start(resumed, self.place), 300)
            judge(what, done)
            if done.code != 0:
                raise Broken(what, f"the lock of a killed process is in the way: {done.message!r}")
        else:
            processes = [start(arguments, self.place)]
            if way == "later":
                self.wait_for_metrics(processes[0], out, what)
                time.sleep(random.random() * 0.2)
            processes += [start(resumed, self.place) for _ in range(random.randint(1, 3))]
            ended = [finish(process, 300) for process in processes]
            for done in ended:
                judge(what, done)
            self.check(what, processes, ended)
            if all(done.code != 0 for done in ended):
                raise Broken(what, f"nobody trained: {[done.message for done in ended]}")
        same_end(what, out, whole)
        return what

    @staticmethod
    def check(what, processes, ended):
        """A process that did not work names one of the others, or a run that was finished by then."""
        numbers = {process.pid for process in processes}
        for process, done in zip(processes, ended):
            if done.code == 0:
                continue
            found = IN_USE.search(done.message)
            if not found:
                if "already holds" in done.message:  # it came when the other had saved or ended
                    continue
                raise Broken(what, f"the second says {done.message!r}, expected \"in use by process N on host H\"")
            if int(found[1]) not in numbers - {process.pid} or found[2] != socket.gethostname():
                raise Broken(what, f"{done.message!r} names none of the processes {sorted(numbers)} on {socket.gethostname()}")

    @staticmethod
    def wait_for_metrics(process, out, what):
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if any(path.stat().st_size for path in out.rglob("metrics.jsonl")):
                return
            time.sleep(0.002)
        if process.poll() is not None:
            raise Broken(what, f"the first ended with {process.returncode} before it wrote metrics")

    def close(self):
        pass
