"""A document of this repository as a page that stands alone, as that of a package: without pictures, and without links to files that are not there.

    packaging/page.py README.md
"""

import re
import sys
from pathlib import Path

# A picture with its caption, which is a paragraph in italics.
PICTURE = re.compile(r"^!\[[^]]*\]\([^)]*\)\n\n(?:\*[^*].*?\*\n\n)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^]]*)\]\((?!https?://|#)[^)]*\)")


def page(text: str) -> str:
    return LINK.sub(r"\1", PICTURE.sub("", text))


if __name__ == "__main__":
    print(page(Path(sys.argv[1]).read_text()), end="")
