#!/usr/bin/env bash
# What only a machine with a GPU can show, without cargo:
#
#   tests/gpu/verify.sh DIR [CHECK...]
#
# DIR holds the program `superoffload` and the test binary `main`, whose path `cargo test --release --no-run` prints. Runs the program's
# conformance suite, and that of several GPUs, which says how much it skipped where there is one, also as GPUs that cannot read each other's
# memory; kernels in small sizes, and all GPUs, under tools of compute-sanitizer; trainings on the GPU that are killed and go on to the same
# bits; and, where there are four GPUs, the program on one, two and four, whose ranks fail, stand still and are stopped. Prints a line for each;
# exits 1 if one failed or could not be run. CHECK: only those of conformance, peers, peers-staged, memcheck, memcheck-peers, initcheck,
# racecheck, racecheck-attention, racecheck-tables, killed-runs, ranks.
# SECONDS_EACH=N ends each after N seconds (600). CUDA_LIBRARIES=DIR has NVIDIA's libraries there, a newer cuBLAS for example, come first.
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

# check NAME COMMAND...: runs it, says how it ended, and shows the end of its log if it failed.
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

# Where it is neither on the PATH nor in the usual place, running it fails and says so.
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
# sanitize CHECK ARGUMENT...: a tool, or a tool and what it gets.
sanitize() { check "$1" "$sanitizer" --tool "${1%%-*}" --error-exitcode 1 "${suite[@]}" --small "${@:2}"; }
sanitize memcheck kernels
sanitize memcheck-peers peers/all
sanitize initcheck kernels
# Only kernels that are ours: it reports hazards in cuDNN's (9.19), and takes minutes for cuBLASLt's products and for the plain attention,
# of which it gets two shapes.
sanitize racecheck kernels --skip kernels/matmul --skip kernels/attention --skip "by cuBLASLt"
sanitize racecheck-attention --attention plain "2x64 tokens" "3x70 tokens"
# It ends in cuBLASLt's products of experts with an error of its own (2025.3): the kernels that write their tables run alone where there is no row.
if [ -n "${CUDA_LIBRARIES:-}" ]; then
  sanitize racecheck-tables "segments [0, 0, 0], by cuBLASLt"
elif [[ " ${wanted[*]} " == *" racecheck-tables "* ]]; then
  echo "skipped racecheck-tables: CUDA_LIBRARIES names no cuBLASLt from 13.8 on"
fi

# Of the tests that start the program those that compare a device with itself.
export SUPEROFFLOAD_PROGRAMS=$dir SUPEROFFLOAD_DEVICE=cuda
check killed-runs "$dir/main" --test-threads=1 resume::kill_9 resume::gradient_accumulation resume::a_run_whose_weights_stream \
  faults::a_step faults::a_worker faults::data_that run_dir::a_second
if [ "$(nvidia-smi -L | wc -l)" -ge 4 ]; then
  check ranks "$dir/main" --test-threads=1 ranks::one_two ranks::a_run ranks::devices_that ranks::a_rank_that_fails_leaves ranks::whom ranks::a_signal
fi

exit $failed
