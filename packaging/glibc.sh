#!/usr/bin/env bash
# Prints the newest glibc version that a wheel of build.sh needs, for its program and its extension module.
#
#   packaging/glibc.sh WHEEL
set -euo pipefail
[ $# = 1 ] || { echo "usage: packaging/glibc.sh WHEEL" >&2; exit 2; }
shown=$("$(dirname "$0")/../target/packaging-tools/bin/auditwheel" show "$1")
grep -oE 'GLIBC_2\.[0-9]+' <<<"$shown" | sort -t. -k2 -n | tail -n 1 | grep . || { echo "auditwheel shows no version of the C library: $shown" >&2; exit 1; }
