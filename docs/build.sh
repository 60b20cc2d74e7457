#!/usr/bin/env bash
# Builds the guide as a book, target/book, and looks whether each of its links leads to a place in it. mdBook is compiled below target/ the
# first time.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.5.4
tools=$PWD/target/mdbook-$version
# It runs for a second: what makes it fast takes longer than it saves.
[ -x "$tools/bin/mdbook" ] || CARGO_PROFILE_RELEASE_OPT_LEVEL=0 \
  cargo install --quiet mdbook --version "$version" --locked --no-default-features --root "$tools"
"$tools/bin/mdbook" build docs
python3 docs/check_links.py target/book
