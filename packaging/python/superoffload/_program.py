"""The program `superoffload`: its path, its arguments, and its output."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

NAME = "superoffload"
USAGE = 2
INTERRUPTED = 75


class TrainError(RuntimeError):
    """The program failed. The message is the program's error message. `returncode` is its exit code, negative for a signal."""

    def __init__(self, message: str, returncode: int) -> None:
        super().__init__(message)
        self.returncode = returncode


class UsageError(TrainError, ValueError):
    """The arguments are invalid. Nothing has run."""


class Interrupted(TrainError):
    """The run was interrupted and has written a checkpoint. `resume_from_checkpoint="auto"` resumes from it."""


def program() -> Path:
    """Return the path of the program in this package's environment, active or not, else on PATH. `SUPEROFFLOAD_PROGRAM` overrides both."""
    named = os.environ.get("SUPEROFFLOAD_PROGRAM")
    if named:
        if not Path(named).is_file():
            raise FileNotFoundError(f"the environment variable SUPEROFFLOAD_PROGRAM names {named}, and there is no such file")
        return Path(named)
    beside: list[str | Path] = [sysconfig.get_path("scripts"), Path(sys.prefix) / "bin", Path(site.getuserbase()) / "bin"]
    installed_with_target = Path(__file__).parent.parent / "bin"
    for folder in [*beside, installed_with_target]:
        candidate = Path(folder) / NAME
        if candidate.is_file():
            return candidate
    found = shutil.which(NAME)
    if found is None:
        raise FileNotFoundError(f"the program {NAME} is neither in this environment nor on PATH: install the wheel again")
    return Path(found)


def flags(settings: dict[str, Any]) -> list[str]:
    """Convert keyword arguments to flags of the program. `None` omits a flag."""
    written = []
    for name, value in settings.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        flag = "--" + name.replace("_", "-")
        written += [f"{flag}={_written(each)}" for each in values if each is not None]
    return written


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def failure(returncode: int, said: str) -> TrainError:
    """Return the exception for a program that ended with `returncode`. Its message is the last line of error in the output `said`."""
    errors = [line.removeprefix("error: ") for line in said.splitlines() if line.startswith("error: ")]
    lines = errors or said.split("\n\n")[-1].strip().splitlines() or [""]
    if returncode == USAGE:
        return UsageError(lines[-1], returncode)
    if returncode == INTERRUPTED:
        return Interrupted(lines[-1] or "the run was interrupted", returncode)
    if returncode < 0:
        return TrainError(f"{NAME} was ended by signal {-returncode}", returncode)
    return TrainError(lines[-1] or f"{NAME} ended with exit code {returncode}", returncode)


def ask(*arguments: str) -> str:
    """Run a command of the program to its end, and return its output."""
    done = subprocess.run([program(), *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise failure(done.returncode, done.stderr)
    return done.stdout


def ask_json(*arguments: str) -> dict[str, Any]:
    """Run a command of the program, and return its JSON output."""
    return json.loads(ask(*arguments))
