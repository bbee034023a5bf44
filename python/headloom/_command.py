"""The command ``headloom``, where a process of its own does the work."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Dict, List, Optional


def program() -> str:
    """The command: that of the environment's HEADLOOM_BINARY, of the source tree, or of the PATH."""
    built = Path(__file__).resolve().parents[2] / "build" / "bin" / "headloom"
    found = os.environ.get("HEADLOOM_BINARY") or (str(built) if built.exists() else shutil.which("headloom"))
    if not found:
        raise FileNotFoundError(
            f"the command headloom is neither at {built} nor in the PATH; set HEADLOOM_BINARY to where it is."
        )
    return found


def called(arguments: List[str], environment: Optional[Dict[str, str]] = None) -> "subprocess.CompletedProcess[str]":
    """``headloom ARGUMENTS``, when it has ended."""
    return subprocess.run([program(), *arguments], env=environment, capture_output=True, text=True)


def said(done: "subprocess.CompletedProcess[str]") -> str:
    """The sentence with which a command has ended."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("headloom: ")]
    if lines:
        return lines[-1].removeprefix("headloom: ")
    return f"headloom {done.args[1]} has ended with exit code {done.returncode}."


def error(done: "subprocess.CompletedProcess[str]") -> Exception:
    """The exception that a command's failure is in Python."""
    return ValueError(said(done)) if done.returncode == 2 else RuntimeError(said(done))
