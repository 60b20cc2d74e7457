"""Converts a document of this repository to a self-contained page for a package: without pictures, and without relative links.

    packaging/page.py README.md
"""

import re
import sys
from pathlib import Path

# A picture and its caption, a paragraph in italics.
PICTURE = re.compile(r"^!\[[^]]*\]\([^)]*\)\n\n(?:\*[^*].*?\*\n\n)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^]]*)\]\((?!https?://|#)[^)]*\)")


def page(text: str) -> str:
    return LINK.sub(r"\1", PICTURE.sub("", text))


if __name__ == "__main__":
    print(page(Path(sys.argv[1]).read_text()), end="")
