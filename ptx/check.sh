#!/usr/bin/env bash
# Assembles every kernel for Hopper and Blackwell, prints what each needs and compares it with resources.golden. Fails on a
# difference, on a register that spills, and on arithmetic that leaves its rounding or fusing to the assembler.
#
#   ptx/check.sh [--update] [PTXAS]
#
# PTXAS is the assembler; without it, the one in PATH; without that, what install-tools.sh installs.
set -euo pipefail
shopt -s nullglob
here=$(cd "$(dirname "$0")" && pwd)

update=
if [ "${1-}" = --update ]; then update=1; shift; fi
ptxas=${1-$(command -v ptxas || true)}
[ -n "$ptxas" ] || ptxas=$("$here/install-tools.sh")/ptxas

cd "$here"
if grep -nE '\b(add|sub|mul|fma|mad|div|sqrt)\.(f16|f32|f64|ftz|sat|approx|full)' ./*.ptx transformer/*.ptx; then
  echo "these must say how they round, and flush nothing" >&2
  exit 1
fi

made=$(mktemp)
trap 'rm -f "$made"' EXIT
columns() { printf '%-26s %-34s %-8s %9s %12s %11s %6s %5s\n' "$@"; }
# One line a kernel. ptxas tells of a kernel in three lines: its name and architecture, its stack and spills, its registers.
resources() {
  awk -v file="$1" -v format='%-26s %-34s %-8s %9s %12s %11s %6s %5s\n' '
    /Compiling entry function/ { kernel = $7; arch = $9; gsub("\047", "", kernel); gsub("\047", "", arch) }
    /bytes stack frame/ { stack = $1; stores = $5; loads = $9 }
    /Used [0-9]+ registers/ {
      shared = 0
      for (i = 3; i <= NF; i++) if ($i ~ /^smem,?$/) shared = $(i - 2)
      printf format, file, kernel, arch, $5, stores, loads, shared, stack
    }
  '
}
for file in *.ptx transformer/*.ptx; do
  for arch in sm_90a sm_100a; do
    log=$("$ptxas" -arch=$arch -v "$file" -o /dev/null 2>&1) || { echo "$log" >&2; echo "ptx/$file does not assemble for $arch" >&2; exit 1; }
    resources "$file" <<<"$log"
  done
done | LC_ALL=C sort >"$made"

columns file kernel arch registers spill_stores spill_loads shared stack | cat - "$made" | tee "$made.table"
mv "$made.table" "$made"
if awk 'NR > 1 && $5 + $6 > 0 { print "spills: " $2 " on " $3; found = 1 } END { exit !found }' "$made" >&2; then exit 1; fi
if [ -n "$update" ]; then
  cp "$made" resources.golden
elif ! diff -u resources.golden "$made" >&2; then
  echo "not what resources.golden says: if it should be, run ptx/check.sh --update" >&2
  exit 1
fi
