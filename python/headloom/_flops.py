"""FLOPs of the fused operators for ``torch.utils.flop_counter.FlopCounterMode``, which does not see what kernels multiply.

A fused operator counts as much as its definition, which is counted on tensors without values.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, List, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

# Operators whose kernels multiply what their definition multiplies, and the arguments that have gradients. Recurrences are
# not among them: their kernels do other products than their definition. The others have no products.
_OPERATORS = {
    "composed_attention": ("q", "k", "v", "pre", "post", "pre_conv", "post_conv", "bias"),
    "dynamic_weights": ("hidden", "w2"),
    "linear": ("x", "weight", "bias"),
    "linear_cross_entropy": ("hidden", "weight", "bias"),
    "moe": ("x", "up", "down", "weight"),
}


def _without_values(t: Tensor) -> Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")


def _definition(name: str, given: Sequence[Any], gradients: Sequence[Tensor]) -> Tuple[int, int]:
    """FLOPs of the forward and of the backward pass that gives those of ``gradients`` that have values.

    ``gradients`` belong to the differentiable arguments that are there, in their order.
    """
    operator = getattr(torch.ops.headloom, name)
    given = tree_map_only(Tensor, _without_values, list(given))
    names = [argument.name for argument in operator.default._schema.arguments]
    places = [t for key in _OPERATORS[name] for t in tree_leaves(given[names.index(key)]) if t is not None]
    wanted: List[Tensor] = [t.requires_grad_() for t, gradient in zip(places, gradients) if gradient.numel() > 0]
    with FlopCounterMode(display=False) as forward:
        result = operator(*given, backend="reference")
    backward = FlopCounterMode(display=False)
    if wanted:
        outputs = [t for t in tree_leaves(result) if t.requires_grad]
        with backward:
            torch.autograd.grad(outputs, wanted, [torch.empty_like(t) for t in outputs], allow_unused=True)
    run, of = 1, 1
    if name == "moe":  # the definition runs every expert on every token
        run, of = given[names.index("choice")].size(1), given[names.index("up")].size(0)
    return forward.get_total_flops() * run // of, backward.get_total_flops() * run // of


def _register(name: str) -> None:
    # A thread of its own has neither the caller's modes nor its dispatch keys, which leave autograd out.
    def count(given: Sequence[Any], gradients: Sequence[Tensor]) -> Tuple[int, int]:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_definition, name, given, gradients).result()

    def forward(*args: Any, out_val: Any = None) -> int:  # (arguments, training)
        return count(args[:-1], ())[0]

    def backward(*args: Any, out_val: Any = None) -> int:  # (gradients, arguments, kept, wanted)
        return count(args[1:-2], out_val)[1]

    for ending, formula in [("_fused", forward), ("_backward", backward)]:
        target = getattr(torch.ops.headloom, name + ending, None)
        if target is not None and target not in flop_registry:  # a module that is reloaded
            register_flop_formula(target, get_raw=True)(formula)


for _name in _OPERATORS:
    _register(_name)
