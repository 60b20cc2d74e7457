"""Data of Python as files, which is what the program reads."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def as_paths(data: Any) -> Any:
    """Paths and names on the hub as they are; a `datasets.Dataset`, or records as dicts, as a file in the cache. Equal records are one file, so
    that a resumed run finds its data."""
    if data is None or isinstance(data, (str, os.PathLike)):
        return data
    if hasattr(data, "to_parquet"):
        return _cached(".parquet", data.to_parquet)
    records = list(data)
    if records and all(isinstance(record, (str, os.PathLike)) for record in records):
        return records
    if not records or not all(isinstance(record, Mapping) for record in records):
        raise TypeError("data: a path, a name on the hub, a datasets.Dataset, or records as dicts, of which there must be one")
    return _cached(".jsonl", lambda path: _write_lines(path, records))


def _write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _cached(suffix: str, write: Any) -> Path:
    """A file of what `write` writes, named by its contents."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "superoffload" / "python"
    root.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(suffix=suffix, prefix=".", dir=root)
    os.close(descriptor)
    made = Path(name)
    try:
        write(made)
        with open(made, "rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        target = root / (digest.hexdigest()[:32] + suffix)
        os.replace(made, target)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    return target
