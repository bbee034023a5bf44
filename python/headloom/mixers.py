"""Mixers as torch modules: Python owns the parameters, C++ runs the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, List, Literal, Mapping, Optional, Tuple, Union, overload

import torch
from torch import Tensor

from headloom._functional import FunctionalModule, expect_tensors, new_tensors, toml_lines


class Mixer(FunctionalModule):
    """A token mixer, ``[B, T, C] -> [B, T, C]``; made by :func:`mixer`.

    Its parameters are ordinary ones, named as in the C++ module and in checkpoints; optimisers, ``state_dict``,
    ``deepcopy``, pickling, ``functional_call``, ``torch.compile`` and autocast treat it like any other module.
    """

    def __init__(self, spec: str):
        super().__init__(spec, *new_tensors(torch.ops.headloom.mixer_tensors, spec))

    def forward(
        self,
        x: Tensor,
        lengths: Optional[Tensor] = None,
        documents: Optional[Tensor] = None,
        memory: Optional[Tensor] = None,
    ) -> Tensor:
        """Mixes along the sequence.

        Args:
            x: ``[B, T, C]`` with C the layer's width and T at least 1, of the parameters' type and device.
            lengths: ``[B]`` int64, how many tokens of each sequence (of the memory, where there is one) are real: 0 to
                T (S).
            documents: ``[B, T]`` int64 ids, one for each document, which does not come back later; attention stays inside a
                document. Not beside a memory.
            memory: ``[B, S, C]``; cross-attention takes keys and values from here.

        Returns:
            ``[B, T, C]`` of x's type.

        Raises:
            ValueError: an argument, or a parameter that was replaced, has a shape, type or device that does not fit,
                or the mixer cannot do what is asked of it; the message names the mixer and the argument.
            TypeError: an argument is no tensor.
        """
        if not (type(x) is Tensor and lengths is None and documents is None and memory is None):
            expect_tensors(self._what, "x", x=x, lengths=lengths, documents=documents, memory=memory)
        y: Tensor = torch.ops.headloom.mixer(
            self.spec, x, self._tensors(), self.training, lengths, documents, memory
        )
        return y

    if TYPE_CHECKING:
        __call__ = forward

    def _redraw(self, step: int, seed: int) -> None:
        torch.ops.headloom.redraw_mixer(self.spec, self._tensors(), step, seed)


class ChannelMixer(FunctionalModule):
    """A channel mixer (feed-forward part), ``[B, T, C] -> [B, T, C]``; made by :func:`channel_mixer`.

    As ordinary a module as :class:`Mixer`.
    """

    def __init__(self, spec: str):
        super().__init__(spec, *new_tensors(torch.ops.headloom.channel_mixer_tensors, spec))

    @overload
    def forward(self, x: Tensor, documents: Optional[Tensor] = None, auxiliary: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, documents: Optional[Tensor] = None, *, auxiliary: Literal[True]
    ) -> Tuple[Tensor, Tensor]: ...
    @overload
    def forward(self, x: Tensor, documents: Optional[Tensor], auxiliary: Literal[True]) -> Tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self, x: Tensor, documents: Optional[Tensor] = None, *, auxiliary: bool
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]: ...
    @overload
    def forward(
        self, x: Tensor, documents: Optional[Tensor], auxiliary: bool
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]: ...

    def forward(
        self, x: Tensor, documents: Optional[Tensor] = None, auxiliary: bool = False
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        """Each position by itself or with the one before it.

        Args:
            x: ``[B, T, C]`` with C the layer's width and T at least 1, of the parameters' type and device.
            documents: ``[B, T]`` int64 ids; a position is not mixed with one of another document.
            auxiliary: also return what the mixer wants added to the loss (``moe``: the balance of its experts), a
                scalar.

        Returns:
            ``[B, T, C]`` of x's type; with ``auxiliary`` a pair.

        Raises:
            ValueError: an argument, or a parameter that was replaced, has a shape, type or device that does not fit;
                the message names the mixer and the argument.
            TypeError: an argument is no tensor.
        """
        if not (type(x) is Tensor and documents is None):
            expect_tensors(self._what, "x", x=x, documents=documents)
        found = torch.ops.headloom.channel_mixer(self.spec, x, self._tensors(), self.training, documents, auxiliary)
        self._count(found[2 if auxiliary else 1 :])
        if auxiliary:
            return found[0], found[1]
        y: Tensor = found[0]
        return y

    if TYPE_CHECKING:
        __call__ = forward

    def _move(self, load: List[Tensor]) -> None:
        torch.ops.headloom.balance_channel_mixer(self.spec, self._tensors(), load)


def _layer_spec(
    key: str, type: str, position: Union[str, Mapping[str, Any]], options: Mapping[str, Any], **shape: Any
) -> str:
    """The TOML that the operators build a layer from: ``key`` is ``"mixer"`` or ``"channel"``."""
    if isinstance(position, str):
        position = {"type": position}
    return toml_lines({**shape, "position": position, key: {"type": type, **options}})


def mixer(
    type: str,
    width: int,
    *,
    position: Union[str, Mapping[str, Any]] = "rope",
    causal: bool = True,
    bias: bool = False,
    layer: Optional[int] = None,
    depth: int = 1,
    max_length: Optional[int] = None,
    init_std: Optional[float] = None,
    **options: Any,
) -> Mixer:
    """Builds the token mixer ``type`` as a ``torch.nn.Module``, run by the C++ implementation.

    Weights are drawn from torch's default generator (``torch.manual_seed``), in the default type, on the default device
    (``torch.device`` as a context, ``"meta"`` too).

    Args:
        type: a name out of :func:`mixers`, such as ``"mha"`` or ``"dcmha"``.
        width: C, the size of x's last dimension.
        position: how positions enter: ``"rope"``, ``"alibi"``, ``"none"``, or a table such as
            ``{"type": "rope", "base": 1e5, "layout": "interleaved", "fraction": 0.25}``.
        causal: whether a token sees only itself and earlier ones.
        bias: biases in the linear maps.
        layer, depth: the layer's index, from 0, and the number of layers of the model it is for; some mechanisms and
            initialisations depend on them. A mixer without ``layer`` is in no model: it starts as a first layer, and
            what only some layers of a model have (the convolutions of ``"multi_token"``) it has.
        max_length: longest sequence, for mixers whose parameters depend on it.
        init_std: standard deviation of new weights.
        **options: the mixer's own options, listed by :func:`mixers` (``heads``, ``window``, ...). None leaves an
            option at its default.

    Raises:
        ValueError: an unknown name or option, or a value that does not fit; the message names it.

    Example:
        >>> layer = headloom.mixer("dcmha", width=512, heads=8)
        >>> y = layer(torch.randn(2, 128, 512))
    """
    return Mixer(
        _layer_spec(
            "mixer",
            type,
            position,
            options,
            width=width,
            layer=layer,
            depth=depth,
            max_length=max_length,
            causal=causal,
            bias=bias,
            init_std=init_std,
        )
    )


def channel_mixer(
    type: str,
    width: int,
    *,
    bias: bool = False,
    layer: Optional[int] = None,
    depth: int = 1,
    init_std: Optional[float] = None,
    **options: Any,
) -> ChannelMixer:
    """Builds the channel mixer ``type`` as a ``torch.nn.Module``, run by the C++ implementation.

    Args:
        type: a name out of :func:`channel_mixers`, such as ``"swiglu"`` or ``"moe"``.
        width: C, the size of x's last dimension.
        bias: biases in the linear maps.
        layer, depth: the layer's index, from 0, and the number of layers of the model it is for; some initialisations
            depend on them.
        init_std: standard deviation of new weights.
        **options: the mixer's own options, listed by :func:`channel_mixers`. None leaves an option at its default.

    Raises:
        ValueError: an unknown name or option, or a value that does not fit; the message names it.

    Example:
        >>> layer = headloom.channel_mixer("swiglu", width=512)
        >>> y = layer(torch.randn(2, 128, 512))
    """
    return ChannelMixer(
        _layer_spec(
            "channel",
            type,
            "none",
            options,
            width=width,
            layer=layer,
            depth=depth,
            bias=bias,
            init_std=init_std,
        )
    )


@dataclass(frozen=True)
class Option:
    """One option of a mixer; ``default`` is empty where there is none."""

    type: str
    default: str
    doc: str


@dataclass(frozen=True)
class MixerInfo:
    """What :func:`mixers` and :func:`channel_mixers` say of a mixer."""

    doc: str
    source: str
    options: Dict[str, Option]


def _listed(rows: List[str]) -> Dict[str, MixerInfo]:
    found: Dict[str, MixerInfo] = {}
    for row in rows:
        kind, name, *rest = row.split("\t")
        if kind == "mixer":
            doc, source = rest
            info = found[name] = MixerInfo(doc, source, options={})
        else:
            info.options[name] = Option(*rest)
    return found


def mixers() -> Dict[str, MixerInfo]:
    """Every token mixer by name, with its source and its options."""
    return _listed(torch.ops.headloom.mixer_rows())


def channel_mixers() -> Dict[str, MixerInfo]:
    """Every channel mixer by name, with its source and its options."""
    return _listed(torch.ops.headloom.channel_mixer_rows())
