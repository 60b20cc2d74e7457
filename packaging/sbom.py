"""What a release is made of, as CycloneDX JSON: the crates that the lock files pin, as far as the program and the extension
module have them on a target.

    packaging/sbom.py TARGET > superoffload.cdx.json
"""

import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    target = sys.argv[1]
    root = Path(__file__).resolve().parent.parent
    packages, uses = {}, {}
    for manifest in ("Cargo.toml", "packaging/torch/Cargo.toml"):
        command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target, "--manifest-path", manifest]
        metadata = json.loads(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout)
        packages |= {package["id"]: package for package in metadata["packages"]}
        for node in metadata["resolve"]["nodes"]:
            uses.setdefault(node["id"], set()).update(d["pkg"] for d in node["deps"] if any(k["kind"] is None for k in d["dep_kinds"]))
    own = next(package for package in packages.values() if package["name"] == "superoffload")
    extension = next(package for package in packages.values() if package["name"] == "superoffload-torch")
    reached, pending = set(), [own["id"], extension["id"]]
    while pending:
        package = pending.pop()
        if package not in reached:
            reached.add(package)
            pending += uses[package]
    parts = sorted((packages[package] for package in reached - {own["id"]}), key=lambda package: (package["name"], package["version"]))
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(own, "application")},
        "components": [component(package, "library") for package in parts],
        "dependencies": [{"ref": purl(packages[p]), "dependsOn": sorted(purl(packages[d]) for d in uses[p])} for p in sorted(reached)],
    }
    print(json.dumps(document, indent=1))


def purl(package: dict) -> str:
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package: dict, kind: str) -> dict:
    return {
        "type": kind,
        "bom-ref": purl(package),
        "name": package["name"],
        "version": package["version"],
        "purl": purl(package),
        # What a path leads to has this repository's licence.
        "licenses": [{"expression": (package["license"] or "MIT OR Apache-2.0").replace("/", " OR ")}],
    }


if __name__ == "__main__":
    main()
