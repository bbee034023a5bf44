"""What a training loop does beside gradients: parameter groups, the balance of experts, new random features, memory."""

from __future__ import annotations

import numbers
from typing import Any, Dict, List, Optional, Set

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headloom._functional import FunctionalModule, Part, shown, whole_number


def parameter_groups(model: nn.Module, weight_decay: float = 0.1) -> List[Dict[str, Any]]:
    """The parameters of ``model`` as two groups for an optimiser: with weight decay and without.

    Decayed are matrices, but for those that their paper or its authors' code exempts (Mamba's ``A_log``, RWKV's ``mix``;
    docs/models.md has all of them with their sources). Those carry ``parameter._no_weight_decay = True``, which is heeded
    on the parameters of other modules too. Biases, norms and other vectors are never decayed.

    Args:
        model: any module, of which a :class:`Model` or a mixer may be a part. Where it is sharded or wrapped, call this
            afterwards, as one makes the optimiser.
        weight_decay: of the first group.

    Raises:
        TypeError: ``weight_decay`` is no number.
        ValueError: it is below 0.

    Example:
        >>> optimizer = torch.optim.AdamW(headloom.parameter_groups(model, weight_decay=0.1), lr=3e-4)
    """
    if not isinstance(weight_decay, numbers.Real):
        raise TypeError(f"weight_decay is {shown(weight_decay)}, expected a number.")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay is {weight_decay}, expected 0 or more.")
    decayed: Dict[nn.Parameter, None] = {}
    kept: Dict[nn.Parameter, None] = {}
    held: Set[nn.Parameter] = set()
    for module in model.modules():
        # What wraps a module may put other tensors in place of its parameters, which have no mark. torch.nn.utils' prune,
        # weight_norm and spectral_norm also change the names, and its parametrizations hold the tensors themselves.
        own = module._undecayed if isinstance(module, Part) else set()
        undecayed = {name + end for name in own for end in ("", "_orig", "_g", "_v")}
        parametrized: Any = getattr(module, "parametrizations", {})
        held.update(p for name in own if name in parametrized for p in parametrized[name].parameters())
        for name, parameter in module.named_parameters(recurse=False):
            marked = name in undecayed or parameter in held or getattr(parameter, "_no_weight_decay", False)
            exempt = parameter.dim() < 2 or marked
            (kept if exempt else decayed)[parameter] = None
    groups = [
        {"params": list(decayed), "weight_decay": weight_decay},
        {"params": [p for p in kept if p not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def balance_experts(
    model: nn.Module, optimizer: Optional[torch.optim.Optimizer] = None
) -> Optional[RemovableHandle]:
    """Evens out the load of experts: moves the biases that ``bias_speed`` asks for, once an optimiser step.

    Every training call of a model or channel mixer counts how many choices each expert got, with ``auxiliary=True`` or
    without. This moves each bias by ``bias_speed``, up where an expert got less than the mean and down where it got more,
    and counts anew. Several calls before one step (accumulated gradients) count together; what activation checkpointing
    computes again does not count again; and where ``torch.distributed`` is initialised, the counts of all processes of the
    default group are summed first, so that all of them must call this. A module without such biases is left as it is.

    Args:
        model: any module, of which a :class:`Model` or :class:`ChannelMixer` may be a part.
        optimizer: do so after each of its steps from now on. None: do so now, in a loop that calls this after every step.

    Returns:
        With ``optimizer`` a handle whose ``remove()`` ends it.

    Example:
        >>> optimizer = torch.optim.AdamW(headloom.parameter_groups(model), lr=3e-4)
        >>> headloom.balance_experts(model, optimizer)
    """
    if optimizer is not None:

        def balance(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            balance_experts(model)

        return optimizer.register_step_post_hook(balance)
    parts = [module for module in model.modules() if isinstance(module, FunctionalModule) and module._load]
    if not parts:
        return None
    for part in parts:
        part._follow()
    with torch.no_grad():
        counts = [load for part in parts for load in part._load]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            together = torch.cat(counts)
            torch.distributed.all_reduce(together)
            counts = list(together.split([len(load) for load in counts]))
        for part in parts:
            own, counts = counts[: len(part._load)], counts[len(part._load) :]
            part._balance(own)
    return None


def redraw_features(model: nn.Module, step: int, seed: int = 0) -> None:
    """Draws the random features of ``performer`` anew where it is time, as ``headloom train`` does.

    Each mixer's option ``redraw`` says after how many steps that is. What is drawn follows from ``step`` and ``seed`` alone,
    so that a run that is resumed, and every process of a run, draws the same; torch's generator is left alone. The features
    are buffers, which ``state_dict`` holds. Calls in between use those that there are.

    Args:
        model: any module, of which a :class:`Model` or :class:`Mixer` may be a part.
        step: optimiser steps so far; call this after each.
        seed: of the run.

    Raises:
        TypeError: ``step`` or ``seed`` is no whole number.

    Example:
        >>> for step in range(1, steps + 1):
        ...     optimizer.step()
        ...     headloom.redraw_features(model, step)
    """
    step = whole_number("step", step, None, "a whole number")
    seed = whole_number("seed", seed, None, "a whole number")
    parts = [module for module in model.modules() if isinstance(module, FunctionalModule)]
    with torch.no_grad():
        for place, part in enumerate(parts):
            part._redraw(step, seed + place)


def keep_freed_memory() -> bool:
    """Keeps what PyTorch frees on the CPU for what it allocates next, in this process and from now on.

    By default glibc gives large blocks back to the system, which clears their pages when the next step asks for them. The
    process then stays as large as it once was until it ends. The command line does this by itself.

    Returns:
        Whether the C library could be told. Only glibc can.

    Example:
        >>> headloom.keep_freed_memory()  # before the training loop
        True
    """
    return bool(torch.ops.headloom.keep_freed_memory())
