"""Launches the CUDA kernels of ``mixes_forward.cu`` and ``mixes_backward.cu``, which are faster than Triton's kernels of the same name in
what they take.

They are compiled at their first call by NVRTC, which comes with PyTorch's CUDA packages, and are kept in a folder of the user's
cache. Compiling takes a few seconds for each kind of call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headloom.gpu import kernels

ROWS = 64  # queries of a block, as in mixes.cu
TO = {"scores": 0, "weights": 1, "composed": 2}


class Call(ctypes.Structure):
    """As in mixes.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("lengths", "documents", "mask")],
        *[(name, ctypes.c_int64) for name in ("mask_batch", "mask_row", "mask_key")],
        *[(name, ctypes.c_void_p) for name in ("lse", "of_queries", "of_keys")],
        *[
            (name, ctypes.c_int32)
            for name in (
                "T", "S", "window", "first", "last", "left", "right", "chunks", "step", "rows", "columns",
                "query_blocks", "key_blocks", "keys_before", "heads", "groups",
            )
        ],
    ]  # fmt: skip


class Kernel:
    """A compiled kernel on PyTorch's current GPU."""

    def __init__(self, code: bytes, name: str, shared: int) -> None:
        from cuda.bindings import driver

        self.module = checked(driver.cuModuleLoadData(code))
        self.function = checked(driver.cuModuleGetFunction(self.module, name.encode()))
        self.shared = shared
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(self.function, attribute, shared))

    def launch(self, grid: Tuple[int, int, int], threads: int, arguments: Sequence[object]) -> None:
        from cuda.bindings import driver

        places = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(x) for x in arguments])  # type: ignore[arg-type]
        stream = torch.cuda.current_stream().cuda_stream
        checked(driver.cuLaunchKernel(self.function, *grid, threads, 1, 1, self.shared, stream, ctypes.addressof(places), 0))


@functools.lru_cache(maxsize=None)
def installed() -> bool:
    """Whether there is cuda-bindings, which PyTorch's packages for CUDA need from version 2.11 on."""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def compiler() -> Any:
    """NVRTC's functions."""
    from cuda.bindings import nvrtc

    try:
        checked(nvrtc.nvrtcVersion())
    except RuntimeError as error:
        raise RuntimeError(f"composed_attention has kernels in CUDA, which NVRTC compiles, and NVRTC is not found ({error}).") from error
    return nvrtc


def checked(result: Tuple[Any, ...]) -> Any:
    """What a function of CUDA returns after its error code."""
    if int(result[0]) != 0:
        raise RuntimeError(f"CUDA reports {result[0]!r}.")
    return result[1] if len(result) > 1 else None


def source(constants: Dict[str, int]) -> str:
    """Of a kernel with these constants: what all share, and the forward or the backward. Messages of a compiler name the files."""
    files = "mixes.cu", "mixes_forward.cu" if "TO" in constants else "mixes_backward.cu"
    return "".join(f'#line 1 "{name}"\n{(Path(__file__).parent / name).read_text()}' for name in files)


def options(constants: Dict[str, int], capability: int) -> List[str]:
    return [f"--gpu-architecture=sm_{capability}", "--std=c++17", *[f"-D{name}={value}" for name, value in constants.items()]]


def compiled(constants: Dict[str, int], capability: int, *more: str) -> Tuple[bytes, str]:
    """The machine code for a GPU of a compute capability, such as 90, and what NVRTC says. No GPU needs to be there.

    Args:
        more: options of NVRTC.
    """
    nvrtc = compiler()
    program = checked(nvrtc.nvrtcCreateProgram(source(constants).encode(), b"mixes.cu", 0, [], []))
    arguments = [option.encode() for option in (*options(constants, capability), *more)]
    failed = int(nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)[0]) != 0
    text = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    checked(nvrtc.nvrtcGetProgramLog(program, text))
    log = text.rstrip(b"\0").decode(errors="replace")
    if failed:
        raise RuntimeError(f"NVRTC does not compile a kernel of {Path(__file__).parent} for sm_{capability}:\n{log}")
    code = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code), log


