#!/usr/bin/env bash
# Tests the Arm code on an x86-64 machine in qemu's user mode. Runs the library's tests that depend on the instruction set, runs the
# optimizer's tests for each SVE vector length and without SVE, and compares the demo's digest with that of this machine.
#
#   tests/aarch64/run.sh [--all]
#
# `--all` also runs the workspace's tests and the tests that start the program. It takes about 15 minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -eq 0 ] || [ "$*" = --all ] || { echo "usage: tests/aarch64/run.sh [--all]" >&2; exit 2; }

cargo=tests/aarch64/cargo.sh
target=${CARGO_TARGET_DIR:-target}
built=$target/aarch64-unknown-linux-gnu/debug
emulate=tests/aarch64/emulate.sh
step() { printf '\n== %s (at %s s)\n' "$*" "$SECONDS"; timeout 30m "$@"; }
give_up() { echo "aarch64: $*" >&2; exit 1; }

# Each of these takes minutes in an emulator: large matrix products, or many trained models.
too_slow=(
  kernels::matmul::tests::every_layout_and_shape_agrees_with_f64
  kernels::matmul::tests::slabs_change_no_bit
  exactness::a_ring_of_gradients_changes_no_bit
  exactness::paged_states_change_no_bit
  exactness::streamed_weights_change_no_bit_and_come_once_a_pass
)
# The emulator starts a program that does not exist, and exits with 127.
unlike=(tests::missing_files_are_errors)
# One test at a time: if the emulator forks a process while another thread holds a lock, the process may wait for that lock forever.
skip=(--test-threads=1 --skip=optim:: "${too_slow[@]/#/--skip=}" "${unlike[@]/#/--skip=}")

# Builds the library's tests and the program. A workspace test needs the program, built with the features that tests add to its
# dependencies.
step $cargo test --quiet --package superoffload --lib --test alloc --no-run

# Vector lengths in bytes; Grace has 16.
for cpu in max,sve-default-vector-length={16,32,64} max,sve=off; do
  step env SUPEROFFLOAD_QEMU_CPU="$cpu" $cargo test --quiet --package superoffload --lib -- optim::
done
step $cargo test --quiet --package superoffload --lib -- device::cpu:: dtype:: hardware:: "${skip[@]}"

# The compiler vectorises the optimizer's passes. The number of scalable square root instructions in the program shows that it did so in
# passes that write 16-bit weights, as in training: one for step, one for speculate, and two for the fused pass, for each format of
# gradients and weights.
roots=$(aarch64-linux-gnu-objdump --disassemble --no-show-raw-insn "$built/superoffload" | grep -c 'fsqrt.*z[0-9]') || true
echo "square roots of vectors of any length in the program: $roots"
[ "$roots" -ge 24 ] || give_up "SVE2 is hardly used: found $roots such square roots, expected at least 24"

runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
step $emulate "$built/superoffload" doctor
demo=(train --device cpu --max-steps 2 --seq-length 16 --per-device-train-batch-size 1 --digest --output-dir)
digest_of() { "$@" | tee >(cat >&2) | sed -n 's/^digest: //p'; }
cargo build --quiet --workspace --bins --tests
there=$(digest_of $emulate "$built/superoffload" "${demo[@]}" "$runs/there")
here=$(digest_of "$target/debug/superoffload" "${demo[@]}" "$runs/here")
[ -n "$here" ] && [ "$here" = "$there" ] || give_up "the demo's digest is $there, not $here"

[ $# -gt 0 ] || exit 0

# The remaining code does not depend on the processor. It is built as a whole workspace, because single packages get other features of their
# dependencies.
step $cargo test --quiet --workspace --lib -- host:: bucket:: engine:: units:: "${skip[@]}"
# Tests that start the program. Those of cli and resume follow below; the others do not depend on the processor.
starting=(cli:: resume:: resume_compare:: ranks:: run_dir:: faults:: data:: aliases:: newcomer:: readme:: chat:: evaluation:: tensorboard::
  fake_gpus:: packing:: report:: selftest:: tokens_per_step:: the_program_shows_a_tree each_condition)
# Fewer random models and kills than on a fast machine.
step env SUPEROFFLOAD_CASES=10 $cargo test --quiet --workspace --test main --test alloc --test recorded -- "${skip[@]}" \
  "${starting[@]/#/--skip=}"
# These tests run on this machine, and start the program in the emulator. The tests skip the phase that checks when an emulated program has
# installed its signal handlers, which is not visible from outside. A time measurement would measure the emulator.
emulated=(SUPEROFFLOAD_EMULATOR="$PWD/$emulate" SUPEROFFLOAD_PROGRAMS="$(realpath "$built")" SUPEROFFLOAD_KILLS=3)
step env "${emulated[@]}" cargo test --quiet --workspace --test main -- cli:: resume:: --skip=cli::a_probe_measures
step env "${emulated[@]}" cargo test --quiet --workspace --test recorded
