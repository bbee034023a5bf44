"""Loads the C++ operators into torch.ops.headloom."""

import sys
from pathlib import Path

import torch  # first: it brings the libraries that ours are linked to

_here = Path(__file__).resolve().parent


def _load() -> None:
    # An installed package has its libraries beside it, or, where its sources stay elsewhere ("pip install -e"), in another
    # folder of its own; a source tree has them where CMake builds them.
    own = map(Path, sys.modules["headloom"].__path__)
    folders = [_here, *(folder for folder in own if folder.resolve() != _here), _here.parents[1] / "build" / "lib"]
    for folder in folders:
        libraries = [folder / f"libheadloom_{name}.so" for name in ("ops", "python")]
        if not all(library.exists() for library in libraries):
            continue
        for library in libraries:
            try:
                torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
            except OSError as error:
                missing = "cannot open shared object file" in str(error)
                advice = (
                    "install the system package that has this library"
                    if missing
                    else f"build or install Headloom again with this PyTorch {torch.__version__}"
                )
                raise ImportError(f"{library} does not load ({error}): {advice}.") from error
        return
    raise ImportError(
        f"the library libheadloom_ops.so is neither in {folders[0]} nor in {folders[-1]}; run ./test or "
        "'pip install .' in Headloom's folder first."
    )


_load()
