"""Modules whose parameters and buffers are Python's and whose computation is C++'s."""

from __future__ import annotations

import json
import numbers
import operator
import re
import warnings
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

#: Training calls after which a load that nothing balances is reported.
_PATIENCE = 1000

#: Forward pre-hooks of PyTorch that compute a parameter from others, and look at no input.
_PARAMETER_HOOKS = (BasePruningMethod, SpectralNorm, WeightNorm)

#: Names, values and kinds of a module's parameters and buffers.
Named = Tuple[List[str], List[Tensor], List[str]]


def shown(value: Any) -> str:
    """A value and its type, for messages."""
    return f"{' '.join(repr(value).split()):.40} ({type(value).__name__})"


def wrong_type(what: str, name: str, value: Any) -> TypeError:
    """That ``name``, an argument of ``what``, is no tensor, and what makes one of it."""
    if isinstance(value, str):
        hint = "; model.encode makes tokens of a text" if what == "model" else ""
    elif type(value).__module__ == "numpy":
        hint = f"; torch.from_numpy({name}) makes one"
    elif isinstance(value, (list, tuple, int, float)):
        hint = f"; torch.tensor({name}) makes one"
    else:
        hint = ""
    return TypeError(f"{what}: {name} must be a tensor; it is {shown(value)}{hint}.")


#: What PyTorch's dispatcher says where an argument is of another type; the value in full follows.
_OTHER_TYPE = re.compile(r"headloom::(\w+)\(\) Expected a value of type '.*?' for argument '(\w+)'")
_KINDS = {"int": "a whole number of 64 bits", "float": "a number", "bool": "True or False", "str": "a text"}


def call(name: str, *given: Any) -> Any:
    """``torch.ops.headloom.NAME`` of these arguments.

    Raises:
        TypeError: an argument is of another type than the operator's; it names the argument, where PyTorch's error prints
            all of its values.
    """
    function = getattr(torch.ops.headloom, name)
    try:
        return function(*given)
    except (RuntimeError, TypeError, ValueError) as error:
        schema = function.default._schema.arguments
        arguments = {one.name: (str(one.type), value) for one, value in zip(schema, given)}
        found = _OTHER_TYPE.match(str(error))
        if found and found.group(1) == name:
            unfit = found.group(2)
        else:
            # The dispatcher passes on None in place of a tensor.
            absent = [one for one, (kind, value) in arguments.items() if kind == "Tensor" and value is None]
            if not absent:
                raise
            unfit = absent[0]
    raise _unfit(name, unfit, *arguments[unfit])


def _unfit(what: str, argument: str, kind: str, value: Any) -> TypeError:
    """That ``value`` is not of ``kind``, a type as PyTorch writes it."""
    optional = re.fullmatch(r"Optional\[(.*)\]", kind)
    plain = optional.group(1) if optional else kind
    if plain not in _KINDS:
        return wrong_type(what, argument, value)
    expected = _KINDS[plain] + (" or None" if optional else "")
    return TypeError(f"{what}: {argument} must be {expected}; it is {shown(value)}.")


def whole_number(name: str, value: Any, least: Optional[int], expected: str) -> int:
    """``value`` as an int of 64 bits, at least ``least`` where that is given. A tensor of one whole number is one."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}, expected {expected}.")
    if (least is not None and number < least) or not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} is {number}, expected {expected}.")
    return number


def expect_tensors(what: Callable[[], str], needed: str, **given: Any) -> None:
    """TypeError where an argument is neither a tensor, nor something that stands for one, nor None, which ``needed`` must
    not be."""
    for name, value in given.items():
        absent = value is None and name != needed
        if not (absent or isinstance(value, Tensor) or hasattr(type(value), "__torch_function__")):
            raise wrong_type(what(), name, value)


def new_tensors(make: Callable[[str, bool], Named], spec: str) -> Named:
    """The parameters and buffers of a new module, on the default device (``torch.device`` as a context, or
    ``torch.set_default_device``) and of the default type. They have no values on the meta device, nor under a mode whose
    tensors have none, as PyTorch's FakeTensorMode."""
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    with_values = device.type != "meta" and type(torch.empty(0)) is Tensor
    names, values, kinds = make(spec, with_values)

    def type_of(name: str, value: Tensor) -> torch.dtype:
        if not value.is_floating_point():
            return value.dtype
        return _type_of_bias(dtype) if _is_choice_bias(name) else dtype

    def new(value: Tensor, own_type: torch.dtype) -> Tensor:
        return value.to(device, own_type) if with_values else torch.empty(value.shape, dtype=own_type, device=device)

    return names, [new(v, type_of(n, v)) for n, v in zip(names, values)], kinds


