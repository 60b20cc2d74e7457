#!/usr/bin/env bash
# Compiles ptx/transformer/*.cu to the PTX beside each. With --check it compares instead, and fails if one differs.
#
#   ptx/build.sh [--check] [NVCC]
#
# NVCC is the compiler; without it, the one in PATH; without that, what install-tools.sh installs. Another release than
# install-tools.sh names compiles to other text.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

check=
if [ "${1-}" = --check ]; then check=1; shift; fi
nvcc=${1-$(command -v nvcc || true)}
[ -n "$nvcc" ] || nvcc=$("$here/install-tools.sh")/nvcc

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
  # Builds of one release differ by host in the build's ID only. nvcc names its own version of PTX; that of the kernels by hand
  # is enough, and check.sh fails where it is not; Ada's conversions to 8 bits came one later.
  sed -e '/^\/\/ Compiler Build ID/d' -e "s/^\.version .*/.version $version/" "$made/raw" >"$made/$ptx"
  if [ -z "$check" ]; then
    cp "$made/$ptx" "$ptx"
  elif ! cmp -s "$made/$ptx" "$ptx"; then
    echo "ptx/transformer/$ptx is not what $source compiles to: run ptx/build.sh" >&2
    status=1
  fi
done
for ptx in *.ptx; do
  [ -f "${ptx%.ptx}.cu" ] || { echo "ptx/transformer/$ptx has no source" >&2; status=1; }
done
exit $status
