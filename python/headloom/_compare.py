"""Comparisons from Python, whose runs any ``concurrent.futures`` executor may train."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shlex
import time
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

from headloom import _command

_ATTEMPTS = 2  # of a run whose process ends without a result
_WAIT_SECONDS = 60.0  # for a process that has lost the one that started it


def _train_planned(folder: str, path: str) -> str:
    """Trains one planned run; returns why it ended without success, or nothing. Executors call it in their workers."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    end = time.monotonic() + _WAIT_SECONDS
    while True:
        done = _command.called(["compare", folder, "--run", path], environment)
        if done.returncode == 0:
            return ""
        # The worker that began the run has died. Its process is still there, and ends when it next reports.
        if "is in use by" in done.stderr and time.monotonic() < end:
            time.sleep(1)
            continue
        return _command.said(done)


def _train_round(executor: Executor, folder: str, paths: List[str]) -> Dict[str, str]:
    """Why each of the runs ended without success; nothing for the others."""
    futures: Dict["Future[str]", str] = {}
    try:
        for path in paths:
            futures[executor.submit(_train_planned, folder, path)] = path
        concurrent.futures.wait(futures)
    except concurrent.futures.BrokenExecutor as error:
        raise _broken(folder, error) from error
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    reasons: Dict[str, str] = {}
    for future, path in futures.items():
        problem = future.exception()
        if isinstance(problem, concurrent.futures.BrokenExecutor):
            raise _broken(folder, problem) from problem
        reasons[path] = str(problem) if problem is not None else future.result()
    return reasons


def _broken(folder: str, error: BaseException) -> RuntimeError:
    said = str(error).strip().rstrip(".")
    return RuntimeError(
        f"a worker of the executor has died and the executor takes no more work ({said}); finished runs in {folder} are "
        "kept, so call compare again with a new executor."
    )


def compare(
    config: Union[str, "os.PathLike[str]"],
    folder: Union[str, "os.PathLike[str]", None] = None,
    executor: Optional[Executor] = None,
) -> Dict[str, Any]:
    """Compares several models as ``headloom compare`` does, and goes on with the comparison that is in the folder.

    Args:
        config: the TOML file with ``[[models]]`` and ``[[tasks]]``, or the folder of a comparison to go on with.
        folder: of the comparison; ``runs/NAME`` by default, as for the command. Finished runs in it are kept.
        executor: trains the runs, each in a call of its own: ``concurrent.futures.ProcessPoolExecutor``, Dask's
            ``client.get_executor()`` or any other, whose workers see the folder and the data under the same paths. A run
            has one thread there, unless OMP_NUM_THREADS says otherwise. None: one run after the other, here.

    Returns:
        What ``--json`` prints: runs, means, spreads and verdicts.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the configuration is wrong.
        RuntimeError: the folder is in use, or a run has ended twice without a result because its worker died, or the
            executor has lost a worker and takes no more work. Finished runs are kept.

    Example:
        >>> with concurrent.futures.ProcessPoolExecutor(4) as executor:
        ...     report = headloom.compare("configs/quickstart.toml", executor=executor)
    """
    if not os.path.exists(config):
        raise FileNotFoundError(f"{os.fspath(config)}: there is no such file.")
    # A comparison's folder stands for its configuration, as for the command.
    usual = config if os.path.isdir(config) else Path("runs") / Path(config).stem
    where = os.path.abspath(folder if folder is not None else usual)
    arguments = ["compare", os.fspath(config), "--out", where]
    if executor is not None:
        attempts: Dict[str, int] = {}
        reasons: Dict[str, str] = {}
        while True:
            plan = _command.called([*arguments, "--plan"])
            if plan.returncode != 0:
                raise _command.error(plan)
            paths = [shlex.split(line)[-1] for line in plan.stdout.splitlines()]
            if not paths:
                break
            for path in paths:
                attempts[path] = attempts.get(path, 0) + 1
                if attempts[path] > _ATTEMPTS:
                    run = path.rpartition("@")[0]  # without the hash of its configuration
                    raise RuntimeError(f"the run {run} in {where} has ended twice without a result: {reasons[path]}")
            reasons = _train_round(executor, where, paths)
    done = _command.called([*arguments, "--json"])
    if not done.stdout:
        raise _command.error(done)
    report: Dict[str, Any] = json.loads(done.stdout)
    return report
