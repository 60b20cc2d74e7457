#!/usr/bin/env bash
# Builds the packages for aarch64 on an x86-64 machine and checks their descriptions. Trains the demo with the wheel's program in an
# emulator, and compares the digest with that of this machine. Prints a JSON line with sizes.
#
#   packaging/test-aarch64.sh [RECORD]
#
# RECORD: a file to which the line is appended. Run packaging/test.sh first, because the comparison needs its program.
# SUPEROFFLOAD_AARCH64_PYTHON: a command that starts a Python for aarch64, in which the extension module is tested.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -le 1 ] || { echo "usage: packaging/test-aarch64.sh [RECORD]" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
give_up() { echo "packages for aarch64: $*" >&2; exit 1; }
built=${CARGO_TARGET_DIR:-target}/x86_64-unknown-linux-gnu/dist
here=$built/superoffload
[ -x "$here" ] || give_up "no $here to compare with: run packaging/test.sh first"

packaging/build.sh "$work/dist" aarch64
packaging/check.sh "$work/dist" aarch64
python3 -m zipfile -e "$work"/dist/*.whl "$work/wheel"
there=$(ls "$work"/wheel/superoffload-*.data/scripts/superoffload)
chmod +x "$there"

demo=(train --device cpu --max-steps 2 --seq-length 16 --per-device-train-batch-size 1 --digest --output-dir)
digest_of() { "$@" | tee >(cat >&2) | sed -n 's/^digest: //p'; }
version=$(tests/aarch64/emulate.sh "$there" --version)
[[ $version = *"$(git rev-parse HEAD)"* ]] || give_up "the program is of another commit: $version"
expected=$(digest_of "$here" "${demo[@]}" "$work/here")
trained=$(digest_of tests/aarch64/emulate.sh "$there" "${demo[@]}" "$work/there")
[ -n "$expected" ] && [ "$trained" = "$expected" ] || give_up "the demo's digest is $trained, not $expected"

read -ra python <<<"${SUPEROFFLOAD_AARCH64_PYTHON-}"
if [ "${#python[@]}" -gt 0 ]; then
  expected=$(python3 packaging/torch/steps.py "$built/lib_cpu_adam.so")
  stepped=$("${python[@]}" packaging/torch/steps.py "$work/wheel/superoffload/_cpu_adam.abi3.so")
  [ "$stepped" = "$expected" ] || give_up "ten steps of the extension module leave $stepped, not $expected"
else
  echo "packages for aarch64: LEFT OUT: the extension module is not run; name a Python in SUPEROFFLOAD_AARCH64_PYTHON" >&2
fi

record=$(packaging/record.py packaging/test-aarch64.sh aarch64 "$work"/dist/*.whl "$there")
echo "$record"
[ $# -eq 0 ] || echo "$record" >>"$1"
echo "packages for aarch64: passed"
