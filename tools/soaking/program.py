"""Runs the program and judges how it ended."""

import os
import pathlib
import re
import resource
import signal
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("HEADLOOM_BINARY", ROOT / "build" / "bin" / "headloom"))

# What only somebody who knows the sources can understand: names of C++ and of its libraries' parts.
INTERNAL = re.compile(
    r"\bstd::|basic_string|\bvector::|\bmap::at|\bc10::|\bat::|\btorch::(?!save|load)|nlohmann|json\.exception|toml::|CLI::"
    r"|bad_alloc|bad_variant|bad_optional|bad_cast|length_error|out_of_range|system_error|filesystem error|regex_error"
    r"|INTERNAL ASSERT|enforce fail|Exception raised from|CHECK failed|Check failed|Assertion|terminate called|what\(\):"
    r"|\.(?:cpp|h|cc|hpp):\d+|invalid stoi|\bstoi\b|\bstol\b|_M_\w+|std_|cannot create std|please report a bug"
)


class Broken(Exception):
    """Something promised did not hold; `what` is the kind of case for the counts."""

    def __init__(self, what, message):
        super().__init__(message)
        self.what = what


class Done:
    """A process that has ended: its code, what it wrote, and whether it had to be stopped."""

    def __init__(self, code, out, err, stopped=False):
        self.code, self.out, self.err, self.stopped = code, out, err, stopped

    @property
    def message(self):
        """The sentence it ended with."""
        lines = [line for line in self.err.splitlines() if line.startswith("headloom: ")]
        return lines[-1].removeprefix("headloom: ") if lines else ""


def limited(address_space):
    """For preexec_fn: no more address space than this, and no core dumps."""

    def limit():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if address_space is not None:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

    return limit


def start(arguments, cwd, binary=BINARY, address_space=None, **options):
    command = [str(binary), *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, stdin=options.pop("stdin", subprocess.DEVNULL), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=limited(address_space), **options,
    )


def finish(process, seconds, text=None):
    stopped = False
    try:
        out, err = process.communicate(text, timeout=seconds)
    except subprocess.TimeoutExpired:
        stopped = True
        process.kill()
        out, err = process.communicate()
    return Done(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"), stopped)


def run(arguments, cwd, seconds=60, text=None, **options):
    stdin = subprocess.DEVNULL if text is None else subprocess.PIPE
    return finish(start(arguments, cwd, stdin=stdin, **options), seconds, text)


def fault(message):
    """What is wrong with a message to the user, or None."""
    internal = INTERNAL.search(message)
    if internal:
        return f"the message speaks of {internal[0]!r}: {message[:300]!r}"
    if "\n" in message:
        return f"the message has more than a line: {message[:300]!r}"
    if not message.rstrip().endswith((".", "?", ")")):
        return f"the message is no sentence: {message[:300]!r}"
    return None


def judge(what, done):
    """Raises Broken unless a process has ended as promised: code 0, 1 or 2, and a sentence where it is not 0."""
    if done.stopped:
        raise Broken(what, f"did not end in time; its last words: {done.err[-200:]!r}")
    if done.code not in (0, 1, 2):
        name = signal.Signals(-done.code).name if done.code < 0 else f"exit code {done.code}"
        raise Broken(what, f"ended with {name}: {done.err[-300:]!r}")
    said = [line for line in done.err.splitlines() if line.startswith("headloom: ")]
    if done.code == 0:
        return
    if len(said) != 1 or done.err.splitlines()[-1] != said[0]:
        raise Broken(what, f"exit code {done.code} without one sentence at the end: {done.err[-300:]!r}")
    wrong = fault(done.message)
    if wrong:
        raise Broken(what, wrong)


def expect(what, arguments, cwd, **options):
    """Runs what must succeed."""
    done = run(arguments, cwd, **options)
    if done.code != 0:
        raise Broken(what, f"headloom {' '.join(map(str, arguments))} ended with {done.code}: {done.err[-300:]!r}")
    return done
