#!/usr/bin/env bash
# Compiles ptx/transformer/*.cu to ptx/generated/*.ptx.zst. With --check, compares the generated text with the committed text, and fails if
# a file differs.
#
#   ptx/build.sh [--check] [NVCC]
#
# NVCC is the compiler; by default, the one in PATH, or else the release that install-tools.sh installs. Another release generates other
# text. `zstd -d` unpacks a generated file for reading.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

check=
if [ "${1-}" = --check ]; then check=1; shift; fi
tools=$("$here/install-tools.sh")
nvcc=${1-$(command -v nvcc || true)}
[ -n "$nvcc" ] || nvcc=$tools/nvcc
python=$here/../target/cuda-tools/bin/python3

# Target compute_80 runs on every GPU since Ampere. Files named *_sm89 need Ada or later, and files named *_sm90a need Hopper. Without
# contraction, only explicit fused operations are fused, so that results are bit-identical to those of the CPU.
flags=(-ptx -std=c++17 -O3 -fmad=false --restrict)

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
# The names of file-local symbols depend on the given path, so the path is relative.
cd "$here/transformer"
status=0
for source in *.cu; do
  ptx=${source%.cu}.ptx
  arch=compute_80 version=8.0
  [[ $source != *_sm89.cu ]] || arch=compute_89 version=8.1
  [[ $source != *_sm90a.cu ]] || arch=compute_90a
  "$nvcc" "${flags[@]}" -arch=$arch "$source" -o "$made/raw"
  # Comments differ between hosts of the same release. nvcc writes its own PTX version, which is replaced by that of the hand-written
  # kernels, or by the next one for Ada's conversions to 8 bits. check.sh fails if that version is too low.
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
