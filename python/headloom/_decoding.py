"""What decoding keeps, how it draws tokens, and the text that comes of it."""

from __future__ import annotations

import codecs
import copy
import numbers
from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from headloom._functional import shown, whole_number


class State:
    """What decoding keeps of the tokens that a batch of sequences has seen; :meth:`Model.extend` fills it.

    ``copy.copy``, ``copy.deepcopy`` and pickling make a state of its own, with memory of its own.

    Args:
        cache: what attention forgets: ``"full"`` nothing, ``"window:N"``, ``"sinks:N"`` and ``"tova:N"`` keep N positions.
        cache_dtype: ``"int8"`` keeps keys and values as int8, with a scale for each position and head; None keeps them as
            they were computed.
    """

    def __init__(self, cache: str = "full", cache_dtype: Optional[str] = None, *, _state: Any = None):
        self._state: Any = torch.classes.headloom.State(*cache_policy(cache, cache_dtype)) if _state is None else _state

    def __copy__(self) -> "State":
        return copy.deepcopy(self)

    @property
    def position(self) -> int:
        """Tokens seen, of the sequence that has seen most."""
        return int(self._state.position())

    @property
    def bytes(self) -> int:
        """Of the tensors it holds."""
        return int(self._state.bytes())

    def select(self, rows: Union[Tensor, Sequence[int]]) -> "State":
        """The state of the sequences that ``rows`` names, one as often as it is named.

        Args:
            rows: ``[n]``, numbers of sequences from 0 on.

        Raises:
            ValueError: a number is of no sequence that the state has seen, or they are no whole numbers ``[n]``, or there
                is none.
            TypeError: ``rows`` has something else than numbers.
        """
        try:
            chosen = rows if isinstance(rows, Tensor) else torch.as_tensor(rows, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"rows is {shown(rows)}, expected the numbers [n] of sequences.") from None
        if not isinstance(rows, Tensor) and chosen.numel() == 0:
            chosen = chosen.long()  # an empty list has no type
        if chosen.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8) or chosen.dim() != 1:
            raise ValueError(
                f"rows has shape {list(chosen.shape)} and type {chosen.dtype}, expected the numbers [n] of sequences."
            )
        return State(_state=self._state.select(chosen.to(torch.int64)))


def cache_policy(cache: Any, cache_dtype: Any) -> Tuple[str, str]:
    """Both as C++ takes them."""
    if not isinstance(cache, str):
        raise TypeError(f"cache is {shown(cache)}, expected a text such as \"full\" or \"window:512\".")
    if not (cache_dtype is None or isinstance(cache_dtype, str)):
        raise TypeError(f"cache_dtype is {shown(cache_dtype)}, expected None or \"int8\".")
    return cache, cache_dtype or ""


@dataclass(frozen=True)
class Sampling:
    """The options of :meth:`Model.generate` that choose a token."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        def expect(name: str, low: float, high: float, expected: str) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name} is {shown(value)}, expected a number, {expected}.")
            if not low <= float(value) <= high:
                raise ValueError(f"{name} is {value}, expected {expected}.")

        largest, smallest = 1.7976931348623157e308, 5e-324
        expect("temperature", 0, largest, "0 (always the likeliest token) or more")
        whole_number("top_k", self.top_k, 0, "0 (all tokens) or more, a whole number")
        expect("top_p", 0, 1, "0 to 1")
        expect("min_p", 0, 1, "0 to 1")
        expect("repetition_penalty", smallest, largest, "more than 0")


class Sample:
    """One text as it is written: its new tokens and, where ``pieces`` are kept, their bytes up to a stop string."""

    def __init__(self, stops: Sequence[bytes]):
        self.tokens: List[int] = []
        self.ended = False
        self._stops = stops
        self._text = b""
        self._shown = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes) -> None:
        before = len(self._text)
        self._text += piece
        places = [self._text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
        places = [place for place in places if place >= 0]
        if places:
            self._text = self._text[: min(places)]
            self.ended = True

    def show(self, last: bool) -> str:
        """What was not shown before: unless it is the last time, nothing that may turn out to be a stop string."""
        safe = len(self._text)
        for stop in [] if last or self.ended else self._stops:
            beginnings = (n for n in range(min(len(stop) - 1, safe), 0, -1) if self._text.endswith(stop[:n]))
            safe = min(safe, len(self._text) - next(beginnings, 0))
        safe = max(safe, self._shown)
        new, self._shown = self._text[self._shown : safe], safe
        return self._decoder.decode(new, last)

    def text(self) -> str:
        return self._text.decode(errors="replace")
