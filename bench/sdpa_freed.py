"""Composed attention against scaled_dot_product_attention with MKL's vendor check lifted.

    python bench/sdpa_freed.py [--only TEXT] [--rounds N] [--seconds S] [--threads N] [--json]

On processors of other makers than Intel, MKL takes slow paths, so that PyTorch's attention runs at less than half
the machine's peak. Here the peer alone runs in a process whose MKL is freed (mkl_freed.py). The two take turns, `headloom bench
composed_attention` and the peer, so that a drift of the machine hits both; results are medians over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import mkl_freed
from timing import median_seconds

ROOT = Path(__file__).resolve().parents[1]

# Name of the case: length, heads and head size of plain attention, targets of the ratios.
CASES = {
    "dcmha T=2048": (2048, 8, 64, 0.9, 1.2),
    "dcmha T=8192": (8192, 8, 64, 1.1, 1.4),
    "dcmha H=32 D=128 T=2048": (2048, 32, 128, 1.2, 1.3),
    "talking heads T=2048": (2048, 8, 64, 0.85, 1.15),
    "differential T=2048": (2048, 8, 64, 0.85, 1.1),
    "multi_token 6x11 T=2048": (2048, 8, 64, 1.3, 1.7),
    "nothing composed T=2048": (2048, 8, 64, None, None),
}


def peer_main(threads):
    """Reads lines "length heads size seconds" and answers with the seconds of forward and of forward + backward."""
    import torch

    torch.set_num_threads(threads)
    attention = torch.nn.functional.scaled_dot_product_attention
    for line in sys.stdin:
        length, heads, size, seconds = line.split()
        q, k, v, cotangent = (torch.randn(1, int(heads), int(length), int(size)) for _ in range(4))

        def forward(inputs=(q, k, v)):
            with torch.no_grad():
                attention(*inputs, is_causal=True)

        def training(inputs=(q, k, v), cotangent=cotangent):
            wanted = [t.detach().requires_grad_(True) for t in inputs]
            attention(*wanted, is_causal=True).backward(cotangent)

        print(*(median_seconds(step, float(seconds)) for step in (forward, training)), flush=True)


class Peer:
    def __init__(self, folder, threads):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--peer", "--threads", str(threads)],
            env=mkl_freed.environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, length, heads, size, seconds):
        self.process.stdin.write(f"{length} {heads} {size} {seconds}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().split()
        if len(answer) != 2:
            sys.exit("sdpa_freed: the peer's process ended.")
        return tuple(map(float, answer))

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def headloom_seconds(program, name, seconds, threads):
    command = [program, "bench", "composed_attention", "--only", name, "--backend", "fused", "--json"]
    command += ["--seconds", str(2 * seconds), "--threads", str(threads)]
    result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    case = next(c for c in result["cases"] if c["case"] == name)
    return case["forward_seconds"]["median"], case["training_seconds"]["median"]


def summary(name, ours, theirs, targets):
    row = {"case": name}
    for i, part in enumerate(("forward", "training")):
        ratios = [a[i] / b[i] for a, b in zip(ours, theirs)]
        row[part] = {
            "headloom_seconds": statistics.median(a[i] for a in ours),
            "peer_seconds": statistics.median(b[i] for b in theirs),
            "ratio": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "target": targets[i],
        }
    return row


def show(row):
    print(f"{row['case']:<26}", end="")
    for part in ("forward", "training"):
        r = row[part]
        verdict = "" if r["target"] is None else "PASS" if r["ratio"] <= r["target"] else f"short of {r['target']}"
        print(
            f"{1e3 * r['headloom_seconds']:9.2f} ms {1e3 * r['peer_seconds']:9.2f} ms "
            f"{r['ratio']:5.2f} ({r['low']:.2f} - {r['high']:.2f}) {verdict:<14}",
            end="",
        )
    print(flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1, help="of each measurement")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--program", default=ROOT / "build" / "bin" / "headloom")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        peer_main(arguments.threads)
        return

    rows = []
    if not arguments.json:
        print(f"{'':<26}{'forward':>12} {'peer':>12} {'ratio':>5} {'':<29}{'training':>12} {'peer':>12} {'ratio':>5}")
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(folder, arguments.threads)
        for name, (length, heads, size, *targets) in CASES.items():
            if arguments.only not in name:
                continue
            ours, theirs = [], []
            for _ in range(arguments.rounds):
                theirs.append(peer.seconds(length, heads, size, arguments.seconds))
                ours.append(headloom_seconds(arguments.program, name, arguments.seconds, arguments.threads))
            rows.append(summary(name, ours, theirs, targets))
            if not arguments.json:
                show(rows[-1])
        peer.close()
    if arguments.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
