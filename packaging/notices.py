"""Licence texts of the crates that are linked into the program and the extension module. Most licences require that binaries include them.

    packaging/notices.py TARGET > THIRD-PARTY-NOTICES.txt
"""

import sys
from pathlib import Path

from crates import linked

NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE", "COPYRIGHT")
RULE = "=" * 100


def main() -> None:
    _, parts, _ = linked(sys.argv[1])
    foreign = [package for package in parts if not is_own(package)]
    by_text: dict[str, list[str]] = {}
    for package in foreign:
        for text in texts(package) or [without_text(package)]:
            by_text.setdefault(text, []).append(f"{package['name']} {package['version']}")
    print("superoffload is made with these crates:\n")
    for package in foreign:
        print(f"{package['name']} {package['version']}: {package['license'] or 'see below'}")
    for text, users in by_text.items():
        print(f"\n{RULE}\n{', '.join(users)}\n{RULE}\n\n{text}")


def is_own(package: dict) -> bool:
    """Whether a crate belongs to this project. Vendored crates of other authors do not."""
    return package["source"] is None and not package["authors"]


def texts(package: dict) -> list[str]:
    folder = Path(package["manifest_path"]).parent
    found = sorted(path for path in folder.iterdir() if path.is_file() and path.name.upper().startswith(NAMES))
    return [path.read_text(errors="replace").strip() for path in found]


def without_text(package: dict) -> str:
    """Return the notice for a crate without a licence text: it is used under Apache-2.0, and the text of that licence is part of this package."""
    if "Apache-2.0" not in (package["license"] or ""):
        sys.exit(f"notices: {package['name']} ships no text of its licence, and that is {package['license']}: write it here")
    authors = ", ".join(package["authors"])
    return f"{package['name']} is used under Apache-2.0; the text of the licence is in LICENSE-APACHE." + (f" Authors: {authors}." if authors else "")


if __name__ == "__main__":
    main()
