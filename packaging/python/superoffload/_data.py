"""Writes Python data to files, which the program reads."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def as_paths(data: Any) -> Any:
    """Return paths and hub names unchanged. Write a `datasets.Dataset` or a list of records to a file in the cache. Equal records have the same
    file, so a resumed run finds its data."""
    if data is None or isinstance(data, (str, os.PathLike)):
        return data
    if hasattr(data, "to_parquet"):
        return _cached(".parquet", data.to_parquet)
    if isinstance(data, Mapping):
        raise TypeError(f"data: {_of_a_mapping(data)}")
    records = list(data)
    if records and all(isinstance(record, (str, os.PathLike)) for record in records):
        return records
    if not records or not all(isinstance(record, Mapping) for record in records):
        raise TypeError("data: a path, a name on the hub, a datasets.Dataset, or records as dicts, of which there must be one")
    return _cached(".jsonl", lambda path: _write_lines(path, records))


def as_model(model: Any) -> Any:
    """Return the path or hub name of a model. Rejects a transformers model in memory."""
    if model is None or isinstance(model, (str, os.PathLike)):
        return model
    if hasattr(model, "save_pretrained"):
        why = "call model.save_pretrained(DIR) and tokenizer.save_pretrained(DIR), and pass DIR"
        raise TypeError(f"model: this {type(model).__name__} is in memory, and the program reads models from files: {why}")
    raise TypeError(f"model: a path or a name on the hub, not a {type(model).__name__}")


def _of_a_mapping(data: Mapping[str, Any]) -> str:
    names, kind = ", ".join(map(repr, data)), type(data).__name__
    if data and all(hasattr(split, "to_parquet") for split in data.values()):
        return f"this {kind} has the splits {names}: pass one of them, as in data=dataset[{next(iter(data))!r}]"
    remedy = "pass datasets.Dataset.from_dict(data), or a list with a dict for each record"
    return f"this {kind} with {names or 'nothing in it'} is no list of records: {remedy}"


def _write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _cached(suffix: str, write: Any) -> Path:
    """Create a file with `write` and name it after a digest of its contents."""
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
