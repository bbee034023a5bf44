"""Looking into models: attention maps, diversity of heads, ranks, noise, experts, states, theorems.

Each function returns a :class:`Findings`: NumPy arrays, tables, sentences and a page. docs/analyses.md says how each
is read. An encoder-decoder reads ``source``, and ``inputs`` is then what it writes. The command line has the same:
``headloom analyze RUN WHAT``.

Example:
    >>> model = headloom.load("runs/text")
    >>> found = headloom.analysis.maps(model, "To be, or not to be")
    >>> found.arrays["layer0.weights"].shape
    (1, 8, 19, 19)
    >>> found.save("maps.html")
"""

from __future__ import annotations

import html as _html
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Optional, Sequence, Union

import torch
from torch import Tensor

from headloom import _command
from headloom._functional import shown, whole_number
from headloom._model import Model

if TYPE_CHECKING:
    import numpy

Inputs = Union[str, Tensor]


@dataclass(frozen=True)
class Table:
    """A table: ``rows`` have a text or a number for each of ``columns``; None is a number that is not known."""

    title: str
    columns: List[str]
    rows: List[List[Union[str, int, float, None]]]

    def column(self, name: str) -> List[Union[str, int, float, None]]:
        """The cells of one column.

        Raises:
            KeyError: there is none of that name.
        """
        if name not in self.columns:
            raise KeyError(f"the table has no column {name!r}, it has {', '.join(self.columns)}.")
        place = self.columns.index(name)
        return [row[place] for row in self.rows]


