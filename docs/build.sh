#!/usr/bin/env bash
# Builds the guide as a book in target/book, and checks that all of its links have a target in the book. The first run compiles mdBook below
# target/.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.5.4
tools=$PWD/target/mdbook-$version
# mdBook runs for only a second, so optimizing it would cost more time than it saves.
[ -x "$tools/bin/mdbook" ] || CARGO_PROFILE_RELEASE_OPT_LEVEL=0 \
  cargo install --quiet mdbook --version "$version" --locked --no-default-features --root "$tools"
"$tools/bin/mdbook" build docs
python3 docs/check_links.py target/book
