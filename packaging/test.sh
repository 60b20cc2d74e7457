#!/usr/bin/env bash
# Builds the packages, checks their descriptions, and uses them like a user who only has Python. In an environment that is never activated,
# the wheel trains the demo, and its Python package passes its tests. The tarball has the same program, and cargo installs the program from
# the clone. Prints a JSON line with sizes and times.
#
#   packaging/test.sh [RECORD]
#
# RECORD: a file to which the line is appended.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -le 1 ] || { echo "usage: packaging/test.sh [RECORD]" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
give_up() { echo "packages: $*" >&2; exit 1; }
arch=$(uname -m)

packaging/build.sh "$work/dist" "$arch"
packaging/check.sh "$work/dist" "$arch"
wheel=$(ls "$work"/dist/superoffload-*.whl)

read -ra times <<<"$(packaging/first-start.sh "$wheel" "$work/bare")"
[ "${#times[@]}" = 2 ] || give_up "the demo does not train from the wheel"
clean=(env -i HOME="$work/home" PATH=/usr/bin:/bin)
mkdir "$work/home"
# The provenance and the program have the same commit.
version=$("${clean[@]}" "$work/bare/bin/superoffload" --version)
[[ $version = *"$(git rev-parse HEAD)"* ]] || give_up "the program is of another commit: $version"
"${clean[@]}" "$work/bare/bin/superoffload" selftest --device cpu kernels/swiglu kernels/adam
"${clean[@]}" "$work/bare/bin/python" -W ignore -m unittest discover -s packaging/python/tests

# superoffload.torch is tested if a Python with torch is available; the wheel is installed outside of that Python's packages. Lints the
# crate, too, because it is not part of the workspace.
torch_python=${SUPEROFFLOAD_TORCH_PYTHON:-python3}
if "$torch_python" -c 'import torch' 2>/dev/null; then
  "$torch_python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$work/beside-torch" "$wheel"
  for tests in torch likeness shards offload reads loops trainer trl gpu; do
    PYTHONPATH=$work/beside-torch "$torch_python" -W ignore -m unittest discover -s packaging/python/tests -p "test_$tests.py"
  done
else
  echo "packages: LEFT OUT: superoffload.torch is not tested, $torch_python has no torch; name one that has in SUPEROFFLOAD_TORCH_PYTHON" >&2
fi
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target} cargo clippy --quiet --locked --manifest-path packaging/torch/Cargo.toml -- -D warnings
cargo fmt --check --manifest-path packaging/torch/Cargo.toml

# The tarball has the same program.
tar -C "$work" -xzf "$work"/dist/superoffload-*.tar.gz
unpacked=$(ls -d "$work"/superoffload-*-"$arch"-unknown-linux-gnu)
cmp "$unpacked/bin/superoffload" "$work/bare/bin/superoffload" || give_up "tarball and wheel have different programs"

"$work/bare/bin/pip" uninstall --quiet --disable-pip-version-check --yes superoffload
[ ! -e "$work/bare/bin/superoffload" ] || give_up "pip leaves the program behind"

# cargo installs the program from a clone, with the patched build script of the driver. Built without optimization, to save time.
export CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_DEBUG=0
began=$SECONDS
cargo install --quiet --locked --git "file://$PWD" --rev "$(git rev-parse HEAD)" --root "$work/cargo" superoffload
version=$("$work/cargo/bin/superoffload" --version)
[[ $version = *", features cuda,"* ]] || give_up "cargo installs another program: $version"
times+=(cargo_install_s="$((SECONDS - began))")

record=$("$work/bare/bin/python" packaging/record.py packaging/test.sh "$arch" "$wheel" "$unpacked/bin/superoffload" "${times[@]}")
echo "$record"
[ $# -eq 0 ] || echo "$record" >>"$1"
echo "packages: passed"
