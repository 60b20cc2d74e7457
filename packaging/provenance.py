"""The provenance of a release as an in-toto statement in SLSA's format: the commit, the digests of both lock files, the toolchain, the command, and
the sha256 of each artefact.

    packaging/provenance.py write COMMAND ARTEFACT... > superoffload.provenance.json
    packaging/provenance.py check STATEMENT

`check` compares a statement with the artefacts in the same folder. A statement is not signed: it does not prove its author.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATEMENT, PROVENANCE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
BUILDER = "pkg:cargo/superoffload#packaging/build.sh"
LOCKS = ("Cargo.lock", "packaging/torch/Cargo.lock")
# Commands that print the versions of the tools. build.sh has put zig and maturin on PATH.
TOOLS = (["rustc", "--version"], ["cargo", "--version"], ["maturin", "--version"], ["python-zig", "version"])


def main() -> None:
    if len(sys.argv) > 3 and sys.argv[1] == "write":
        print(json.dumps(statement(sys.argv[2], [Path(name) for name in sys.argv[3:]]), indent=1))
    elif len(sys.argv) == 3 and sys.argv[1] == "check":
        check(Path(sys.argv[2]))
    else:
        give_up(f"usage: {__doc__.split(chr(10) * 2)[1].strip()}", code=2)


def statement(command: str, artefacts: list[Path]) -> dict:
    return {
        "_type": STATEMENT,
        "subject": [{"name": path.name, "digest": {"sha256": sha256(path)}} for path in artefacts],
        "predicateType": PROVENANCE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILDER,
                "externalParameters": {"command": command},
                "resolvedDependencies": [source(), *({"name": lock, "digest": {"sha256": sha256(ROOT / lock)}} for lock in LOCKS)],
            },
            "runDetails": {"builder": {"id": BUILDER, "version": {tool[0]: said(tool) for tool in TOOLS}}},
        },
    }


def source() -> dict:
    """Return the commit and the files that differ from it. Outside of a clone, the commit is that of SUPEROFFLOAD_COMMIT."""
    named = os.environ.get("SUPEROFFLOAD_COMMIT")
    changed = [] if named else said(["git", "status", "--porcelain", "--untracked-files=no"]).splitlines()
    commit = {"name": "source", "digest": {"gitCommit": named or said(["git", "rev-parse", "HEAD"])}}
    return commit | ({"annotations": {"changed": [line[3:] for line in changed]}} if changed else {})


def said(command: list[str]) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.rstrip()
    except (OSError, subprocess.CalledProcessError) as error:
        give_up(f"{' '.join(command)}: {error}; outside of a clone name the commit in SUPEROFFLOAD_COMMIT")


def check(path: Path) -> None:
    for name, digest in subjects(path):
        artefact = path.parent / Path(name).name
        if not artefact.is_file():
            give_up(f"{path}: {artefact.name} is not beside it")
        if sha256(artefact) != digest:
            give_up(f"{path}: {artefact.name} is not the file that was built")
        print(f"{artefact.name}: as it was built")


def subjects(path: Path) -> list[tuple[str, str]]:
    """Return the names and digests of the artefacts in a statement."""
    try:
        told = json.loads(path.read_bytes())
        if (told["_type"], told["predicateType"]) == (STATEMENT, PROVENANCE) and told["subject"]:
            return [(subject["name"], subject["digest"]["sha256"]) for subject in told["subject"]]
    except OSError as error:
        give_up(f"{path}: {error.strerror}")
    except (ValueError, KeyError, TypeError):
        pass
    give_up(f"{path}: no statement of provenance")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def give_up(why: str, code: int = 1) -> None:
    print(f"provenance: {why}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
