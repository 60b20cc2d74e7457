#!/usr/bin/env bash
# Runs what threads meet in, and what says whose memory is, under Miri, which interprets it and stops at undefined behaviour, data races
# among it: `tests/threads/miri.sh OUT [SEEDS]`, each test as often as there are seeds, 2 unless told, which switch threads differently.
# Leaves a line of JSON for each group of tests in OUT, in place of those of an earlier run. Exits with 1 if one fails.
# Needs a nightly toolchain with the components miri and rust-src. System calls and vector instructions are beyond Miri.
set -euo pipefail
out=$(realpath "${1:?usage: miri.sh OUT [SEEDS]}") seeds=${2:-2}
cd "$(dirname "$0")/../.."
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/miri
tool=$(cargo +nightly miri --version)
touch "$out"
sed -i '/"tool":"miri /d' "$out"
failures=0
for group in bucket:: engine::coordinator:: host::doorbell:: host::pool:: device::cpu::stream::; do
  start=$SECONDS failed=0 runs=0
  for ((seed = 0; seed < seeds; seed++)); do
    # Spans read the clock.
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
