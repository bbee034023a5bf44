"""Whole models as torch modules."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    Iterable,
    Iterator,
    List,
    Literal,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
    overload,
)

import torch
from torch import Tensor

from headloom._decoding import Sample, Sampling, State, cache_policy
from headloom._functional import FunctionalModule, Part, expect_tensors, new_tensors, shown, toml_lines, whole_number
from headloom._tokenizer import Tokenizer

Path = Union[str, "os.PathLike[str]"]
Prompt = Union[str, Tensor]
Stop = Union[str, int, Sequence[Union[str, int]]]

_MOST_SAMPLES = 65536  # of a prompt; each is a Python object


if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Rest(TypedDict, total=False):
        """The arguments of :meth:`Model.forward` that say more of its inputs."""

        lengths: Optional[Tensor]
        documents: Optional[Tensor]
        segments: Optional[Tensor]
        source: Optional[Tensor]
        source_lengths: Optional[Tensor]

    class _Options(TypedDict, total=False):
        """The options of :meth:`Model.generate` on which the type of its result does not depend."""

        temperature: float
        top_k: int
        top_p: float
        min_p: float
        repetition_penalty: float
        stop: Stop
        seed: Optional[int]
        cache: str
        cache_dtype: Optional[str]
        source: Union[Prompt, Sequence[Prompt], None]


class Model(FunctionalModule):
    """A model that :func:`load` has read or :func:`model` has made: its parameters are Python's, C++ runs it.

    A ``torch.nn.Module`` like any other: its parameters are named as in checkpoints, and optimisers, ``state_dict``,
    ``deepcopy``, pickling, ``DistributedDataParallel``, ``torch.compile`` and autocast treat it so.

    Attributes:
        config: the complete ``[model]`` table, as a run's ``config.toml`` has it.
        tokenizer: the :class:`Tokenizer` of its text, or None. It may be set.
    """

    def __init__(
        self, spec: str, config: Dict[str, Any], names: Sequence[str], values: Sequence[Tensor], kinds: Sequence[str],
        tokenizer: Optional[Tokenizer] = None,
    ):
        super().__init__(spec, names, values, kinds)
        self.config = config
        self.tokenizer = tokenizer
        #: Of the checkpoint it was loaded from.
        self.step: int = 0

    @overload
    def forward(self, inputs: Tensor, *, auxiliary: Literal[False] = False, **rest: Unpack[_Rest]) -> Tensor: ...
    @overload
    def forward(self, inputs: Tensor, *, auxiliary: Literal[True], **rest: Unpack[_Rest]) -> Tuple[Tensor, Tensor]: ...
    @overload
    def forward(self, inputs: Tensor, *, auxiliary: bool, **rest: Unpack[_Rest]) -> Union[Tensor, Tuple[Tensor, Tensor]]: ...
    @overload
    def forward(self, inputs: Tensor, *, maps: Sequence[str], **rest: Unpack[_Rest]) -> Tuple[Tensor, Dict[str, Tensor]]: ...

    def forward(
        self,
        inputs: Tensor,
        *,
        lengths: Optional[Tensor] = None,
        documents: Optional[Tensor] = None,
        segments: Optional[Tensor] = None,
        source: Optional[Tensor] = None,
        source_lengths: Optional[Tensor] = None,
        auxiliary: bool = False,
        maps: Optional[Sequence[str]] = None,
    ) -> Union[Tensor, Tuple[Tensor, Tensor], Tuple[Tensor, Dict[str, Tensor]]]:
        """Logits.

        Args:
            inputs: tokens ``[B, T]``, integers of the vocabulary with T at least 1; of a vision transformer images
                ``[B, channels, height, width]``.
            lengths: ``[B]`` int64, how many tokens of each sequence are real: 0 to T.
            documents: ``[B, T]`` int64 ids, one for each document; attention stays inside a document.
            segments: ``[B, T]`` int64, which of its segment embeddings each token has; all the first where absent.
            source: ``[B, S]``, what an encoder-decoder reads; ``inputs`` is then what it writes.
            source_lengths: ``[B]`` int64, as ``lengths``.
            auxiliary: also return what the layers want added to the loss, a scalar (mixtures of experts: the
                balance of their load).
            maps: also return what layers compute on the way, since forward hooks see no inner module: names such as
                ``"weights"`` or ``"input"``, of every layer, or ``"layer3.weights"`` of one (docs/analyses.md lists
                them). Gradients flow through them.

        Returns:
            ``[B, T, vocabulary]``; ``[B, classes]`` of a model that labels its input, ``[B, T, classes]`` of one that
            tags it, ``[B, T, 2]`` (begin and end) of one that finds a span; with ``auxiliary`` a pair; with ``maps`` a
            pair, whose second part has each tensor under its full name, ``"layer3.weights"``.

        Raises:
            ValueError: an input does not fit the model, or a parameter that was replaced does not fit its place; the
                message names it.
            TypeError: an input is no tensor.
        """
        given = self._inputs(inputs, lengths, documents, segments, source, source_lengths)
        if maps is not None:
            if auxiliary:
                raise ValueError("model: maps and auxiliary are of two calls, expected one of them.")
            return self._record(given, maps)
        found = self._run(given, auxiliary=auxiliary)
        if auxiliary:
            return found[0], found[1]
        logits: Tensor = found[0]
        return logits

    if TYPE_CHECKING:
        __call__ = forward

    def loss(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        lengths: Optional[Tensor] = None,
        documents: Optional[Tensor] = None,
        segments: Optional[Tensor] = None,
        source: Optional[Tensor] = None,
        source_lengths: Optional[Tensor] = None,
    ) -> Tensor:
        """The mean cross-entropy of ``targets``; in training mode with what the layers want added.

        As ``torch.nn.functional.cross_entropy`` of the logits, but the scores of a vocabulary are never all in memory
        (:func:`headloom.ops.linear_cross_entropy`).

        Args:
            inputs: as in :meth:`forward`, and so the other arguments.
            targets: ``[B, T]`` int64, the token after each position (of an encoder, the token or tag there), ``[B]`` of a
                model that labels its input; -100 at positions that count for nothing.

        Returns:
            A scalar, float32 or wider.

        Raises:
            ValueError: an input or ``targets`` does not fit the model, or it finds spans.
            IndexError: a target is no class.
            TypeError: an input is no tensor.

        Example:
            >>> loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            >>> loss.backward()
        """
        expect_tensors(self._what, "targets", targets=targets)
        given = self._inputs(inputs, lengths, documents, segments, source, source_lengths)
        loss: Tensor = self._run(given, targets=targets)[0]
        return loss

    def _inputs(
        self,
        inputs: Tensor,
        lengths: Optional[Tensor],
        documents: Optional[Tensor],
        segments: Optional[Tensor],
        source: Optional[Tensor],
        source_lengths: Optional[Tensor],
    ) -> Tuple[Optional[Tensor], ...]:
        """The arguments as the operators ``model`` and ``record`` take them: tokens first, images last."""
        plain = lengths is None and documents is None and segments is None and source is None and source_lengths is None
        if not (plain and type(inputs) is Tensor):
            expect_tensors(
                self._what,
                "inputs",
                inputs=inputs,
                lengths=lengths,
                documents=documents,
                segments=segments,
                source=source,
                source_lengths=source_lengths,
            )
        images = self.config["kind"] == "vit"
        rest = (lengths, documents, segments, source, source_lengths)
        return (None, *rest, inputs) if images else (inputs, *rest, None)

    def _run(
        self, given: Tuple[Optional[Tensor], ...], auxiliary: bool = False, targets: Optional[Tensor] = None
    ) -> Tuple[Tensor, ...]:
        """The logits and what ``auxiliary`` asks for, or the loss of ``targets``."""
        found: Tuple[Tensor, ...] = torch.ops.headloom.model(
            self.spec, self._tensors(), self.training, *given, auxiliary, targets
        )
        self._count(found[2 if auxiliary else 1 :])
        return found

    def _record(self, given: Tuple[Optional[Tensor], ...], maps: Sequence[str]) -> Tuple[Tensor, Dict[str, Tensor]]:
        """The logits, and what is wanted of the inside."""
        wanted = list(maps) if isinstance(maps, Iterable) and not isinstance(maps, str) else [None]
        if not all(isinstance(name, str) for name in wanted):
            raise TypeError(f'maps is {shown(maps)}, expected a list of names such as ["weights"].')
        output, names, values, load = torch.ops.headloom.record(
            self.spec, self._tensors(), self.training, wanted, *given
        )
        self._count(load)
        return output, dict(zip(names, values))

    def _move(self, load: List[Tensor]) -> None:
        torch.ops.headloom.balance_model(self.spec, self._tensors(), load)

    def _redraw(self, step: int, seed: int) -> None:
        torch.ops.headloom.redraw_model(self.spec, self._tensors(), step, seed)

    def extra_repr(self) -> str:
        parameters = sum(p.numel() for p in self.parameters())
        shape = f"{self.config['kind']}, {parameters} parameters, width {self.config['width']}, depth {self.config['depth']}"
        return ", ".join(filter(None, [shape, Part.extra_repr(self)]))

    # --- Decoding ---------------------------------------------------------------------------

    def extend(
        self,
        tokens: Tensor,
        state: State,
        last: bool = False,
        *,
        source: Optional[Tensor] = None,
        source_lengths: Optional[Tensor] = None,
    ) -> Tensor:
        """Reads the next tokens of sequences whose earlier ones ``state`` has seen; it has then seen these too.

        Equal to those rows of ``model(whole)`` for any cutting of the sequences into pieces. Without gradients.

        Args:
            tokens: ``[B, n]``.
            state: empty (``headloom.State()``) before the first.
            last: only the logits of the last position. The last layer then computes little for the others.
            source: ``[B, S]``, with the first tokens that an encoder-decoder writes: what it reads. It is encoded once,
                and the state keeps what the later ones need of it.
            source_lengths: ``[B]`` int64, how many tokens of each source are real.

        Returns:
            ``[B, n, vocabulary]``, or ``[B, 1, vocabulary]``.

        Raises:
            ValueError: the tokens are outside the vocabulary or not of the sequences that the state has seen, the state
                is another model's, the model does not write, or a source is missing or too much.
            TypeError: ``tokens`` is no tensor or ``state`` no :class:`State`, or the model was in another type, or under
                another autocast, when the state began.

            After these errors the state is as it was. After any other it may be refused: make a new one.

        Example:
            >>> state = headloom.State()
            >>> logits = model.extend(prompt, state, last=True)
            >>> for _ in range(100):
            ...     logits = model.extend(logits.argmax(-1), state)
        """
        if not isinstance(state, State):
            raise TypeError(f"model: state must be a headloom.State; it is {shown(state)}.")
        if not (type(tokens) is Tensor and source is None and source_lengths is None):
            expect_tensors(self._what, "tokens", tokens=tokens, source=source, source_lengths=source_lengths)
        logits: Tensor = torch.ops.headloom.extend(
            self.spec, self._tensors(), state._state, tokens, last, source, source_lengths
        )
        return logits

    def encode(self, text: str) -> Tensor:
        """The tokens ``[n]`` int64 of a text as the model reads it from its start, by its tokenizer.

        Raises:
            ValueError: the model has no tokenizer.
            TypeError: ``text`` is no text.
        """
        return self._text_tokenizer().encode(text, start=True)

    def decode(self, tokens: Union[Tensor, Sequence[int]]) -> str:
        """The text of tokens ``[n]``, by the model's tokenizer. Numbers that are none of its tokens have no text.

        Raises:
            ValueError: the model has no tokenizer, or the tokens are not ``[n]``.
        """
        return self._text_tokenizer().decode(tokens)

    def _text_tokenizer(self) -> Tokenizer:
        if self.config["kind"] == "vit":
            raise ValueError('the model is of kind "vit", which reads images and no text.')
        if self.tokenizer is None:
            vocabulary = self.config.get("vocabulary")
            raise ValueError(
                "the model has no tokenizer: set model.tokenizer to a headloom.Tokenizer"
                + (f" of its {vocabulary} tokens, or give it tokens." if vocabulary else ".")
            )
        return self.tokenizer

    def _prompt_tokens(self, prompt: Prompt) -> Tensor:
        if not isinstance(prompt, (str, Tensor)):
            raise TypeError(f"a prompt is {shown(prompt)}, expected text or a tensor of tokens.")
        if isinstance(prompt, Tensor):
            if prompt.dim() != 1 or prompt.numel() == 0:
                raise ValueError(f"a prompt has shape {list(prompt.shape)}, expected at least one token [n].")
            return prompt
        tokens = self.encode(prompt)
        # A model starts a text after the end of another.
        return tokens if tokens.numel() > 0 else torch.tensor([self._text_tokenizer().end_token], device="cpu")

    def _source_tokens(self, source: Any, prompts: int) -> List[Tensor]:
        """One ``[S]`` for each prompt; none for None."""
        if source is None:
            return []
        if isinstance(source, Tensor):
            given: List[Any] = list(source) if source.dim() == 2 else [source]
        else:
            given = list(source) if isinstance(source, (list, tuple)) else [source]
        for one in given:
            if not isinstance(one, (str, Tensor)):
                raise TypeError(f"a source is {shown(one)}, expected text or a tensor of tokens.")
        tokens = [self.encode(one) if isinstance(one, str) else one for one in given]
        for one in tokens:
            if one.dim() != 1 or one.numel() == 0:
                raise ValueError(f"a source has shape {list(one.shape)}, expected at least one token [S].")
            longest = self.config.get("max_source_length")
            if longest is not None and one.numel() > longest:
                raise ValueError(f"a source has {one.numel()} tokens, expected at most max_source_length = {longest}.")
        if len(tokens) != prompts:
            raise ValueError(f"there are {len(tokens)} sources for {prompts} prompts, expected one for each.")
        return tokens

    def _stops(self, stop: Stop) -> Tuple[List[bytes], List[int]]:
        """Texts and tokens that end a text."""
        given = list(stop) if isinstance(stop, Iterable) and not isinstance(stop, (str, bytes)) else [stop]
        texts = [s.encode() for s in given if isinstance(s, str)]
        tokens = [whole_number("stop", s, None, "texts and tokens") for s in given if not isinstance(s, str)]
        vocabulary = self.config.get("vocabulary", 2**63)  # a vision transformer, which is refused later, has none
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise ValueError(f"stop has the token {token}, expected one of the vocabulary's 0 to {vocabulary - 1}.")
        if b"" in texts:
            raise ValueError("stop has an empty text, which would end everything.")
        if texts:
            self._text_tokenizer()
        if self.tokenizer is not None:
            tokens.append(self.tokenizer.end_token)
        return texts, tokens

    def _write(
        self,
        prompts: Sequence[Prompt],
        most: int,
        sampling: Sampling,
        stop: Stop,
        seed: Optional[int],
        samples: int,
        text: bool,
        cache: Tuple[str, str],
        source: Any,
    ) -> Iterator[List[Sample]]:
        """The samples of each prompt before the first token and after each; ``text`` asks for their text."""
        samples = whole_number("num_samples", samples, 1, f"a whole number from 1 to {_MOST_SAMPLES}")
        if samples > _MOST_SAMPLES:
            raise ValueError(f"num_samples is {samples}, expected a whole number from 1 to {_MOST_SAMPLES}.")
        most = whole_number("max_new_tokens", most, 0, "a whole number, at least 0")
        if seed is not None:
            seed = whole_number("seed", seed, None, "a whole number of 64 bits")
        stop_texts, stop_tokens = self._stops(stop)
        tokens = [self._prompt_tokens(prompt) for prompt in prompts]
        sources = self._source_tokens(source, len(tokens))
        piece = self._text_tokenizer().piece if stop_texts or text else None
        if seed is None:
            seed = 0 if sampling.temperature == 0 else int(torch.randint(2**62, (), device="cpu"))
        written = [Sample(stop_texts) for _ in range(len(tokens) * samples)]
        yield written
        if most == 0 or not written:
            return
        generation = torch.classes.headloom.Generation(
            self.spec,
            self._tensors(),
            tokens,
            sources,
            float(sampling.temperature),
            int(sampling.top_k),
            float(sampling.top_p),
            float(sampling.min_p),
            float(sampling.repetition_penalty),
            seed,
            samples,
            *cache,
            most,
        )
        limit, longest = generation.most(), max(map(len, tokens))
        for step in range(most):
            if longest + step == max(limit, longest - 1) + 1:
                warnings.warn(
                    f"the text has outgrown the {limit} positions that the model was built for (max_length): it goes on "
                    f"from its newest {generation.newest()} tokens alone.",
                    stacklevel=4,
                )
            for sample, token in zip(written, generation.next().tolist()):
                if sample.ended:
                    continue
                sample.tokens.append(token)
                if token in stop_tokens:
                    sample.ended = True
                elif piece is not None:
                    sample.add(piece(token))
            yield written
            if all(sample.ended for sample in written):
                return

    @overload
    def generate(
        self, prompt: Tensor, max_new_tokens: int = 256, *, num_samples: int = 1, **options: Unpack[_Options]
    ) -> Tensor: ...
    @overload
    def generate(
        self, prompt: str, max_new_tokens: int = 256, *, num_samples: Literal[1] = 1, **options: Unpack[_Options]
    ) -> str: ...
    @overload
    def generate(
        self, prompt: Union[List[str], Tuple[str, ...]], max_new_tokens: int = 256, *, num_samples: int = 1, **options: Unpack[_Options]
    ) -> List[str]: ...
    @overload
    def generate(
        self, prompt: str, max_new_tokens: int = 256, *, num_samples: int, **options: Unpack[_Options]
    ) -> Union[str, List[str]]: ...

    def generate(
        self,
        prompt: Union[Prompt, Sequence[str]],
        max_new_tokens: int = 256,
        *,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Stop = (),
        seed: Optional[int] = None,
        num_samples: int = 1,
        cache: str = "full",
        cache_dtype: Optional[str] = None,
        source: Union[Prompt, Sequence[Prompt], None] = None,
    ) -> Union[str, List[str], Tensor]:
        """Goes on with a prompt, a token at a time, from a decoding state.

        A text ends before a stop string, at a stop token, at the tokenizer's end token, or after ``max_new_tokens``. One
        that outgrows the model's ``max_length`` goes on from its newer half, with a warning; a model without one has no
        such limit, unless a mixer has weights for so many positions only.

        Args:
            prompt: a text or a list of them, or tokens ``[T]`` or ``[B, T]``.
            temperature: 0 always takes the likeliest token.
            top_k: sample among the k likeliest; 0: all.
            top_p: sample among the likeliest that have this probability together.
            min_p: keep tokens at least this likely beside the likeliest.
            repetition_penalty: above 1, what was there already is less likely to come again.
            stop: texts or tokens that end it.
            seed: sample i of a prompt draws with ``seed + i``, whatever stands beside it; None takes a seed from torch's
                default generator (``torch.manual_seed``).
            num_samples: texts from each prompt, which is read once.
            cache: what attention forgets, as in :class:`State`.
            cache_dtype: how keys and values are kept, as in :class:`State`.
            source: what an encoder-decoder reads, one for each prompt, which is then the beginning of what it writes: a text
                or a list of them, or tokens ``[S]``, ``[B, S]`` or a list of ``[S]``, of any lengths. (An encoder with
                ``fnet``, which has no mask, reads the padding of the shorter ones: give it sources of one length.)

        Returns:
            The prompt and what follows. For text a string; for several samples or prompts a list, the samples of a
            prompt side by side. For tokens ``[T + n]``, or ``[B num_samples, T + n]``, int64, where a text that ended
            before others is filled up with its last token.

        Raises:
            ValueError: an option or the prompt does not fit, or the model has no tokenizer for a text; the message names
                it.
            TypeError: an option or the prompt is of another type.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        policy = cache_policy(cache, cache_dtype)

        def written(prompts: Sequence[Prompt], text: bool) -> List[Sample]:
            samples: List[Sample] = []
            for samples in self._write(prompts, max_new_tokens, sampling, stop, seed, num_samples, text, policy, source):
                pass
            return samples

        if isinstance(prompt, Tensor):
            rows = prompt if prompt.dim() == 2 else prompt.unsqueeze(0)
            new = [sample.tokens for sample in written(list(rows), False)]
            longest = max(map(len, new), default=0)
            filled = torch.tensor([t + t[-1:] * (longest - len(t)) for t in new], dtype=torch.int64, device=rows.device)
            old = rows.to(torch.int64).repeat_interleave(num_samples, 0)
            whole = torch.cat([old, filled.view(len(new), longest)], 1)
            return whole[0] if prompt.dim() == 1 and num_samples == 1 else whole
        prompts: List[Any] = list(prompt) if isinstance(prompt, (list, tuple)) else [prompt]
        for one in prompts:
            if isinstance(one, Tensor):
                raise TypeError("a list of prompts has a tensor, expected texts; tokens of several are one tensor [B, T].")
        texts = [prompts[i // num_samples] + sample.text() for i, sample in enumerate(written(prompts, True))]
        return texts[0] if isinstance(prompt, str) and num_samples == 1 else texts

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 256,
        *,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Stop = (),
        seed: Optional[int] = None,
        cache: str = "full",
        cache_dtype: Optional[str] = None,
        source: Optional[Prompt] = None,
    ) -> Iterator[str]:
        """What :meth:`generate` writes after the prompt, piece by piece as it comes.

        Arguments and errors are those of :meth:`generate`, of one prompt and one sample; errors come with the first
        piece.

        Example:
            >>> for piece in model.stream("ROMEO:"):
            ...     print(piece, end="", flush=True)
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        policy = cache_policy(cache, cache_dtype)
        sample = None
        for (sample,) in self._write([prompt], max_new_tokens, sampling, stop, seed, 1, True, policy, source):
            piece = sample.show(last=False)
            if piece:
                yield piece
        rest = "" if sample is None else sample.show(last=True)
        if rest:
            yield rest

    def save(self, folder: Path) -> None:
        """Writes the model as a run that :func:`load` and the command line read (``headloom generate FOLDER``).

        Parameters are stored as float32, with the tokenizer beside them.

        Raises:
            ValueError: the folder holds a run or another model already.
        """
        name = "" if self.tokenizer is None or self.tokenizer.name == "bytes" else self.tokenizer.name
        torch.ops.headloom.save(os.fspath(folder), self.spec, self._tensors(), name)


def load(folder: Path, checkpoint: Union[str, int] = "best") -> Model:
    """The model of a run, or of a Hugging Face folder, in evaluation mode.

    Parameters are float32, or float64 where the run was trained in that. A run with ``train.dtype = "bfloat16"`` was trained
    under autocast, and ``headloom generate`` and ``serve`` run it so; calls under ``torch.autocast("cpu", torch.bfloat16)``
    do the same. ``model.to(torch.bfloat16)`` rounds the parameters themselves, which takes half the memory.

    Args:
        folder: a run (what ``headloom train`` and ``import`` write, or :meth:`Model.save`), or a folder with
            ``config.json``, weights (safetensors or PyTorch's files) and perhaps a tokenizer, of an architecture that
            ``headloom import`` knows.
        checkpoint: of a run: ``"best"`` (lowest held-out loss), ``"last"``, or a step.

    Raises:
        FileNotFoundError: there is no such folder.
        TypeError: ``folder`` is no path.
        ValueError: the folder's model is of a kind that Headloom does not have; the message names the key.
        RuntimeError: a file is missing or damaged; the message names it.

    Example:
        >>> model = headloom.load("runs/text")
        >>> logits = model(model.encode("To be, or not").unsqueeze(0))
        >>> print(model.generate("ROMEO:", 100, temperature=0.7))
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"folder is {shown(folder)}, expected a path.")
    path = os.fspath(folder)
    if not os.path.isdir(path):
        raise FileNotFoundError(f"{path}: is not a folder, expected a run or a Hugging Face folder.")
    if not any(os.path.exists(os.path.join(path, name)) for name in ("config.toml", "config.json")):
        raise RuntimeError(f"{path}: has neither config.toml, as a run has, nor config.json, as a Hugging Face folder has.")
    spec, config, names, values, kinds, tokenizer, step, note = torch.ops.headloom.load(path, str(checkpoint))
    if note:
        warnings.warn(note, stacklevel=2)
    model = Model(spec, json.loads(config), names, values, kinds, Tokenizer(tokenizer) if tokenizer else None)
    model.step = step
    return model.eval()


def model(
    config: Union[str, Mapping[str, Any], None] = None,
    *,
    tokenizer: Union[Path, Tokenizer, None] = None,
    **options: Any,
) -> Model:
    """A new model, to be trained.

    Weights are drawn from torch's default generator (``torch.manual_seed``). The parameters have the default type
    (``torch.set_default_dtype``) and are on the default device: under ``torch.device("meta")`` they have no values, until
    ``to_empty`` and ``load_state_dict`` give them some.

    Args:
        config: a name out of :func:`presets`, or a table with the keys of ``[model]`` in a run's ``config.toml``
            (``headloom list model`` prints them), such as another model's ``config``.
        tokenizer: of its text: ``"bytes"``, a file, or a :class:`Tokenizer`. It gives the ``vocabulary`` where
            nothing else does.
        **options: keys of ``[model]``, over those of ``config``. None leaves a key as it was.

    Raises:
        ValueError: an unknown key, a value that does not fit, or a size that is missing; the message names it.

    Example:
        >>> model = headloom.model("dcformer++-tiny", vocabulary=256, max_length=512)
        >>> model = headloom.model(
        ...     width=128,
        ...     depth=4,
        ...     tokenizer="bytes",
        ...     layer=[{"mixer": {"type": "dcmha", "heads": 4}, "channel": {"type": "swiglu"}}],
        ... )
    """
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer(tokenizer)
    if not (config is None or isinstance(config, (str, Mapping))):
        raise TypeError(f"config is {shown(config)}, expected a preset's name or a table.")
    table: Dict[str, Any] = {"preset": config} if isinstance(config, str) else dict(config or {})
    table.update({key: value for key, value in options.items() if value is not None})
    spec, text = torch.ops.headloom.model_spec(toml_lines(table))
    if tokenizer is not None:
        given = json.loads(text).get("vocabulary")
        if given is None:
            spec, text = torch.ops.headloom.model_spec(toml_lines({**table, "vocabulary": tokenizer.vocabulary}))
        elif given < tokenizer.vocabulary:
            raise ValueError(f"vocabulary is {given}, expected at least the {tokenizer.vocabulary} tokens of the tokenizer.")
    return Model(spec, json.loads(text), *new_tensors(torch.ops.headloom.model_tensors, spec), tokenizer)


@dataclass(frozen=True)
class Preset:
    """What :func:`presets` says of a model."""

    doc: str
    source: str


def presets() -> Dict[str, Preset]:
    """Every named model."""
    rows = (row.split("\t") for row in torch.ops.headloom.preset_rows())
    return {name: Preset(doc, source) for name, doc, source in rows}