class Part(nn.Module):
    """A part of a C++ module, for reading: its parameters and buffers, and parts of its own.

    It runs inside the whole module only: to call it is an error, and a hook on it warns that it never fires. The hooks by
    which ``torch.nn.utils`` (``prune``, ``weight_norm``, ``spectral_norm``) computes a parameter do run.
    """

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

    # Copies of a parameter, and what a device, a type or a state put in its place, lose its attributes.

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        # A narrower type for everything else does not round the biases of experts.
        biases = {n: b for n, b in self._buffers.items() if _is_choice_bias(n) and b is not None}
        done = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in biases.items():
            after: Any = self._buffers[name]
            if after.dtype != _type_of_bias(after.dtype):
                self._buffers[name] = before.to(after.device, _type_of_bias(after.dtype))
        self._mark()
        return done

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)  # type: ignore[misc]
        for name, value in self._buffers.items():  # assigned as they are stored
            if value is not None and _is_choice_bias(name):
                self._buffers[name] = value.to(_type_of_bias(value.dtype))
        self._mark()

    def __setattr__(self, name: str, value: Any) -> None:
        part = self.__dict__.get("_modules", {}).get(name)
        if isinstance(part, Part) and isinstance(value, nn.Module) and not isinstance(value, Part):
            _warn_of_replacement(name, part, value)
        super().__setattr__(name, value)

    def forward(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            "a part of a model cannot be called, because the model runs in C++ as a whole; headloom.mixer and "
            "headloom.channel_mixer make single layers, which take a part's state_dict."
        )

    def register_forward_hook(self, *given: Any, **options: Any) -> RemovableHandle:
        self._warn_of_hook()
        return super().register_forward_hook(*given, **options)

    def register_forward_pre_hook(self, *given: Any, **options: Any) -> RemovableHandle:
        if not (given and isinstance(given[0], _PARAMETER_HOOKS)):
            self._warn_of_hook()
        return super().register_forward_pre_hook(*given, **options)

    def register_full_backward_hook(self, *given: Any, **options: Any) -> RemovableHandle:
        self._warn_of_hook()
        return super().register_full_backward_hook(*given, **options)

    def register_full_backward_pre_hook(self, *given: Any, **options: Any) -> RemovableHandle:
        self._warn_of_hook()
        return super().register_full_backward_pre_hook(*given, **options)

    def _warn_of_hook(self) -> None:
        if type(self) is Part:
            warnings.warn(
                "a hook on a part of a model never fires, because the model runs in C++ as a whole; register it "
                "on the model, or on a single layer made by headloom.mixer or headloom.channel_mixer.",
                stacklevel=3,
            )

    def _get_name(self) -> str:
        return ""

    def extra_repr(self) -> str:
        own = [*self._parameters.items(), *self._buffers.items()]
        return ", ".join(f"{name} {list(t.shape)}" for name, t in own if t is not None)


