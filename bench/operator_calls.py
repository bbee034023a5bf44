"""What a call of an operator on tiny tensors costs: the processor's instructions, counted by callgrind.

    python bench/operator_calls.py LIBRARY [--calls N] [--only NAME]

LIBRARY is a `libheadloom_ops.so`. On tensors this small the call is dispatch, checks, the choice of the backend and
autograd; the kernel hardly counts. Unlike times, the counts hardly vary, so that two builds can be told apart by them. The
Python interpreter's own instructions are left out. Needs valgrind, and some minutes.
"""

import argparse
from pathlib import Path

from torch.utils.benchmark import Timer

SETUP = """
import torch
torch.ops.load_library({library!r})
torch.manual_seed(0)
x, scale = torch.randn(2, 16), torch.randn(16)
q, k, v = torch.randn(3, 1, 2, 1, 8).unbind()
gamma = torch.full((1,), 0.9)
for t in (x, scale, q, k, v):
    t.requires_grad_({training})
rms_norm, retention = torch.ops.headloom.rms_norm.default, torch.ops.headloom.retention.default
"""
FORWARD = {
    "rms_norm": "y = rms_norm(x, scale)",
    "retention": "y = retention(q, k, v, gamma)[0]",
}
TRAINING = {
    "rms_norm": "torch.autograd.grad(rms_norm(x, scale).sum(), (x, scale))",
    "retention": "torch.autograd.grad(retention(q, k, v, gamma)[0].sum(), (q, k, v))",
}


def instructions(statement, library, training, calls):
    """Of one call of `statement`."""
    timer = Timer(statement, SETUP.format(library=library, training=training), num_threads=1)
    return timer.collect_callgrind(number=calls).counts(denoise=True) / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--only", choices=FORWARD, help="this operator alone")
    arguments = parser.parse_args()
    library = str(arguments.library.resolve(strict=True))
    for name in [arguments.only] if arguments.only else FORWARD:
        for training, statement in ((False, FORWARD[name]), (True, TRAINING[name])):
            count = instructions(statement, library, training, arguments.calls)
            print(f"{name:10} {'training' if training else 'forward':9} {count:9.0f} instructions a call", flush=True)


if __name__ == "__main__":
    main()
