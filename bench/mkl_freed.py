"""Peers whose MKL takes the processor for one of Intel's.

On processors of other makers MKL takes slow paths, so that PyTorch's float32 products can run at less than half of
what the machine can do. A comparison that shall not flatter frees the peer, and the peer alone: a library of one
function is built with `cc` and preloaded into the peer's process.
"""

import os
import subprocess
from pathlib import Path


def environment(folder):
    """The environment of a process with a freed MKL. ``folder`` is where the library is built."""
    source, library = Path(folder, "intel.c"), Path(folder, "intel.so")
    if not library.exists():
        source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}
