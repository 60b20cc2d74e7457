"""The crates in the lock files that the program and the extension module use on a target."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def linked(target: str) -> tuple[dict, list[dict], dict[str, set[str]]]:
    """Return the program's own package, the packages linked into the program or the extension module, and each package's users by identifier."""
    packages: dict[str, dict] = {}
    uses: dict[str, set[str]] = {}
    for manifest in ("Cargo.toml", "packaging/torch/Cargo.toml"):
        command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target, "--manifest-path", manifest]
        metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
        packages |= {package["id"]: package for package in metadata["packages"]}
        for node in metadata["resolve"]["nodes"]:
            uses.setdefault(node["id"], set()).update(d["pkg"] for d in node["deps"] if any(k["kind"] is None for k in d["dep_kinds"]))
    own = next(package for package in packages.values() if package["name"] == "superoffload")
    extension = next(package for package in packages.values() if package["name"] == "superoffload-torch")
    reached: set[str] = set()
    pending = [own["id"], extension["id"]]
    while pending:
        package = pending.pop()
        if package not in reached:
            reached.add(package)
            pending += uses[package]
    parts = sorted((packages[package] for package in reached - {own["id"]}), key=lambda package: (package["name"], package["version"]))
    return own, parts, {user: uses[user] for user in reached}