@dataclass(frozen=True)
class Findings:
    """What an analysis has found.

    Attributes:
        found: the result in sentences.
        tables: what the command line prints.
        arrays: NumPy arrays by name.
        html: a page with tables and figures, for maps the interactive one. Notebooks show it.
    """

    title: str
    found: List[str]
    tables: List[Table]
    arrays: Dict[str, "numpy.ndarray[Any, Any]"] = field(repr=False)
    html: str = field(repr=False)

    def save(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes the page, which needs no other file and no network."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.html)

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{_html.escape(self.html)}" width="100%" height="760" style="border:0"></iframe>'


def _findings(text: str, html: str, arrays: Dict[str, "numpy.ndarray[Any, Any]"]) -> Findings:
    found = json.loads(text)
    tables = [Table(t["title"], t["columns"], t["rows"]) for t in found["tables"]]
    return Findings(found["title"], found["found"], tables, arrays, html)


def _numbers(name: str, given: Optional[Sequence[int]]) -> List[int]:
    if given is None:
        return []
    numbers = list(given) if isinstance(given, Iterable) else [None]
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise TypeError(f"{name} is {shown(given)}, expected a list of whole numbers.")
    if not numbers:
        raise ValueError(f"{name} is empty, expected at least one number, or None for all.")
    return numbers


def _array(value: Tensor) -> "numpy.ndarray[Any, Any]":
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _analyze(
    what: str,
    model: Optional[Model],
    inputs: Optional[Inputs] = None,
    layers: Optional[Sequence[int]] = None,
    heads: Optional[Sequence[int]] = None,
    top: int = 5,
    source: Optional[Inputs] = None,
    targets: Optional[Tensor] = None,
    answer: Optional[Tensor] = None,
) -> Findings:
    if what != "theorems" and not isinstance(getattr(model, "_orig_mod", model), Model):  # torch.compile wraps it
        raise TypeError(f"model is {shown(model)}, expected a headloom.Model.")

    def tokens_of(name: str, given: Optional[Inputs]) -> Optional[Tensor]:
        if given is None or model is None:
            return None
        if isinstance(given, str):
            tokens = model.encode(given).unsqueeze(0)
        elif isinstance(given, Tensor):
            tokens = given.unsqueeze(0) if given.dim() == 1 else given
        else:
            raise TypeError(f"{name} is {shown(given)}, expected a text or a tensor.")
        longest = model.config.get("max_source_length" if name == "source" else "max_length")
        if isinstance(given, str) and longest is not None and tokens.shape[1] > longest:
            raise ValueError(f"the text has {tokens.shape[1]} tokens, but the model reads at most {longest}.")
        return tokens

    top = whole_number("top", top, 1, "a whole number, at least 1")
    read = tokens_of("inputs", inputs)
    vit = model is not None and model.config["kind"] == "vit"
    vocabulary: List[str] = []
    if model is not None and model.tokenizer is not None and read is not None:
        vocabulary = [_shown_token(model.tokenizer.piece(i)) for i in range(model.config["vocabulary"])]
    text, html, names, values = torch.ops.headloom.analyze(
        "" if model is None else model.spec,
        [] if model is None else model._tensors(),
        what,
        vocabulary,
        _numbers("layers", layers),
        _numbers("heads", heads),
        top,
        None if vit else read,
        tokens_of("source", source),
        read if vit else None,
        targets,
        answer,
    )
    return _findings(text, html, {name: _array(value) for name, value in zip(names, values)})


def _shown_token(piece: bytes) -> str:
    """A token as the page shows it."""
    text = piece.decode("utf-8", "backslashreplace").replace("\n", "\u21b5")
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def maps(
    model: Model,
    inputs: Inputs,
    *,
    layers: Optional[Sequence[int]] = None,
    heads: Optional[Sequence[int]] = None,
    source: Optional[Inputs] = None,
) -> Findings:
    """Attention maps before and after composition, what its parts add, composition maps and hidden states.

    Args:
        inputs: a text, tokens ``[T]`` or ``[B, T]``, or images. The page shows the first sequence.
        layers: numbers of layers; None: all.
        heads: numbers of heads; None: all.
        source: what an encoder-decoder reads.

    Returns:
        ``arrays`` has the tensors of ``model(tokens, maps=[...])`` under the same names.

    Raises:
        ValueError: the model has no maps, or a layer or head is not there; the message says which.
    """
    return _analyze("maps", model, inputs, layers, heads, source=source)


def diversity(
    model: Model,
    inputs: Optional[Inputs] = None,
    *,
    layers: Optional[Sequence[int]] = None,
    source: Optional[Inputs] = None,
) -> Findings:
    """How different the heads are (Xiao et al. 2024, figure 5).

    Args:
        inputs: where given, also how similar the heads' maps are on it, before and after composition.
        source: what an encoder-decoder reads.

    Returns:
        ``arrays["qk"]`` and ``arrays["ov"]`` ``[H]``: the share of the heads' products W_Q W_K^T and W_V W_O that the
        first 1, 2, ... H principal components capture, mean over layers; ``"layer0.qk"`` of one layer.

    Raises:
        ValueError: the model has no heads of that form.
    """
    return _analyze("diversity", model, inputs, layers, source=source)


def rank(
    model: Model,
    inputs: Inputs,
    *,
    layers: Optional[Sequence[int]] = None,
    heads: Optional[Sequence[int]] = None,
    source: Optional[Inputs] = None,
) -> Findings:
    """Ranks and singular values of the maps against head size and length (Bhojanapalli et al. 2020).

    Returns:
        ``arrays["layer0.length64.singular_values"]`` ``[B, H, 64]``, descending.
    """
    return _analyze("rank", model, inputs, layers, heads, source=source)


def noise(
    model: Model,
    inputs: Inputs,
    *,
    answer: Optional[str] = None,
    targets: Optional[Tensor] = None,
    layers: Optional[Sequence[int]] = None,
    heads: Optional[Sequence[int]] = None,
    source: Optional[Inputs] = None,
) -> Findings:
    """The share of attention that goes to the answer, against the rest (Ye et al. 2024).

    Args:
        inputs: a text, or tokens ``[B, T]``.
        answer: of a text: the part of it, at its last place, that the last token is to find.
        targets: of tokens ``[B, T]``: which token is asked for at each position, -100 elsewhere. The answer is where it
            stands before, in the surroundings that agree most.

    Returns:
        ``arrays["layer0.composed.answer"]`` ``[H]``, and ``.rest``; ``"softmax"`` before composition.

    Raises:
        ValueError: there is no question, or its answer does not stand in the context.
    """
    place: Optional[Tensor] = None
    if answer is not None:
        if not isinstance(inputs, str):
            raise TypeError("answer is a part of a text, expected inputs to be that text.")
        place = _answer_place(model, inputs, answer)
    return _analyze("noise", model, inputs, layers, heads, source=source, targets=targets, answer=place)


def _answer_place(model: Model, text: str, answer: str) -> Tensor:
    """Which tokens of ``text`` hold the last place of ``answer``."""
    tokens = model.encode(text)
    pieces = [model._text_tokenizer().piece(token) for token in tokens.tolist()]
    whole, wanted = b"".join(pieces), answer.encode()
    begin = whole.rfind(wanted)
    if not wanted or begin < 0:
        raise ValueError(f"answer is {answer!r}, which does not stand in the text.")
    place, at = [], 0
    for piece in pieces:
        place.append(at + len(piece) > begin and at < begin + len(wanted))
        at += len(piece)
    return torch.tensor(place, device="cpu")


def experts(
    model: Model,
    inputs: Inputs,
    *,
    layers: Optional[Sequence[int]] = None,
    top: int = 5,
    source: Optional[Inputs] = None,
) -> Findings:
    """Load and specialisation of experts (Dai et al. 2024).

    Returns:
        ``arrays["layer0.load"]`` ``[experts]``: how often each was chosen.
    """
    return _analyze("experts", model, inputs, layers, top=top, source=source)


def states(
    model: Model, inputs: Inputs, *, layers: Optional[Sequence[int]] = None, source: Optional[Inputs] = None
) -> Findings:
    """Norms of recurrent states along the sequence, and decays.

    Returns:
        ``arrays["layer0.norm.wkv"]`` ``[B, T]`` and ``arrays["layer0.decay"]``, the factors of a position.
    """
    return _analyze("states", model, inputs, layers, source=source)


def memory(
    model: Model,
    inputs: Inputs,
    *,
    layers: Optional[Sequence[int]] = None,
    top: int = 5,
    source: Optional[Inputs] = None,
) -> Findings:
    """Feed-forward layers as key-value memory: what a hidden unit fires on and what it writes (Geva et al. 2021).

    Returns:
        ``arrays["layer0.largest"]`` and ``["layer0.positions"]`` ``[10, units]``: each unit's highest firings and where
        in the flattened tokens they are.
    """
    return _analyze("memory", model, inputs, layers, top=top, source=source)


def sparsity(
    model: Model,
    inputs: Inputs,
    *,
    layers: Optional[Sequence[int]] = None,
    heads: Optional[Sequence[int]] = None,
    source: Optional[Inputs] = None,
) -> Findings:
    """Attention as a graph: how many edges matter, how far they reach, where they meet.

    Returns:
        ``arrays["layer0.edges"]`` ``[B, H, T]``: keys with 90% of a query's attention; ``["layer0.in_degree"]``.
    """
    return _analyze("sparsity", model, inputs, layers, heads, source=source)


def params(model: Model) -> Findings:
    """Parameters and FLOPs of each part, and what the mechanism adds (Xiao et al. 2024, table 2)."""
    return _analyze("params", model)


def theorems() -> Findings:
    """The theorems of the papers, computed in float64: errors of equalities, witnesses of inequalities."""
    return _analyze("theorems", None)


def overhead(run: Union[str, "os.PathLike[str]"], *, length: Optional[int] = None, seconds: float = 4.0) -> Findings:
    """Speed of training and decoding against plain attention on this machine (Xiao et al. 2024, table 6).

    It is the command's: a process of its own times it.

    Args:
        run: the folder of a run, whose model's sizes count; its weights do not.
        length: positions; None: the longest of the model.
        seconds: time for each measurement.

    Raises:
        ValueError: the run's model is no decoder, or ``length`` is more than it reads.
        RuntimeError: the run is not there or damaged.
    """
    if not isinstance(run, (str, os.PathLike)):
        raise TypeError(f"overhead: run is a {type(run).__name__}, expected the folder of a run.")
    command = ["analyze", os.fspath(run), "overhead", "--json", "--seconds", str(seconds)]
    if length is not None:
        command += ["--length", str(length)]
    done = _command.called(command)
    if done.returncode != 0:
        raise _command.error(done)
    with open(os.path.join(run, "analysis", "overhead.html"), encoding="utf-8") as file:
        return _findings(done.stdout, file.read(), {})
