#!/usr/bin/env bash
# Compiles ptx/transformer/*.cu to ptx/generated/*.ptx.zst. With --check it compares the text instead, and fails if one differs.
#
#   ptx/build.sh [--check] [NVCC]
#
# NVCC is the compiler; without it, the one in PATH; without that, the release that install-tools.sh installs. Another release compiles to other text.
# `zstd -d` unpacks a generated file for reading.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

check=
if [ "${1-}" = --check ]; then check=1; shift; fi
tools=$("$here/install-tools.sh")
nvcc=${1-$(command -v nvcc || true)}
[ -n "$nvcc" ] || nvcc=$tools/nvcc
python=$here/../target/cuda-tools/bin/python3

# Plain compute_80: every GPU since Ampere compiles it; what is called *_sm89 is for Ada and later, *_sm90a for Hopper alone. No contraction: every fused operation is written as one, so that results
# are those of the CPU.
flags=(-ptx -std=c++17 -O3 -fmad=false --restrict)

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
# Names of file-local symbols depend on the path as given, so it is a relative one.
cd "$here/transformer"
status=0
for source in *.cu; do
  ptx=${source%.cu}.ptx
  arch=compute_80 version=8.0
  [[ $source != *_sm89.cu ]] || arch=compute_89 version=8.1
  [[ $source != *_sm90a.cu ]] || arch=compute_90a
  "$nvcc" "${flags[@]}" -arch=$arch "$source" -o "$made/raw"
  # Comments differ between hosts of one release. nvcc names its own version of PTX; that of the kernels by hand is enough, and
  # check.sh fails where it is not; Ada's conversions to 8 bits came one later.
  sed -e '/^[[:space:]]*\/\//d' -e "s/^\.version .*/.version $version/" "$made/raw" >"$made/$ptx"
  packed=../generated/$ptx.zst
  if [ -z "$check" ]; then
    mkdir -p ../generated
    "$python" ../pack.py pack "$made/$ptx" "$packed"
  elif ! { [ -f "$packed" ] && "$python" ../pack.py unpack "$packed" "$made/committed" && cmp -s "$made/$ptx" "$made/committed"; }; then
    echo "ptx/generated/$ptx.zst differs from the PTX that $source compiles to: run ptx/build.sh" >&2
    status=1
  fi
done
for packed in ../generated/*; do
  name=$(basename "$packed" .ptx.zst)
  [ -f "$name.cu" ] || { echo "ptx/generated/${packed##*/} has no source" >&2; status=1; }
done
exit $status
