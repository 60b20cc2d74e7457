"""Trains language models whose optimizer does not fit the GPU, by the program `superoffload` as a child process.

    import superoffload

    run = superoffload.train(model="Qwen/Qwen3-0.6B", data="corpus.jsonl", max_steps=100, output_dir="runs/mine")
    run.metrics[-1]["loss"], run.checkpoint

Keywords are the program's flags, with underscores: `superoffload train --help` lists them. A crash of the program is an exception here.
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
    # Whoever asks for type hints at run time gets a plain one: the names of settings are in a stub alone.
    Unpack, Settings = dict, (str, Any)

try:
    __version__ = version("superoffload")
except PackageNotFoundError:
    __version__ = "unknown: the package is not installed"

__all__ = ["Interrupted", "Metrics", "Run", "TrainError", "UsageError", "doctor", "__version__", "export", "plan", "start", "train"]

OUTPUT_DIR = "runs/train"

DOES_NOT_FIT = re.compile(r"plan [\d.]+ \w+ of \w+ memory for ")
"""How the program begins to say that memory does not suffice."""


def start(model: Any = None, data: Any = None, **settings: Unpack[Settings]) -> Run:
    """Starts a run and returns at once. `data` may be a path, a name on the hub, a `datasets.Dataset`, or records as dicts."""
    output_dir = settings.pop("output_dir", None) or OUTPUT_DIR
    eval_data = as_paths(settings.pop("eval_data", None))
    said = {"model": as_model(model), "data": as_paths(data), "eval_data": eval_data, **settings, "output_dir": output_dir}
    return Run(["train", *flags(said)], output_dir)


def train(model: Any = None, data: Any = None, *, quiet: bool = False, **settings: Unpack[Settings]) -> Run:
    """Trains, and returns the run when it is done; shows it meanwhile unless `quiet`. A run that fails raises `TrainError`."""
    run = start(model, data, **settings)
    return run.wait() if quiet else run._show()


def plan(model: Any, **settings: Unpack[Settings]) -> dict[str, Any]:
    """Whether and how the model trains on a machine (`hardware`), how fast, and what limits that. `fits` is False where memory does not suffice, and
    `why` has the program's words then."""
    try:
        return {"fits": True, **ask_json("plan", "--json", *flags({"model": as_model(model), **settings}))}
    except UsageError:
        raise
    except TrainError as error:
        if DOES_NOT_FIT.match(str(error)):
            return {"fits": False, "why": str(error)}
        raise


def doctor() -> dict[str, Any]:
    """What this machine is, and what would make it faster."""
    return ask_json("doctor", "--json")


def export(run: Run | str | os.PathLike[str], out: str | os.PathLike[str], *, best: bool = False, dtype: str | None = None) -> Path:
    """Writes a run's newest checkpoint, or its best, as a Hugging Face model directory, and returns that."""
    source = run.output_dir if isinstance(run, Run) else run
    # A path may begin with a dash.
    ask("export", *(["--best"] if best else []), *flags({"dtype": dtype}), "--", os.fspath(source), os.fspath(out))
    return Path(out)
