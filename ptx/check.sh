#!/usr/bin/env bash
# Assembles every kernel for every GPU generation since Ampere (*_sm89 since Ada, *_sm90a for Hopper only), prints the resources of each
# kernel, and compares them with resources.golden. Fails if they differ, if a register spills, if a kernel uses a stack, or if an arithmetic
# instruction leaves rounding or fusing to the assembler.
#
#   ptx/check.sh [--update] [PTXAS]
#
# PTXAS is the assembler; by default, the one in PATH, or else the one that install-tools.sh installs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# A100; RTX 30 and A10; RTX 40 and L40; H100, H200 and GH200; B200; RTX 50.
generations='sm_80 sm_86 sm_89 sm_90 sm_100 sm_120'

update=
if [ "${1-}" = --update ]; then update=1; shift; fi
ptxas=${1-$(command -v ptxas || true)}

# Unpack the generated kernels beside the hand-written ones.
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
tools=$("$here/install-tools.sh")
[ -n "$ptxas" ] || ptxas=$tools/ptxas
mkdir "$made/generated"
for packed in "$here"/generated/*.ptx.zst; do
  "$here/../target/cuda-tools/bin/python3" "$here/pack.py" unpack "$packed" "$made/generated/$(basename "$packed" .zst)"
done
cp "$here"/*.ptx "$made"
cd "$made"
if grep -nE '\b(add|sub|mul|fma|mad|div|sqrt)\.(f16|f32|f64|ftz|sat|approx|full)' ./*.ptx generated/*.ptx; then
  echo "these must say how they round, and flush nothing" >&2
  exit 1
fi

# Prints one line per kernel of a file, for one generation. ptxas describes a kernel in three lines: name and generation, stack and spills,
# registers.
resources() {
  local file=$1 arch=$2 log
  log=$("$ptxas" -arch="$arch" -v "$file" -o /dev/null 2>&1) || { echo "$log" >&2; echo "ptx/$file does not assemble for $arch" >&2; return 1; }
  awk -v file="$file" '
    /Compiling entry function/ { kernel = $7; arch = $9; gsub("\047", "", kernel); gsub("\047", "", arch); sub("90a", "90", arch) }
    /bytes stack frame/ { stack = $1; spills = $5 + $9 }
    /Used [0-9]+ registers/ {
      shared = 0
      for (i = 3; i <= NF; i++) if ($i ~ /^smem,?$/) shared = $(i - 2)
      print file, kernel, arch, $5, shared, spills, stack
    }
  ' <<<"$log"
}
export ptxas
export -f resources
for file in *.ptx generated/*.ptx; do
  if [[ $file = *_sm90a.ptx ]]; then echo "$file sm_90a"; continue; fi
  among=$generations
  [[ $file != *_sm89.ptx ]] || among=${generations#*sm_86}
  for arch in $among; do echo "$file $arch"; done
done | xargs -P "$(nproc)" -L 1 bash -c 'resources "$@"' resources >"$made/needs"
if awk '$6 + $7 > 0 { print "spills, or has a stack: " $2 " on " $3; found = 1 } END { exit !found }' "$made/needs" >&2; then exit 1; fi

# One line per kernel: shared memory, and registers by generation.
LC_ALL=C sort "$made/needs" | awk -v generations="$generations" '
  function line(file, kernel, shared) {
    printf "%-30s %-34s %6s", file, kernel, shared
    for (i = 1; i <= n; i++) printf " %6s", names[i] in registers ? registers[names[i]] : "-"
    print ""
    delete registers
  }
  BEGIN { shared = 0; n = split(generations, names); for (i in names) title[names[i]] = names[i]; for (i in title) registers[i] = title[i]; line("file", "kernel", "shared") }
  { id = $1 " " $2 }
  NR > 1 && id != last { line(file, kernel, shared); shared = 0 }
  { last = id; file = $1; kernel = $2; registers[$3] = $4; if ($5 > shared) shared = $5 }
  END { line(file, kernel, shared) }
' | tee "$made/table"
if [ -n "$update" ]; then
  cp "$made/table" "$here/resources.golden"
elif ! diff -u "$here/resources.golden" "$made/table" >&2; then
  echo "not what resources.golden says: if it should be, run ptx/check.sh --update" >&2
  exit 1
fi
