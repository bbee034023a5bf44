"""A training step of GPT-2 124M: Headloom against PyTorch, eager and compiled, as shipped and with MKL freed.

    python bench/gpt2_step.py [--type float32|bfloat16] [--length T] [--batch B] [--rounds N] [--only NAME ...] [--json]

Width 768, 12 layers of 12 heads, MLP of 3072, LayerNorm, learned positions, tied vocabulary of 50257. A step is
forward, cross-entropy, backward, clipping and PyTorch's fused AdamW; bfloat16 is autocast. Every peer has a process
of its own. They take turns, so that a drift of the machine hits all. Results are medians over the rounds, and each
ratio is of one round. "Memory kept" sets glibc's variables so that freed memory stays for the next step, as the
command line does by itself; otherwise the system gives every step new pages, which it clears first. A peer that keeps
its memory is compared with a Headloom that does.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mkl_freed

WIDTH, DEPTH, HEADS, VOCABULARY = 768, 12, 12, 50257
ROOT = Path(__file__).resolve().parents[1]
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_TOP_PAD_": str(1 << 28)}
# Name: the model that runs, whether MKL is freed, whether freed memory is kept.
PEERS = {
    "headloom": ("headloom", False, False),
    "eager": ("eager", False, False),
    "compiled": ("compiled", False, False),
    "eager, MKL freed": ("eager", True, False),
    "compiled, MKL freed": ("compiled", True, False),
    "headloom, memory kept": ("headloom", False, True),
    "compiled, MKL freed, memory kept": ("compiled", True, True),
}
# (type, peer): least speed of Headloom as a multiple of the peer's.
TARGETS = {
    ("float32", "compiled"): 1.7,
    ("float32", "compiled, MKL freed"): 1.0,
    ("bfloat16", "compiled"): 1.3,
}


def plain_model(length):
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
            self.norm = nn.LayerNorm(WIDTH)
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.02)

        def loss(self, tokens, targets):
            x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.norm(x), self.embedding.weight)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Decoder()


def headloom_model(length):
    sys.path.insert(0, str(ROOT / "python"))
    import headloom

    layer = {"mixer": {"type": "mha", "heads": HEADS}, "channel": {"type": "mlp", "activation": "gelu_tanh"}}
    return headloom.model(
        width=WIDTH,
        depth=DEPTH,
        vocabulary=VOCABULARY,
        max_length=length,
        norm="layer_norm",
        bias=True,
        position={"type": "learned"},
        layer=[layer],
    )


def worker(kind, arguments):
    """Answers every line on stdin with the seconds of one step, the median of a turn."""
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(arguments.threads)
    model = headloom_model(arguments.length) if kind == "headloom" else plain_model(arguments.length)
    loss_of = model.loss
    if kind == "compiled":
        loss_of = torch.compile(loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, VOCABULARY, (arguments.batch, arguments.length + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    half = arguments.type == "bfloat16"

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16) if half else contextlib.nullcontext():
            loss = loss_of(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    print("parameters", sum(p.numel() for p in model.parameters()), flush=True)
    for _ in sys.stdin:
        times = []
        for _ in range(arguments.steps):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        print(statistics.median(times), flush=True)


def headloom_for(peer):
    """The Headloom that is compared with a peer: the one that treats freed memory alike."""
    return "headloom, memory kept" if PEERS[peer][2] else "headloom"


class Peer:
    def __init__(self, name, arguments, folder):
        kind, freed, kept = PEERS[name]
        options = {"--type": arguments.type, "--length": arguments.length, "--batch": arguments.batch}
        options |= {"--threads": arguments.threads, "--steps": arguments.steps, "--worker": kind}
        self.process = subprocess.Popen(
            [sys.executable, __file__, *(str(x) for option in options.items() for x in option)],
            env=(mkl_freed.environment(folder) if freed else dict(os.environ)) | (KEPT if kept else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.parameters = int(self.process.stdout.readline().split()[1])

    def turn(self):
        print(file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments)
        return

    with tempfile.TemporaryDirectory() as folder:
        names = dict.fromkeys(["headloom", *map(headloom_for, arguments.only), *arguments.only])
        peers = {name: Peer(name, arguments, folder) for name in names}
        seconds = {name: [] for name in peers}
        for i in range(arguments.rounds):
            for name, peer in peers.items():
                seconds[name].append(peer.turn())
            print(f"round {i + 1}: " + ", ".join(f"{n} {s[-1]:.3f} s" for n, s in seconds.items()), file=sys.stderr)
        for peer in peers.values():
            peer.process.stdin.close()
            peer.process.wait()
    tokens = arguments.batch * arguments.length
    rows = []
    for name, times in seconds.items():
        ratios = [theirs / ours for theirs, ours in zip(times, seconds[headloom_for(name)])]
        rows.append(
            {
                "peer": name,
                "parameters": peers[name].parameters,
                "seconds": statistics.median(times),
                "tokens_per_second": tokens / statistics.median(times),
                "headloom_speed": statistics.median(ratios),
                "low": min(ratios),
                "high": max(ratios),
                "target": TARGETS.get((arguments.type, name)),
            }
        )
    if arguments.json:
        print(json.dumps({"type": arguments.type, "length": arguments.length, "rows": rows}, indent=1))
        return
    print(f"{arguments.type}, batch {arguments.batch}, T {arguments.length}, {arguments.threads} threads")
    for row in rows:
        target = row["target"]
        verdict = "" if target is None else f"{'PASS' if row['headloom_speed'] >= target else 'short of'} {target}"
        print(
            f"{row['peer']:32} {row['seconds']:7.3f} s {row['tokens_per_second']:7.0f} tokens/s   Headloom's speed "
            f"over it {row['headloom_speed']:.2f} ({row['low']:.2f} - {row['high']:.2f})  {verdict}"
        )


if __name__ == "__main__":
    main()
