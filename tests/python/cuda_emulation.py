"""CUDA kernels on the CPU: compiles those of the mixes with tests/testing/cuda and runs them on tensors of the CPU."""

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from headloom.gpu import mixes

SOURCES = Path(__file__).resolve().parents[1] / "testing" / "cuda"
# Constants that the emulation reads from memory, so that one compilation serves many calls.
READ = ("BF16", "CAUSAL", "WINDOW", "LENGTHS", "DOCUMENTS", "MASK")


class Launch(ctypes.Structure):
    """As in mixes.cpp."""

    _fields_ = [*[(name, ctypes.c_uint) for name in ("x", "y", "z", "order")], ("shared", ctypes.c_size_t)]


@functools.lru_cache(maxsize=None)
def folder():
    found = tempfile.mkdtemp(prefix="headloom-emulation-")
    atexit.register(shutil.rmtree, found, True)
    return Path(found)


@functools.lru_cache(maxsize=None)
def library(constants):
    """Of a kernel with these constants: (name, value) for each."""
    file = folder() / f"{'-'.join(f'{name}{value}' for name, value in constants)}.so"
    source = file.with_suffix(".cu")
    source.write_text(mixes.source(dict(constants)))
    compiler = os.environ.get("CXX", "c++")
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", f'-DMIXES="{source}"']
    options += [f"-D{name}={value}" for name, value in constants]
    command = [compiler, *options, str(SOURCES / "mixes.cpp"), "-o", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = ctypes.CDLL(str(file))
    found.run.restype = ctypes.c_char_p
    found.lower_value.restype = ctypes.c_float
    found.packed_values.argtypes = [ctypes.c_int, ctypes.c_float, ctypes.c_float]
    found.packed_values.restype = ctypes.c_uint
    return found


def some_library():
    """For what does not depend on the constants."""
    names = ("HEADS", "RQ", "RK", "GATE_Q", "GATE_K", "WARPS", "TO", "EXP")
    return library(tuple(zip(names, (1, 0, 0, 1, 0, 4, 2, 0))))


class Kernel:
    """In place of ``mixes.Kernel``."""

    order = 0  # of threads: 0 forwards, 1 backwards, others mixed

    def __init__(self, constants, shared):
        given = dict(constants)
        self.library = library(tuple(x for x in constants if x[0] not in (*READ, "BLOCKS")))
        self.constants = (ctypes.c_int * len(READ))(*[given[name] for name in READ])
        self.shared = shared
        self.threads = 32 * given["WARPS"]

    def launch(self, grid, threads, arguments):
        assert threads == self.threads
        call, *pointers = arguments
        places = (ctypes.c_void_p * len(pointers))(*[x.value for x in pointers])
        launch = Launch(*grid, self.order, self.shared)
        error = self.library.run(ctypes.byref(launch), self.constants, ctypes.byref(call), places)
        assert error is None, error.decode()


def install(monkeypatch, block=232448, multiprocessor=233472):
    """Tensors of the CPU in 16 bits are taken by the kernels, as on a GPU with so many bytes of shared memory; by default an H100."""
    monkeypatch.setattr(mixes, "memory", lambda x: None if x.element_size() != 2 else mixes.Memory(block, multiprocessor))
    monkeypatch.setattr(mixes, "kernel", lambda name, constants, shared, device: Kernel(constants, shared))
