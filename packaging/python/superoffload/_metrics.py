"""Metrics of a run: the file `metrics.jsonl` in its output directory."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"

LOCKS = Path("/proc/locks")

# Beginning of the line with a run's facts. The lines of the run's steps follow it.
FACTS = b'{"facts":'


class Metrics(list):
    """The steps of a run. Each step is a dict, as in `metrics.jsonl`."""

    def to_pandas(self) -> Any:
        """Convert the steps to a `pandas.DataFrame` with one row per step."""
        import pandas

        return pandas.DataFrame(self)


class MetricsFile:
    """Reads complete lines of a growing file. A file that replaces another one is read from its start."""

    def __init__(self, directory: Path, is_new: bool = False) -> None:
        """Open the metrics of a run. With `is_new`, runs that are already in the file are skipped."""
        self.path = directory / FILE
        self.facts: dict[str, Any] = {}
        self._inode, self._offset = 0, 0
        self._is_told, self._earlier = True, set()
        if is_new and self.path.exists():
            self._earlier = {line for line in self.path.read_bytes().splitlines() if line.startswith(FACTS)}

    def read(self) -> list[dict[str, Any]]:
        """Return the lines of steps and evaluations that were written since the last call."""
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
        lines, damaged = [], 0
        for line in filter(None, whole.split(b"\n")):
            record = _record(line)
            if record is None:
                damaged += 1
            elif "facts" in record:
                self._is_told = line not in self._earlier
                self.facts = record["facts"] if self._is_told else {}
            elif self._is_told:
                lines.append(record)
        if damaged:
            warnings.warn(f"{self.path}: damaged lines left out: {damaged}", stacklevel=2)
        return lines


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse a line with a run's facts or with a step. Returns None for a damaged line, which the program also ignores."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    is_whole = isinstance(record["facts"], dict) if "facts" in record else isinstance(record.get("step"), int)
    return record if is_whole else None


def is_running(directory: Path, locks: Path = LOCKS) -> bool:
    """Whether a run holds the lock on the directory's `.lock` file. Trying to take the lock could disturb a run that is starting."""
    try:
        with open(directory / ".lock", "rb") as file:
            place = _place(file.fileno())
    except OSError:
        return False
    return any("FLOCK" in line and place in line for line in locks.read_text().splitlines())


def _place(file: int) -> str:
    """Return device and inode of an open file as in /proc/locks. On btrfs and overlayfs, `stat` has a different device."""
    inode, mount = os.fstat(file).st_ino, ""
    for line in Path(f"/proc/self/fdinfo/{file}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "mnt_id":
            mount = value.strip()
        elif name == "ino":
            inode = int(value)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        identity, _, device, *_ = line.split(" ")
        if identity == mount:
            major, minor = map(int, device.split(":"))
            return f" {major:02x}:{minor:02x}:{inode} "
    return f":{inode} "
