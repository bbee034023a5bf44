"""A model of the time of composed attention on GPUs that need not be there: ``python bench/gpu_model.py`` prints the
prediction of docs/gpu.md. No figure of it is a measurement.

A kernel or product takes the longest of three times: its bytes at the memory's bandwidth, its instructions at the rate at
which multiprocessors issue them, and its tensor cores' operations at their rate. The instructions of a kernel are
counted in the machine code of its loops over heads. Flash attention's time is its operations at a share of the peak that
its authors publish. The shares below are assumptions; the first runs on a card replace them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

import torch
import triton
from gpu_resources import MIXES, Launch, compiled, launches, shape


class Card(NamedTuple):
    capability: int
    tensor: float  # operations per second in bfloat16, dense (the maker's data sheet)
    memory: float  # bytes per second (the maker's data sheet)
    multiprocessors: int
    clock: float  # per second, boost
    flash: float  # what flash attention reaches of `tensor`: version 2 (Dao 2023) and 3 (Shah et al. 2024)


CARDS = {
    "A100 80 GB": Card(80, 312e12, 2.04e12, 108, 1.41e9, 0.65),
    "H100 SXM": Card(90, 989e12, 3.35e12, 132, 1.83e9, 0.65),
}
# Assumed shares of a peak that large products, streams of memory and loops of arithmetic reach.
TENSOR, MEMORY, ISSUE = 0.7, 0.85, 0.7
LANES = 128  # a multiprocessor issues four instructions for 32 lanes each in a clock
FLASH_BACKWARD = 2.5  # five products where the forward has two


def loops(launch: Launch, capability: int) -> float:
    """Instructions of one lane for one place (t, s) of one head."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(launch, capability).asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    labels: Dict[str, int] = {}
    code: List[str] = []
    bodies: Dict[int, List[str]] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label.group(1)] = len(code)
        elif re.match(r"\s+/\*[0-9a-f]+\*/\s+\S", line):
            code.append(line)
            target = re.search(r"\bBRA .*?(\.L_x_\d+)", line)
            if target and target.group(1) in labels:
                start = labels[target.group(1)]
                bodies[start] = max(bodies.get(start, []), code[start:], key=len)
    # The loop that clears tiles which nobody sees, and the trap after the end, are short.
    total = sum(len(body) / heads_at_once(body) for body in bodies.values() if len(body) > 40)
    return total * launch.warps * 32 / (launch.arguments["M"] * launch.arguments["N"])


def heads_at_once(body: List[str]) -> int:
    """The compiler may do several heads in one turn of a loop; its counter runs down by so many."""
    steps = [re.search(r"IADD3 (U?R\d+), .*\b\1, -0x([0-9a-f]+)", line) for line in body]
    return min((int(step.group(2), 16) for step in steps if step), default=1)


# Maps that a launch reads from memory and writes to it. A second reading of a tile comes from a cache.
MAPS = {
    "mix_kernel to scores": 2,
    "mix_kernel to weights": 2,
    "mix_kernel to composed": 2,
    "mix_backward_kernel after softmax": 4,
    "mix_backward_kernel before softmax": 4,
}


class Part(NamedTuple):
    what: str
    seconds: float
    bound: str


def longest(what: str, **times: float) -> Part:
    bound = max(times, key=lambda name: times[name])
    return Part(what, times[bound], bound)


def seen_places(launch: Launch, window: Optional[int]) -> int:
    """Queries times keys of the tiles in which some query sees some key, by a causal mask and a window."""
    chunk, M, N = launch.chunk, launch.arguments["M"], launch.arguments["N"]
    tiles = 0
    for first in range(chunk.first, chunk.last, M):
        left = chunk.left if window is None else max(chunk.left, first - window + 1)
        tiles += (min(first + M, chunk.right) - 1 - chunk.left) // N - (left - chunk.left) // N + 1
    return tiles * M * N


