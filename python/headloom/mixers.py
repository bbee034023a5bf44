"""Token mixers as torch modules: Python owns the parameters, C++ runs the layer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Union

import torch
from torch import Tensor, nn


class Mixer(nn.Module):
    """A token mixer, ``[B, T, C] -> [B, T, C]``; made by :func:`mixer`.

    Its parameters are ordinary ones, named as in the C++ module and in checkpoints; optimisers, ``state_dict``,
    ``deepcopy``, pickling, ``functional_call``, ``torch.compile`` and autocast treat it like any other module.
    """

    def __init__(self, spec: str):
        super().__init__()
        self.spec = spec
        names, values = torch.ops.headloom.mixer_parameters(spec)
        self._paths = [tuple(name.split(".")) for name in names]
        for path, value in zip(self._paths, values):
            owner: nn.Module = self
            for part in path[:-1]:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner._modules[part]
            owner.register_parameter(path[-1], nn.Parameter(value))

    def _tensors(self) -> List[Tensor]:
        tensors = []
        for path in self._paths:
            value: Any = self
            for part in path:
                value = getattr(value, part)
            tensors.append(value)
        return tensors

    def forward(
        self,
        x: Tensor,
        lengths: Optional[Tensor] = None,
        documents: Optional[Tensor] = None,
        memory: Optional[Tensor] = None,
    ) -> Tensor:
        """Mixes along the sequence.

        Args:
            x: ``[B, T, C]``.
            lengths: ``[B]`` int64, how many tokens of each sequence (of the memory, where there is one) are real.
            documents: ``[B, T]`` int64 ids; attention stays inside a document.
            memory: ``[B, S, C]``; cross-attention takes keys and values from here.
        """
        return torch.ops.headloom.mixer(
            self.spec, x, self._tensors(), self.training, lengths, documents, memory
        )

    def extra_repr(self) -> str:
        return self.spec.strip().replace("\n", ", ")


def mixer(
    type: str,
    width: int,
    *,
    position: Union[str, Mapping[str, Any]] = "rope",
    causal: bool = True,
    bias: bool = False,
    layer: int = 0,
    depth: int = 1,
    max_length: Optional[int] = None,
    init_std: Optional[float] = None,
    **options: Any,
) -> Mixer:
    """Builds the token mixer ``type`` as a ``torch.nn.Module``, run by the C++ implementation.

    Weights are drawn from torch's default generator (``torch.manual_seed``).

    Args:
        type: a name out of :func:`mixers`, such as ``"mha"`` or ``"dcmha"``.
        width: C, the size of x's last dimension.
        position: how positions enter: ``"rope"``, ``"alibi"``, ``"none"``, or a table such as
            ``{"type": "rope", "base": 1e5, "layout": "interleaved", "fraction": 0.25}``.
        causal: whether a token sees only itself and earlier ones.
        bias: biases in the linear maps.
        layer, depth: the layer's index and the number of layers of the model it is for; some mechanisms and
            initialisations depend on them.
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
    if isinstance(position, str):
        position = {"type": position}
    table = {
        "width": width,
        "layer": layer,
        "depth": depth,
        "max_length": max_length,
        "causal": causal,
        "bias": bias,
        "init_std": init_std,
        "position": position,
        "mixer": {"type": type, **options},
    }
    return Mixer("".join(f"{key} = {_toml(value)}\n" for key, value in table.items() if value is not None))


@dataclass(frozen=True)
class Option:
    """One option of a mixer; ``default`` is empty where there is none."""

    type: str
    default: str
    doc: str


@dataclass(frozen=True)
class MixerInfo:
    """What :func:`mixers` says of a mixer."""

    doc: str
    source: str
    options: Dict[str, Option]


def mixers() -> Dict[str, MixerInfo]:
    """Every token mixer by name, with its source and its options."""
    found: Dict[str, MixerInfo] = {}
    for row in torch.ops.headloom.mixer_rows():
        kind, name, *rest = row.split("\t")
        if kind == "mixer":
            info = found[name] = MixerInfo(*rest, options={})
        else:
            info.options[name] = Option(*rest)
    return found


def _toml(value: Any) -> str:
    """A Python value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML string
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    raise TypeError(f"an option of a mixer is {value!r}, expected a number, text, a boolean or a list of them.")
