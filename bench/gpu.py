"""The kernels on an NVIDIA GPU: are they right, and how fast are they? Prints tables to paste into an issue.

First the outputs and all gradients are compared with the reference in float64, in three types; the script ends there if one
is wrong. Then times are medians over rounds in one process: those of composed attention as multiples of
``scaled_dot_product_attention``'s, those of its kernels alone, and those of the other operators beside the reference's.

    python bench/gpu.py --lengths 2048 4096 8192
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from gpu_resources import MIXES, shape

import headloom  # noqa: F401: loads the operators
from headloom.gpu import composed_attention as gpu
from headloom.gpu import mixes

operator = torch.ops.headloom.composed_attention
MULTI_TOKEN = "multi_token, 6 x 11"
WINDOW = "dcmha, R 2, window of 60"
CASES = [name for name in MIXES if name != "none"] + [MULTI_TOKEN, WINDOW]


def case(B: int, T: int, H: int, D: int, name: str, dtype: torch.dtype) -> List[Any]:
    """The operator's arguments: a mix on both sides of softmax, or a convolution before it and a static matrix after it."""
    if name == WINDOW:
        return shape(B, T, H, D, "dcmha, R 2", "dcmha, R 2", dtype, "cuda", window=60)
    if name != MULTI_TOKEN:
        return shape(B, T, H, D, name, name, dtype, "cuda")
    given = shape(B, T, H, D, "none", "static", dtype, "cuda")
    given[7] = torch.randn(H, 6, 11, device="cuda").div_(66**0.5).to(dtype)
    return given


def operator_calls(B: int, T: int) -> Dict[str, List[Any]]:
    """The other operators, in float32: 12 heads of 64 or 768 channels."""

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda")

    def positive(*size: int) -> torch.Tensor:
        return torch.rand(size, device="cuda") + 0.1

    heads, channels = (B, T, 12, 64), (B, T, 768)
    bias = 0.1 * normal(T, 32)
    return {
        "aft": [normal(*channels), normal(*channels), normal(*channels), "local", bias, True, None, None, None, 0],
        "gated_norm": [normal(*heads), normal(*heads), positive(B, T, 12)],
        "dynamic_weights": [normal(B, T, 4 * 48), 0.1 * normal(4, 1, 48, 48), 2],
        "rms_norm": [normal(*heads), positive(64), 1e-6],
        "rotary": [normal(*heads), normal(T, 32).cos(), normal(T, 32).sin(), False],
        "swiglu": [normal(B, T, 2 * 2048)],
        "retention": [
            0.1 * normal(*heads), 0.1 * normal(*heads), normal(*heads), 1 - 2.0 ** -torch.arange(5, 17, device="cuda"),
            None, None, "chunkwise", 64,
        ],
        "gated_linear_attention": [
            0.1 * normal(*heads), 0.1 * normal(*heads), normal(*heads), -positive(*heads) / 16, None, None, "chunkwise", 16,
        ],
        "wkv": [normal(*channels), normal(*channels), positive(768), normal(768), normal(*channels), None, None],
        "causal_conv1d": [normal(*channels), normal(768, 4), normal(768), True, None, None],
        "selective_scan": [
            normal(*channels), normal(*channels), -positive(768, 16), normal(B, T, 16), normal(B, T, 16),
            normal(768), normal(*channels), normal(768), True, None, None,
        ],
    }  # fmt: skip


# The arguments that take the type that is asked for; the others stay in float32.
IN_TYPE = {
    "aft": (0, 1, 2),
    "gated_norm": (0, 1),
    "dynamic_weights": (0, 1),
    "rms_norm": (0,),
    "rotary": (0,),
    "swiglu": (0,),
    "retention": (0, 1, 2),
    "gated_linear_attention": (0, 1, 2, 3),
    "wkv": (0, 1, 4),
    "causal_conv1d": (0, 4),
    "selective_scan": (0, 1, 3, 4, 6),
}
# Arguments whose gradient the kernels do not have.
CONSTANT = {"gated_norm": (2,), "retention": (3,), "rotary": (1, 2)}


