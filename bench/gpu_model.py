"""A model of the time of our kernels on GPUs that need not be there: ``python bench/gpu_model.py`` prints the predictions of
docs/gpu.md. No figure that it prints is a measurement. It needs Triton, and NVRTC for the kernels in CUDA.

A kernel or product takes the longest of its times: its bytes at the memory's bandwidth, its instructions at the rate at
which multiprocessors issue them, and its tensor cores' operations at their rate. The kernels of composed attention, those in
CUDA, also take turns of shared memory. Instructions and turns are counted in the machine code. Flash attention's time is its
operations at a share of the peak. Shares that say so were measured on an H100; the others are assumptions.

The model of ``aft`` has three things more. Bytes that are read many times come from the L2 cache. A warp issues one instruction
in a clock at most. A program that goes over the sequence alone on its multiprocessor waits for each load.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

import torch
from gpu_resources import MIXES, CudaLaunch, aft_call, compiled, gated_norm_call, launches, recorded, shape, triton

from headloom.gpu import aft, gated_norm
from headloom.gpu import mixes as cuda
from headloom.gpu.composed_attention import BAND, COLUMNS, Chunk, up


class Card(NamedTuple):
    capability: int
    tensor: float  # operations per second in bfloat16, dense (the maker's data sheet)
    memory: float  # bytes per second (the maker's data sheet)
    multiprocessors: int
    clock: float  # per second, boost
    flash: Dict[int, float]  # by T, what flash attention's forward reaches of `tensor`
    backward: float  # time of flash attention's backward over its forward's


CARDS = {
    # Version 2 reaches 0.65 with long sequences (Dao 2023), and has five products in the backward and two in the forward.
    "A100 80 GB": Card(80, 312e12, 2.04e12, 108, 1.41e9, {2048: 0.65, 4096: 0.65, 8192: 0.65}, 2.5),
    # scaled_dot_product_attention of PyTorch 2.11, measured.
    "H100 SXM": Card(90, 989e12, 3.35e12, 132, 1.83e9, {2048: 0.40, 4096: 0.54, 8192: 0.62}, 3.0),
    "H200 SXM": Card(90, 989e12, 4.8e12, 132, 1.83e9, {2048: 0.33, 4096: 0.49, 8192: 0.60}, 3.1),
}
# Shares of a peak that large products, streams of memory, streams of the L2 cache and loops of arithmetic reach. That of
# memory was measured: a copy moves 2.9 TB in a second.
TENSOR, MEMORY, CACHE, ISSUE = 0.7, 0.85, 0.7, 0.7
# Measured: the share of the memory's bandwidth at which products write or read a map, because 128 is a short sum, and the share
# of the turns of shared memory that the kernels of composed attention take, with rank 2 (forward, on an H200, and backward, on an
# H100).
MAP_PRODUCT, MIX, MIX_BACKWARD = 0.51, 0.54, 0.30
LANES = 128  # a multiprocessor issues four instructions for 32 lanes each in a clock
L2 = 5120  # bytes from the L2 cache in a clock (the A100's white paper; taken for both cards)
FUNCTIONS = 16  # exponentials and reciprocals of a multiprocessor in a clock (the programming guide's table)
LOAD = 500  # clocks until a load from memory arrives (Luo et al. 2024 measure 466 on an A100 and 479 on an H100)


class Code(NamedTuple):
    """Of a kernel: its instructions, and again those of each of its loops."""

    instructions: List[str]
    loops: List[List[str]]


def machine_code(cubin: bytes) -> Code:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
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
    return Code(code, [body for body in bodies.values() if len(body) > 40])


class PerPlace(NamedTuple):
    """What one place (t, s) of one head takes."""

    instructions: float  # of a lane
    turns: float  # of the shared memory of a multiprocessor, for whole warps
    maps: int  # that are read or written
    cleared: int  # that are written where no query sees a key


# Maps that a kernel in CUDA reads from memory and writes to it, those that it only clears where nobody sees a key, and rows of
# which a warp reads a part together: each row takes a turn.
MAPS = {
    "mix to scores": (2, 0, 2),
    "mix to weights": (2, 1, 2),
    "mix to composed": (2, 1, 2),
    "mix_backward after softmax": (4, 2, 8),
    "mix_backward before softmax": (4, 1, 8),
}
# Turns of a warp's instruction with shared memory, by what its name begins with.
TURNS = {r"LDS\.128": 4, r"LDS\.64": 2, r"LDS(?!\.128|\.64)": 1, r"STS\.64": 2, r"STS(?!\.64)": 1, "LDGSTS": 2, "SHFL": 1, "MOVM": 1}


def per_place(launch: CudaLaunch, capability: int) -> PerPlace:
    """The longest loop takes a step's queries, of which a thread has 4 keys. In the forward there are loops over heads in it, four at
    a time: those with multiplications. Other short loops, which load weights and add up sums of warps, count once."""
    body, *others = sorted(machine_code(launch.compiled(capability)[0]).loops, key=len, reverse=True)
    heads = launch.plan.constants["HEADS"]
    lines = list(body)
    for loop in others:
        if "TO" in launch.more and sum("FMA" in line for line in loop) >= 8:
            lines += loop * (heads // 4 - 1)
    names = [re.sub(r"@!?U?P\w+ ", "", line.split("*/")[1].strip()) for line in lines]
    of_warp = sum(turns * sum(bool(re.match(kind, name)) for name in names) for kind, turns in TURNS.items())
    places = 4 * heads  # of a thread
    maps, cleared, rows = MAPS[launch.name()]
    return PerPlace(len(lines) / places, of_warp / (32 * places) + maps * rows / 128, maps, cleared)


class Part(NamedTuple):
    what: str
    seconds: float
    bound: str


def longest(what: str, **times: float) -> Part:
    bound = max(times, key=lambda name: times[name])
    return Part(what, times[bound], bound)


def seen_places(launch: CudaLaunch, window: Optional[int]) -> int:
    """Queries times keys of the parts of tiles in which some query sees some key, by a causal mask and a window."""
    chunk, M, N = launch.chunk, launch.plan.step, launch.plan.columns
    tiles = 0
    for number in range(chunk.chunks):
        offset = number * chunk.step
        for first in range(chunk.first, chunk.last, M):
            left = max(-offset, chunk.left, -offset if window is None else first - window + 1)
            tiles += (min(first + M, chunk.right) - 1 - chunk.left) // N - (left - chunk.left) // N + 1
    return tiles * M * N


def banded(chunk: Chunk) -> int:
    """Queries times keys that a product takes of a causal chunk."""
    bands = range(chunk.first, chunk.last, BAND)
    return sum((min(t + BAND, chunk.last) - t) * min(up(t + BAND, COLUMNS), chunk.right) for t in bands)


def predict(card: Card, B: int, T: int, H: int, D: int, mixes: str, window: Optional[int] = None) -> List[Part]:
    """The parts of a forward and backward of causal self-attention, in order."""
    item = 2
    parts: List[Part] = []
    counted: Dict[str, PerPlace] = {}
    arguments = shape(B, T, H, D, mixes, mixes, torch.bfloat16, window=window)

    def product(what: str, places: float) -> Part:
        # A map is read or written once; the other operands are small beside it.
        return longest(
            what, memory=places * item / (MAP_PRODUCT * card.memory), tensor=2 * D * places / (TENSOR * card.tensor)
        )

    for backward in (False, True):
        for launch in launches(arguments, backward, card.capability):
            if not isinstance(launch, CudaLaunch):
                continue  # a few numbers for each row
            chunk, name = launch.chunk, launch.name()
            rows = chunk.last - chunk.first
            places = B * H * chunk.chunks * rows * (chunk.right - chunk.left)
            multiplied = places if window is not None else B * H * banded(chunk)
            seen = B * H * seen_places(launch, window)
            if name not in counted:
                counted[name] = per_place(launch, card.capability)
            of_place = counted[name]
            clocks = card.multiprocessors * card.clock
            parts.append(
                longest(
                    name,
                    memory=item * (seen * of_place.maps + (places - seen) * of_place.cleared) / (MEMORY * card.memory),
                    arithmetic=seen * of_place.instructions / (ISSUE * LANES * clocks),
                    shared=seen * of_place.turns / ((MIX if name.startswith("mix to") else MIX_BACKWARD) * clocks),
                )
            )
            before = {
                "mix to scores": ["scores", "output"],
                "mix to weights": ["scores again", "dout . v"],
                "mix_backward after softmax": ["dv"],
                "mix_backward before softmax": ["dq", "dk"],
            }
            parts += [product(what, multiplied) for what in before.get(name, [])]
    return parts


def step_over_plain(card: Card) -> float:
    """A training step of dcformer++ at 1.4B parameters over one of transformer++, from Xiao et al. 2024, table 3: 24 layers of
    width 2048 with 32 heads, T = 2048, every second layer with a window of 256. Its small networks add 2.7%
    to the parameters. Products outside of attention reach TENSOR of the peak in both; what is neither is left out."""
    layers, H, D, T, parameters = 24, 32, 64, 2048, 1.4e9
    maps = 6 * parameters * T / (TENSOR * card.tensor)
    flash = (1 + card.backward) * flash_forward(card, 1, T, H, D)
    ours = [sum(part.seconds for part in predict(card, 1, T, H, D, "dcmha, R 2", window)) for window in (None, 256)]
    return (1.027 * maps + layers / 2 * sum(ours)) / (maps + layers * flash)


def of_a_warp(code: Code, turns: List[int], kind: str = "") -> float:
    """Instructions that a warp issues, all or of a kind. A kernel of aft or gated_norm has one loop within another at most, and
    the compiler does not unroll them. turns: of each loop, from the outer one on."""

    def count(lines: List[str]) -> int:
        return sum(kind in line and " NOP" not in line for line in lines)

    total, before = count(code.instructions), 1
    for loop, of_loop in zip(sorted(code.loops, key=len, reverse=True), turns, strict=True):
        total += before * (of_loop - 1) * count(loop)
        before *= of_loop
    return total


class Traffic(NamedTuple):
    """Values that a kernel of aft reads and writes for each position and channel: in the call's type and in float32."""

    typed: int
    floats: int


