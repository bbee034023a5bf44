"""Log-likelihoods of token sequences, in batches of unequal lengths."""

from __future__ import annotations

from typing import List, Sequence, Tuple

import torch

from headloom._model import Model

Pair = Tuple[Sequence[int], Sequence[int]]


def context_length(model: Model) -> int:
    """The longest sequence that the model is built for."""
    return int(model.config.get("max_length") or 256)


@torch.no_grad()
def log_likelihoods(model: Model, pairs: Sequence[Pair], batch_size: int = 8) -> List[Tuple[float, bool]]:
    """For each (context, continuation) of tokens: the log-probability of the continuation, in nats, and whether each of its tokens
    is the likeliest.

    Of a sequence that is longer than the model reads, the oldest tokens are left out.

    Raises:
        ValueError: a context is empty, or a continuation is longer than the model reads.
    """
    longest = context_length(model)
    device = next(model.parameters()).device
    cut: List[Tuple[List[int], int]] = []  # all tokens, how many are scored
    for context, continuation in pairs:
        if not context:
            raise ValueError("a context has no tokens, expected at least one.")
        if len(continuation) > longest:
            raise ValueError(f"a continuation has {len(continuation)} tokens, expected at most the model's {longest}.")
        cut.append(([*context, *continuation][-(longest + 1) :], len(continuation)))
    found = [(0.0, True)] * len(cut)
    # Longest first: what does not fit into memory fails at once, and little is padded.
    order = sorted((i for i, (_, scored) in enumerate(cut) if scored), key=lambda i: -len(cut[i][0]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        length = len(cut[chosen[0]][0]) - 1
        # Padding comes last, where no token of a causal model sees it.
        inputs = torch.zeros(len(chosen), length, dtype=torch.int64, device="cpu")
        for row, i in enumerate(chosen):
            tokens = cut[i][0]
            inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1], device="cpu")
        logits = model(inputs.to(device)).cpu()
        for row, i in enumerate(chosen):
            tokens, scored = cut[i]
            end = len(tokens) - 1
            scores = torch.log_softmax(logits[row, end - scored : end].float(), -1)
            targets = torch.tensor(tokens[-scored:], device="cpu")
            likeliest = bool((scores.argmax(-1) == targets).all())
            found[i] = (float(scores.gather(-1, targets[:, None]).sum()), likeliest)
    return found


def rolling_log_likelihood(model: Model, tokens: Sequence[int], start: int, batch_size: int = 8) -> float:
    """The log-probability of a whole text, in nats, whose first token follows ``start``.

    A text that is longer than the model reads is cut into windows of that length: each token is scored once, given the tokens
    before it in its window, and the last window reaches back to be full.
    """
    longest = context_length(model)
    pairs: List[Pair] = []
    whole = [start, *tokens]
    for first in range(0, len(tokens), longest):
        scored = tokens[first : first + longest]
        end = first + len(scored) + 1
        context = whole[max(0, end - longest - 1) : end - len(scored)]
        pairs.append((context, scored))
    return sum(value for value, _ in log_likelihoods(model, pairs, batch_size))
