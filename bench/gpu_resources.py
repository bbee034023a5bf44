"""Compiles the kernels for GPUs that need not be there, and prints what each takes of a multiprocessor.
``python bench/gpu_resources.py`` prints the tables of docs/gpu.md; a kernel that breaks a limit ends with an error. Those in CUDA are
left out where NVRTC is not installed, which comes with PyTorch for CUDA.

The kernels and their arguments are those of a call: ``forward`` and ``backward`` run on meta tensors, with a launch that
records instead of starting a kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

try:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature
except ImportError as error:
    sys.exit(f"{sys.argv[0]} needs Triton: pip install 'triton>=3.6' ({error}).")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import headloom  # noqa: E402, F401: loads the operators
from headloom.gpu import aft, dynamic_weights, gated_norm, mixes, rms_norm, rotary, swiglu  # noqa: E402
from headloom.gpu import composed_attention as gpu  # noqa: E402

# Shared memory that one program may have, in bytes (CUDA's programming guide, table of compute capabilities).
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
REGISTERS = 255

# What a mix has: rank of query-wise and key-wise weights, gates, static matrix.
MIXES: Dict[str, Tuple[int, int, bool, bool]] = {
    "none": (0, 0, False, False),
    "query-wise, R 1": (1, 0, False, False),
    "dcmha, R 2": (2, 2, True, False),
    "rank 4": (4, 4, True, False),
    "static": (0, 0, False, True),
    "static and R 2": (2, 2, True, True),
}


class Launch(NamedTuple):
    kernel: Any
    arguments: Dict[str, Any]
    warps: int
    chunk: Optional[gpu.Chunk] = None  # of composed attention
    programs: int = 0  # of the other operators
    stages: int = 3

    def name(self) -> str:
        """What it does in a call."""
        given = self.arguments
        name: str = self.kernel.__name__
        if "TO" in given:
            return f"{name} to {given['TO']}" + (", with M" if given["product"] is not None else "")
        if "BACKWARD" in given:
            return f"{name}, {'backward' if given['BACKWARD'] else 'forward'}"
        if "TF32" in given:
            return f"{name} " + ("before softmax" if given["out"] is None else "after softmax")
        return name


class CudaLaunch(NamedTuple):
    """Of a kernel in CUDA."""

    kernel: str
    plan: mixes.Plan
    more: Dict[str, int]  # the constants that the plan does not have
    chunk: gpu.Chunk

    def name(self) -> str:
        """What it does in a call."""
        if "TO" in self.more:
            return f"{self.kernel} to {next(to for to, number in mixes.TO.items() if number == self.more['TO'])}"
        return f"{self.kernel} {'after' if self.more['AFTER'] else 'before'} softmax"

    def compiled(self, capability: int, *options: str) -> Tuple[bytes, str]:
        return mixes.compiled({**self.plan.constants, **self.more}, capability, *options)


def shape(
    B: int,
    T: int,
    H: int,
    D: int,
    pre: str,
    post: str,
    dtype: torch.dtype,
    device: str = "meta",
    window: Optional[int] = None,
) -> List[Any]:
    """The operator's arguments for self-attention with a causal mask."""

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device).div_(H**0.5).to(dtype)

    def mix(name: str) -> List[Optional[torch.Tensor]]:
        query_rank, key_rank, gates, static = MIXES[name]
        tensors = [random(H, H) if static else None]
        for rank in (query_rank, key_rank):
            tensors += [random(B, T, rank, H) if rank else None for _ in range(2)]
            tensors += [random(B, T, H) if gates else None]
        return tensors if any(t is not None for t in tensors) else []

    q, k, v = (random(B, T, H, D).mul_(H**0.5) for _ in range(3))
    return [
        q, k, v, mix(pre), mix(post), 1, 1, None, None, "both", "double", None, True, window, None, None, None, None,
    ]  # fmt: skip


def launches(arguments: List[Any], backward: bool, cuda: Optional[int] = None) -> List[Any]:
    """The kernels that a call would start: a Launch or CudaLaunch of each.

    Args:
        cuda: the compute capability of a card on which kernels in CUDA run. None for all kernels in Triton.
    """
    found: List[Any] = []

    def record(kernel: Any, p: gpu.KernelArguments, chunk: gpu.Chunk, of: gpu.Tile, *given: Any, **constants: Any) -> None:
        named = dict(zip(kernel.arg_names, given), **constants, M=of.M, N=of.N)
        found.append(Launch(kernel, named, of.warps, chunk, stages=of.stages))

    def record_cuda(name: str, of: mixes.Plan, more: Dict[str, int], call: Any, *others: Any) -> None:
        chunk = gpu.Chunk(call.first, call.last, call.left, call.right, call.chunks, call.step)
        found.append(CudaLaunch(name, of, more, chunk))

    def memory(maps: torch.Tensor) -> Optional[mixes.Memory]:
        if cuda is None or maps.dtype == torch.float32:
            return None
        return mixes.Memory(SHARED[cuda], SHARED[cuda] + 1024)

    before = gpu.run, mixes.run, mixes.memory, gpu.capability
    gpu.run, mixes.run, mixes.memory = record, record_cuda, memory
    if cuda is not None:
        gpu.capability = of_card(cuda)
    try:
        with recording(found):
            out, lse = gpu.forward(*arguments, True)
            if backward:
                found.clear()
                gpu.backward([out], *arguments, [lse], (1 << 20) - 1)
    finally:
        gpu.run, mixes.run, mixes.memory, gpu.capability = before
    return found


