"""Shows a run in W&B, trackio or MLflow while it trains: `python -m superoffload.follow RUN --to wandb`.

It reads the files of the run, so a failing tracker does not affect training. It ends when the run ends.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

from ._metrics import MetricsFile, is_running

POLL_S = 1.0


class Wandb:
    """Tracker for W&B, and for trackio, which has the same functions."""

    module = "wandb"

    def __init__(self, tracker: Any, project: str, name: str, facts: dict[str, Any]) -> None:
        self.tracker = tracker
        tracker.init(project=project, name=name, config=facts)

    def log(self, values: dict[str, float], step: int) -> None:
        self.tracker.log(values, step=step)

    def finish(self) -> None:
        self.tracker.finish()


class Trackio(Wandb):
    module = "trackio"


class Mlflow:
    module = "mlflow"

    def __init__(self, tracker: Any, project: str, name: str, facts: dict[str, Any]) -> None:
        self.tracker = tracker
        tracker.set_experiment(project)
        tracker.start_run(run_name=name)
        tracker.log_dict(facts, "facts.json")

    def log(self, values: dict[str, float], step: int) -> None:
        self.tracker.log_metrics(values, step=step)

    def finish(self) -> None:
        self.tracker.end_run()


TRACKERS = {tracker.module: tracker for tracker in (Wandb, Trackio, Mlflow)}


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """Return the numeric metrics of a line, with the metric names of Hugging Face."""
    is_number = lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)  # noqa: E731
    taken = {name: value for name, value in line.items() if is_number(value) and name != "step"}
    return {name.replace("eval_", "eval/", 1) if name.startswith("eval_") else f"train/{name}": value for name, value in taken.items()}


def follow(run: Path, to: str, project: str = "superoffload", poll_s: float = POLL_S) -> int:
    """Follow the run until it ends. Returns the number of logged lines."""
    try:
        tracker = importlib.import_module(to)
    except ImportError as error:
        raise SystemExit(f"error: --to {to}: {error}; pip install {to}") from None
    file, sink, logged = MetricsFile(run), None, 0
    while True:
        has_ended = not is_running(run)
        for line in file.read():
            sink = sink or TRACKERS[to](tracker, project, run.name, file.facts)
            sink.log(numbers(line), step=line.get("step", 0))
            logged += 1
        if has_ended:
            break
        time.sleep(poll_s)
    if sink is not None:
        sink.finish()
    return logged


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m superoffload.follow", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="output directory of a run")
    parser.add_argument("--to", choices=sorted(TRACKERS), required=True)
    parser.add_argument("--project", default="superoffload")
    asked = parser.parse_args(arguments)
    if not asked.run.is_dir():
        print(f"error: {asked.run}: no directory of a run", file=sys.stderr)
        return 2
    logged = follow(asked.run, asked.to, asked.project)
    if logged == 0:
        print(f"error: {asked.run}: no step to log", file=sys.stderr)
    return 0 if logged else 1


if __name__ == "__main__":
    sys.exit(main())
