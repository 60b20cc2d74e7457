"""What a run writes about its steps: `metrics.jsonl` in its output directory."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"

LOCKS = Path("/proc/locks")

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
    """The facts of a run, or a line of a step; nothing where the line is damaged, which the program leaves out as well."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    is_whole = isinstance(record["facts"], dict) if "facts" in record else isinstance(record.get("step"), int)
    return record if is_whole else None


def is_running(directory: Path, locks: Path = LOCKS) -> bool:
    """Whether a run owns the directory, on whose `.lock` it holds a lock. To try that lock could be in a starting run's way."""
    try:
        with open(directory / ".lock", "rb") as file:
            place = _place(file.fileno())
    except OSError:
        return False
    return any("FLOCK" in line and place in line for line in locks.read_text().splitlines())


def _place(file: int) -> str:
    """Device and inode of an open file as /proc/locks writes them. The device of `stat` is another one on btrfs and overlayfs."""
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
