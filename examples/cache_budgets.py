"""What a smaller KV cache costs: the loss of models that keep a half to a sixteenth of their keys, by cache policy.

    python examples/cache_budgets.py runs/text/mha/seed-1 runs/text/mha/seed-2 ...

The runs are one model with several seeds, trained on text of one length. Each is read token by token, as decoding does. A row
says how much the loss grows over that of the whole cache: the mean over seeds, and the smallest and the largest. `sinks` always keeps
the first four positions, so it has a row only where it keeps more.
"""

import json
import pathlib
import shutil
import statistics
import subprocess
import sys

SEQUENCES = 512
SHARES = (2, 4, 8, 16)
POLICIES = ("tova", "window", "sinks")


# The program that is installed, or that of the folder that this file lies in.
BUILT = pathlib.Path(__file__).resolve().parents[1] / "build/bin/headloom"
PROGRAM = shutil.which("headloom") or str(BUILT)


def loss(run, policy):
    command = [PROGRAM, "eval", run, "--cache", policy, "--piece", "1", "--sequences", str(SEQUENCES), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:  # it has said why
        sys.exit(done.returncode)
    found = json.loads(done.stdout)
    return found["loss"], found["context"]


def shown(values):
    return f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def main(runs):
    if not pathlib.Path(PROGRAM).exists():
        sys.exit(f"The program headloom is neither in the PATH nor at {BUILT}: run ./run --build.")
    whole, contexts = zip(*(loss(run, "full") for run in runs))
    if len(set(contexts)) > 1:
        sys.exit(f"The runs read sequences of different lengths: {', '.join(map(str, sorted(set(contexts))))}.")
    print(f"{len(runs)} models, sequences of {contexts[0]} tokens. Loss with all keys: {shown(whole)} nats a token.")
    for share in SHARES:
        kept = contexts[0] // share
        for policy in POLICIES:
            if kept <= (4 if policy == "sinks" else 0):
                continue
            grown = [loss(run, f"{policy}:{kept}")[0] - full for run, full in zip(runs, whole)]
            print(f"1/{share:<3} {policy + ':' + str(kept):12} grows by {shown(grown)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
