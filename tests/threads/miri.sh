#!/usr/bin/env bash
# Runs the tests of thread interactions and memory ownership under Miri, an interpreter that detects undefined behaviour, including data
# races: `tests/threads/miri.sh OUT [SEEDS]`. Each test runs once per seed, and seeds switch threads differently; 2 by default. Replaces the
# JSON lines of an earlier run in OUT by one line per group of tests. Exits with 1 if a test fails. Needs a nightly toolchain with the
# components miri and rust-src. Miri does not support system calls and vector instructions.
set -euo pipefail
out=$(realpath "${1:?usage: miri.sh OUT [SEEDS]}") seeds=${2:-2}
cd "$(dirname "$0")/../.."
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/miri
tool=$(cargo +nightly miri --version)
touch "$out"
sed -i '/"tool":"miri /d' "$out"
failures=0
for group in bucket:: engine::protocol::coordinator:: host::doorbell:: host::pool:: device::cpu::stream::; do
  start=$SECONDS failed=0 runs=0
  for ((seed = 0; seed < seeds; seed++)); do
    # Trace spans read the clock, which Miri's isolation forbids.
    log=$(MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-seed=$seed" cargo +nightly miri test --lib --no-default-features \
      --features stv,deadline-order,repartition,weight-flow -- "$group" 2>&1) || { ((failed += 1)); tail -n 60 <<<"$log" >&2; }
    runs=$((runs + $(grep -c '^test .* \.\.\. ok$' <<<"$log" || true)))
  done
  failures=$((failures + failed))
  printf '{"date":"%s","commit":"%s","tool":"%s","rust":"%s","tests":"%s","with":"%s seeds","runs":%s,"failures":%s,"seconds":%s}\n' \
    "$(date -u +%F)" "$(git rev-parse HEAD)" "${tool% (*}" "$(rustc +nightly --version)" "$group" "$seeds" "$runs" "$failed" \
    "$((SECONDS - start))" >>"$out"
done
exit $((failures > 0))
