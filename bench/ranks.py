"""Every "-tiny" preset on one to four processes: by how much the losses of its first steps differ.

    python bench/ranks.py [--only NAME ...] [--type float32|float64] [--lr 3e-4] [--steps 20] [--ranks 2 3 4] [--json]

Each preset trains on a task for its kind of model, once alone and once on each number of processes, from the same
start and with the same batches of 12 sequences. Whatever differs is rounding: sums are added in another order. The
table has the largest difference of a loss over all steps. Every process has one thread.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1e-4
TASKS = {
    "decoder": 'type = "text"\npaths = ["text"]\nlength = 64',
    "encoder": 'type = "masked_text"\npaths = ["text"]\nlength = 64',
    "encoder_decoder": 'type = "sequence"\nkind = "reverse"\nsymbols = 30\ncount = 16',
    "vit": 'type = "images"\nsize = 32',
}

KINDS = {"bert-tiny": "encoder", "fnet-tiny": "encoder", "linformer-tiny": "encoder"}
KINDS |= {"transformer-tiny": "encoder_decoder", "dctransformer-tiny": "encoder_decoder"}
KINDS |= {"vit-tiny": "vit", "dcvit-tiny": "vit"}


def run(program, *arguments, cwd=None):
    done = subprocess.run(
        [str(a) for a in (program, *arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    return done.stdout


def tiny_presets(program):
    return re.findall(r"^\s*(\S+-tiny)\s", run(program, "list", "presets"), flags=re.MULTILINE)


def losses(program, preset, processes, arguments, folder):
    config = folder / "run.toml"
    text = folder / "text/docs.txt"
    if not text.exists():  # which would change where somebody edits a page between two runs
        text.parent.mkdir()
        text.write_text("".join(page.read_text() for page in sorted(ROOT.glob("docs/*.md"))))
    config.write_text(
        f'[model]\npreset = "{preset}"\n[task]\n{TASKS[KINDS.get(preset, "decoder")]}\n'
        f'[train]\nsteps = {arguments.steps}\nbatch = 12\nwarmup = 4\nlr = {arguments.lr}\ndtype = "{arguments.type}"\n'
        f"eval_every = {arguments.steps}\neval_sequences = 12\n"
    )
    out = folder / f"{preset}-{processes}"
    run(program, "train", config, "--out", out, *(["--processes", processes] if processes > 1 else []), cwd=folder)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--type", choices=["float32", "float64"], default="float32")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--program", type=Path, default=ROOT / "build/bin/headloom")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for preset in arguments.only or tiny_presets(arguments.program):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            alone = losses(arguments.program, preset, 1, arguments, place)
            row = {"preset": preset, "first": alone[0], "last": alone[-1], "difference": {}}
            for processes in arguments.ranks:
                several = losses(arguments.program, preset, processes, arguments, place)
                row["difference"][processes] = max(abs(a - b) for a, b in zip(alone, several, strict=True))
            rows.append(row)
        if not arguments.json:
            found = ", ".join(f"{n} processes {d:.1e}" for n, d in row["difference"].items())
            verdict = "PASS" if max(row["difference"].values()) <= LIMIT else f"more than {LIMIT:g}"
            print(f"{preset:26} loss {row['first']:.3f} -> {row['last']:.3f}   {found}   {verdict}", flush=True)
    if arguments.json:
        print(json.dumps({"type": arguments.type, "lr": arguments.lr, "steps": arguments.steps, "rows": rows}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
