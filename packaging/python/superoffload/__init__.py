"""Train language models whose optimizer state does not fit into GPU memory. Runs the program `superoffload` as a child process.

    import superoffload

    run = superoffload.train(model="Qwen/Qwen3-0.6B", data="corpus.jsonl", max_steps=100, output_dir="runs/mine")
    run.metrics[-1]["loss"], run.checkpoint

Keyword arguments are the program's flags, with underscores; `superoffload train --help` lists them. A failure of the program raises an exception.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._data import as_model, as_paths
from ._metrics import Metrics
from ._program import Interrupted, TrainError, UsageError, ask, ask_json, flags
from ._run import Run

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._settings import Settings
else:
    # At run time, type hints are plain types, because the names of the settings exist only in a stub file.
    Unpack, Settings = dict, (str, Any)

try:
    __version__ = version("superoffload")
except PackageNotFoundError:
    __version__ = "unknown: the package is not installed"

__all__ = ["Interrupted", "Metrics", "Run", "TrainError", "UsageError", "doctor", "__version__", "export", "plan", "start", "train"]

OUTPUT_DIR = "runs/train"

DOES_NOT_FIT = re.compile(r"not enough (device|host) memory: ")
"""Beginning of the program's error message for insufficient memory."""


def start(model: Any = None, data: Any = None, **settings: Unpack[Settings]) -> Run:
    """Start a run and return at once.

    Args:
        model: Path of a Hugging Face model directory, or a name on the hub.
        data: Path, name on the hub, `datasets.Dataset`, or a list of records as dicts.
        settings: Flags of `superoffload train`, with underscores.
    """
    output_dir = settings.pop("output_dir", None) or OUTPUT_DIR
    eval_data = as_paths(settings.pop("eval_data", None))
    said = {"model": as_model(model), "data": as_paths(data), "eval_data": eval_data, **settings, "output_dir": output_dir}
    return Run(["train", *flags(said)], output_dir)


def train(model: Any = None, data: Any = None, *, quiet: bool = False, **settings: Unpack[Settings]) -> Run:
    """Train a model, and return the run when it has finished.

    Args:
        model: See `start`.
        data: See `start`.
        quiet: Do not show the run's progress.
        settings: Flags of `superoffload train`, with underscores.

    Raises:
        TrainError: The run failed.
    """
    run = start(model, data, **settings)
    return run.wait() if quiet else run._show()


def plan(model: Any, **settings: Unpack[Settings]) -> dict[str, Any]:
    """Plan a training run on this machine or on the profile `hardware`: memory, speed, and bottleneck.

    Returns:
        The plan, with `fits` set to True. If memory is insufficient, `fits` is False, and `why` has the program's message.
    """
    try:
        return {"fits": True, **ask_json("plan", "--json", *flags({"model": as_model(model), **settings}))}
    except UsageError:
        raise
    except TrainError as error:
        if DOES_NOT_FIT.match(str(error)):
            return {"fits": False, "why": str(error)}
        raise


def doctor() -> dict[str, Any]:
    """Report the hardware and the settings that affect performance on this machine."""
    return ask_json("doctor", "--json")


def export(run: Run | str | os.PathLike[str], out: str | os.PathLike[str], *, best: bool = False, dtype: str | None = None) -> Path:
    """Export a run's newest checkpoint as a Hugging Face model directory.

    Args:
        run: The run, or its output directory.
        out: Directory to write.
        best: Export the best checkpoint instead of the newest.
        dtype: Format of the exported weights.

    Returns:
        The path `out`.
    """
    source = run.output_dir if isinstance(run, Run) else run
    # The separator `--` allows paths that begin with a dash.
    ask("export", *(["--best"] if best else []), *flags({"dtype": dtype}), "--", os.fspath(source), os.fspath(out))
    return Path(out)
