"""Sharding rules by which PyTorch's DTensor splits Headloom's operators. Importing this module registers them.

A rule says which dimension of each argument and result belongs to the batch, and which to the heads (or to channels, where each
channel works by itself). If the first tensor is sharded along its batch, the operator runs on each process's part of the batch.
If it is sharded along its heads and nothing in the call mixes heads, the operator runs on each process's heads. Otherwise every
process computes the whole. Arguments that lie differently are redistributed; an argument that is no DTensor is taken as replicated.

Gradients of arguments that every process reads whole, such as weights, come back as Partial sums.

The rules are for the fused kernels. Where an operator's reference runs instead (`headloom list` says where), or
`scaled_dot_product_attention` in its place, DTensor splits PyTorch's own operators as it can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from . import _library  # noqa: F401  (defines the operators)

# The dimensions of the batch and of the heads of a tensor; None where it has no such dimension.
Dims = tuple[int | None, int | None]
NEITHER: Dims = (None, None)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Dimensions by argument, for arguments that have any. A function finds them for a tensor and the call's arguments."""

    arguments: Mapping[str, Dims | Callable[[torch.Tensor, Mapping[str, Any]], Dims]]
    results: Sequence[Dims]  # those that a call may have; a list of tensors repeats the last
    constants: frozenset[str] = frozenset()  # tensors that have no gradient
    separate_heads: Callable[[Mapping[str, Any]], bool] = lambda call: True  # whether nothing mixes heads
    every_row: bool = False  # every dimension of the first tensor but its last may be split like a batch
    summed_results: frozenset[int] = frozenset()  # results that are sums over the batch
    fused_results: int | None = None  # how many the kernels give, where they are not the operator's


def _aligned(batch: int, heads: int) -> Callable[[torch.Tensor, Mapping[str, Any]], Dims]:
    """For a tensor that broadcasts: dimensions counted from the last, where they are there and larger than 1."""

    def dims(tensor: torch.Tensor, call: Mapping[str, Any]) -> Dims:
        def there(dim: int) -> int | None:
            return tensor.dim() + dim if tensor.dim() + dim >= 0 and tensor.size(dim) > 1 else None

        return there(batch), there(heads)

    return dims


def _mix(tensor: torch.Tensor, call: Mapping[str, Any]) -> Dims:
    """Of head mixes: dynamic weights [B, T, ...] have a batch, static matrices have none."""
    static = any(tensor is mix[0] for mix in (call["pre"], call["post"]) if len(mix) > 0)
    return NEITHER if static else (0, None)


def _plain_attention(call: Mapping[str, Any]) -> bool:
    mixes = [*call["pre"], *call["post"], call["pre_conv"], call["post_conv"]]
    return all(mix is None for mix in mixes)


def _scan_input(tensor: torch.Tensor, call: Mapping[str, Any]) -> Dims:
    """B and C of a selective scan: [B, L, N], [B, L, G, N] or [channels, N]."""
    return {2: (None, 0), 3: (0, None), 4: (0, 2)}[tensor.dim()]


def _position_bias(tensor: torch.Tensor, call: Mapping[str, Any]) -> Dims:
    """Of aft: the form conv has a row for each head, the other forms have rows for positions."""
    return _WEIGHT if call["form"] == "conv" else NEITHER


def _rows(last: int) -> Callable[[torch.Tensor, Mapping[str, Any]], Dims]:
    """Of tensors with any number of dimensions, of which the `last` ones are never split: [B, ..., E], or [B, T, H, ..., E]."""
    return lambda tensor, call: (0 if tensor.dim() > last else None, 2 if tensor.dim() > 2 + last else None)


_HEADS: Dims = (0, 2)  # [B, T, H, ...], and [B, T, C]
_BATCH: Dims = (0, None)
_WEIGHT: Dims = (None, 0)  # [H, ...]
_PARTS_OF_A_MIX = 7  # a static matrix, and dynamic weights of queries and keys

