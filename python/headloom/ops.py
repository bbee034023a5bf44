"""The operators, typed and documented: each calls ``torch.ops.headloom.NAME``.

Legend: B batch, T or L length, S keys, C channels, H heads, D the size of a head's query and key, E of its value.

All have autograd and fake kernels, so ``torch.compile``, autocast and ``gradcheck`` work on them (but not through the exponents
in the states of ``wkv`` and ``aft``, which are constants to gradients). ``backend`` is None for the fastest implementation that
can run the case, ``"fused"`` (kernels for CPUs in float32 and bfloat16, and of some operators for NVIDIA GPUs, in float16 too) or
``"reference"`` (plain ATen, any floating type, gradients of any order) to force one. All raise ``ValueError`` or ``TypeError``
naming the argument that does not fit, and ``NotImplementedError`` where the forced backend cannot run. The reference of attention
in which nothing is composed is ``scaled_dot_product_attention``, which on a CPU has a second derivative and forward derivatives
only under ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import Tensor

from headloom._functional import call
from headloom.attention import composed_attention

__all__ = [
    "aft",
    "causal_conv1d",
    "composed_attention",
    "dynamic_weights",
    "gated_linear_attention",
    "gated_norm",
    "gelu_tanh",
    "linear",
    "linear_cross_entropy",
    "moe",
    "retention",
    "rms_norm",
    "rotary",
    "selective_scan",
    "swiglu",
    "token_shift",
    "wkv",
]


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    state: Optional[Tensor] = None,
    documents: Optional[Tensor] = None,
    form: str = "chunkwise",
    chunk: int = 64,
    backend: Optional[str] = None,
) -> Tuple[Tensor, Tensor]:
    """Attention whose softmax is replaced by a fixed exponential decay (RetNet, Sun et al. 2023, eq. 5 to 7)::

        S_n = gamma S_{n-1} + k_n^T v_n        o_n = q_n S_n

    Nothing is scaled, rotated or normalised here.

    Args:
        q, k: ``[B, T, H, D]``.
        v: ``[B, T, H, E]``.
        gamma: ``[H]``, float32 or float64, in (0, 1].
        state: ``[B, H, D, E]``, S before the first position; 0 when None.
        documents: ``[B, T]`` int64 ids; the state starts anew wherever the id changes.
        form: ``"chunkwise"``, ``"parallel"`` or ``"recurrent"``; the three agree.
        chunk: positions of a chunk.

    Returns:
        The output ``[B, T, H, E]`` of q's type, and the state after the last position, float64 for float64 and float32
        otherwise.
    """
    found: Tuple[Tensor, Tensor] = call(
        "retention", q, k, v, gamma, state, documents, form, chunk, backend
    )
    return found


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Optional[Tensor] = None,
    documents: Optional[Tensor] = None,
    form: str = "chunkwise",
    chunk: int = 16,
    backend: Optional[str] = None,
) -> Tuple[Tensor, Tensor]:
    """Linear attention that decays each row of its state as the sequence says (GLA, Yang et al. 2024, section 4.1)::

        S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t        o_t = q_t S_t

    Nothing is scaled or normalised here.

    Args:
        q, k: ``[B, T, H, D]``.
        v: ``[B, T, H, E]``.
        log_decay: ``[B, T, H, D]``, at most 0, which is not checked; float32 or of q's type.
        state: ``[B, H, D, E]``, S before the first position; 0 when None.
        documents: ``[B, T]`` int64 ids; the state starts anew wherever the id changes.
        form: how the reference computes, ``"chunkwise"`` or ``"recurrent"``; the two agree, and the kernels compute either.
        chunk: positions of the reference's chunks.

    Returns:
        The output ``[B, T, H, E]`` of q's type, and the state after the last position, float64 for float64 and float32
        otherwise.
    """
    found: Tuple[Tensor, Tensor] = call(
        "gated_linear_attention", q, k, v, log_decay, state, documents, form, chunk, backend
    )
    return found


def wkv(
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    bonus: Tensor,
    receptance: Optional[Tensor] = None,
    state: Optional[Tensor] = None,
    documents: Optional[Tensor] = None,
    backend: Optional[str] = None,
) -> Tuple[Tensor, Tensor]:
    """The recurrence of RWKV version 4 (Peng et al. 2023, eq. 16), a channel at a time::

        y_t = (sum_{i<t} e^(-(t-1-i) w + k_i) v_i + e^(u + k_t) v_t) / (the same sum without v)

    and ``sigmoid(r_t) y_t`` where there is a receptance r. No exponential overflows, however large k is.

    Args:
        k, v: ``[B, T, C]``.
        rate: w ``[C]``, at least 0: ``exp(time_decay)``, not ``time_decay`` itself, which the mixer ``rwkv`` has as its
            parameter.
        bonus: u ``[C]``, RWKV's ``time_first``.
        receptance: r ``[B, T, C]``.
        state: ``[B, 3, C]``, the sums before the first position: a (with v), b (without) and the exponent m, which stand
            for a e^m and b e^m; a = b = 0 and m = -1e38 when None.
        documents: ``[B, T]`` int64 ids; the sums start anew wherever the id changes.

    Returns:
        The output ``[B, T, C]`` of k's type, and the state after the last position, float64 for float64 and float32
        otherwise; its m is a constant to gradients.
    """
    found: Tuple[Tensor, Tensor] = call("wkv", k, v, rate, bonus, receptance, state, documents, backend)
    return found


def token_shift(
    x: Tensor,
    mix: Tensor,
    last: Optional[Tensor] = None,
    documents: Optional[Tensor] = None,
    backend: Optional[str] = None,
) -> List[Tensor]:
    """Each channel mixed with the position before, in several proportions (RWKV, Peng et al. 2023, eq. 11 to 13)::

        y^i_t = mix^i x_t + (1 - mix^i) x_{t-1}

    Args:
        x: ``[B, T, C]``.
        mix: ``[N, C]``.
        last: ``[B, C]``, what is before the first position; 0 when None.
        documents: ``[B, T]`` int64 ids; x_{t-1} counts as 0 where the id changes.

    Returns:
        N tensors ``[B, T, C]``.
    """
    found: List[Tensor] = call("token_shift", x, mix, last, documents, backend)
    return found


def aft(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    form: str = "simple",
    bias: Optional[Tensor] = None,
    causal: bool = True,
    lengths: Optional[Tensor] = None,
    documents: Optional[Tensor] = None,
    state: Optional[Tensor] = None,
    offset: int = 0,
    backend: Optional[str] = None,
) -> Tuple[Tensor, Tensor]:
    """The attention-free transformer (Zhai et al. 2021, eq. 1 to 5), a channel at a time::

        y_t = sigmoid(q_t) (sum_s e^(k_s + w[t, s]) v_s) / (sum_s e^(k_s + w[t, s]))

    Args:
        q, k, v: ``[B, T, C]``.
        form: ``"simple"`` (w = 0), ``"local"`` (w where ``|t - s| < W``), ``"full"``, or ``"conv"`` (a function of t - s,
            shared by the channels of a head).
        bias: w. local ``[L, W]`` with ``bias[t, i]`` for s = t - (W - 1) + i, ``[L, 2W - 1]`` where not causal; full
            ``[L, L]``; conv ``[H, W]`` or ``[H, 2W - 1]``. L is at least T + offset. Without a kernel (float64, and forms
            that are not causal) e^w is computed as it is, so w must lie between -700 and 700.
        causal: s runs up to t only.
        lengths: ``[B]`` int64, positions of each sequence that are keys where it is not causal; an empty sequence gives 0.
        documents: ``[B, T]`` int64 ids; nothing is read across a change of id.
        state: ``[B, 3 + 2 (W - 1), C]`` of the causal simple (W = 1) and local forms, as returned.
        offset: position of the first in its document, for the w of local and full.

    Returns:
        The output ``[B, T, C]`` of q's type, and the state after the last position, ``[B, 0, C]`` where a form has none. The
        exponents in it, its channels' third row, are constants to gradients.
    """
    found: Tuple[Tensor, Tensor] = call(
        "aft", q, k, v, form, bias, causal, lengths, documents, state, offset, backend
    )
    return found


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor] = None,
    z: Optional[Tensor] = None,
    delta_bias: Optional[Tensor] = None,
    delta_softplus: bool = False,
    state: Optional[Tensor] = None,
    documents: Optional[Tensor] = None,
    backend: Optional[str] = None,
) -> Tuple[Tensor, Tensor]:
    """Mamba's diagonal recurrence, whose step and maps come from the sequence (Gu & Dao 2023, eq. 2 and 4)::

        dt_t = delta_t + delta_bias, then softplus where asked
        h_t  = exp(dt_t A) h_{t-1} + dt_t B_t u_t
        y_t  = sum_n C_t[n] h_t[n] + D u_t,  times SiLU(z_t) where z is given

    Here B and C are the maps of the state, N the numbers in a channel's state.

    Args:
        u, delta: ``[batch, L, channels]``.
        A: ``[channels, N]``.
        B, C: ``[batch, L, N]``, ``[batch, L, G, N]`` for G groups of channels, or ``[channels, N]`` where constant.
        D: ``[channels]``.
        z: ``[batch, L, channels]``.
        delta_bias: ``[channels]``.
        delta_softplus: whether the step goes through softplus.
        state: ``[batch, channels, N]``, h before the first position; 0 when None.
        documents: ``[batch, L]`` int64 ids; the state starts anew wherever the id changes.

    Returns:
        y ``[batch, L, channels]`` of u's type, and the state after the last position, float64 for float64 and float32
        otherwise.
    """
    found: Tuple[Tensor, Tensor] = call(
        "selective_scan", u, delta, A, B, C, D, z, delta_bias, delta_softplus, state, documents, backend
    )
    return found


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    silu: bool = False,
    state: Optional[Tensor] = None,
    documents: Optional[Tensor] = None,
    backend: Optional[str] = None,
) -> Tuple[Tensor, Tensor]:
    """A filter over the last W positions for each channel, as before Mamba's scan (Gu & Dao 2023)::

        y_t = act(bias + sum_{j < W} weight[:, j] x_{t - (W - 1) + j})        act: SiLU or nothing

    Args:
        x: ``[B, L, C]``.
        weight: ``[C, W]``; the last tap is the current position's.
        bias: ``[C]``.
        silu: whether SiLU follows.
        state: ``[B, W - 1, C]``, the rows before the first position; 0 when None.
        documents: ``[B, L]`` int64 ids; what belongs to another document counts as 0.

    Returns:
        y ``[B, L, C]``, and the state after the last position, both of x's type.
    """
    found: Tuple[Tensor, Tensor] = call("causal_conv1d", x, weight, bias, silu, state, documents, backend)
    return found


def moe(
    x: Tensor, up: Tensor, down: Tensor, choice: Tensor, weight: Tensor, backend: Optional[str] = None
) -> Tensor:
    """SwiGLU experts, each on the tokens that chose it (DeepSeekMoE, Dai et al. 2024, eq. 3 and 5)::

        y_n = sum_j weight[n, j] expert_i(x_n),  i = choice[n, j]
        expert_i(x) = down_i (SiLU(g) * u),      [g | u] = up_i x

    Args:
        x: ``[N, C]``, a row a token.
        up: ``[experts, 2 I, C]`` for I hidden units, the gate's rows first.
        down: ``[experts, C, I]``.
        choice: ``[N, K]`` int64.
        weight: ``[N, K]``, float32 or of x's type.

    Returns:
        ``[N, C]`` of x's type.

    Raises:
        IndexError: a choice is no expert.
    """
    found: Tensor = call("moe", x, up, down, choice, weight, backend)
    return found


def gated_norm(x: Tensor, gate: Tensor, eps: Tensor, backend: Optional[str] = None) -> Tensor:
    """A norm of each head's values, times a swish gate (RetNet, Sun et al. 2023, eq. 8)::

        y = SiLU(gate) x / sqrt(mean(x^2) + eps)        the mean over the last dimension

    Args:
        x, gate: ``[..., E]``.
        eps: float32, of a shape that broadcasts to x's without the last dimension.

    Returns:
        ``[..., E]`` of x's type.
    """
    found: Tensor = call("gated_norm", x, gate, eps, backend)
    return found


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    backend: Optional[str] = None,
) -> Tensor:
    """A linear map. Of few rows, as decoding has them, its time is that of reading the weights, once::

        y[m, o] = scale[o] sum_i x[m, i] weight[o, i] + bias[o]

    Weights of four bits have a scale for each group of 32 inputs (G = ceil(I / 32) groups, the last filled up
    with zeros). 8 consecutive groups of a row make a block (the last block of a row may have fewer, n). A block
    lies in 16 n bytes; byte 8 n h + 8 g + j (h < 2, j < 8) holds, of its group g, element 8 h + j in the low four
    bits and element 16 + 8 h + j in the high four, each plus 8.

    Args:
        x: ``[..., I]``.
        weight: ``[O, I]`` of x's type, float32 or int8; or uint8 ``[O, 16 G]``, of four bits each.
        scale: ``[O]`` float32 with int8 weights, ``[O, G]`` bfloat16 with weights of four bits; with others none.
        bias: ``[O]`` of x's type.
        backend: ``"fused"`` (CPU, float32 and bfloat16; with weights of eight or four bits where no gradient is
            wanted) or ``"reference"``; None: fused where it can.

    Returns:
        ``[..., O]`` of x's type.
    """
    found: Tensor = call("linear", x, weight, scale, bias, backend)
    return found


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor] = None,
    backend: Optional[str] = None,
) -> Tuple[Tensor, Tensor]:
    """A linear map to many classes and its summed cross-entropy, without the scores of all positions in memory at once::

        s = hidden weight^T + bias
        loss = sum over n of log(sum_v exp(s[n, v])) - s[n, targets[n]]

    Where a gradient is wanted, the forward computes it too (as Liger does), and the backward only scales it.

    Args:
        hidden: ``[N, C]``.
        weight: ``[V, C]`` of hidden's type.
        targets: ``[N]`` int64, 0 to V - 1, or -100 at a position that counts for nothing.
        bias: ``[V]`` of hidden's type.

    Returns:
        The loss, a scalar of float32 (of float64 for float64), and ``[N]`` int64: the class with the largest score of each
        position, -1 where the target is -100.
    """
    found: Tuple[Tensor, Tensor] = call("linear_cross_entropy", hidden, weight, targets, bias, backend)
    return found


def dynamic_weights(hidden: Tensor, w2: Tensor, rank: int, backend: Optional[str] = None) -> List[Tensor]:
    """The second half of DCMHA's weight networks (Xiao et al. 2024, eq. 7), for all S sides of a layer at once::

        down, up = split(GELU(hidden) W2)                       exact GELU
        down = down / sqrt(mean over the group's heads of down^2 + 1e-6)

    Args:
        hidden: ``[B, L, S g I]``, x W1 of S sides and g groups.
        w2: ``[S, g, I, 2 R n]``: R rows of n heads for ``down`` and as many for ``up``.
        rank: R.
        backend: ``"fused"`` (CPU, float32 and bfloat16, at most 16 positions, no gradient; NVIDIA GPUs with Triton, float16
            too) or ``"reference"``; None: fused where it can.

    Returns:
        2 S tensors ``[B, L, R, H]`` of hidden's type with H = g n: each side's ``down``, then each side's ``up``.
    """
    found: List[Tensor] = call("dynamic_weights", hidden, w2, rank, backend)
    return found


def rms_norm(x: Tensor, scale: Optional[Tensor] = None, eps: float = 1e-6, backend: Optional[str] = None) -> Tensor:
    """The values over the root of their mean square (Zhang & Sennrich 2019)::

        y = x / sqrt(mean(x^2) + eps) scale        the mean over the last dimension

    Args:
        x: ``[..., E]``.
        scale: ``[E]``; 1 when None.

    Returns:
        ``[..., E]`` of x's type; computed in float32 or wider.
    """
    found: Tensor = call("rms_norm", x, scale, eps, backend)
    return found


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, backend: Optional[str] = None
) -> Tensor:
    """Rotary positions (Su et al. 2021): pairs of a head's first 2 P dimensions turned by their position's angles::

        (a, b) -> (a cos - b sin, b cos + a sin)

    Args:
        x: ``[B, T, H, D]``, queries or keys.
        cos, sin: ``[T, P]`` or ``[B, T, P]``, float32 (float64 where x is).
        interleaved: pairs are dimensions (2 p, 2 p + 1), else (p, p + P).

    Returns:
        ``[B, T, H, D]``, contiguous; the dimensions after the first 2 P as they are. Differentiable in x.
    """
    found: Tensor = call("rotary", x, cos, sin, interleaved, backend)
    return found


def gelu_tanh(x: Tensor, backend: Optional[str] = None) -> Tensor:
    """GELU by its approximation (Hendrycks & Gimpel 2016, GPT-2's ``gelu_new``), in one pass over memory::

        y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

    Args:
        x: of any shape.

    Returns:
        As ``x``.
    """
    found: Tensor = call("gelu_tanh", x, backend)
    return found


def swiglu(x: Tensor, backend: Optional[str] = None) -> Tensor:
    """The gate of a feed-forward network (Shazeer 2020): SiLU(g) u of x = [g | u].

    Args:
        x: ``[..., 2 I]``.

    Returns:
        ``[..., I]``.
    """
    found: Tensor = call("swiglu", x, backend)
    return found


def _document() -> None:
    for name in __all__:
        getattr(torch.ops.headloom, name).__doc__ = globals()[name].__doc__


_document()