def kept(constants: Dict[str, int], capability: int) -> bytes:
    """The machine code, from the user's cache where it is there."""
    nvrtc = compiler()
    key = hashlib.sha256(source(constants).encode())
    key.update(repr((nvrtc.nvrtcVersion(), options(constants, capability))).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = (cache if cache.is_absolute() else Path.home() / ".cache") / "headloom"
    except RuntimeError:  # The user has no home.
        return compiled(constants, capability)[0]
    file = folder / f"mixes-{key.hexdigest()[:32]}.cubin"
    try:
        return file.read_bytes()
    except OSError:
        pass
    code, _ = compiled(constants, capability)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Another process never sees half a file.
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
            part.write(code)
        os.replace(part.name, file)
    except OSError:
        pass  # It is compiled again next time.
    return code


@functools.lru_cache(maxsize=None)
def kernel(name: str, constants: Tuple[Tuple[str, int], ...], shared: int, device: int) -> Kernel:
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        return Kernel(kept(dict(constants), 10 * major + minor), name, shared)


class Plan(NamedTuple):
    """How a kernel is compiled and started."""

    constants: Dict[str, int]
    shared: int  # bytes of a block
    columns: int  # keys of a block
    step: int  # queries that a block takes at a time


class Memory(NamedTuple):
    """Bytes of shared memory that a block may have, and a multiprocessor has."""

    block: int
    multiprocessor: int


def memory(x: Tensor) -> Optional[Memory]:
    """None where these kernels cannot run: for float32, on GPUs before Ampere, and without cuda-bindings."""
    if not x.is_cuda or x.dtype == torch.float32 or not installed():
        return None
    properties = torch.cuda.get_device_properties(x.device)
    if properties.major < 8:
        return None
    # PyTorch's type hints leave the first out.
    return Memory(properties.shared_memory_per_block_optin, properties.shared_memory_per_multiprocessor)  # type: ignore[attr-defined]


def plan(call: "kernels.Call", mix: "kernels.Mix", maps: Tensor, after: Optional[bool] = None) -> Optional[Plan]:
    """None where Triton's kernels are to run.

    Args:
        after: of the backward, whether it is that of the mix after softmax; None for the forward.
    """
    available = memory(maps)
    RQ, RK, gate_q, gate_k = (int(x.value) for x in (mix.RQ, mix.RK, mix.q_gate, mix.k_gate))
    WQ, WK = 2 * RQ + gate_q, 2 * RK + gate_k
    if available is None or mix.static is not None or WQ + WK == 0:
        return None
    heads = call.H.value // call.groups.value
    # Registers of a thread: two places of a map in one, inner maps, and what the rest was seen to take. The forward keeps its maps
    # in shared memory.
    registers = 128 if after is None else 4 * heads + 8 * (RQ + RK) + 96
    # The forward's offsets have 32 bits.
    if registers > 256 or heads * maps.shape[-2] * maps.shape[-1] >= 1 << 31:
        return None

    def shared(warps: int) -> int:
        """Bytes, as the kernels' comments list them."""
        if after is None:
            of_keys = heads * WK * 32  # weights of two keys in a word
            of_query = (RQ + gate_q + 2) // 2 * 2
            of_sums = 4 * (heads + heads % 2)
            return 4 * (of_keys + warps * (heads * (64 + 2 * of_query) + of_sums))
        of_keys = (RK + gate_k + WK) * 16 * warps  # weights, and sums of their gradients
        return 4 * heads * (of_keys + 8 * (WQ + 1) + warps * (WQ + after) * 8)

    def blocks(warps: int) -> int:
        """That a multiprocessor has room for."""
        if shared(warps) > available.block:
            return 0
        return min(65536 // (registers * 32 * warps), available.multiprocessor // (shared(warps) + 1024))

    if after is None:
        warps = max((8, 4), key=lambda warps: warps * blocks(warps))
        columns, step = 64, 2 * warps
    else:
        warps = 4 if blocks(4) > 0 else 2
        columns, step = 16 * warps, 8
    if blocks(warps) == 0:
        return None
    constants = {
        "HEADS": heads,
        "RQ": RQ,
        "RK": RK,
        "GATE_Q": gate_q,
        "GATE_K": gate_k,
        "BF16": int(maps.dtype == torch.bfloat16),
        "CAUSAL": int(call.causal.value),
        "WINDOW": int(call.window is not None),
        "LENGTHS": int(call.lengths is not None),
        "DOCUMENTS": int(call.documents is not None),
        "MASK": int(call.mask is not None),
        "WARPS": warps,
        "BLOCKS": blocks(warps),
    }
    return Plan(constants, shared(warps), columns, step)


def run(
    name: str,
    of: Plan,
    more: Dict[str, int],
    call: "kernels.Call",
    mix: "kernels.Mix",
    maps: Tensor,
    keys: int,
    *others: Optional[Tensor],
) -> None:
    """Starts ``mix`` or ``mix_backward``.

    Args:
        more: the constants that ``of`` does not have.
        keys: of the chunk.
        others: the kernel's arguments after the maps.
    """

    def pointer(x: Optional[Tensor]) -> Optional[int]:
        return None if x is None else x.data_ptr()

    given = Call(
        *[pointer(x) for x in (call.lengths, call.documents, call.mask)],
        call.mask_batch, call.mask_row, call.mask_key,
        *[pointer(x) for x in (call.lse, mix.of_queries, mix.of_keys)],
        call.T, call.S, call.window or 0, call.first, call.last, call.left, call.right, call.chunks, call.step, call.rows, call.columns,
        call.query_blocks, call.key_blocks, call.keys_before, call.H.value, call.groups.value,
    )  # fmt: skip
    grid = (-(-keys // of.columns), maps.shape[2] // ROWS, maps.shape[0] * call.groups.value)
    pointers = [ctypes.c_void_p(pointer(x)) for x in (maps, *others)]
    found = kernel(name, (*of.constants.items(), *more.items()), of.shared, maps.device.index)
    found.launch(grid, 32 * of.constants["WARPS"], [given, *pointers])
