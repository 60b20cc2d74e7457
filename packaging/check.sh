#!/usr/bin/env bash
# Compares the description of a release with its files. Runs nothing of the release. Prints the newest glibc version that the release needs.
#
#   packaging/check.sh DIST x86_64|aarch64
#
# DIST is a folder that build.sh has filled from the current state of this clone.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# = 2 ] || { echo "usage: packaging/check.sh DIST x86_64|aarch64" >&2; exit 2; }
dist=$(cd "$1" && pwd) arch=$2
give_up() { echo "release: $*" >&2; exit 1; }

# README contains the wheel's file name in its installation command.
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
name=superoffload-$version-$arch-unknown-linux-gnu
wheel=superoffload-$version-py3-none-manylinux2014_$arch.manylinux_2_17_$arch.whl
for file in "$wheel" "$name".{tar.gz,cdx.json,provenance.json}; do [ -s "$dist/$file" ] || give_up "$file is missing"; done
grep -qF "${wheel//$arch/x86_64}" README.md || give_up "README.md names another wheel"
(cd "$dist" && sha256sum --quiet --check SHA256SUMS) || give_up "checksums differ"
for file in "$dist"/*; do grep -qF "${file##*/}" "$dist/SHA256SUMS" || [ "${file##*/}" = SHA256SUMS ] || give_up "${file##*/} has no checksum"; done

# The program and the extension module need no newer glibc than the wheel's name promises.
newest=$(packaging/glibc.sh "$dist/$wheel")
echo "newest version of the C library: $newest"
[ "${newest#GLIBC_2.}" -le 17 ] || give_up "the wheel needs $newest"
bytes=$(stat -c %s "$dist/$wheel")
[ "$bytes" -le 10500000 ] || give_up "the wheel has $bytes bytes: more than 10.5 MB"

# CI tests the wheel of wheel.py instead of the released one, so both must have the same metadata.
python3 packaging/wheel.py --compare "$dist/$wheel"

# The wheel has the extension module, and the tarball has the usual files.
listed=$(python3 -m zipfile -l "$dist/$wheel")
for file in superoffload/_cpu_adam.abi3.so superoffload/py.typed superoffload/THIRD-PARTY-NOTICES.txt "superoffload-$version.data/scripts/superoffload"; do
  grep -q "^$file " <<<"$listed" || give_up "the wheel lacks $file"
done
listed=$(tar -tzf "$dist/$name.tar.gz")
for file in bin/superoffload share/man/man1/superoffload-train.1 share/completions/superoffload.{bash,zsh,fish} LICENSE-MIT LICENSE-APACHE THIRD-PARTY-NOTICES.txt; do
  grep -qxF "$name/$file" <<<"$listed" || give_up "the tarball lacks $file"
done

# The SBOM has the crates of the program and those of the extension module.
for part in pkg:cargo/superoffload@"$version" pkg:cargo/tokenizers@ pkg:cargo/pyo3@; do
  grep -qF "\"bom-ref\": \"$part" "$dist/$name.cdx.json" || give_up "the list of parts lacks $part"
done

# The provenance names the files, sources and tools. A changed file is detected.
statement=$name.provenance.json
python3 packaging/provenance.py check "$dist/$statement"
digest_of() { sha256sum "$1" | cut -d' ' -f1; }
for told in "$wheel" "$name".{tar.gz,cdx.json} "$(git rev-parse HEAD)" "$(digest_of Cargo.lock)" "$(digest_of packaging/torch/Cargo.lock)" \
  "$(rustc --version)" "packaging/build.sh OUT $arch"; do
  grep -qF "\"$told\"" "$dist/$statement" || give_up "$statement does not name $told"
done
other=$(mktemp -d)
trap 'rm -rf "$other"' EXIT
cp "$dist/$wheel" "$dist/$name".* "$other"
echo >>"$other/$name.tar.gz"
if python3 packaging/provenance.py check "$other/$statement" >/dev/null 2>&1; then give_up "no change of the tarball is noticed"; fi
