"""A training step of dcformer++ 1.4B over one of transformer++ 1.4B on an NVIDIA GPU. Prints a table to paste into an issue.

    python bench/gpu_step.py [--batch B] [--layers N] [--width C] [--heads H] [--length T] [--rounds N] [--profile]

The sizes are those of Xiao et al. 2024, table 3: 24 layers of width 2048 with 32 heads of 64, T = 2048, and every second layer
of dcformer++ has a window of 256. A step is forward, cross-entropy, backward, clipping and PyTorch's fused AdamW;
bfloat16 is autocast, with parameters in float32. Both models are in memory and take turns in one process. A turn is three
steps one after the other, as in training, so that the host may run ahead of the GPU. Times are medians over the rounds, and
each ratio is of one round. ``bench/gpu_model.py`` predicts the ratio.

``--device cpu`` is for trying the script out at small sizes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import headloom  # noqa: E402

NAMES = ("transformer++", "dcformer++")
WARM_UP, TURN = 2, 3  # steps


class Peer:
    """A model with its optimiser and a batch."""

    def __init__(self, name: str, given: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(1)
        mixers: List[Dict[str, Any]] = [{"type": "mha", "heads": given.heads}]
        if name == "dcformer++":
            plain = {"type": "dcmha", "heads": given.heads}
            mixers = [{**plain, "window": 256}, plain]
        layers = [{"mixer": mixer, "channel": {"type": "swiglu"}} for mixer in mixers]
        self.model = headloom.model(f"{name}-1.4b", width=given.width, depth=given.layers, layer=layers).to(device)
        self.optimizer = torch.optim.AdamW(headloom.parameter_groups(self.model), lr=1e-4, fused=True)
        tokens = torch.randint(0, self.model.config["vocabulary"], (given.batch, given.length + 1), device=device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.inputs.device.type, torch.bfloat16):
            return self.model.loss(self.inputs, self.targets)

    def forward(self) -> None:
        with torch.no_grad():
            self.loss()

    def step(self) -> None:
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def kept(self) -> int:
        """Bytes that stay from step to step."""
        states = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in (*self.model.parameters(), *states))


def milliseconds(device: torch.device, call: Callable[[], Any]) -> float:
    """Of one call, in a turn."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(TURN):
            call()
        return 1e3 * (time.perf_counter() - begin) / TURN
    torch.cuda.synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(TURN):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / TURN


def peak(peer: Peer, other: Peer, device: torch.device) -> float:
    """GB that a step needs, without what the other model keeps."""
    torch.cuda.reset_peak_memory_stats(device)
    peer.step()
    return (torch.cuda.max_memory_allocated(device) - other.kept()) / 1e9


def waits(step: Callable[[], Any]) -> int:
    """How often the host waits for the GPU in a step, as far as PyTorch sees it."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in found)


class Spread(NamedTuple):
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: List[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def shown(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def row(what: str, columns: List[str], ratio: str = "") -> None:
    print(f"| {what} | {' | '.join(columns)} | {ratio} |", flush=True)


def compare(peers: Dict[str, Peer], device: torch.device, rounds: int) -> None:
    for peer in peers.values():
        for _ in range(WARM_UP):
            peer.step()
            peer.forward()
    found: Dict[str, Dict[str, List[float]]] = {what: {name: [] for name in NAMES} for what in ("forward", "step")}
    retries = allocation_retries(device)
    for i in range(rounds):
        for what, times in found.items():
            for name, peer in peers.items():
                times[name].append(milliseconds(device, getattr(peer, what)))
        now = ", ".join(f"{name} {found['step'][name][-1]:.1f} ms" for name in NAMES)
        print(f"round {i + 1}: {now}", file=sys.stderr, flush=True)
    retries = allocation_retries(device) - retries

    plain, composed = (peers[name] for name in NAMES)
    print(f"| | {' | '.join(NAMES)} | ratio |")
    print("|---|---|---|---|")
    counts = [peer.parameters() for peer in peers.values()]
    row("parameters", [f"{n:,}" for n in counts], f"{counts[1] / counts[0]:.3f}")
    for what, times in found.items():
        ratios = [ours / theirs for theirs, ours in zip(*(times[name] for name in NAMES))]
        row(f"{what}, ms", [Spread.of(times[name]).shown(1) for name in NAMES], Spread.of(ratios).shown(3))
    rates = [plain.inputs.numel() / statistics.median(found["step"][name]) * 1e3 for name in NAMES]
    row("tokens in a second of training", [f"{rate:,.0f}" for rate in rates], f"{rates[1] / rates[0]:.3f}")
    if device.type != "cuda":
        return
    peaks = [peak(plain, composed, device), peak(composed, plain, device)]
    row("peak memory of a step, GB", [f"{gb:.1f}" for gb in peaks], f"{peaks[1] / peaks[0]:.3f}")
    row("waits of the host for the GPU in a step", [str(waits(peer.step)) for peer in peers.values()])
    if retries:
        print(f"\nMemory ran short {retries} times while it was timed, so the times are too long: take a smaller --batch.")


def allocation_retries(device: torch.device) -> int:
    """How often PyTorch had to give memory back first."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


