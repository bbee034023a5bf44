"""Composed attention: one operator for every mechanism that mixes attention maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from torch import Tensor

from headloom._functional import call, expect_tensors


@dataclass
class HeadMix:
    """How maps are composed across heads (DCMHA, Xiao et al. 2024, equation 7).

    For one pair of query t and key s, maps ``x[h]`` become::

        y[h'] = sum_h x[h] static[h, h']                             (x[h'] when static is None)
              + sum_r (sum_h x[h] q_down[t,r,h]) q_up[t,r,h'] + x[h'] q_gate[t,h']
              + sum_r (sum_h x[h] k_down[s,r,h]) k_up[s,r,h'] + x[h'] k_gate[s,h']

    Every term is optional. With ``groups = g`` all sums over h stay inside one of g equal runs of heads.

    Args:
        static: ``[H, H']``, or ``[g, H/g, H/g]`` with groups. A rectangular matrix changes the number of maps and
            admits no other term.
        q_down, q_up: ``[B, T, R, H]``, both or neither.
        q_gate: ``[B, T, H]``.
        k_down, k_up: ``[B, S, R, H]``, both or neither.
        k_gate: ``[B, S, H]``.
        groups: a divisor of H.
    """

    static: Optional[Tensor] = None
    q_down: Optional[Tensor] = None
    q_up: Optional[Tensor] = None
    q_gate: Optional[Tensor] = None
    k_down: Optional[Tensor] = None
    k_up: Optional[Tensor] = None
    k_gate: Optional[Tensor] = None
    groups: int = 1


def _tensors(mix: Optional[HeadMix], name: str) -> List[Optional[Tensor]]:
    """The operator's list of a mix's tensors; empty for none."""
    if mix is None:
        return []
    if not isinstance(mix, HeadMix):
        raise TypeError(
            f"composed_attention: {name} is a {type(mix).__name__}, expected a headloom.HeadMix or None; "
            f"a matrix alone is HeadMix(static=matrix)."
        )
    names = ["static", "q_down", "q_up", "q_gate", "k_down", "k_up", "k_gate"]
    tensors = [getattr(mix, part) for part in names]
    expect_tensors(lambda: "composed_attention", "", **{f"{name}.{part}": t for part, t in zip(names, tensors)})
    return [] if all(t is None for t in tensors) else tensors


def composed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pre: Optional[HeadMix] = None,
    post: Optional[HeadMix] = None,
    pre_conv: Optional[Tensor] = None,
    post_conv: Optional[Tensor] = None,
    conv_padding: str = "both",
    conv_mask: str = "double",
    bias: Optional[Tensor] = None,
    causal: bool = True,
    window: Optional[int] = None,
    lengths: Optional[Tensor] = None,
    documents: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    scale: Optional[float] = None,
    backend: Optional[str] = None,
) -> Tensor:
    """Attention whose maps are convolved and mixed across heads, before and after softmax::

        A     = scale * q k^T + bias                 map h reads key head floor(h Gk / H)
        A     = mix_pre(conv_pre(A))                 may change the number of maps
        P     = softmax over s of A                  0 where invisible; a row without visible keys is 0
        P     = mix_post(conv_post(P))               may change the number of maps to H'
        o[h'] = sum_s P[h', t, s] v[g(h'), s]        g(h') = floor(h' Gv / H')

    Sources: DCMHA (Xiao et al. 2024) for the mixes, Multi-Token Attention (Golovneva et al. 2025) for the
    convolutions. Where nothing is composed this is plain attention. The operator itself is
    ``torch.ops.headloom.composed_attention``.

    Args:
        q: ``[B, T, H, D]``; the T queries stand at the end of the S keys.
        k: ``[B, S, Gk, D]``.
        v: ``[B, S, Gv, E]``.
        pre, post: mixes before and after softmax.
        pre_conv, post_conv: key-query convolution (cross-correlation) ``[H, c_q, c_k]``, or ``[H, c_h, c_q, c_k]``
            over groups of c_h heads. The last query tap is the current query.
        conv_padding: where a convolution reaches among the keys: ``"both"`` sides (c_k odd), only ``"left"``
            (earlier) or only ``"right"``.
        conv_mask: ``"double"`` counts what is invisible from its own row as 0; ``"exact"`` keeps, in the row of an
            earlier query, the keys up to the current one.
        bias: finite, broadcasts to ``[B, H, T, S]``.
        causal: key s is visible to query t when ``s <= t + S - T``.
        window: the last ``window`` keys are visible, the query's own included; without ``causal`` those less than ``window``
            positions away.
        lengths: ``[B]`` int64, keys ``s < lengths[b]`` are visible.
        documents: ``[B, S]`` int64 ids, a query sees keys of its own document.
        mask: boolean, broadcasts to ``[B, 1, T, S]``; true is visible.
        scale: ``D ** -0.5`` when None.
        backend: None takes the fastest that supports the case; ``"reference"`` or ``"fused"`` forces one and raises
            where it cannot run.

    Returns:
        ``[B, T, H', E]``.

    Raises:
        ValueError: a shape or option does not fit; the message names the argument.
        TypeError: a dtype or an argument's type does not fit.
        NotImplementedError: the forced backend cannot run this case.
    """
    out: Tensor = call(
        "composed_attention",
        q,
        k,
        v,
        _tensors(pre, "pre"),
        _tensors(post, "post"),
        1 if pre is None else pre.groups,
        1 if post is None else post.groups,
        pre_conv,
        post_conv,
        conv_padding,
        conv_mask,
        bias,
        causal,
        window,
        lengths,
        documents,
        mask,
        scale,
        backend,
    )
    return out