@contextlib.contextmanager
def recording(found: List[Launch]) -> Iterator[None]:
    """While it lasts, Triton's launches are added to a list and start nothing."""

    def record(kernel: Any, *given: Any, grid: Tuple[int, ...], num_warps: int = 4, **constants: Any) -> None:
        named = dict(zip(kernel.arg_names, given), **{k: v for k, v in constants.items() if k != "warmup"})
        found.append(Launch(kernel, named, num_warps, programs=math.prod(grid)))

    run, triton.JITFunction.run = triton.JITFunction.run, record
    try:
        yield
    finally:
        triton.JITFunction.run = run


def recorded(operator: Any, call: List[Any], results: int, *, of_state: bool = True) -> List[Launch]:
    """The kernels that a forward and backward of another operator would start.

    Args:
        results: how many of the forward's outputs are results; the others are kept for the backward.
        of_state: whether results after the first have a gradient too.
    """
    found: List[Launch] = []
    with recording(found):
        outputs = operator.forward(*call, True)
        grads = [x if i == 0 or of_state else None for i, x in enumerate(outputs[:results])]
        operator.backward(grads, *call, outputs[results:], (1 << 20) - 1)
    return found


def on_meta(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def aft_call(B: int, T: int, C: int, W: Optional[int], dtype: torch.dtype, *, from_state: bool) -> List[Any]:
    """"local" with a window of W, or "simple", which begins anew or goes on from a state, with documents."""
    bias = None if W is None else on_meta(T, W, dtype=torch.float32)
    documents = on_meta(B, T, dtype=torch.int64) if from_state else None
    state = on_meta(B, 2 * (W or 1) + 1, C, dtype=torch.float32) if from_state else None
    return [on_meta(B, T, C, dtype=dtype) for _ in range(3)] + [
        "simple" if W is None else "local", bias, True, None, documents, state, 0,
    ]  # fmt: skip


def gated_norm_call(rows: int, width: int, dtype: torch.dtype) -> List[Any]:
    return [on_meta(rows, width, dtype=dtype), on_meta(rows, width, dtype=dtype), on_meta(rows, dtype=torch.float32)]


def dynamic_weights_call(rows: int, heads: int, dtype: torch.dtype) -> List[Any]:
    """Of the four sides of ``dcmha`` with rank 2."""
    return [on_meta(1, rows, 16 * heads, dtype=dtype), on_meta(4, 1, 4 * heads, 4 * heads, dtype=dtype), 2]


def rotary_call(rows: int, heads: int, width: int, pairs: int, interleaved: bool, dtype: torch.dtype) -> List[Any]:
    angles = on_meta(rows, pairs, dtype=torch.float32)
    return [on_meta(1, rows, heads, width, dtype=dtype), angles, angles, interleaved]


def operator_launches(dtype: torch.dtype) -> Dict[str, List[Launch]]:
    """By their operator. Sizes are those of a model of 124M parameters, and a call has all that it can have."""
    return {
        "aft, simple": recorded(aft, aft_call(8, 1024, 768, None, dtype, from_state=True), 2),
        "aft, local": recorded(aft, aft_call(8, 1024, 768, 32, dtype, from_state=True), 2),
        **{
            f"gated_norm of {width}": recorded(gated_norm, gated_norm_call(4096, width, dtype), 1)
            for width in (64, 768, 8192)
        },
        **{
            f"rms_norm of {width}": recorded(rms_norm, [on_meta(4096, width, dtype=dtype), on_meta(width, dtype=torch.float32), 1e-6], 1)
            for width in (64, 768, 8192)
        },
        **{
            f"dynamic_weights, {heads} heads": recorded(dynamic_weights, dynamic_weights_call(4096, heads, dtype), 1)
            for heads in (12, 32, 64)
        },
        "rotary": recorded(rotary, rotary_call(4096, 12, 64, 32, False, dtype), 1),
        "rotary, interleaved, a part": recorded(rotary, rotary_call(4096, 6, 128, 17, True, dtype), 1),
        "swiglu of 64": recorded(swiglu, [on_meta(4096, 2 * 64, dtype=dtype)], 1),
        "swiglu of 2048": recorded(swiglu, [on_meta(4096, 2 * 2048, dtype=dtype)], 1),
    }


class Resources(NamedTuple):
    registers: int
    spilled: int  # bytes of a thread's stack
    shared: int  # bytes of a program
    layouts: int  # ways in which threads share the places of a map


def compiled(launch: Launch, capability: int) -> Any:
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kernel = launch.kernel
    options: Dict[str, Any] = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, parsed = bind(**launch.arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, parsed)
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=target, options=parsed.__dict__
    )


