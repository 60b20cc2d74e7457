#!/usr/bin/env bash
# The Arm path on an x86-64 machine: builds the workspace for aarch64, runs its tests in qemu's user mode, the optimizer's for every
# length of SVE's vectors and without SVE2, and trains to the same bits as this machine does.
set -euo pipefail
cd "$(dirname "$0")/../.."

cargo=tests/aarch64/cargo.sh
target=${CARGO_TARGET_DIR:-target}
step() { printf '\n== %s\n' "$*"; "$@"; }
# on MODEL COMMAND...: in bytes, 16 is what Grace has.
on() { SUPEROFFLOAD_QEMU_CPU=$1 "${@:2}"; }

step $cargo test --workspace --no-run
for cpu in max,sve-default-vector-length={16,32,64} max,sve=off; do
  step on "$cpu" $cargo test --quiet --package superoffload --lib -- optim::
done
step $cargo test --workspace --quiet -- --skip optim:: "${beyond_qemu[@]/#/--skip=}"

# The compiler vectorises the passes. That it did so for SVE, in the passes that training runs, shows in the program.
roots=$(aarch64-linux-gnu-objdump --disassemble --no-show-raw-insn "$target/aarch64-unknown-linux-gnu/debug/superoffload" | grep -c 'fsqrt.*z[0-9]')
echo "SVE square roots in the program: $roots"

step $cargo run --quiet -- doctor
demo=(train --device cpu --max-steps 3 --digest true)
