"""Too little memory, and sizes that no machine has."""

import json
import re
import shutil
import subprocess
import sys

import serving
from program import ROOT, Broken, fault, finish, judge, limited, run, start
from training import compare_config, text_run, train_config

DOC = "train, compare, generate, eval, serve and Python with little memory, and absurd sizes: one sentence, nothing aborts"
SHARE = 2
SECONDS = 120

# Each must be refused, whatever memory there is.
ABSURD = [
    ["train", "train.toml", "--set", "model.width=1000000000"],
    ["train", "train.toml", "--set", "model.width=4000000"],
    ["train", "train.toml", "--set", "model.depth=100000"],
    ["train", "train.toml", "--set", "model.depth=9223372036854775807"],
    ["train", "train.toml", "--set", "train.batch=100000000"],
    ["train", "train.toml", "--set", "model.layer.0.channel.hidden=100000000000"],
    ["train", "train.toml", "--set", "task.count=100000000", "--set", "task.symbols=3"],
    ["train", "text.toml", "--set", "task.length=100000000000"],
    ["generate", "run", "--samples", "1099511627776"],
    ["generate", "run", "--tokens", "4611686018427387904", "--samples", "4611686018427387904"],
    ["compare", "compare.toml", "--set", "model.width=1000000000"],
]  # fmt: skip

# What cannot be had raises something that can be caught, and the process goes on.
PYTHON = [
    "torch.empty(1 << 44)",
    "headloom.model(width=10**9, depth=2, vocabulary=256, max_length=64)",
    "headloom.model(width=64, depth=100000, vocabulary=256, max_length=64)",
    "headloom.model(width=64, depth=2**63 - 1, vocabulary=256, max_length=64)",
    "headloom.model(width=64, depth=2, vocabulary=2**40, max_length=64)",
    "headloom.load('run').generate('a', 4, num_samples=2**40)",
    "headloom.load('run').generate('a', 2**62, num_samples=2**20)",
    "headloom.mixer('mha', width=10**9, heads=2)",
    "headloom.ops.retention(*[torch.ones(1, 1, 1 << 20, 1)] * 3, torch.tensor([0.9]), form='parallel')",
]
SCRIPT = """
import sys
sys.path.insert(0, {package!r})
import torch, headloom
import resource
if {room}:
    mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + {room}, mapped + {room}))
try:
    {statement}
except Exception as error:
    print("caught", type(error).__name__, str(error).splitlines()[0])
print("still", int(torch.ones(3).sum()))
"""

# With an address space from little more than the program's own to enough.
STARVED = [
    (["train", "train.toml"], 4),
    (["train", "text.toml", "--set", "model.width=512", "--set", "train.batch=64"], 4),
    (["compare", "compare.toml"], 3),
    (["generate", "run", "--tokens", "20", "--samples", "50"], 2),
    (["eval", "run"], 2),
    (["describe", "train.toml"], 1),
]


def mapped_by(arguments, cwd):
    """The address space in bytes that a command needs to do nothing, to 64 MiB."""
    too_little, enough = 0, 1 << 36
    while enough - too_little > 64 << 20:
        middle = (too_little + enough) // 2
        done = run(arguments, cwd, seconds=SECONDS, address_space=middle)
        too_little, enough = (too_little, middle) if done.code == 0 else (middle, enough)
    return enough


class Campaign:
    def __init__(self, place):
        self.place = place
        train_config(place, steps=6)
        text_run(place, "run")
        (place / "text.toml").write_text((place / "run.toml").read_text())
        compare_config(place, steps=2)
        self.base = None

    def case(self, number, random):
        if number % 3 == 0:
            return self.absurd(number // 3)
        if number % 3 == 1:
            return self.python(number // 3, random)
        return self.starved(number // 3, random)

    def out(self, arguments):
        shutil.rmtree(self.place / "out", ignore_errors=True)
        return [*arguments, "--out", "out"] if arguments[0] in ("train", "compare") else arguments

    def absurd(self, number):
        arguments = ABSURD[number % len(ABSURD)]
        what = "absurd sizes"
        done = run(self.out(arguments), self.place, seconds=SECONDS)
        judge(what, done)
        if done.code == 0:
            raise Broken(what, f"headloom {' '.join(arguments)} succeeded")
        return what

    def python(self, number, random):
        statement = PYTHON[number % len(PYTHON)]
        room = 0 if number < len(PYTHON) else random.choice([64 << 20, 256 << 20, 1 << 30])
        what = "Python, absurd sizes" if not room else "Python, little memory"
        script = SCRIPT.format(package=str(ROOT / "python"), room=room, statement=statement)
        process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=self.place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=limited(None)
        )
        done = finish(process, SECONDS)
        if done.stopped:
            raise Broken(what, f"{statement} did not end in time")
        if done.code != 0 or "still 3" not in done.out:
            raise Broken(what, f"{statement} ended the process with {done.code}: {done.err[-300:]!r}")
        caught = re.search(r"^caught (\w+) (.*)$", done.out, re.M)
        if not caught and not room:
            raise Broken(what, f"{statement} raised nothing")
        if caught and "DefaultCPUAllocator" not in caught[2]:  # PyTorch's own sentence
            wrong = fault(caught[2])
            if wrong:
                raise Broken(what, f"{statement}: {wrong}")
        return what

    def starved(self, number, random):
        if self.base is None:
            self.base = mapped_by(["list", "tasks"], self.place)
        arguments, widest = STARVED[number % len(STARVED)]
        limit = self.base + random.randrange(0, widest << 28)
        what = "little memory"
        if random.random() < 0.2:
            return self.serving(limit)
        done = run(self.out(arguments), self.place, seconds=SECONDS, address_space=limit)
        try:
            judge(what, done)
        except Broken as broken:
            raise Broken(what, f"headloom {' '.join(arguments)} with {limit >> 20} MiB of address space: {broken}") from None
        return what

    def serving(self, limit):
        """A server that has too little goes on answering, or does not begin."""
        what = "serving with little memory"
        server = start(["serve", "run", "--port", "0"], self.place, address_space=limit)
        line = server.stdout.readline().decode()
        found = re.search(r" at http://127\.0\.0\.1:(\d+)/v1$", line.strip())
        if not found:
            judge(what, finish(server, SECONDS))
            return what
        try:
            client = serving.Campaign.__new__(serving.Campaign)
            client.port = int(found[1])
            for size in [1, 16, 64]:
                body = json.dumps({"prompt": ["The quick"] * size, "n": 4, "max_tokens": 16, "logprobs": 20}).encode()
                answer = client.send(serving.request("POST", "/v1/completions", body))
                if answer.status is None:
                    raise Broken(what, f"no answer with {limit >> 20} MiB of address space, {size} prompts: {server.poll()}")
                if answer.status >= 400:
                    wrong = fault(json.loads(answer.body)["error"]["message"])
                    if wrong:
                        raise Broken(what, wrong)
        except (OSError, ValueError, KeyError) as error:
            raise Broken(what, f"the server with {limit >> 20} MiB of address space: {error}, {server.poll()}") from None
        finally:
            server.kill()
            server.communicate()
        return what

    def close(self):
        pass