def predict(card: Card, B: int, T: int, H: int, D: int, mixes: str, window: Optional[int] = None) -> List[Part]:
    """The parts of a forward and backward of causal self-attention, in order."""
    item = 2
    parts: List[Part] = []
    counted: Dict[str, float] = {}
    arguments = shape(B, T, H, D, mixes, mixes, torch.bfloat16, window=window)

    def product(what: str, places: float) -> Part:
        # A map is read or written once; the other operands are small beside it.
        return longest(
            what, memory=places * item / (MEMORY * card.memory), tensor=2 * D * places / (TENSOR * card.tensor)
        )

    for backward in (False, True):
        for launch in launches(arguments, backward):
            chunk, name = launch.chunk, launch.name()
            rows = chunk.last - chunk.first
            places = B * H * rows * (chunk.right - chunk.left)
            seen = B * H * seen_places(launch, window)
            if name not in counted:
                counted[name] = loops(launch, card.capability)
            rate = ISSUE * card.multiprocessors * LANES * card.clock
            # Tiles that nobody sees are cleared: they are written and not read.
            size = item * (seen * MAPS[name] + (places - seen) * (MAPS[name] // 2 if name != "mix_kernel to scores" else 0))
            parts.append(
                longest(name, memory=size / (MEMORY * card.memory), arithmetic=seen * counted[name] / rate)
            )
            before = {
                "mix_kernel to scores": ["scores", "output"],
                "mix_kernel to weights": ["scores again", "dout . v"],
                "mix_backward_kernel after softmax": ["dv"],
                "mix_backward_kernel before softmax": ["dq", "dk"],
            }
            parts += [product(what, places) for what in before.get(name, [])]
    return parts


def step_over_plain(card: Card) -> float:
    """A training step of dcformer++ at 1.4B parameters over one of transformer++, from Xiao et al. 2024, table 3: 24 layers of
    width 2048 with 32 heads, T = 2048, every second layer with a window of 256. Its small networks add 2.7%
    to the parameters. Products outside of attention reach TENSOR of the peak in both; what is neither is left out."""
    layers, H, D, T, parameters = 24, 32, 64, 2048, 1.4e9
    maps = 6 * parameters * T / (TENSOR * card.tensor)
    flash = (1 + FLASH_BACKWARD) * 4 * D * H * T * T / 2 / (card.flash * card.tensor)
    ours = [sum(part.seconds for part in predict(card, 1, T, H, D, "dcmha, R 2", window)) for window in (None, 256)]
    return (1.027 * maps + layers / 2 * sum(ours)) / (maps + layers * flash)


FORWARD = {"mix_kernel to scores", "mix_kernel to composed", "scores", "output"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    # Static matrices add products and maps that are not counted here.
    known = [name for name, mix in MIXES.items() if not mix[-1]]
    parser.add_argument("--mixes", nargs="+", default=["query-wise, R 1", "dcmha, R 2"], choices=known)
    parser.add_argument("--parts", action="store_true", help="also print the parts")
    given = parser.parse_args()
    B, H, D = 1, 32, 128
    print("| card | mixes before and after softmax | T | forward / flash | training / flash |")
    print("|---|---|---|---|---|")
    for name, card in CARDS.items():
        for mixes in given.mixes:
            for T in given.lengths:
                parts = predict(card, B, T, H, D, mixes)
                flash = 4 * D * B * H * T * T / 2 / (card.flash * card.tensor)
                forward = sum(p.seconds for p in parts if p.what in FORWARD)
                total = sum(p.seconds for p in parts)
                print(
                    f"| {name} | {mixes} | {T} | {forward / flash:.1f} | {total / flash / (1 + FLASH_BACKWARD):.1f} |",
                    flush=True,
                )
                if given.parts:
                    for what in dict.fromkeys(p.what for p in parts):
                        same = [p for p in parts if p.what == what]
                        share = sum(p.seconds for p in same) / flash
                        print(f"  {what}: {share:.2f} of flash attention's forward, bound by {same[-1].bound}")
    print("| card | step of dcformer++ 1.4B / transformer++ 1.4B |")
    print("|---|---|")
    for name, card in CARDS.items():
        print(f"| {name} | {step_over_plain(card):.2f} |", flush=True)


if __name__ == "__main__":
    main()
