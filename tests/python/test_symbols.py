"""No library of ours and none that it brings has a symbol that one of PyTorch's has too: the two would become one."""

import pathlib
import re
import subprocess

import pytest
import torch

BUILD = pathlib.Path(__file__).parents[2] / "build"
TORCH = pathlib.Path(torch.__file__).parent / "lib"
# Every program has them, PyTorch's libraries too, once.
SYSTEM = re.compile(r"^(linux-vdso|ld-linux.*|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libgomp.*)$")
LINKED = [BUILD / "lib/libheadloom_ops.so", BUILD / "lib/libheadloom_python.so", BUILD / "bin/headloom"]
APART = BUILD / "lib/libheadloom_sentencepiece.so"


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def libraries(path):
    """What `path` needs, PyTorch's and the system's left out."""
    found = [pathlib.Path(line.split(" => ")[1].split(" (")[0]) for line in output("ldd", path).splitlines() if " => /" in line]
    return {p for p in found if not SYSTEM.match(p.name.split(".so")[0]) and TORCH.resolve() not in p.resolve().parents}


def exported(path):
    """Names to whether they are strong: an uppercase letter of nm's, but weak (W), a weak object (V) or unique (u)."""
    symbols = {}
    for line in output("nm", "-D", "--defined-only", path).splitlines():
        *_, kind, name = line.split()
        if name not in {"_edata", "_end", "__bss_start"}:  # the linker's marks in every library
            symbols[name.split("@")[0]] = kind not in "WwVvu"
    return symbols


@pytest.fixture(scope="module")
def torchs():
    names = {}
    for path in sorted(TORCH.glob("*.so*")):
        for name, strong in exported(path).items():
            names[name] = names.get(name, False) or strong
    assert "FLAGS_minloglevel" in names  # what this is about is seen
    return names


def clashes(path, torchs):
    # A symbol that is weak in both comes from an inline function, a template, or the typeinfo and vtable of a class
    # without a key function: the linker is meant to make one of them, and they were compiled from the same headers of
    # the C++ library or of PyTorch's.
    # So do templates of the C++ library itself and typeinfo of function types, which some libraries keep as strong symbols.
    of_std = re.compile(r"_Z(GV|TI|TS|TV|Z|N|K)*St|_ZT[IS]P?F")
    return {n for n, strong in exported(path).items() if n in torchs and (strong or torchs[n]) and not of_std.match(n)}


def test_what_is_linked_shares_no_symbol_with_torch(torchs):
    present = [p for p in LINKED if p.exists()]
    assert present
    paths = set(present).union(*map(libraries, present))
    assert {p.name: sorted(c) for p in paths if (c := clashes(p, torchs))} == {}


def test_sentencepiece_is_opened_apart(torchs):
    needed = {p.name for p in libraries(APART)}
    assert any(name.startswith("libsentencepiece.so") for name in needed)
    assert any("FLAGS_minloglevel" in clashes(p, torchs) for p in libraries(APART))  # why it is apart
    for path in LINKED:
        assert not {p.name for p in libraries(path)} & needed, path
    # It gives one function away and takes none of PyTorch's or of Headloom's.
    assert [n for n in exported(APART) if not n.startswith("_")] == ["headloom_sentencepiece"]
    assert "torch" not in output("readelf", "-d", APART).split("RUNPATH")[0]
