#!/usr/bin/env bash
# Runs the thread interactions in every order that the memory model allows, with loom: `tests/threads/loom.sh OUT [PREEMPTIONS]`.
# PREEMPTIONS is the maximum number of involuntary thread switches in an execution; 2 by default, because more take hours. Replaces the JSON
# lines of an earlier run in OUT by one line per test. Exits with 1 if a test fails.
set -euo pipefail
out=$(realpath "${1:?usage: loom.sh OUT [PREEMPTIONS]}") preemptions=${2:-2}
cd "$(dirname "$0")/../.."
# A separate build folder, because the flag applies to all crates.
export RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/loom
binary=$(cargo test --no-run --lib --no-default-features 2>&1 | tee /dev/stderr | sed -n 's/^ *Executable .* (\(.*\))$/\1/p')
tool="loom $(sed -n '/^name = "loom"$/{n;s/version = "\(.*\)"/\1/p}' Cargo.lock)"
touch "$out"
sed -i '/"tool":"loom /d' "$out"
failures=0
for name in $("$binary" --list interleavings:: | sed -n 's/: test$//p'); do
  start=$SECONDS failed=0
  log=$(LOOM_LOG=info LOOM_MAX_BRANCHES=10000 LOOM_MAX_PREEMPTIONS=$preemptions \
    "$binary" --exact "$name" --nocapture 2>&1) || { failed=1; tail -n 20 <<<"$log" >&2; }
  failures=$((failures + failed))
  runs=$(sed -n 's/.*Completed in \([0-9]*\) iterations.*/\1/p' <<<"$log")
  printf '{"date":"%s","commit":"%s","tool":"%s","rust":"%s","tests":"%s","with":"at most %s preemptions","runs":%s,"failures":%s,"seconds":%s}\n' \
    "$(date -u +%F)" "$(git rev-parse HEAD)" "$tool" "$(rustc --version)" "$name" "$preemptions" "${runs:-0}" "$failed" \
    "$((SECONDS - start))" >>"$out"
done
exit $((failures > 0))
