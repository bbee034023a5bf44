"""Convolutions of attention maps over queries and keys (Golovneva et al. 2025), by PyTorch's ``conv2d``."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Chunk(NamedTuple):
    """Queries from `first` up to `last`, and the keys that some of them may see. There may be more such chunks, each `step`
    queries and keys after the one before; of those, some queries and keys may lie beyond the sequence."""

    first: int
    last: int
    left: int
    right: int
    chunks: int = 1
    step: int = 0

    @property
    def queries(self) -> slice:
        """Those of all these chunks; the slice may end beyond the sequence."""
        return slice(self.first, self.last + (self.chunks - 1) * self.step)

    @property
    def rows(self) -> int:
        return self.last - self.first

    @property
    def keys(self) -> int:
        return self.right - self.left


class Convolution:
    """One convolution of a call, and the gradient of its kernel, as the chunks' parts are added.

    With x 0 where it does not count, h over the c_h maps of the group of h', and `before` 0 for padding "right", c_k - 1
    for "left" and half of it for "both"::

        y[h',t,s] = sum_h,i,j kernel[h',h,i,j] x[h, t - (c_q - 1) + i, s - before + j]

    The row of an earlier query does not count where that query is of another document and, with `exact`, beyond the key of
    query t. The terms i then differ in what they hide, and each is a convolution of its own.
    """

    def __init__(self, kernel: Tensor, padding: str, exact: bool, documents: Optional[Tensor], past: int) -> None:
        self.kernel = kernel if kernel.dim() == 4 else kernel.unsqueeze(1)
        heads, of_group, queries, keys = self.kernel.shape
        self.groups = heads // of_group
        self.halo = queries - 1
        self.before = {"both": (keys - 1) // 2, "left": keys - 1, "right": 0}[padding]
        self.after = keys - 1 - self.before
        self.exact = exact
        self.documents = documents
        self.past = past
        self.grad = torch.zeros_like(self.kernel, dtype=torch.float32)

    def terms(self, to: Chunk) -> Iterator[Tuple[slice, Optional[Tensor]]]:
        """Taps over queries that are taken together, and where their rows do not count for the queries of `to`."""
        taps = self.halo + 1
        if not self.exact and self.documents is None:
            yield slice(0, taps), None
            return
        place = self.kernel.device
        positions = torch.arange(to.first + self.past, to.last + self.past, device=place)
        future: Optional[Tensor] = None
        if self.exact:
            future = torch.arange(to.left, to.right, device=place) > positions[:, None]
        for i in range(taps):
            hidden = future
            if self.documents is not None:
                of_query = self.documents[:, positions.clamp(min=0)]
                of_row = self.documents[:, (positions - (self.halo - i)).clamp(min=0)]
                others = of_query.ne(of_row)[:, None, :, None]
                hidden = others if hidden is None else hidden | others
            yield slice(i, i + 1), hidden

    def input(self, x: Tensor, of: Chunk, to: Chunk, taps: slice, hidden: Optional[Tensor]) -> Tensor:
        """What `taps` read of x, maps of `of`, for the queries of `to`: [B, H, rows, keys], padded."""
        missing = self.halo - (to.first - of.first)  # rows before the first query
        rows = F.pad(x[:, :, : of.rows, : of.keys], (0, 0, missing, 0))
        part = rows[:, :, taps.start : to.rows + taps.stop - 1]
        if hidden is not None:
            part = part.masked_fill(hidden, 0)
        return F.pad(part, (self.before, self.after))

    def apply(self, x: Tensor, of: Chunk, to: Chunk) -> Tensor:
        """y for the queries of `to` from x, maps of `of`, which reaches back by the halo: [B, H, rows, keys]."""
        y: Optional[Tensor] = None
        for taps, hidden in self.terms(to):
            term = F.conv2d(self.input(x, of, to, taps, hidden), self.kernel[:, :, taps], groups=self.groups)
            y = term if y is None else y + term
        assert y is not None
        return y

    def backward(self, x: Tensor, dy: Tensor, of: Chunk, to: Chunk) -> Tensor:
        """dx for the queries of `of` from dy, maps of `to`; adds to the kernel's gradient."""
        missing = self.halo - (to.first - of.first)
        dx = x.new_zeros((*x.shape[:2], missing + of.rows, of.keys))
        dy = dy[:, :, : to.rows, : to.keys]
        for taps, hidden in self.terms(to):
            part, dkernel, _ = torch.ops.aten.convolution_backward(
                dy,
                self.input(x, of, to, taps, hidden),
                self.kernel[:, :, taps],
                None,
                [1, 1],
                [0, 0],
                [1, 1],
                False,
                [0, 0],
                self.groups,
                [True, True, False],
            )
            part = part[..., self.before : self.before + of.keys]
            if hidden is not None:
                part = part.masked_fill(hidden, 0)
            dx[:, :, taps.start : to.rows + taps.stop - 1] += part
            self.grad[:, :, taps] += dkernel
        return dx[:, :, missing:]