class FunctionalModule(Part):
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
        done = super()._apply(fn, recurse)
        self._follow()
        return done

    def _follow(self) -> None:
        """Counts anew where the biases have gone to another device."""
        self._load = [
            load if load.device == bias.device else self._zero_load(bias)
            for load, bias in zip(self._load, self._biases())
        ]

    def _count(self, load: Sequence[Tensor]) -> None:
        """Adds what one training call counted."""
        if any(held.device != new.device for held, new in zip(self._load, load)):
            self._follow()  # load_state_dict(assign=True) gives a module of the meta device another one
        for held, new in zip(self._load, load):
            held.add_(new)
        if load and not torch.compiler.is_compiling():
            self._calls += 1
            if self._calls == _PATIENCE:
                warnings.warn(
                    f"nothing has balanced the experts' load in {_PATIENCE} training calls: call "
                    "headloom.balance_experts(model) after each optimiser step, or give it the optimiser once.",
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

    def _redraw(self, step: int, seed: int) -> None:
        """Draws random features anew where ``step`` is one that asks for it. Channel mixers have none."""

    def _tensors(self) -> List[Tensor]:
        """The parameters and buffers in the C++ module's order."""
        tensors = []
        for *parts, name in self._paths:
            # A module's own tables answer in a tenth of an attribute's time, which counts at every token; what a
            # wrapper or a parametrization stands for is an attribute only.
            owner: Any = self
            for part in parts:
                inner = owner._modules.get(part)
                owner = getattr(owner, part, None) if inner is None else inner
                if owner is None:
                    raise ValueError(f"{self._what()}: the part '{part}' of '{'.'.join([*parts, name])}' is missing.")
            value = owner._parameters.get(name)
            if value is None:
                value = owner._buffers.get(name)
            if value is None:
                if name in owner.__dict__:
                    _compute(owner, name)
                value = getattr(owner, name, None)
                if value is None:
                    is_what = "is None" if hasattr(owner, name) else f"is missing in the {type(owner).__name__} in its place"
                    raise ValueError(f"{self._what()}: parameter '{'.'.join([*parts, name])}' {is_what}, expected a tensor.")
            tensors.append(value)
        return tensors

    def _get_name(self) -> str:
        return type(self).__name__

    def extra_repr(self) -> str:
        return ", ".join(filter(None, [self.spec.strip().replace("\n", ", "), super().extra_repr()]))

    def _what(self) -> str:
        """How messages call it: ``mixer 'dcmha'``."""
        found = re.search(r'"(mixer|channel)" = \{ "type" = "(\w+)"', self.spec)
        if found is None:
            return "model"
        return f"{'mixer' if found[1] == 'mixer' else 'channel_mixer'} '{found[2]}'"


def _warn_of_replacement(name: str, part: Part, other: nn.Module) -> None:
    """Where ``other``, put in the place of ``part``, has parameters that nothing will use. What wraps a part to keep or to
    send its parameters, as PyTorch's FullyShardedDataParallel, has those of the part alone or is PyTorch's."""
    if type(other).__module__.startswith("torch.distributed"):
        return
    names = {n for n, _ in part.named_parameters()}
    known = {id(p) for p in part.parameters()}
    unused = [n for n, p in other.named_parameters() if n not in names and id(p) not in known]
    if unused:
        warnings.warn(
            f"the {type(other).__name__} in the place of the part '{name}' is never called, because the model runs in C++ as a "
            f"whole: it reads {', '.join(sorted(names))} there, and nothing uses {', '.join(unused)}; "
            "torch.nn.utils.parametrize computes a parameter from others.",
            stacklevel=3,
        )


def _compute(part: nn.Module, name: str) -> None:
    """Runs the hook that computes ``part``'s parameter ``name``, which no call of the part does."""
    for hook in list(part._forward_pre_hooks.values()):
        if isinstance(hook, _PARAMETER_HOOKS):
            computed = hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name
            if computed == name:
                hook(part, ())


def _is_choice_bias(name: str) -> bool:
    """Whether it is the biases by which experts are chosen."""
    return name.split(".")[-1] == "choice_bias"


def _type_of_bias(dtype: torch.dtype) -> torch.dtype:
    """The type of the biases of experts in a module of type ``dtype``: float32 at least, because a narrower type loses or
    doubles a step of 0.001."""
    return torch.promote_types(dtype, torch.float32)


def toml(value: Any, key: str) -> str:
    """A Python value as TOML; ``key`` is its name for messages."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):
        if not -(2**63) <= int(value) < 2**63:
            raise ValueError(f"'{key}' is {value}, expected a number below 2**63.")
        return repr(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML string
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(k))} = {toml(v, f'{key}.{k}')}" for k, v in value.items() if v is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml(v, f"{key}[{i}]") for i, v in enumerate(value)) + "]"
    raise TypeError(f"'{key}' is {shown(value)}, expected a number, text, a boolean, or a list or table of them.")


def toml_lines(table: Mapping[str, Any]) -> str:
    """The lines of a TOML file; what is None is left out."""
    return "".join(f"{json.dumps(key)} = {toml(value, key)}\n" for key, value in table.items() if value is not None)
