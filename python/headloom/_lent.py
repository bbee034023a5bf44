"""Modules whose parameters are Python's and whose computation is C++'s."""

from __future__ import annotations

import json
from typing import Any, List, Mapping, Sequence

from torch import Tensor, nn


class Part(nn.Module):
    """A part of a C++ module: its parameters, and parts of its own."""

    def _get_name(self) -> str:
        return ""

    def extra_repr(self) -> str:
        return ", ".join(f"{name} {list(p.shape)}" for name, p in self._parameters.items() if p is not None)


class Lent(Part):
    """Holds ordinary parameters under the dotted names of a C++ module; ``spec`` says which module."""

    spec: str

    def __init__(self, spec: str, names: Sequence[str], values: Sequence[Tensor]):
        super().__init__()
        self.spec = spec
        self._paths = [tuple(name.split(".")) for name in names]
        for path, value in zip(self._paths, values):
            owner: nn.Module = self
            for part in path[:-1]:
                if part not in owner._modules:
                    owner.add_module(part, Part())
                owner = owner.get_submodule(part)
            owner.register_parameter(path[-1], nn.Parameter(value))

    def _tensors(self) -> List[Tensor]:
        """The parameters in the C++ module's order."""
        tensors = []
        for *parts, name in self._paths:
            # A module's own tables answer in a tenth of an attribute's time, which counts at every token; what a
            # wrapper or a parametrization stands for is an attribute only.
            owner: Any = self
            for part in parts:
                inner = owner._modules.get(part)
                owner = getattr(owner, part) if inner is None else inner
            value = owner._parameters.get(name)
            tensors.append(getattr(owner, name) if value is None else value)
        return tensors

    def _get_name(self) -> str:
        return type(self).__name__

    def extra_repr(self) -> str:
        return self.spec.strip().replace("\n", ", ")


def toml(value: Any) -> str:
    """A Python value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML string
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml(v) for v in value) + "]"
    raise TypeError(f"an option is {value!r}, expected a number, text, a boolean, or a list or table of them.")


def toml_lines(table: Mapping[str, Any]) -> str:
    """The lines of a TOML file; what is None is left out."""
    return "".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in table.items() if value is not None)
