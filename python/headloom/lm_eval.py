"""Headloom's models in lm-evaluation-harness (``pip install lm_eval``).

From a shell, with all options of ``lm_eval``::

    python -m headloom.lm_eval --model headloom --model_args path=runs/text --tasks lambada_openai

In Python::

    import lm_eval
    import headloom.lm_eval
    results = lm_eval.simple_evaluate(headloom.lm_eval.HeadloomLM("runs/text"), tasks=["lambada_openai"])
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple, Union

from headloom import _scoring
from headloom._decoding import Sampling
from headloom._model import Model, load

try:
    from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped]
    from lm_eval.api.registry import register_model  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(f"headloom.lm_eval needs lm-evaluation-harness: pip install lm_eval ({error}).") from error

__all__ = ["HeadloomLM"]


@register_model("headloom")
class HeadloomLM(TemplateLM):  # type: ignore[misc]
    """A decoder with its tokenizer.

    Args:
        path: a run or a Hugging Face folder, as :func:`headloom.load` reads it, or a model.
        checkpoint: ``"best"``, ``"last"`` or a step.
        batch_size: sequences scored at once; ``"auto"`` is ``max_batch_size``.
        max_gen_toks: tokens written at most where a task does not say.
        max_batch_size: 8 where it is None.
        device: where the model runs, such as ``"cuda"``; None leaves it where it is.
    """

    def __init__(
        self,
        path: Union[str, Model],
        checkpoint: Union[str, int] = "best",
        batch_size: Union[str, int] = 8,
        max_gen_toks: int = 256,
        max_batch_size: Optional[int] = None,
        device: Optional[str] = None,
    ):
        super().__init__()
        self.model = path if isinstance(path, Model) else load(path, checkpoint)
        self.model.eval()
        if device is not None:
            self.model.to(device)
        if self.model.config["kind"] != "decoder" or self.model.tokenizer is None:
            raise ValueError(f"{path}: is no decoder with a tokenizer, which language-model evaluation needs.")
        self.tokenizer = self.model.tokenizer
        automatic = str(batch_size).startswith("auto")  # lm_eval also knows "auto:4", which tries anew four times
        self.batch_size = int(max_batch_size or 8) if automatic else int(batch_size)
        self.max_gen_toks = int(max_gen_toks)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.end_token

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context follows."""
        start = self.tokenizer.start_token
        return self.tokenizer.end_token if start is None else start

    @property
    def max_length(self) -> int:
        return _scoring.context_length(self.model)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: Optional[bool] = None, **_: Any) -> List[int]:
        tokens: List[int] = self.tokenizer.encode(string, start=add_special_tokens is not False).tolist()
        return tokens

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> List[Tuple[float, bool]]:
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        return _scoring.log_likelihoods(self.model, pairs, self.batch_size)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> List[float]:
        return [
            _scoring.rolling_log_likelihood(
                self.model, self.tok_encode(request.args[0], False), self.prefix_token_id, self.batch_size
            )
            for request in requests
        ]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> List[str]:
        written = []
        for request in requests:
            context, options = request.args
            until = options.get("until") or []
            most = int(options.get("max_gen_toks", self.max_gen_toks))
            tokens = self.model._prompt_tokens(context)
            length = self.model.config.get("max_length")
            if length is not None:
                # A context that leaves no room is read from its newer part on. Of a model that is shorter than what it may
                # write, half is read all the same: a text that outgrows it goes on from its newer half.
                tokens = tokens[-max(length - most, length // 2, 1) :]
            sampled = bool(options.get("do_sample", options.get("temperature", 0) > 0))
            sampling = Sampling(
                temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
                top_k=int(options.get("top_k", 0)),
                top_p=float(options.get("top_p", 1.0)),
                min_p=float(options.get("min_p", 0.0)),
                repetition_penalty=float(options.get("repetition_penalty", 1.0)),
            )
            stop = [until] if isinstance(until, str) else [text for text in until if text]
            for (sample,) in self.model._write([tokens], most, sampling, stop, None, 1, True, ("full", ""), None):
                pass
            written.append(sample.text())
        return written


def main() -> None:
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-untyped]

    cli_evaluate()


if __name__ == "__main__":
    main()