def resources(launch: Launch, capability: int) -> Resources:
    binary = compiled(launch, capability)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}
    return Resources(usage["REG"], usage["STACK"], binary.metadata.shared, layouts(launch, binary.asm["ttgir"]))


def layouts(launch: Launch, code: str) -> int:
    """Kernels change a map in place without waiting for each other's threads: each thread must write the places that it read."""
    maps = launch.arguments.get("maps")
    if maps is None:
        return 1
    kind = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[maps.dtype]
    size = "{M}x{N}".format(**launch.arguments)
    found = re.findall(rf"tt\.(?:load|store) .*tensor<{size}x!tt\.ptr<{kind}>, (#\w+)>", code)
    return len(set(found))


class Row(NamedTuple):
    capability: int
    kernel: str
    H: Optional[int]
    mixes: str  # or the operator
    dtype: str
    tile: str
    warps: int
    found: Resources

    def fits(self) -> bool:
        r = self.found
        return r.registers <= REGISTERS and r.spilled == 0 and r.shared <= SHARED[self.capability] and r.layouts == 1


def of_card(capability: int) -> Callable[[torch.device], int]:
    """In place of ``gpu.capability``, which would ask a GPU."""
    return lambda device: capability // 10


def rows(capabilities: List[int], heads: List[int], mixes: List[str], dtypes: List[torch.dtype]) -> Iterator[Row]:
    for H, name, dtype, capability in itertools.product(heads, mixes, dtypes, capabilities):
        gpu.capability = of_card(capability)
        arguments = shape(1, 8192, H, 128, name, name, dtype)
        for backward in (False, True):
            # The second chunk's: the first has other alignments.
            found = launches(arguments, backward)
            second = [x for x in found if x.chunk is None or x.chunk.first > 0]
            yield from rows_of(second, [capability], H, name, dtype)


def cuda_rows(capabilities: List[int], heads: List[int], names: List[str], dtypes: List[torch.dtype]) -> Iterator[Row]:
    """The kernels in CUDA, of calls with every mask but a boolean one."""
    for H, name, dtype, capability in itertools.product(heads, names, dtypes, capabilities):
        arguments = shape(1, 8192, H, 128, name, name, dtype, window=1024)
        arguments[14:16] = on_meta(1, dtype=torch.int64), on_meta(1, 8192, dtype=torch.int64)
        found = [x for backward in (False, True) for x in launches(arguments, backward, capability)]
        for launch in {x.name(): x for x in found if isinstance(x, CudaLaunch)}.values():
            plan = launch.plan
            _, log = launch.compiled(capability, "--ptxas-options=-v")
            registers, stack = re.findall(r"Used (\d+) registers", log), re.findall(r"(\d+) bytes stack frame", log)
            tile = f"{mixes.ROWS} x {plan.columns}"
            resources = Resources(int(registers[0]), int(stack[0]), plan.shared, 1)
            kind = str(dtype).removeprefix("torch.")
            yield Row(capability, launch.name(), H, name, kind, tile, plan.constants["WARPS"], resources)


def rows_of(found: List[Launch], capabilities: List[int], H: Optional[int], name: str, dtype: torch.dtype) -> Iterator[Row]:
    """Of each kernel, the first launch that does something else."""
    for launch in {x.name(): x for x in reversed(found)}.values():
        tile = " x ".join(str(launch.arguments[size]) for size in "MN" if size in launch.arguments)
        kind = str(dtype).removeprefix("torch.")
        for capability in capabilities:
            yield Row(capability, launch.name(), H, name, kind, tile, launch.warps, resources(launch, capability))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 12, 32, 64])
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=list(MIXES))
    parser.add_argument("--operators", action="store_true", help="the kernels of other operators in place of composed attention's")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["float32", "float16", "bfloat16"])
    given = parser.parse_args()
    dtypes = [getattr(torch, name) for name in given.dtypes]
    print("| card | kernel | H | of | type | tile | warps | registers | spilled bytes | shared bytes |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    fits = True
    if given.operators:
        table: Iterator[Row] = (
            row
            for dtype in dtypes
            for name, found in operator_launches(dtype).items()
            for row in rows_of(found, given.capabilities, None, name, dtype)
        )
    else:
        table = rows(given.capabilities, given.heads, given.mixes, dtypes)
        if mixes.installed():
            narrow = [dtype for dtype in dtypes if dtype != torch.float32]
            table = itertools.chain(table, cuda_rows(given.capabilities, given.heads, given.mixes, narrow))
    for row in table:
        fits = fits and row.fits()
        print(
            f"| sm_{row.capability} | {row.kernel} | {row.H or ''} | {row.mixes} | {row.dtype} | {row.tile} | {row.warps} | "
            f"{row.found.registers} | {row.found.spilled} | {row.found.shared} |",
            flush=True,
        )
    if not fits:
        print("a kernel needs more than a multiprocessor has, or its threads exchange places of a map", file=sys.stderr)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
