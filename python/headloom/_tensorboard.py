"""Runs as TensorBoard reads them."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Union

__all__ = ["tensorboard"]

_NAMES = {
    "loss": "train/loss",
    "lr": "train/lr",
    "gradient_norm": "train/gradient_norm",
    "step_seconds": "train/step_seconds",
    "balance_loss": "train/balance_loss",
    "eval_loss": "eval/loss",
    "accuracy": "eval/accuracy",
}


def tensorboard(run: Union[str, "os.PathLike[str]"], log_dir: Union[str, "os.PathLike[str]", None] = None) -> str:
    """Writes a run's metrics as TensorBoard event files, through PyTorch's own ``SummaryWriter``.

    Losses, the learning rate and the gradients' norm stand over the steps. Event files that an earlier call has written
    there are replaced, so that a run that goes on can be written again. Lines of ``metrics.jsonl`` that are no JSON objects
    are left out, with a warning that names them.

    Args:
        run: a run's folder, with its ``metrics.jsonl``.
        log_dir: the folder of the event files; ``RUN/tensorboard`` where it is not given.

    Returns:
        The folder of the event files, for ``tensorboard --logdir``.

    Raises:
        FileNotFoundError: ``run`` has no ``metrics.jsonl``.
        FileExistsError: ``log_dir`` has other files than those of TensorBoard.
        ImportError: the package ``tensorboard`` is not installed.

    Example:
        >>> headloom.tensorboard("runs/text")
        'runs/text/tensorboard'
    """
    folder = Path(run)
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise FileNotFoundError(f"{folder}: has no metrics.jsonl, expected the folder of a run.")
    try:
        from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]
    except ImportError as error:
        raise ImportError(f"headloom.tensorboard needs the package tensorboard: pip install tensorboard ({error}).") from error
    target = folder / "tensorboard" if log_dir is None else Path(log_dir)
    _empty(target)
    writer: Any = SummaryWriter(str(target))
    try:
        for line in _lines(metrics):
            for key, name in _NAMES.items():
                value = _number(line.get(key))
                if value is not None:
                    writer.add_scalar(name, value, int(_number(line.get("step")) or 0))
    finally:
        writer.close()
    return str(target)


def _empty(target: Path) -> None:
    """Removes the event files of an earlier call."""
    if not target.exists():
        return
    others = [path.name for path in target.iterdir() if not path.name.startswith("events.out.tfevents.")]
    if others:
        raise FileExistsError(f"{target}: has {sorted(others)[0]}, expected a folder of TensorBoard's event files alone.")
    shutil.rmtree(target)


def _number(value: Any) -> Optional[float]:
    """None for everything else, as for what is absent."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _lines(metrics: Path) -> Iterator[Mapping[str, Any]]:
    """The whole lines that are objects; the last one may be half written while the run goes on."""
    others = []
    *whole, _ = metrics.read_bytes().split(b"\n")
    for number, text in enumerate(whole, 1):
        try:
            line = json.loads(text)
        except ValueError:  # of text that is not UTF-8, too
            line = None
        if isinstance(line, dict):
            yield line
        elif text.strip():
            others.append(str(number))
    if others:
        named = others[:5] + ([f"and {len(others) - 5} more"] if len(others) > 5 else [])
        is_one = len(others) == 1
        warnings.warn(
            f"{metrics}: line{'' if is_one else 's'} {', '.join(named)} "
            + ("is no JSON object and is left out." if is_one else "are no JSON objects and are left out."),
            stacklevel=3,
        )
