"""Text as tokens and back."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, Optional, Union

import torch
from torch import Tensor

from headloom._functional import shown, whole_number


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())


class Tokenizer:
    """A tokenizer, as a run keeps it.

    Args:
        name: ``"bytes"`` (a token is a byte, 0 ends a text), or a file: a ``tokenizer.json`` of Hugging Face with
            byte-level BPE or WordPiece, or a SentencePiece ``*.model``.

    Raises:
        ValueError: another name.
        FileNotFoundError: there is no such file.
        RuntimeError: a file that cannot be used; the message names it.

    Example:
        >>> tokenizer = headloom.Tokenizer("bytes")
        >>> tokenizer.encode("hi")
        tensor([104, 105])
        >>> tokenizer.decode([104, 105])
        'hi'
    """

    def __init__(self, name: Union[str, "os.PathLike[str]"]):
        self.name = os.fspath(name)
        self._load()
        # A model is saved and unpickled with it, wherever the process is then.
        if self.name != "bytes":
            self.name = os.path.abspath(self.name)

    def _load(self) -> None:
        try:
            self._tokenizer: Any = torch.classes.headloom.Tokenizer(self.name)
        except RuntimeError as error:
            if not os.path.exists(self.name):
                raise FileNotFoundError(str(error)) from None
            raise
        #: Number of tokens.
        self.vocabulary: int = self._tokenizer.vocabulary()
        #: The token that ends every text.
        self.end_token: int = self._tokenizer.end_token()
        #: The token that a model expects before a text, where there is one.
        self.start_token: Optional[int] = self._tokenizer.start_token()

    def encode(self, text: Union[str, bytes], start: bool = False) -> Tensor:
        """The tokens of a text, ``[n]`` int64.

        Args:
            text: characters, or bytes of any kind.
            start: puts the token before it that a model expects there, where there is one.

        Raises:
            TypeError: ``text`` is neither.
            UnicodeEncodeError: ``text`` has half a surrogate pair, which UTF-8 cannot write.
        """
        if not isinstance(text, (str, bytes)):
            raise TypeError(f"text is {shown(text)}, expected text or bytes.")
        data = text.encode() if isinstance(text, str) else text
        # A text without bytes has no buffer.
        none = torch.empty(0, dtype=torch.uint8, device="cpu")
        characters = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else none
        tokens: Tensor = self._tokenizer.encode(characters)
        if start and self.start_token is not None:
            tokens = torch.cat([tokens.new_tensor([self.start_token]), tokens])
        return tokens

    def decode(self, tokens: Union[Tensor, Iterable[int]]) -> str:
        """The text of tokens ``[n]`` from its start on; what is no UTF-8 becomes U+FFFD. The end token and numbers that are no
        tokens have no text.

        Raises:
            ValueError: the tokens are a tensor of another shape.
            TypeError: they are no whole numbers.
        """
        if isinstance(tokens, Tensor) and tokens.dim() != 1:
            raise ValueError(f"tokens has shape {list(tokens.shape)}, expected [n].")
        numbers = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        if not (isinstance(tokens, Tensor) and tokens.dtype == torch.int64):
            numbers = [whole_number("a token", token, None, "a whole number") for token in numbers]
        return _bytes(self._tokenizer.decode(numbers)).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        """What a token adds in the middle of a text, perhaps a part of a character; nothing for special tokens.

        Raises:
            TypeError: ``token`` is no whole number.
        """
        return _bytes(self._tokenizer.piece(whole_number("token", token, None, "a whole number")))

    def __deepcopy__(self, memo: Dict[int, Any]) -> Tokenizer:
        return self  # nothing changes it, and its file may be gone

    def __getstate__(self) -> Dict[str, str]:
        return {"name": self.name}

    def __setstate__(self, state: Dict[str, str]) -> None:
        self.name = state["name"]
        self._load()

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r})"
