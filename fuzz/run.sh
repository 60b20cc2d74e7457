#!/usr/bin/env bash
# Coverage-guided fuzzing of one door for so many seconds: `fuzz/run.sh TARGET SECONDS`; without arguments the targets are named.
# Needs a nightly toolchain and cargo-fuzz (`cargo install cargo-fuzz --locked`). Inputs that it finds go to fuzz/found/TARGET, which
# git ignores; those that break something go to fuzz/artifacts/TARGET, and the script exits with 1. Ends with a line of JSON.
set -euo pipefail
cd "$(dirname "$0")"
[ $# -eq 2 ] || { echo "usage: fuzz/run.sh TARGET SECONDS; targets:"; ls corpus; exit 2; }
target=$1 seconds=$2
mkdir -p "found/$target"
log=$(mktemp)
code=0
export ASAN_OPTIONS=detect_leaks=0
# The limit of ten seconds allows for other work on the machine and for the slow sanitizer. Leaks are not searched for: a scope ends before its
# threads have freed their own memory, which the sanitizer reports as a leak. The line has CPU seconds, which are fewer than seconds beside
# other work. The sanitizer's stack frames are several times larger, so templates of the greatest allowed depth need a larger stack.
ulimit -s 1000000
cargo +nightly fuzz build --fuzz-dir . "$target" >&2
TIMEFORMAT='%U %S'
{
  time cargo +nightly fuzz run --fuzz-dir . "$target" "found/$target" "corpus/$target" -- \
    -max_total_time="$seconds" -timeout=10 -detect_leaks=0 -rss_limit_mb=1024 -max_len=8192 -print_final_stats=1 >"$log" 2>&1
} 2>"$log.time" || code=$?
tail -n 25 "$log" >&2
stat() { sed -n "s/^stat::$1: *//p" "$log" | tail -n 1; }
printf '{"date":"%s","commit":"%s","target":"%s","seconds":%s,"cpu_s":%.0f,"executions":%s,"peak_rss_mb":%s,"failures":%s,"compiler":"%s"}\n' \
  "$(date -u +%F)" "$(git rev-parse HEAD)" "$target" "$seconds" "$(awk '{ print $1 + $2 }' "$log.time")" \
  "$(stat number_of_executed_units)" "$(stat peak_rss_mb)" "$((code != 0))" "$(rustc +nightly --version)"
rm "$log" "$log.time"
exit $((code != 0))
