"""Modules whose parameters and buffers are Python's and whose computation is C++'s."""

from __future__ import annotations

import json
import warnings
from typing import Any, Callable, Dict, List, Mapping, Sequence, Set

import torch
from torch import Tensor, nn

#: Training calls after which a load that nothing balances is reported.
_PATIENCE = 1000


class Part(nn.Module):
    """A part of a C++ module: its parameters and buffers, and parts of its own."""

    #: Its own parameters that weight decay leaves alone.
    _undecayed: Set[str]

    def __init__(self) -> None:
        super().__init__()
        self._undecayed = set()

    def _hold(self, name: str, value: Tensor, kind: str) -> None:
        if kind == "buffer":
            self.register_buffer(name, value)
            return
        self.register_parameter(name, nn.Parameter(value))
        if kind == "undecayed":
            self._undecayed.add(name)
            self._mark()

    def _mark(self) -> None:
        """What other people's optimiser groups look for."""
        for name in self._undecayed:
            parameter: Any = self._parameters.get(name)
            if parameter is not None:
                parameter._no_weight_decay = True

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()  # copies of a parameter lose its attributes

    def _get_name(self) -> str:
        return ""

    def extra_repr(self) -> str:
        own = [*self._parameters.items(), *self._buffers.items()]
        return ", ".join(f"{name} {list(t.shape)}" for name, t in own if t is not None)


class Lent(Part):
    """Holds ordinary parameters and buffers under the dotted names of a C++ module; ``spec`` says which module."""

    spec: str

    def __init__(self, spec: str, names: Sequence[str], values: Sequence[Tensor], kinds: Sequence[str]):
        super().__init__()
        self.spec = spec
        self._paths = [tuple(name.split(".")) for name in names]
        for path, value, kind in zip(self._paths, values, kinds):
            owner: Part = self
            for part in path[:-1]:
                inner = owner._modules.get(part)
                if not isinstance(inner, Part):
                    inner = Part()
                    owner.add_module(part, inner)
                owner = inner
            owner._hold(path[-1], value, kind)
        # How many choices each expert got since balance_experts() was called last, for each bias that it moves. Not
        # buffers: DistributedDataParallel would overwrite them with the first rank's.
        self._load = [self._zero_load(v) for n, v, k in zip(names, values, kinds) if k == "buffer" and _is_choice_bias(n)]
        self._calls = 0

    @staticmethod
    def _zero_load(bias: Tensor) -> Tensor:
        return torch.zeros(bias.shape, dtype=torch.int64, device=bias.device)

    def _biases(self) -> List[Tensor]:
        return [buffer for name, buffer in self.named_buffers() if _is_choice_bias(name)]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        done = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._load = [
            load if load.device == bias.device else self._zero_load(bias)
            for load, bias in zip(self._load, self._biases())
        ]
        return done

    def _count(self, load: Sequence[Tensor]) -> None:
        """Adds what one training call counted."""
        for held, new in zip(self._load, load):
            held.add_(new)
        if load and not torch.compiler.is_compiling():
            self._calls += 1
            if self._calls == _PATIENCE:
                warnings.warn(
                    f"nothing has balanced the experts' load in {_PATIENCE} training calls: call "
                    "headloom.balance_experts(model) behind each optimiser step, or give it the optimiser once.",
                    stacklevel=3,
                )

    def _balance(self, load: Sequence[Tensor]) -> None:
        """Moves the biases by the choices ``load`` of one optimiser step, and counts anew."""
        self._move(list(load))
        for held in self._load:
            held.zero_()
        self._calls = 0

    def _move(self, load: List[Tensor]) -> None:
        raise NotImplementedError

    def _tensors(self) -> List[Tensor]:
        """The parameters and buffers in the C++ module's order."""
        tensors = []
        for *parts, name in self._paths:
            # A module's own tables answer in a tenth of an attribute's time, which counts at every token; what a
            # wrapper or a parametrization stands for is an attribute only.
            owner: Any = self
            for part in parts:
                inner = owner._modules.get(part)
                owner = getattr(owner, part) if inner is None else inner
            value = owner._parameters.get(name)
            if value is None:
                value = owner._buffers.get(name)
            tensors.append(getattr(owner, name) if value is None else value)
        return tensors

    def _get_name(self) -> str:
        return type(self).__name__

    def extra_repr(self) -> str:
        return ", ".join(filter(None, [self.spec.strip().replace("\n", ", "), super().extra_repr()]))


def _is_choice_bias(name: str) -> bool:
    return name.split(".")[-1] == "choice_bias"


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
