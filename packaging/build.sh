#!/usr/bin/env bash
# Builds a release into a folder: the wheel, a tarball (program, manual pages, completions, licences), a software bill of materials (SBOM,
# CycloneDX), the provenance (SLSA), and checksums.
#
#   packaging/build.sh OUT [x86_64|aarch64]
#
# The program runs with glibc 2.17 (2014) and newer. The script needs Rust and python3 with venv. It installs maturin, zig (its C compiler
# and linker) and deflate (compression of the wheel) below target/.
set -euo pipefail
cd "$(dirname "$0")/.."
usage() { echo "usage: packaging/build.sh OUT [x86_64|aarch64]" >&2; exit 2; }
[ $# -ge 1 ] || usage
out=$1 arch=${2-$(uname -m)}
case $arch in x86_64 | aarch64) ;; *) usage ;; esac
mkdir -p "$out"
out=$(cd "$out" && pwd)
target=$arch-unknown-linux-gnu
built=$(realpath -m "${CARGO_TARGET_DIR:-target}")

tools=$PWD/target/packaging-tools
if ! "$tools/bin/python" -c 'import deflate' 2>/dev/null; then
  python3 -m venv "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check 'maturin==1.16.*' 'ziglang==0.17.*' 'auditwheel==6.*' 'deflate==0.9.*'
fi
export PATH=$tools/bin:$PATH
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)

if [ "$arch" != "$(uname -m)" ]; then
  [ -d "tests/$arch" ] || { echo "build: no emulator is known here for programs of $arch, which write their manual: build there" >&2; exit 1; }
  # Rust's standard library for the target, and an emulator. zig is the C compiler and linker.
  eval "$("tests/$arch/install-tools.sh")"
  unset CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER CC_aarch64_unknown_linux_gnu
fi

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT

# README.md and the licences are part of the package: they are copied beside its description, so that they exist once in the repository.
mkdir "$stage/wheel" "$stage/extension"
cp -r packaging/python LICENSE-MIT LICENSE-APACHE "$stage/wheel/"
python3 packaging/page.py README.md >"$stage/wheel/README.md"
python3 packaging/notices.py "$target" >"$stage/wheel/python/superoffload/THIRD-PARTY-NOTICES.txt"
sed "s|^manifest-path = .*|manifest-path = \"$PWD/Cargo.toml\"|" packaging/pyproject.toml >"$stage/wheel/pyproject.toml"
# The extension module of superoffload.torch. It uses Python's stable ABI, so one module serves all Python versions and is part of the
# wheel.
CARGO_TARGET_DIR=$built maturin build --quiet --zig --compatibility manylinux_2_17 --profile dist --locked --target "$target" \
  --manifest-path packaging/torch/Cargo.toml --out "$stage/extension"
python3 -m zipfile -e "$stage"/extension/*.whl "$stage/extension"
find "$stage/extension" -name '_cpu_adam.abi3.so' -exec cp {} "$stage/wheel/python/superoffload/" \;
[ -s "$stage/wheel/python/superoffload/_cpu_adam.abi3.so" ] || { echo "build: maturin made no extension module" >&2; exit 1; }
(cd "$stage/wheel" && CARGO_TARGET_DIR=$built \
  maturin build --zig --compatibility manylinux_2_17 --profile dist --locked --target "$target" --compression-level 1 --out "$out")
wheel=superoffload-$version-py3-none-manylinux2014_$arch.manylinux_2_17_$arch.whl
"$tools/bin/python" packaging/repack.py "$out/$wheel"

name=superoffload-$version-$target
mkdir -p "$stage/$name"/{bin,share/man/man1,share/completions}
program=$stage/$name/bin/superoffload
cp "$built/$target/dist/superoffload" "$program"
cp LICENSE-MIT LICENSE-APACHE README.md CHANGELOG.md "$stage/wheel/python/superoffload/THIRD-PARTY-NOTICES.txt" "$stage/$name/"
run=("$program")
[ "$arch" = "$(uname -m)" ] || run=("tests/$arch/emulate.sh" "$program")
"${run[@]}" man "$stage/$name/share/man/man1"
for shell in bash zsh fish; do "${run[@]}" completions $shell >"$stage/$name/share/completions/superoffload.$shell"; done
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@${SOURCE_DATE_EPOCH:-0}" -C "$stage" -cf - "$name" | gzip -n9 >"$out/$name.tar.gz"

python3 packaging/sbom.py "$target" >"$out/$name.cdx.json"
python3 packaging/provenance.py write "packaging/build.sh OUT $arch" "$out/$wheel" "$out/$name".{tar.gz,cdx.json} >"$out/$name.provenance.json"
(cd "$out" && sha256sum -- *.whl *.tar.gz *.json >SHA256SUMS)
ls -l "$out"
