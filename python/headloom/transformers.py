"""Headloom's attention inside Hugging Face ``transformers``.

Importing this module registers it::

    import headloom.transformers
    model = AutoModelForCausalLM.from_pretrained("my-model", attn_implementation="headloom")

Causal attention of any head count (grouped queries are read in place), sliding windows, padding, packed sequences, and static as well as
dynamic caches; also attention without a causal mask. Padded rows and other patterns go through a boolean mask, all else without one.
(``transformers`` makes the mask of a window all the same, of T x S bytes.) What plain attention lacks here (dropout, soft caps, sinks,
position biases, choices of keys, the weights as output) is refused with a ``ValueError``.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from headloom.attention import composed_attention

__all__ = ["attention", "attention_mask"]


# The attribute of a mask that says no more than causality and a window of this size.
_WINDOW = "_headloom_window"


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    sliding_window: Optional[int] = None,
    is_causal: Optional[bool] = None,
    **options: Any,
) -> Tuple[Tensor, None]:
    """What ``transformers`` calls: query ``[B, H, T, D]``, key and value ``[B, G, S, D]`` -> ``[B, T, H, D]``.

    Without a mask the queries are the last of the keys, as :func:`attention_mask` makes sure.
    """
    if dropout:
        raise ValueError(f"attn_implementation='headloom' has no dropout of the weights, but it is {dropout}, expected 0.")
    for name in ("softcap", "s_aux", "sinks", "indices", "block_indices", "position_bias", "output_attentions"):
        given = options.get(name)  # some are tensors, which are not to be compared
        if given is not None and given is not False:
            raise ValueError(f"attn_implementation='headloom' has no {name}; expected a model that does not use it.")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(
            f"attn_implementation='headloom' reads boolean masks, but this one is {attention_mask.dtype}; give the "
            "model a mask [B, S] of ones and zeros."
        )
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        if attention_mask is None and query.size(2) > 1:
            raise ValueError(
                f"attn_implementation='headloom' needs to know whether {type(module).__name__} is causal, but it has no is_causal; "
                "expected True or False there."
            )
        causal = True
    if causal and sliding_window is not None and getattr(attention_mask, _WINDOW, None) == sliding_window:
        attention_mask = None
    out = composed_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal and attention_mask is None,
        window=sliding_window if causal and attention_mask is None else None,
        mask=attention_mask,
        scale=scaling,
    )
    return out, None


def _is_window(pattern: Callable[..., Any], first: int, rows: int, offset: int, window: Optional[int], device: Any) -> bool:
    """Whether row q sees the keys from q - window + 1, or from the first, up to q."""
    q = torch.arange(first, first + rows, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)

    def sees(keys: Tensor) -> Tensor:
        seen: Tensor = pattern(zero, zero, q, keys)
        return seen.expand(rows)

    if not sees(q).all() or sees(q + 1).any():
        return False
    oldest = (q - (window or first + rows) + 1).clamp(min=offset)
    before = oldest > offset
    return bool(sees(oldest).all()) and not (sees(oldest - 1) & before).any()


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Optional[Tensor] = None,
    local_size: Optional[int] = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Optional[Tensor]:
    """The boolean mask ``[B, 1, T, S]`` of a forward pass, or None where causality says it all.

    A mask that says no more than causality and a window of ``local_size`` is marked, so that :func:`attention` goes without it where the
    model tells it of the window, which not all models do.
    """
    needless = (
        allow_is_causal_skip
        and isinstance(q_offset, int)
        and not torch.compiler.is_compiling()
        and q_offset + q_length == kv_offset + kv_length
        and (attention_mask is None or bool(attention_mask.all()))
        and _is_window(mask_function, q_offset, q_length, kv_offset, local_size, options.get("device", "cpu"))
    )
    if needless and (local_size is None or kv_length <= local_size):
        return None
    mask: Optional[Tensor] = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        **{**options, "allow_is_causal_skip": False},
    )
    if needless:
        setattr(mask, _WINDOW, local_size)
    return mask


AttentionInterface.register("headloom", attention)
AttentionMaskInterface.register("headloom", attention_mask)