def of_type(name: str, call: List[Any], dtype: torch.dtype) -> List[Any]:
    """A copy of a call whose tensors want gradients; in float64 all are."""

    def one(i: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach().to(dtype if i in IN_TYPE[name] or dtype == torch.float64 else torch.float32)
        return value.requires_grad_(i not in CONSTANT.get(name, ()))

    return [one(i, x) for i, x in enumerate(call)]


def run_operator(name: str, call: List[Any], backend: str) -> List[torch.Tensor]:
    """The output, and the gradients of its sum."""
    results = getattr(torch.ops.headloom, name)(*call, backend)
    if name == "dynamic_weights":
        results = torch.stack(results)
    out = results if isinstance(results, torch.Tensor) else results[0]
    wanted = [x for x in call if isinstance(x, torch.Tensor) and x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.float().sum(), wanted)]


def taken(name: str, call: List[Any]) -> str:
    """Why no kernel takes a call, or nothing."""
    try:
        run_operator(name, call, "fused")
    except NotImplementedError as error:
        return str(error)
    return ""


def operators(rounds: int) -> bool:
    """Correctness, and then times, of what is installed."""
    columns = ("largest relative error of output and gradients", "of the reference in this type", "right", "ms", "ms of the reference")
    print("| operator | type | " + " | ".join(columns) + " |")
    print("|---|---|---|---|---|---|---|")
    fine, missing = True, []
    torch.manual_seed(1)
    for name, call in operator_calls(2, 200).items():
        exact = run_operator(name, of_type(name, call, torch.float64), "reference")
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            given = of_type(name, call, dtype)
            reason = taken(name, given)
            if reason:
                missing.append(f"{name} has no kernel for {dtype} here: {reason}")
                continue
            ours, plain = run_operator(name, given, "fused"), run_operator(name, given, "reference")
            right, errors, allowed = judged(ours, plain, exact)
            right = right and all(torch.equal(x, y) for x, y in zip(ours, run_operator(name, given, "fused")))
            fine = fine and right
            columns = ["not timed"] * 2
            if right:
                long = of_type(name, operator_calls(4, 2048)[name], dtype)
                columns = [
                    f"{median_ms(lambda b=b: run_operator(name, long, b), rounds):.3f}" for b in ("fused", "reference")
                ]
            print(f"| {name} | {dtype} | {errors:.1e} | {allowed:.1e} | {'yes' if right else 'NO'} | {' | '.join(columns)} |", flush=True)
    print("\n" + "\n".join(missing))
    return fine


def judged(ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> Tuple[bool, float, float]:
    """Whether kernels err at most twice as much as the reference in the same type, and the largest errors of both."""
    errors = [distance(x, y) for x, y in zip(ours, exact)]
    of_plain = [distance(x, y) for x, y in zip(plain, exact)]
    return all(e <= 2 * p + 1e-5 for e, p in zip(errors, of_plain)), max(errors), max(of_plain)


def median_ms(step: Callable[[], Any], rounds: int) -> float:
    for _ in range(3):
        step()
    return statistics.median(milliseconds(step) for _ in range(rounds))


def leaves(arguments: List[Any]) -> List[torch.Tensor]:
    tensors = [*arguments[:3], *arguments[3], *arguments[4], *arguments[7:9]]
    return [t for t in tensors if t is not None]


def converted(arguments: List[Any], dtype: torch.dtype) -> List[Any]:
    """A copy in another type, whose tensors want gradients."""

    def one(value: Any) -> Any:
        if isinstance(value, list):
            return [one(v) for v in value]
        return value.detach().to(dtype).requires_grad_() if isinstance(value, torch.Tensor) else value

    return [one(a) for a in arguments]


def with_gradients(arguments: List[Any], backend: str, grad: torch.Tensor) -> List[torch.Tensor]:
    out = operator(*arguments, backend)
    return [out.detach(), *torch.autograd.grad(out, leaves(arguments), grad.to(out.dtype))]


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x.double() - y).norm() / y.norm().clamp(min=1e-30)).item()


