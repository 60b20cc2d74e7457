#!/usr/bin/env bash
# Builds the packages, checks what they say of themselves, and uses them as a person does who has nothing but Python: in a bare environment that
# nobody activates the wheel trains the demo, its Python package passes its tests, the tarball has the same program, and cargo installs it from the
# clone. Prints a JSON line with sizes and times.
#
#   packaging/test.sh [RECORD]
#
# RECORD: a file that gets the line appended.
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
# The commit that provenance names is the one that the program tells.
version=$("${clean[@]}" "$work/bare/bin/superoffload" --version)
[[ $version = *"$(git rev-parse HEAD)"* ]] || give_up "the program is of another commit: $version"
"${clean[@]}" "$work/bare/bin/superoffload" selftest --device cpu kernels/swiglu kernels/adam
"${clean[@]}" "$work/bare/bin/python" -W ignore -m unittest discover -s packaging/python/tests

# superoffload.torch, where a Python has torch: the wheel lies beside that Python's packages. Lints, since the workspace's do not reach the crate.
torch_python=${SUPEROFFLOAD_TORCH_PYTHON:-python3}
if "$torch_python" -c 'import torch' 2>/dev/null; then
  "$torch_python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$work/beside-torch" "$wheel"
  for tests in torch likeness shards offload reads trainer; do
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

# cargo installs it from a clone, with the patch of the driver's build script; without optimization, which is not what this is about.
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
