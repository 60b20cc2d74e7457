#!/usr/bin/env bash
# The Arm path on an x86-64 machine, in qemu's user mode: the library's tests of what the instruction set decides, the optimizer's for every
# length of SVE's vectors and without SVE, and the demo trained to the bits that this machine gets.
#
#   tests/aarch64/run.sh [--all]
#
# `--all`, a campaign of a quarter of an hour: the workspace's tests, too, and those that start the program.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -eq 0 ] || [ "$*" = --all ] || { echo "usage: tests/aarch64/run.sh [--all]" >&2; exit 2; }

cargo=tests/aarch64/cargo.sh
target=${CARGO_TARGET_DIR:-target}
built=$target/aarch64-unknown-linux-gnu/debug
emulate=tests/aarch64/emulate.sh
step() { printf '\n== %s (at %s s)\n' "$*" "$SECONDS"; timeout 30m "$@"; }
give_up() { echo "aarch64: $*" >&2; exit 1; }

# Minutes each in an emulator: large products of matrices, many models trained.
too_slow=(
  kernels::matmul::tests::every_layout_and_shape_agrees_with_f64
  kernels::matmul::tests::slabs_change_no_bit
  exactness::a_ring_of_gradients_changes_no_bit
  exactness::paged_states_change_no_bit
  exactness::streamed_weights_change_no_bit_and_come_once_a_pass
)
# In the emulator a program that is not there can be started, and exits with 127.
unlike=(tests::what_is_not_there_is_said)
# One test at a time: a process that the emulator forks while another of its threads holds a lock may wait for that lock for ever.
skip=(--test-threads=1 --skip=optim:: "${too_slow[@]/#/--skip=}" "${unlike[@]/#/--skip=}")

# The library's tests, and the program: a test of the workspace's needs it, and has it built with what tests add to the packages it uses.
step $cargo test --quiet --package superoffload --lib --test alloc --no-run

# Lengths in bytes: 16 is Grace's.
for cpu in max,sve-default-vector-length={16,32,64} max,sve=off; do
  step env SUPEROFFLOAD_QEMU_CPU="$cpu" $cargo test --quiet --package superoffload --lib -- optim::
done
step $cargo test --quiet --package superoffload --lib -- device::cpu:: dtype:: hardware:: "${skip[@]}"

# The compiler vectorises the passes. That it did so for vectors of any length in those that write 16-bit weights, as training's do,
# shows in the program: a square root each of step and speculate, two of the fused pass, for every format of gradients and weights.
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

# What is left is the same code as on the machine that builds it. Built as a whole: packages alone get other features of what they use.
step $cargo test --quiet --workspace --lib -- host:: bucket:: engine:: units:: "${skip[@]}"
# Tests that start the program: those of cli and resume follow below, the others say nothing of a processor.
starting=(cli:: resume:: resume_compare:: ranks:: run_dir:: faults:: data:: aliases:: newcomer:: readme:: chat:: evaluation:: tensorboard::
  fake_gpus:: packing:: report:: selftest:: tokens_per_step:: the_program_shows_a_tree each_condition)
# Fewer random models and kills than on a fast machine.
step env SUPEROFFLOAD_CASES=10 $cargo test --quiet --workspace --test main --test alloc --test recorded -- "${skip[@]}" \
  "${starting[@]/#/--skip=}"
# Tests that start the program run here, and only the program in the emulator. When handlers of signals are there is not to be seen of an
# emulated program: that phase is left out by its test. A measurement of seconds would be one of the emulator.
emulated=(SUPEROFFLOAD_EMULATOR="$PWD/$emulate" SUPEROFFLOAD_PROGRAMS="$(realpath "$built")" SUPEROFFLOAD_KILLS=3)
step env "${emulated[@]}" cargo test --quiet --workspace --test main -- cli:: resume:: --skip=cli::a_probe_measures
step env "${emulated[@]}" cargo test --quiet --workspace --test recorded