# What is read again for the neighbouring tile is in a cache, and a tile's sums are few.
TRAFFIC = {
    "sums_kernel": Traffic(2, 0),  # k, v
    "carry_kernel, forward": Traffic(0, 0),
    "rows_kernel, forward": Traffic(4, 0),  # q, k, v; y
    "rows_kernel, backward": Traffic(5, 3),  # q, k, v, dy; dq, -L, g, g r
    "carry_kernel, backward": Traffic(0, 0),
    "keys_kernel": Traffic(4, 3),  # k, v, -L, g, g r; dk, dv
}


def predict_aft(card: Card, B: int, T: int, C: int, W: Optional[int]) -> List[Part]:
    """The kernels of a forward and backward in bfloat16, without documents and state, in order."""
    parts: List[Part] = []
    for launch in recorded(aft, aft_call(B, T, C, W, torch.bfloat16, from_state=False), 2, of_state=False):
        name, given = launch.name(), launch.arguments
        along = name.startswith("carry_kernel")  # the sequence
        together, seen = 1, 0
        if "R" in given:
            # R queries read the keys of their windows together, or R keys the queries.
            together = given["R"]
            seen = W + together - 1 if W else 0
            turns = [given["M"] // together]
            if seen:
                turns.append(math.ceil(seen / given.get("G", 1)))
        else:
            turns = [math.ceil((given["steps"] if along else given["M"]) / given["G"])]
        code = machine_code(compiled(launch, card.capability).asm["cubin"])
        # A warp issues one instruction in a clock at most.
        lanes = min(LANES, 32 * launch.warps * max(1, launch.programs // card.multiprocessors))
        clocks = card.clock * min(card.multiprocessors, launch.programs) / (launch.programs * launch.warps * 32)
        values = B * T * C * (2 * TRAFFIC[name].typed + 4 * TRAFFIC[name].floats)
        # Sums of w's gradient over the channels of a program.
        shares = 4 * B * T * C * (W or 0) / given["N"] if name == "keys_kernel" else 0
        of_window = B * T * C * seen / together * (12 if name == "keys_kernel" else 4)  # -L, g, g r; k, v
        times = {
            "memory": (values + shares) / (MEMORY * card.memory),
            "cache": (values + shares + of_window) / (CACHE * L2 * card.clock),
            "arithmetic": of_a_warp(code, turns) / (ISSUE * lanes * clocks),
            "functions": of_a_warp(code, turns, "MUFU") / (FUNCTIONS * clocks),
        }
        if along and launch.programs <= card.multiprocessors:
            times["arithmetic and waiting"] = times["arithmetic"] + turns[0] * LOAD / card.clock
        parts.append(longest(name, **times))
    return parts


def predict_gated_norm(card: Card, rows: int, width: int) -> List[Tuple[float, float]]:
    """Forward and backward in bfloat16: the time of the bytes, and that of the instructions."""
    times = []
    for launch in recorded(gated_norm, gated_norm_call(rows, width, torch.bfloat16), 1):
        # x, gate; y. Or x, gate, dy; dx, dgate.
        values = 5 if launch.arguments["BACKWARD"] else 3
        code = machine_code(compiled(launch, card.capability).asm["cubin"])
        turns = [1 for _ in code.loops]
        clocks = card.clock * card.multiprocessors / (launch.programs * launch.warps * 32)
        arithmetic = max(of_a_warp(code, turns) / (ISSUE * LANES), of_a_warp(code, turns, "MUFU") / FUNCTIONS) / clocks
        times.append((rows * (2 * values * width + 4) / (MEMORY * card.memory), arithmetic))
    return times


FORWARD = {"mix to scores", "mix to composed", "scores", "output"}
# The backward has no sums_kernel, because the state has no gradient here.
AFT_FORWARD = {"sums_kernel", "carry_kernel, forward", "rows_kernel, forward"}


def flash_forward(card: Card, B: int, T: int, H: int, D: int) -> float:
    return 4 * D * B * H * T * T / 2 / (card.flash[T] * card.tensor)


def row(columns: List[str], parts: List[Part], forward: Set[str], card: Card, flash: float, *, with_parts: bool) -> None:
    """Of a table whose last columns are multiples of flash attention. with_parts: a line for each kernel follows."""
    total = sum(p.seconds for p in parts)
    of_forward = sum(p.seconds for p in parts if p.what in forward)
    print(f"| {' | '.join(columns)} | {of_forward / flash:.1f} | {total / flash / (1 + card.backward):.1f} |", flush=True)
    if not with_parts:
        return
    for what in dict.fromkeys(p.what for p in parts):
        same = [p for p in parts if p.what == what]
        share = sum(p.seconds for p in same) / flash
        print(f"  {what}: {share:.2f} of flash attention's forward, bound by {same[-1].bound}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    lengths = [2048, 4096, 8192]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, choices=lengths)
    # Static matrices and calls without mixes have no kernels in CUDA.
    known = [name for name, (query_rank, _, _, static) in MIXES.items() if query_rank and not static]
    parser.add_argument("--mixes", nargs="+", default=["query-wise, R 1", "dcmha, R 2"], choices=known)
    parser.add_argument("--parts", action="store_true", help="also print the parts")
    given = parser.parse_args()
    if not cuda.installed():
        parser.error("cuda-bindings and NVRTC, which compile the kernels in CUDA, are not installed")
    B, H, D = 1, 32, 128
    print("| card | mixes before and after softmax | T | forward / flash | training / flash |")
    print("|---|---|---|---|---|")
    for name, card in CARDS.items():
        for mixes in given.mixes:
            for T in given.lengths:
                parts, flash = predict(card, B, T, H, D, mixes), flash_forward(card, B, T, H, D)
                row([name, mixes, str(T)], parts, FORWARD, card, flash, with_parts=given.parts)
    print("| card | step of dcformer++ 1.4B / transformer++ 1.4B |")
    print("|---|---|")
    for name, card in CARDS.items():
        print(f"| {name} | {step_over_plain(card):.2f} |", flush=True)
    print("| card | aft | T | forward / flash | training / flash |")
    print("|---|---|---|---|---|")
    for name, card in CARDS.items():
        for form, W in (("simple", None), ("local, window of 32", 32)):
            for T in given.lengths:
                parts, flash = predict_aft(card, B, T, H * D, W), flash_forward(card, B, T, H, D)
                row([name, form, str(T)], parts, AFT_FORWARD, card, flash, with_parts=given.parts)
    print("| card | values of a row of gated_norm | forward / its bytes | training / its bytes | instructions / bytes |")
    print("|---|---|---|---|---|")
    for name, card in CARDS.items():
        for width in (64, 128, 768, 4096):
            forward, backward = predict_gated_norm(card, 1 << 16, width)
            sums = [sum(max(x) for x in times) / sum(x[0] for x in times) for times in ([forward], [forward, backward])]
            share = (forward[1] + backward[1]) / (forward[0] + backward[0])
            print(f"| {name} | {width} | {sums[0]:.1f} | {sums[1]:.1f} | {share:.2f} |", flush=True)


if __name__ == "__main__":
    main()