def profile(name: str, step: Callable[[], Any], device: torch.device, most: int) -> None:
    """What the GPU runs in a step; of the CPU, its operators."""
    gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
        if gpu:
            torch.cuda.synchronize(device)
    side = torch.autograd.DeviceType.CUDA if gpu else torch.autograd.DeviceType.CPU
    # An annotation, such as the optimiser's step, is no kernel: it has the time of those within it.
    events = [e for e in profiler.key_averages() if e.device_type == side and not getattr(e, "is_user_annotation", False)]

    def ms(event: Any) -> float:
        return float(event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e3

    events.sort(key=ms, reverse=True)
    total = sum(map(ms, events))
    count = sum(event.count for event in events)
    print(f"\n{count:,} kernels of a step of {name} take {total:.1f} ms. For the rest of its time the GPU waits for the host.")
    if most == 0:
        return
    print("\n| kernel | times | ms | share |")
    print("|---|---|---|---|")
    for event in events[:most]:
        label = " ".join(event.key.replace("|", "\\|").split())
        label = label if len(label) <= 100 else label[:97] + "..."
        print(f"| {label} | {event.count} | {ms(event):.2f} | {ms(event) / total:.1%} |")


def title(given: argparse.Namespace, device: torch.device) -> str:
    card = torch.cuda.get_device_properties(device).name if device.type == "cuda" else "CPU"
    try:
        triton = f"Triton {__import__('triton').__version__}"
    except ImportError:
        triton = "no Triton, so composed attention runs by its definition on a GPU"
    sizes = f"{given.layers} layers of width {given.width}, {given.heads} heads, T = {given.length}, batch {given.batch}"
    return f"{card}, PyTorch {torch.__version__}, {triton}; {sizes}; medians of {given.rounds} rounds with the range"


def chosen(name: Optional[str]) -> Optional[torch.device]:
    """None where it is a GPU that is not there."""
    device = torch.device(name or "cuda")
    if device.type != "cuda":
        return device
    return torch.device("cuda", device.index or 0) if torch.cuda.is_available() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="also print the 25 kernels that take most of each step")
    parser.add_argument("--device", help="cuda, or cpu to try the script out")
    given = parser.parse_args()
    device = chosen(given.device)
    if device is None:
        print("bench/gpu_step.py: PyTorch sees no NVIDIA GPU; bench/gpu_model.py predicts without one.", file=sys.stderr)
        return 1
    if device.type == "cuda":
        torch.cuda.set_device(device)
    print(f"{title(given, device)}\n", flush=True)
    try:
        peers = {name: Peer(name, given, device) for name in NAMES}
        compare(peers, device, given.rounds)
        if given.profile:
            for name, peer in peers.items():
                profile(name, peer.step, device, 25)
    except torch.OutOfMemoryError as error:
        print(
            f"bench/gpu_step.py: two models do not fit at --layers {given.layers} and --batch {given.batch}, expected less "
            f"({str(error).splitlines()[0]})",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
