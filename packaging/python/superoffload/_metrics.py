"""What a run writes about its steps: `metrics.jsonl` in its output directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"

# How the line begins that says what a run is; its steps follow.
FACTS = b'{"facts":'


class Metrics(list):
    """Steps of a run, each a dict as in `metrics.jsonl`."""

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a row for each."""
        import pandas

        return pandas.DataFrame(self)


class MetricsFile:
    """Reads a file that grows, whole lines only. A file that has taken the place of another is read from its start."""

    def __init__(self, directory: Path, is_new: bool = False) -> None:
        """With `is_new` nothing is told of the runs that are there already."""
        self.path = directory / FILE
        self.facts: dict[str, Any] = {}
        self._inode, self._offset = 0, 0
        self._is_told, self._earlier = True, set()
        if is_new and self.path.exists():
            self._earlier = {line for line in self.path.read_bytes().splitlines() if line.startswith(FACTS)}

    def read(self) -> list[dict[str, Any]]:
        """The lines of steps and evaluations that have come since the last call."""
        try:
            with open(self.path, "rb") as file:
                return self._take(file)
        except FileNotFoundError:
            return []

    def _take(self, file: Any) -> list[dict[str, Any]]:
        here = os.fstat(file.fileno())
        if here.st_ino != self._inode or here.st_size < self._offset:
            self._inode, self._offset = here.st_ino, 0
        file.seek(self._offset)
        whole = file.read().rpartition(b"\n")[0]
        self._offset += len(whole) + bool(whole)
        lines = []
        for line in filter(None, whole.split(b"\n")):
            if line.startswith(FACTS):
                self._is_told = line not in self._earlier
                self.facts = json.loads(line)["facts"] if self._is_told else {}
            elif self._is_told:
                lines.append(json.loads(line))
        return lines


def is_running(directory: Path) -> bool:
    """Whether a run owns the directory, on whose `.lock` it holds a lock. To try that lock could be in a starting run's way."""
    try:
        inode = (directory / ".lock").stat().st_ino
    except OSError:
        return False
    return any("FLOCK" in line and f":{inode} " in line for line in Path("/proc/locks").read_text().splitlines())
