"""Operators whose kernels for NVIDIA GPUs other packages have: flash-linear-attention and mamba-ssm.

The functions take what ``headloom::X_fused`` takes and return its results, which have a gradient. The headers
of the operators (``src/ops``) say what the arguments are, and their ``CudaKernels`` which cases come here.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

Results = Tuple[Tensor, ...]


def retention(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Optional[Tensor], documents: None, form: str, chunk: int
) -> Results:
    chunk_simple_gla = import_module("fla.ops.simple_gla").chunk_simple_gla
    decay = gamma.float().log()
    return chunk_simple_gla(q, k, v, g_gamma=decay, scale=1.0, initial_state=state, output_final_state=True)


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Optional[Tensor], documents: None, form: str, chunk: int
) -> Results:
    chunk_gla = import_module("fla.ops.gla").chunk_gla
    return chunk_gla(q, k, v, log_decay, scale=1.0, initial_state=state, output_final_state=True)


def wkv(
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    bonus: Tensor,
    receptance: Optional[Tensor],
    state: Optional[Tensor],
    documents: None,
) -> Results:
    fused_recurrent_rwkv4 = import_module("fla.ops.rwkv4").fused_recurrent_rwkv4
    B, _, C = k.shape
    if state is None:
        state = k.new_zeros((B, 3, C), dtype=torch.float32)
        state[:, 2] = -1e38  # the exponent of an empty sum
    # Its rate is exp of its first argument. It keeps the sums in the type of the keys.
    y, last = fused_recurrent_rwkv4(rate.float().log(), bonus.float(), k.float(), v.float(), state.unsqueeze(2))
    out = y.to(k.dtype) if receptance is None else (torch.sigmoid(receptance.float()) * y).to(k.dtype)
    sums, exponent = last.squeeze(2).split((2, 1), dim=1)
    # The exponent is a constant to gradients: the sums stand for themselves times its exp.
    fixed = exponent.detach()
    return out, torch.cat((sums * torch.exp(exponent - fixed), fixed), dim=1)


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    z: Optional[Tensor],
    delta_bias: Optional[Tensor],
    delta_softplus: bool,
    state: None,
    documents: None,
) -> Results:
    selective_scan_fn = import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
    def channels_first(x: Optional[Tensor]) -> Optional[Tensor]:
        return None if x is None else x.transpose(1, 2)

    def maps(x: Tensor) -> Tensor:
        """[B, L, N] or [B, L, G, N] with the length last; what is constant along it is [channels, N] already."""
        return x.float() if x.dim() == 2 else x.movedim(1, -1)

    y, last = selective_scan_fn(
        channels_first(u),
        channels_first(delta),
        A.float(),
        maps(B),
        maps(C),
        None if D is None else D.float(),
        z=channels_first(z),
        delta_bias=None if delta_bias is None else delta_bias.float(),
        delta_softplus=delta_softplus,
        return_last_state=True,
    )
    return y.transpose(1, 2).contiguous(), last.float()


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    silu: bool,
    state: Optional[Tensor],
    documents: None,
) -> Results:
    """The output alone: the operator makes the state itself."""
    convolve = import_module("fla.modules.causal_conv1d").causal_conv1d
    # Its backward computes again what SiLU is given, and rounds it to the type of x.
    wide = silu and torch.is_grad_enabled()
    rows = x.float() if wide else x
    before = None
    if state is not None:
        # It has the channels first, and one more row, which it does not read.
        before = torch.nn.functional.pad(state.to(rows.dtype).transpose(1, 2), (1, 0))
    y, _ = convolve(rows, weight, bias, initial_state=before, activation="silu" if silu else None)
    return (y.to(x.dtype),)


class Function(NamedTuple):
    run: Callable[..., Results]
    differentiable: Sequence[int]  # the arguments that may have a gradient, in the order of the operator's bits


FUNCTIONS: Dict[str, Function] = {
    "retention": Function(retention, (0, 1, 2, 4)),
    "gated_linear_attention": Function(gated_linear_attention, (0, 1, 2, 3, 4)),
    "wkv": Function(wkv, (0, 1, 2, 3, 4, 5)),
    "selective_scan": Function(selective_scan, (0, 1, 2, 3, 4, 5, 6, 7, 9)),
    "causal_conv1d": Function(causal_conv1d, (0, 1, 2, 4)),
}


def empty(call: Sequence[Any]) -> bool:
    return bool(call[0].numel() == 0)


def definition(name: str, call: Sequence[Any]) -> Results:
    return getattr(torch.ops.headloom, name)(*call, "reference")


def forward(name: str, *arguments: Any) -> List[Tensor]:
    """The schema of ``headloom::X_fused``."""
    *call, training = arguments
    with torch.no_grad():
        results = definition(name, call) if empty(call) else FUNCTIONS[name].run(*call)
    # What the operator's own kernels keep for the backward is not used here, but is part of what it returns. A state that is
    # rows of its arguments is not: the operator makes it.
    described = getattr(torch.ops.headloom, name + "_fused")(
        *(x.to("meta") if isinstance(x, Tensor) else x for x in call), training
    )
    results = results[: len(described)]
    kept = [call[0].new_empty(x.shape, dtype=x.dtype) for x in described[len(results) :]]
    return [*(x.contiguous() for x in results), *kept]


def backward(name: str, grads: Sequence[Optional[Tensor]], *arguments: Any) -> List[Tensor]:
    """The schema of ``headloom::X_backward``. The forward runs again, because its kernels keep what only they know."""
    *given, _, wanted = arguments
    call, leaves = list(given), []
    for bit, i in enumerate(FUNCTIONS[name].differentiable):
        if given[i] is not None:
            call[i] = given[i].detach().requires_grad_(bool(wanted >> bit & 1))
            leaves.append(call[i])
    # mamba-ssm has no gradient of the state.
    by_definition = empty(call) or (name == "selective_scan" and grads[1] is not None)
    with torch.enable_grad(), recorded():
        results = definition(name, call) if by_definition else FUNCTIONS[name].run(*call)
        pairs = [(x, grad) for x, grad in zip(results, grads) if grad is not None and x.requires_grad]
        found = iter(
            torch.autograd.grad(
                [x for x, _ in pairs],
                [x for x in leaves if x.requires_grad],
                [grad for _, grad in pairs],
                allow_unused=True,
                materialize_grads=True,
            )
        )
    return [next(found).contiguous() if x.requires_grad else x.new_empty(0) for x in leaves]


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Autograd records: where a backend's kernels run, the dispatcher has put it out of the way."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude):
        yield