RULES = {
    "composed_attention": Rule(
        {
            **dict.fromkeys(("q", "k", "v"), _HEADS),
            **dict.fromkeys(("pre", "post"), _mix),
            **dict.fromkeys(("lengths", "documents"), _BATCH),
            **dict.fromkeys(("bias", "mask"), _aligned(-4, -3)),
        },
        [_HEADS],
        frozenset({"lengths", "documents", "mask"}),
        _plain_attention,
    ),
    "dynamic_weights": Rule({"hidden": _BATCH}, [_BATCH], fused_results=1),
    "retention": Rule(
        {**dict.fromkeys(("q", "k", "v"), _HEADS), "gamma": _WEIGHT, "state": (0, 1), "documents": _BATCH},
        [_HEADS, (0, 1)],
        frozenset({"gamma", "documents"}),
    ),
    "gated_linear_attention": Rule(
        {**dict.fromkeys(("q", "k", "v", "log_decay"), _HEADS), "state": (0, 1), "documents": _BATCH},
        [_HEADS, (0, 1)],
        frozenset({"documents"}),
    ),
    "wkv": Rule(
        {**dict.fromkeys(("k", "v", "receptance", "state"), _HEADS), "rate": _WEIGHT, "bonus": _WEIGHT, "documents": _BATCH},
        [_HEADS, _HEADS],
        frozenset({"documents"}),
    ),
    "selective_scan": Rule(
        {
            **dict.fromkeys(("u", "delta", "z"), _HEADS),
            **dict.fromkeys(("A", "D", "delta_bias"), _WEIGHT),
            **dict.fromkeys(("B", "C"), _scan_input),
            "state": (0, 1),
            "documents": _BATCH,
        },
        [_HEADS, (0, 1)],
        frozenset({"documents"}),
    ),
    "aft": Rule(
        {
            **dict.fromkeys(("q", "k", "v", "state"), _HEADS),
            "bias": _position_bias,
            **dict.fromkeys(("lengths", "documents"), _BATCH),
        },
        [_HEADS, _HEADS],
        frozenset({"lengths", "documents"}),
    ),
    "causal_conv1d": Rule(
        {"x": _HEADS, "weight": _WEIGHT, "bias": _WEIGHT, "state": _HEADS, "documents": _BATCH},
        [_HEADS, _HEADS],
        frozenset({"documents"}),
    ),
    "token_shift": Rule(
        {"x": _HEADS, "mix": (None, 1), "last": (0, 1), "documents": _BATCH}, [_HEADS], frozenset({"documents"})
    ),
    "gated_norm": Rule({"x": _rows(1), "gate": _rows(1), "eps": _rows(0)}, [_HEADS], frozenset({"eps"})),
    "rotary": Rule(
        {"x": _HEADS, **dict.fromkeys(("cos", "sin"), _aligned(-3, -99))}, [_HEADS], frozenset({"cos", "sin"})
    ),
    "rms_norm": Rule({}, [], every_row=True),
    "swiglu": Rule({}, [], every_row=True),
    "gelu_tanh": Rule({}, [], every_row=True),
    "linear": Rule({}, [], frozenset({"scale"}), every_row=True),
    "linear_cross_entropy": Rule(
        {"hidden": _BATCH, "targets": _BATCH}, [NEITHER, _BATCH], frozenset({"targets"}), summed_results=frozenset({0})
    ),
    "moe": Rule(
        dict.fromkeys(("x", "choice", "weight"), _BATCH), [_BATCH], frozenset({"choice"})
    ),
}  # fmt: skip


