#!/usr/bin/env bash
# Measures the cost of a build and the size of the program. Appends a JSON line to tests/campaigns/build.jsonl for each COMMIT, or for HEAD.
#
#   tests/build.sh [COMMIT...]
#
# The cost is the compiler's CPU time for the crates of this repository in a release build, which other work on the machine hardly changes.
# Other crates are not counted. The program's size is measured with and without debug information. The build folder is target/build-record.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$PWD/tests/campaigns/build.jsonl
export CARGO_INCREMENTAL=0 CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target/build-record}
work=$(mktemp -d)
trap 'git worktree remove --force "$work/tree" 2>/dev/null || true; rm -rf "$work"' EXIT

# Cargo uses this wrapper for the compiler of the workspace's crates. It appends the compiler's CPU time in seconds to a file.
cat >"$work/rustc" <<'WRAPPER'
#!/usr/bin/env bash
TIMEFORMAT='%U %S'
exec 3>&2
{ time "$@" 2>&3; } 2>>"$TIMES"
WRAPPER
chmod +x "$work/rustc"
export RUSTC_WORKSPACE_WRAPPER=$work/rustc TIMES=$work/times

[ $# -gt 0 ] || set -- HEAD
for commit; do
  # A new path, for which Cargo has no cached builds of the workspace's crates.
  git worktree add --quiet --detach "$work/tree" "$commit"
  : >"$TIMES"
  (cd "$work/tree" && cargo build --quiet --release --locked --package superoffload --bin superoffload)
  program=$CARGO_TARGET_DIR/release/superoffload
  strip -o "$work/stripped" "$program"
  printf '{"date":"%s","commit":"%s","command":"tests/build.sh","rust":"%s","cpu":"%s","cores":%d,' \
    "$(date -u +%F)" "$(git -C "$work/tree" rev-parse HEAD)" "$(rustc --version)" \
    "$(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo | head -n 1)" "$(nproc)" >>"$out"
  printf '"compiler_cpu_s":%.0f,"program_bytes":%d,"stripped_bytes":%d,"lines_of_src":%d}\n' \
    "$(awk '{ sum += $1 + $2 } END { print sum }' "$TIMES")" "$(stat -c %s "$program")" "$(stat -c %s "$work/stripped")" \
    "$(find "$work/tree/src" -name '*.rs' -exec cat {} + | wc -l)" >>"$out"
  tail -n 1 "$out"
  git worktree remove --force "$work/tree"
done
