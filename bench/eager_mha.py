"""A training step of Headloom's mha model against the same model in eager PyTorch.

    python bench/eager_mha.py [--rounds N] [--seconds S] [--threads N] [--json]

Width 256, 6 layers of 8 heads and SwiGLU, sequences of 256 bytes, batch 16; a step is forward, loss, backward,
clipping and AdamW. The two take turns, `headloom bench train_step` and eager steps in this process, so that a
drift of the machine hits both; the result is the median over the rounds. Target: at most 1.05.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from timing import median_seconds

WIDTH, DEPTH, HEADS, LENGTH, BATCH, VOCABULARY = 256, 6, 8, 256, 16, 256
HIDDEN = (8 * WIDTH // 3 + 7) // 8 * 8
TARGET = 1.05
ROOT = Path(__file__).resolve().parents[1]


def linear(inputs, outputs, std=0.02):
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = linear(WIDTH, 3 * WIDTH)
        self.output = linear(WIDTH, WIDTH, 0.02 / (2 * DEPTH) ** 0.5)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)

        def rotate(t):
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).transpose(1, 2)

        o = F.scaled_dot_product_attention(rotate(q), rotate(k), v.transpose(1, 2), is_causal=True)
        return self.output(o.transpose(1, 2).flatten(2))


class Channel(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = linear(WIDTH, 2 * HIDDEN)
        self.down = linear(HIDDEN, WIDTH, 0.02 / (2 * DEPTH) ** 0.5)

    def forward(self, x):
        a, b = self.up(x).chunk(2, -1)
        return self.down(F.silu(a) * b)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer_norm, self.channel_norm = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.mixer, self.channel = Mixer(), Channel()

    def forward(self, x, cos, sin):
        x = x + self.mixer(self.mixer_norm(x), cos, sin)
        return x + self.channel(self.channel_norm(x))


class Decoder(nn.Module):
    """Parameters are named as in Headloom's checkpoints."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, WIDTH).normal_(0, 0.02))
        for i in range(DEPTH):
            self.add_module(f"layer{i}", Block())
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        half = WIDTH // HEADS // 2
        angles = torch.arange(LENGTH).unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos().unsqueeze(1), persistent=False)
        self.register_buffer("sin", angles.sin().unsqueeze(1), persistent=False)

    def forward(self, tokens):
        x = F.embedding(tokens, self.embedding)
        for i in range(DEPTH):
            x = getattr(self, f"layer{i}")(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.embedding)


class EagerStep:
    def __init__(self):
        torch.manual_seed(1)
        self.model = Decoder()
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)],
            lr=1e-4,
            betas=(0.9, 0.95),
            fused=True,
        )
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:].contiguous()

    def __call__(self):
        loss = F.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def headloom_seconds(program, seconds, threads):
    command = [program, "bench", "train_step", "--only", "mha", "--json", "--seconds", str(seconds)]
    result = subprocess.run([*command, "--threads", str(threads)], stdout=subprocess.PIPE, check=True)
    return json.loads(result.stdout)["cases"][0]["training_seconds"]["median"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4, help="of each turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--program", default=ROOT / "build" / "bin" / "headloom")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    step = EagerStep()
    eager, ours = [], []
    for i in range(arguments.rounds):
        eager.append(median_seconds(step, arguments.seconds))
        ours.append(headloom_seconds(arguments.program, arguments.seconds / 4, arguments.threads))
        print(f"round {i + 1}: eager {1e3 * eager[-1]:.1f} ms, headloom {1e3 * ours[-1]:.1f} ms", file=sys.stderr)
    ratios = [a / b for a, b in zip(ours, eager)]
    result = {
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "eager_seconds": statistics.median(eager),
        "headloom_seconds": statistics.median(ours),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "target": TARGET,
    }
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    verdict = "PASS" if result["ratio"] <= TARGET else "short of"
    print(
        f"training step, {result['parameters']:,} parameters, {arguments.threads} threads: "
        f"eager {1e3 * result['eager_seconds']:.1f} ms, headloom {1e3 * result['headloom_seconds']:.1f} ms, "
        f"ratio {result['ratio']:.3f} ({min(ratios):.3f} - {max(ratios):.3f}), {verdict} {TARGET}"
    )


if __name__ == "__main__":
    main()