def correct() -> bool:
    """Of composed attention."""
    print("| mixes | type | largest relative error of output and gradients | of the reference in this type | right |")
    print("|---|---|---|---|---|")
    fine = True
    for mixes in CASES:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            torch.manual_seed(1)
            given = case(2, 200, 6, 20, mixes, dtype)
            grad = torch.randn(2, 200, 6, 20, device="cuda").to(dtype)
            exact = with_gradients(converted(given, torch.float64), "reference", grad)
            ours = with_gradients(converted(given, dtype), "fused", grad)
            again = with_gradients(converted(given, dtype), "fused", grad)
            plain = with_gradients(converted(given, dtype), "reference", grad)
            right, errors, allowed = judged(ours, plain, exact)
            right = right and all(torch.equal(x, y) for x, y in zip(ours, again))
            fine = fine and right
            print(f"| {mixes} | {dtype} | {errors:.1e} | {allowed:.1e} | {'yes' if right else 'NO'} |")
    return fine


def milliseconds(step: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def steps(given: List[Any], compiled: bool) -> Dict[str, Callable[[], Any]]:
    """Forward, and forward with backward, of each candidate."""
    # The graphs of other mixes would count towards the most that torch.compile makes of one function.
    torch._dynamo.reset()
    q, k, v = (x.transpose(1, 2) for x in given[:3])
    grad = torch.randn_like(given[0])

    def flash() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    reference = torch.compile(lambda: operator(*given, "reference"), dynamic=False) if compiled else None
    candidates: Dict[str, Callable[[], torch.Tensor]] = {"sdpa": flash, "ours": lambda: operator(*given, "fused")}
    if reference is not None:
        candidates["compiled reference"] = reference

    found: Dict[str, Callable[[], Any]] = {}
    for name, candidate in candidates.items():
        wanted = list(given[:3]) if name == "sdpa" else leaves(given)

        def forward(candidate: Any = candidate) -> None:
            with torch.no_grad():
                candidate()

        def training(candidate: Any = candidate, wanted: Any = wanted) -> None:
            torch.autograd.grad(candidate(), wanted, grad)

        found[f"{name}, forward"] = forward
        found[f"{name}, training"] = training

    def our_forward() -> None:
        with torch.no_grad():
            gpu.forward(*given, False)

    def our_training() -> None:
        with torch.no_grad():
            _, lse = gpu.forward(*given, True)
            gpu.backward([grad], *given, [lse], (1 << 20) - 1)

    found["ours as a CUDA graph, forward"] = replayed(our_forward)
    found["ours as a CUDA graph, training"] = replayed(our_training)
    return found


def replayed(step: Callable[[], Any]) -> Callable[[], None]:
    """The step as a CUDA graph: the processor launches it at once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def kernels(name: str, T: int, rows: int, rounds: int) -> None:
    """The kernels of composed attention one by one, on the last rows, in picoseconds for a place of a head."""
    given = case(1, T, 32, 128, name, torch.bfloat16)
    with torch.no_grad():
        p = gpu.KernelArguments(*given)
        part = p.parts(T - rows, T).own
        lse = torch.full((1, p.H, T), 8.0, device="cuda")
        queries, keys, values = p.inputs(part, part)
        scores = p.scores(queries, keys, part)
        other, weights, grads = (torch.empty_like(scores) for _ in range(3))
        gpu.mix_maps(p, part, lse, p.pre, scores, weights, "weights")
        grads.normal_()
        out = p.q.new_empty((*scores.shape[:3], p.E))
        sizes = [gpu.OfKeys.size(p, p.Gk, p.D), *gpu.MixGradients.sizes(p.pre, p), *gpu.MixGradients.sizes(p.post, p)]
        memory = iter(gpu.zeros(p, sizes))
        dk = gpu.OfKeys(p, next(memory))
        pre, post = (gpu.MixGradients(mix, p, memory) for mix in (p.pre, p.post))
        delta = torch.zeros_like(lse)
        steps: Dict[str, Callable[[], Any]] = {
            "copy of a map": lambda: other.copy_(scores),
            "product to scores": lambda: p.multiply_keys(other, queries, keys, part, p.scale),
            "product to the output": lambda: p.multiply_maps(out, scores, values, part),
            "product to dk": lambda: gpu.add_transposed(dk, part, scores, queries),
        }
        of_mixes: Dict[str, Callable[[], Any]] = {
            "mix to scores": lambda: gpu.mix_maps(p, part, lse, p.pre, scores, other, "scores"),
            "mix to composed": lambda: gpu.mix_maps(p, part, lse, p.post, scores, other, "composed", exp=True),
            "mix to weights": lambda: gpu.mix_maps(p, part, lse, p.pre, scores, other, "weights"),
            "mix_backward after softmax": lambda: gpu.sum_up(
                *gpu.mix_backward(p, part, lse, post, weights, grads, out=other)[0]
            ),
            "mix_backward before softmax": lambda: gpu.sum_up(
                *gpu.mix_backward(p, part, lse, pre, scores, grads, weights=weights, delta=delta)[0]
            ),
        }
        if mixes.installed():
            steps.update({f"{what}, in CUDA": step for what, step in of_mixes.items()})
        steps.update({f"{what}, in Triton": step for what, step in of_mixes.items()})
        print(f"| kernel, {name}, the last {rows} queries of {T} | ps for a place of a head |")
        print("|---|---|")
        plan = mixes.plan
        for what, step in steps.items():
            mixes.plan = (lambda *given, **named: None) if what.endswith("Triton") else plan
            print(f"| {what} | {median_ms(step, rounds) * 1e9 / (p.H * rows * T):.2f} |", flush=True)
            grads.normal_()  # the backward's kernels change it, time after time
        mixes.plan = plan


def times(lengths: List[int], mixes: List[str], rounds: int, compiled_up_to: int) -> None:
    print("| mixes | T | what | ms, median | fastest to slowest | multiple of sdpa |")
    print("|---|---|---|---|---|---|")
    for name in mixes:
        for T in lengths:
            given = converted(case(1, T, 32, 128, name, torch.bfloat16), torch.bfloat16)
            todo = steps(given, compiled=compiled_up_to >= T)
            for step in todo.values():
                for _ in range(3):
                    step()
            found: Dict[str, List[float]] = {what: [] for what in todo}
            for _ in range(rounds):
                for what, step in todo.items():
                    found[what].append(milliseconds(step))
            for what, ms in found.items():
                base = statistics.median(found["sdpa, " + what.rpartition(", ")[2]])
                median = statistics.median(ms)
                print(f"| {name} | {T} | {what} | {median:.3f} | {min(ms):.3f} to {max(ms):.3f} | {median / base:.2f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--mixes", nargs="+", default=["query-wise, R 1", "dcmha, R 2", MULTI_TOKEN], choices=CASES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compiled-up-to", type=int, default=4096, help="the longest T of the compiled reference, which holds whole maps")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/gpu.py: PyTorch sees no NVIDIA GPU; bench/gpu_model.py predicts without one.", file=sys.stderr)
        return 1
    card = torch.cuda.get_device_properties(0)
    print(f"{card.name}, PyTorch {torch.__version__}, Triton {__import__('triton').__version__}\n")
    if not correct():
        print("\nResults are wrong, so nothing is timed.", file=sys.stderr)
        return 1
    print()
    times(given.lengths, given.mixes, given.rounds, given.compiled_up_to)
    print()
    kernels("dcmha, R 2", 4096, 1024, given.rounds)
    print()
    return 0 if operators(given.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