class _Call:
    """One call of an operator, and how it is split along each dimension of the mesh."""

    def __init__(self, rule: Rule, kinds: Mapping[str, str], values: Sequence[Any]):
        self.rule, self.kinds, self.mesh = rule, kinds, _mesh_of(values)
        named = self.named = dict(zip(kinds, values))
        first = self.first = next(iter(named.values()))
        # For each dimension of the mesh: the dimension of the first tensor that is split, and whether it is that of the heads.
        self.split: list[tuple[int, bool] | None] = []
        placements = first.placements if isinstance(first, DTensor) else [Replicate()] * self.mesh.ndim
        parts = 1  # of the heads, by all dimensions of the mesh so far
        for i, placement in enumerate(placements):
            dim = placement.dim if isinstance(placement, Shard) else None
            batch, heads = self.dims(next(iter(named)), first)
            if dim is None:
                self.split.append(None)
            elif dim == batch or (rule.every_row and dim < first.dim() - 1):
                self.split.append((dim, False))
            elif dim == heads and rule.separate_heads(named) and self.heads_fit(parts * self.mesh.size(i)):
                self.split.append((dim, True))
                parts *= self.mesh.size(i)
            else:
                self.split.append(None)

    def dims(self, name: str, tensor: torch.Tensor) -> Dims:
        found = self.rule.arguments.get(name, NEITHER)
        return found(tensor, self.named) if callable(found) else found

    def tensors(self) -> list[tuple[str, torch.Tensor | None]]:
        """Those that the operator takes, with None where one is absent, in the order of its arguments."""
        out: list[tuple[str, torch.Tensor | None]] = []
        for name, value in self.named.items():
            if self.kinds[name] == "mix":
                out += [(name, one) for one in value or [None] * _PARTS_OF_A_MIX]
            elif self.kinds[name] == "tensor":
                out.append((name, value))
        return out

    def heads_fit(self, count: int) -> bool:
        for name, tensor in self.tensors():
            if tensor is not None:
                heads = self.dims(name, tensor)[1]
                if heads is not None and tensor.size(heads) % count != 0:
                    return False
        return True

    def placements(self, dims: Dims, first: bool = False) -> list[Placement]:
        """Where a tensor with these dimensions of batch and heads lies."""
        out: list[Placement] = []
        for split in self.split:
            dim = None if split is None else split[0] if first and self.rule.every_row else dims[split[1]]
            out.append(Replicate() if dim is None else Shard(dim))
        return out

    def of_argument(self, name: str, tensor: torch.Tensor) -> list[Placement]:
        return self.placements(self.dims(name, tensor), first=name == next(iter(self.named)))

    def local(self, name: str, value: Any) -> Any:
        """This process's part of an argument."""
        if isinstance(value, (list, tuple)):
            return [self.local(name, one) for one in value]
        if not isinstance(value, torch.Tensor):
            return value
        return self.laid(value, self.of_argument(name, value))

    def laid(self, value: torch.Tensor, placements: Sequence[Placement]) -> torch.Tensor:
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return value.redistribute(self.mesh, placements).to_local().contiguous()

    def of_result(self, place: int) -> list[Placement]:
        results = self.rule.results or [NEITHER]
        placements = self.placements(results[min(place, len(results) - 1)], first=True)
        if place not in self.rule.summed_results:
            return placements
        return [Partial() if split is not None else Replicate() for split in self.split]

    def of_gradient(self, name: str, tensor: torch.Tensor) -> list[Placement]:
        # Where a process reads all of an argument and has a part of the work, its gradient is a part of the sum.
        lies = self.of_argument(name, tensor)
        return [Partial() if split is not None and p.is_replicate() else p for split, p in zip(self.split, lies)]

    def result(self, place: int, local: torch.Tensor) -> DTensor:
        placements, shape = self.of_result(place), list(local.shape)
        for i, (split, placement) in enumerate(zip(self.split, placements)):
            if split is None or not isinstance(placement, Shard):
                continue
            # Heads are shared out equally; a batch need not be.
            dim, of_heads = split
            shape[placement.dim] = shape[placement.dim] * self.mesh.size(i) if of_heads else self.first.size(dim)
        return self.whole(local, placements, shape)

    def whole(self, local: torch.Tensor, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
        size = torch.Size(shape)
        stride = torch.empty(size, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=size, stride=stride)


def _kinds(schema: torch.FunctionSchema) -> dict[str, str]:
    """The operator's arguments: "tensor", "mix" (a list of tensors) or "setting"."""
    kinds = {}
    for argument in schema.arguments[:-1]:  # the last says whether a backward follows
        text = str(argument.type)
        kinds[argument.name] = "mix" if "List" in text else "tensor" if "Tensor" in text else "setting"
    return kinds


def _mesh_of(values: Sequence[Any]) -> DeviceMesh:
    for value in values:
        if isinstance(value, DTensor):
            return value.device_mesh
        if isinstance(value, (list, tuple)) and any(isinstance(one, DTensor) for one in value):
            return _mesh_of(value)
    raise AssertionError("no DTensor is among the arguments")


def _forward(rule: Rule, kinds: Mapping[str, str], results: int | None) -> Callable[..., Any]:
    def run(cls: type, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Sequence[torch.Tensor]:
        *values, training = args
        call = _Call(rule, kinds, values)
        out = op(*[call.local(name, value) for name, value in call.named.items()], training)
        count = len(out) if results is None else results
        # After the results stands what the backward kernel reads. Each process gets its own back.
        kept = [call.whole(t, [Replicate()] * call.mesh.ndim, t.shape) for t in out[count:]]
        return [call.result(i, t) for i, t in enumerate(out[:count])] + kept

    return run


def _backward(rule: Rule, kinds: Mapping[str, str]) -> Callable[..., Any]:
    def run(cls: type, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> list[torch.Tensor]:
        grads, *values, kept, wanted = args
        call = _Call(rule, kinds, values)
        # The gradient of a sum over the processes goes to each of them as it is.
        lies = [[Replicate() if isinstance(p, Partial) else p for p in call.of_result(i)] for i in range(len(grads))]
        local_grads = [None if g is None else call.laid(g, place) for g, place in zip(grads, lies)]
        local_kept = [t.to_local() if isinstance(t, DTensor) else t for t in kept]
        out = iter(op(local_grads, *[call.local(name, value) for name, value in call.named.items()], local_kept, wanted))
        gradients = []
        bit = 0
        for name, tensor in call.tensors():
            if name in rule.constants:
                continue
            asked, bit = wanted >> bit & 1, bit + 1
            if tensor is not None:
                gradient = next(out)
                gradients.append(call.whole(gradient, call.of_gradient(name, tensor), tensor.shape) if asked else gradient)
        return gradients

    return run


def _register() -> None:
    for name, rule in RULES.items():
        operator = getattr(torch.ops.headloom, name).default._schema
        returns = operator.returns
        one_list = len(returns) == 1 and isinstance(returns[0].type, torch.ListType)
        kinds = _kinds(getattr(torch.ops.headloom, f"{name}_fused").default._schema)
        torch.library.register_torch_dispatch(
            f"headloom::{name}_fused", DTensor, _forward(rule, kinds, rule.fused_results or (None if one_list else len(returns)))
        )
        if hasattr(torch.ops.headloom, f"{name}_backward"):
            torch.library.register_torch_dispatch(f"headloom::{name}_backward", DTensor, _backward(rule, kinds))


_register()
