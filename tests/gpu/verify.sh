#!/usr/bin/env bash
# Checks that need a GPU, without cargo:
#
#   tests/gpu/verify.sh DIR [CHECK...]
#
# DIR has the program `superoffload` and the test binary `main`, whose path `cargo test --release --no-run` prints. The script runs:
# - the program's conformance suite
# - the conformance suite for several GPUs, also with peer access disabled; on one GPU it reports the number of skipped cases
# - small kernels, and all GPUs, under compute-sanitizer
# - GPU trainings that are killed and resume bit-identically
# - on four GPUs: runs with one, two and four ranks, in which ranks fail, stall and are stopped
#
# Prints a line for each check. Exits with 1 if a check fails or cannot run. CHECK selects from conformance, peers, peers-staged, memcheck,
# memcheck-peers, initcheck, racecheck, racecheck-attention, racecheck-tables, killed-runs, ranks. SECONDS_EACH=N is the time limit of a
# check (600). CUDA_LIBRARIES=DIR is searched first for NVIDIA's libraries, for example for a newer cuBLAS.
set -euo pipefail

dir=$(cd "${1:?usage: tests/gpu/verify.sh DIR [CHECK...]}" && pwd)
all=(conformance peers peers-staged memcheck memcheck-peers initcheck racecheck racecheck-attention racecheck-tables killed-runs ranks)
wanted=("${@:2}")
[ ${#wanted[@]} -gt 0 ] || wanted=("${all[@]}")
for name in "${wanted[@]}"; do
  [[ " ${all[*]} " == *" $name "* ]] || { echo "no check is called $name; there are ${all[*]}"; exit 2; }
done
logs=$(mktemp -d)
failed=0

# check NAME COMMAND...: runs the command, prints the outcome, and prints the end of its log after a failure.
check() {
  local name=$1 began=$SECONDS code=0
  shift
  [[ " ${wanted[*]} " == *" $name "* ]] || return 0
  timeout "${SECONDS_EACH:-600}" "$@" >"$logs/$name" 2>&1 || code=$?
  if [ $code = 0 ]; then
    echo "ok      $name ($((SECONDS - began)) s): $(grep -E 'passed|ERROR SUMMARY|hazards' "$logs/$name" | tail -n 2 | tr '\n' ' ')"
  else
    failed=1
    echo "FAILED  $name (exit $code, $((SECONDS - began)) s)"
    tail -n 15 "$logs/$name"
  fi
}

suite=("$dir/superoffload" selftest --device cuda --require-gpu ${CUDA_LIBRARIES:+--cuda-libraries "$CUDA_LIBRARIES"})
check conformance "${suite[@]}" --skip peers/
check peers "${suite[@]}" peers/
cc -shared -fPIC -o "$logs/no_peers.so" "$(dirname "$0")/no_peers.c"
check peers-staged env LD_PRELOAD="$logs/no_peers.so" "${suite[@]}" peers/

# If compute-sanitizer is neither on PATH nor in its usual place, the check fails with that message.
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
# sanitize CHECK ARGUMENT...: runs a tool of compute-sanitizer. CHECK begins with the tool's name.
sanitize() { check "$1" "$sanitizer" --tool "${1%%-*}" --error-exitcode 1 "${suite[@]}" --small "${@:2}"; }
sanitize memcheck kernels
sanitize memcheck-peers peers/all
sanitize initcheck kernels
# Only this project's kernels: racecheck reports hazards in cuDNN's kernels (9.19), and takes minutes for cuBLASLt's products and for the
# plain attention. Two shapes of the plain attention are checked separately.
sanitize racecheck kernels --skip kernels/matmul --skip kernels/attention --skip "by cuBLASLt"
sanitize racecheck-attention --attention plain "2x64 tokens" "3x70 tokens"
# racecheck itself fails in cuBLASLt's grouped products (2025.3), so the kernels that write their tables run without any rows.
if [ -n "${CUDA_LIBRARIES:-}" ]; then
  sanitize racecheck-tables "segments [0, 0, 0], by cuBLASLt"
elif [[ " ${wanted[*]} " == *" racecheck-tables "* ]]; then
  echo "skipped racecheck-tables: CUDA_LIBRARIES names no cuBLASLt from 13.8 on"
fi

# Tests that start the program and compare a device with itself.
export SUPEROFFLOAD_PROGRAMS=$dir SUPEROFFLOAD_DEVICE=cuda
check killed-runs "$dir/main" --test-threads=1 resume::kill_9 resume::gradient_accumulation resume::a_run_whose_weights_stream \
  faults::a_step faults::a_worker faults::data_that run_dir::a_second
if [ "$(nvidia-smi -L | wc -l)" -ge 4 ]; then
  check ranks "$dir/main" --test-threads=1 ranks::one_two ranks::a_run ranks::devices_that ranks::a_rank_that_fails_leaves ranks::whom ranks::a_signal
fi

exit $failed
