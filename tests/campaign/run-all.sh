#!/usr/bin/env bash
# Makes the records of every campaign anew: `tests/campaign/run-all.sh OUT.jsonl [MINUTES [SEED]]`, 60 minutes unless told. Then, to
# publish: move OUT.jsonl to tests/campaigns/reliability.jsonl and write docs/reliability.md by `--report`, as this prints at the end.
# It wants the machine for itself: other work makes runs that wait for a moment miss it, and none fail.
set -euo pipefail
out=$(realpath "${1:?usage: run-all.sh OUT.jsonl [MINUTES [SEED]]}") minutes=${2:-60} seed=${3:-0}
cd "$(dirname "$0")/../.."
cargo build --release --bin superoffload
binary=$(cargo test --release --no-run --test superoffload-campaign 2>&1 | sed -n 's/^ *Executable .* (\(.*\))$/\1/p')
nice -n 19 "$binary" --all --minutes "$minutes" --seed "$seed" --program target/release/superoffload --out "$out" || true
echo "then: mv $out tests/campaigns/reliability.jsonl && $binary --report > docs/reliability.md"
