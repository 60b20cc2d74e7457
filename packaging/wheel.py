#!/usr/bin/env python3
"""Makes a wheel from a compiled program in seconds, with Python alone. It has the files of the released wheel except for the extension module of
superoffload.torch. Its name restricts it to similar machines, because the program is not linked against an old glibc.

    packaging/wheel.py PROGRAM OUT           # prints the wheel's path
    packaging/wheel.py --compare WHEEL       # exits 1 if the metadata of a released wheel differs from this script's
"""

import email
import os
import sys
import zipfile
from pathlib import Path

from page import page

try:
    import tomllib
except ImportError:  # Python 3.10 has it inside of pip.
    from pip._vendor import tomli as tomllib

PACKAGING = Path(__file__).resolve().parent
ROOT = PACKAGING.parent
PROJECT = tomllib.loads((PACKAGING / "pyproject.toml").read_text())["project"]
NAME = f"{PROJECT['name']}-{tomllib.loads((ROOT / 'Cargo.toml').read_text())['workspace']['package']['version']}"
LICENSES = sorted(path for pattern in PROJECT["license-files"] for path in ROOT.glob(pattern))


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--compare":
        compare(Path(sys.argv[2]))
    elif len(sys.argv) == 3:
        print(write(Path(sys.argv[1]), Path(sys.argv[2])))
    else:
        give_up(f"usage: {__doc__.split(chr(10) * 2)[1].strip()}", code=2)


def write(program: Path, out: Path) -> Path:
    tag = f"py3-none-linux_{os.uname().machine}"
    info = f"{NAME}.dist-info"
    texts = {
        f"{info}/METADATA": metadata(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: packaging/wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n",
    }
    files = {f"{NAME}.data/scripts/superoffload": program} | {f"{info}/licenses/{path.name}": path for path in LICENSES}
    files |= {f"superoffload/{path.name}": path for path in sorted((PACKAGING / "python/superoffload").iterdir()) if path.is_file()}
    wheel = out / f"{NAME}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, path in files.items():
            archive.write(path, name)
        for name, text in texts.items():
            archive.writestr(name, text)
        # Without digests, because the wheel is installed by its maker.
        record = f"{info}/RECORD"
        archive.writestr(record, "".join(f"{name},,\n" for name in [*files, *texts, record]))
    return wheel


def metadata() -> str:
    extras = sorted(PROJECT["optional-dependencies"].items())
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {PROJECT['name']}",
        f"Version: {NAME.split('-')[1]}",
        *(f"Classifier: {classifier}" for classifier in PROJECT["classifiers"]),
        *(f"Requires-Dist: {needed} ; extra == '{extra}'" for extra, all_needed in extras for needed in all_needed),
        *(f"Provides-Extra: {extra}" for extra, _ in extras),
        *(f"License-File: {path.name}" for path in LICENSES),
        f"Summary: {PROJECT['description']}",
        f"License-Expression: {PROJECT['license']}",
        f"Requires-Python: {PROJECT['requires-python']}",
        *(f"Project-URL: {label}, {url}" for label, url in PROJECT["urls"].items()),
        "Description-Content-Type: text/markdown; charset=UTF-8; variant=GFM",
    ]
    return "\n".join(lines) + "\n\n" + page((ROOT / PROJECT["readme"]).read_text())


def compare(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        released = parts(archive.read(f"{NAME}.dist-info/METADATA").decode())
    if differing := sorted(released ^ parts(metadata())):
        give_up(f"{wheel} has other metadata than is written here: {differing}")


def parts(text: str) -> set[tuple[str, str]]:
    """Return the metadata fields and the page."""
    message = email.message_from_string(text)
    return {*message.items(), ("page", message.get_payload().strip())}


def give_up(why: str, code: int = 1) -> None:
    print(f"wheel: {why}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
