"""What type checkers see of the package: real types, not Any."""

import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python"
# As much of torch as the package's signatures need: reading all of the real one takes a checker minutes.
TORCH = """
from typing import Any, Iterator
class Tensor:
    shape: tuple[int, ...]
    def __getattr__(self, name: str) -> Any: ...
    def __getitem__(self, at: Any) -> Tensor: ...
    def __iter__(self) -> Iterator[Tensor]: ...
def __getattr__(name: str) -> Any: ...
"""
NN = """
from typing import Any, Callable
class Module:
    __call__: Callable[..., Any]
    def __getattr__(self, name: str) -> Any: ...
    def __setstate__(self, state: Any) -> None: ...
    def _apply(self, fn: Any, recurse: bool = True) -> Any: ...
    def register_forward_hook(self, *given: Any, **options: Any) -> Any: ...
    def register_forward_pre_hook(self, *given: Any, **options: Any) -> Any: ...
    def register_full_backward_hook(self, *given: Any, **options: Any) -> Any: ...
    def register_full_backward_pre_hook(self, *given: Any, **options: Any) -> Any: ...
def __getattr__(name: str) -> Any: ...
"""
# Expressions with model: headloom.Model, x: Tensor, count: int.
TYPES = {
    "model(x)": "torch.Tensor",
    "model(x, auxiliary=True)": "tuple[torch.Tensor, torch.Tensor]",
    "model(x, auxiliary=bool(count))": "torch.Tensor | tuple[torch.Tensor, torch.Tensor]",
    "model.extend(x, headloom.State())": "torch.Tensor",
    "model.generate('a')": "str",
    "model.generate('a', num_samples=count)": "str | list[str]",
    "model.generate(['a', 'b'])": "list[str]",
    "model.generate(x)": "torch.Tensor",
    "list(model.stream('a'))": "list[str]",
    "model.encode('a')": "torch.Tensor",
    "model.decode(x)": "str",
    "model.tokenizer": "headloom._tokenizer.Tokenizer | None",
    "headloom.mixer('mha', 8)(x)": "torch.Tensor",
    "headloom.channel_mixer('moe', 8)(x)": "torch.Tensor",
    "headloom.channel_mixer('moe', 8)(x, auxiliary=True)": "tuple[torch.Tensor, torch.Tensor]",
    "headloom.channel_mixer('moe', 8)(x, auxiliary=bool(count))": "torch.Tensor | tuple[torch.Tensor, torch.Tensor]",
    "headloom.channel_mixer('moe', 8)(x, None, True)": "tuple[torch.Tensor, torch.Tensor]",
    "headloom.channel_mixer('moe', 8)(x, None, bool(count))": "torch.Tensor | tuple[torch.Tensor, torch.Tensor]",
    "headloom.load('run')": "headloom._model.Model",
    "headloom.model(width=8)": "headloom._model.Model",
    "headloom.composed_attention(x, x, x)": "torch.Tensor",
}


def test_calls_have_types(tmp_path):
    pytest.importorskip("mypy")
    for name, text in {"torch/__init__.pyi": TORCH, "torch/nn/__init__.pyi": NN}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    # What the package imports besides, which would bring in all of torch.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.utils.*,torch.nn.utils.*,numpy.*]\nfollow_imports = skip\n")
    lines = ["import headloom", "from torch import Tensor", "def use(model: headloom.Model, x: Tensor, count: int) -> None:"]
    lines += [f"    reveal_type({call})" for call in TYPES]
    (tmp_path / "use.py").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), "use.py"],
        cwd=tmp_path,
        env={"MYPYPATH": f"{tmp_path}:{PACKAGE}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line.split('Revealed type is "')[1].rstrip('"') for line in done.stdout.splitlines() if "Revealed" in line]
    assert dict(zip(TYPES, found)) == TYPES
    assert (PACKAGE / "headloom" / "py.typed").exists()
