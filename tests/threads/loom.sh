#!/usr/bin/env bash
# Runs what threads meet in, in every order that the memory model allows, by loom: `tests/threads/loom.sh [PREEMPTIONS]`, with
# at most so many switches between threads that could both go on, 2 unless told: beyond, hours.
# Prints a line of JSON for each test. Exits with 1 if one fails.
set -euo pipefail
cd "$(dirname "$0")/../.."
preemptions=${1:-2}
# A build of its own: the flag reaches every crate.
export RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/loom
binary=$(cargo test --no-run --lib --no-default-features 2>&1 | tee /dev/stderr | sed -n 's/^ *Executable .* (\(.*\))$/\1/p')
loom=$(sed -n '/^name = "loom"$/{n;s/version = "\(.*\)"/\1/p}' Cargo.lock)
failures=0
for name in $("$binary" --list interleavings:: | sed -n 's/: test$//p'); do
  start=$SECONDS failed=0
  log=$(LOOM_LOG=info LOOM_MAX_BRANCHES=10000 LOOM_MAX_PREEMPTIONS=$preemptions \
    "$binary" --exact "$name" --nocapture 2>&1) || { failed=1; tail -n 20 <<<"$log" >&2; }
  failures=$((failures + failed))
  runs=$(sed -n 's/.*Completed in \([0-9]*\) iterations.*/\1/p' <<<"$log")
  printf '{"date":"%s","commit":"%s","tool":"loom %s","test":"%s","preemptions":%s,"runs":%s,"failures":%s,"seconds":%s}\n' \
    "$(date -u +%F)" "$(git rev-parse HEAD)" "$loom" "$name" "$preemptions" "${runs:-0}" "$failed" "$((SECONDS - start))"
done
exit $((failures > 0))
