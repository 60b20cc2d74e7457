"""Says which links of a book lead nowhere: `check_links.py FOLDER`; exits with 1 if one does."""

import html.parser
import pathlib
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.places = set(), {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.places.add(attrs.get("id"))
        self.links |= {attrs[name] for name in ("href", "src") if attrs.get(name)}


def main():
    book = pathlib.Path(sys.argv[1]).resolve()
    # The page for missing addresses can be shown at any address, so its links start at the site's root.
    pages = {path: Page(path) for path in book.rglob("*.html") if path.name != "404.html"}
    wrong, count = [], 0
    for path, page in sorted(pages.items()):
        for link in sorted(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            is_right = target.is_file() and target.is_relative_to(book)
            if not is_right or target in pages and urllib.parse.unquote(parts.fragment) not in pages[target].places:
                wrong.append(f"{path.name}: {link} leads nowhere")
    print(f"{count} links of {len(pages)} pages", *wrong, sep="\n")
    sys.exit(1 if wrong or not count else 0)


main()
