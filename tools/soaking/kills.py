"""Kills trainings and comparisons at any moment and lets them go on."""

import shutil
import time

from program import Broken, expect, finish, start
from training import compare_config, same_end, train_config

DOC = "SIGKILL to train and compare at random moments; once resumed, the end must be an undisturbed run's bit for bit"
SHARE = 3
MOST_KILLS = 6


class Campaign:
    def __init__(self, place):
        self.place = place
        train_config(place)
        compare_config(place)
        self.seconds = {}

    def undisturbed(self, command):
        """The folder of a run that nobody disturbed, made when it is first asked for."""
        whole = self.place / f"whole-{command}"
        if command not in self.seconds:
            began = time.monotonic()
            expect("preparing", [command, f"{command}.toml", "--out", whole], self.place, seconds=300)
            self.seconds[command] = time.monotonic() - began
        return whole

    def case(self, number, random):
        command = "compare" if number % 4 == 3 else "train"
        whole, out = self.undisturbed(command), self.place / "killed"
        shutil.rmtree(out, ignore_errors=True)
        arguments = [command, f"{command}.toml", "--out", out]
        kills = random.randint(1, MOST_KILLS)
        for kill in range(kills):
            process = start(arguments, self.place)
            if random.random() < 0.5:  # a moment when a checkpoint is being written
                self.wait_for_checkpoint(process, out, random.randint(0, 12), random.random() * 0.004)
            else:
                time.sleep(random.random() * self.seconds[command])
            process.kill()
            done = finish(process, 60)
            if done.code not in (0, -9):
                raise Broken(command, f"after {kill} kills it ended with {done.code}: {done.err[-300:]!r}")
            arguments = self.resumed(command, out)
        done = finish(start(arguments, self.place), 300)
        if done.code != 0:
            raise Broken(command, f"after {kills} kills it ended with {done.code}: {done.err[-300:]!r}")
        same_end(command, out, whole)
        return f"{command} killed {kills} times"

    @staticmethod
    def resumed(command, out):
        resume = ["--resume"] if command == "train" else []
        return [command, f"{command}.toml", "--out", out, *resume]

    @staticmethod
    def wait_for_checkpoint(process, out, writes, delay):
        """Until so many checkpoints have begun to be written, and a little more."""
        deadline, present = time.monotonic() + 60, False
        while process.poll() is None and time.monotonic() < deadline:
            now = any(out.glob("checkpoints/writing")) or any(out.glob("runs/*/*/*/checkpoints/writing"))
            if now and not present:
                if writes == 0:
                    time.sleep(delay)
                    return
                writes -= 1
            present = now

    def close(self):
        pass
