#!/usr/bin/env bash
# Creates the records of all campaigns: `tests/campaign/run-all.sh OUT.jsonl [MINUTES [SEED]]`, 60 minutes by default. To publish the
# records, move OUT.jsonl to tests/campaigns/reliability.jsonl and write docs/reliability.md with `--report`; the script prints the commands
# at the end. Run it on an idle machine: other work makes runs miss the moment that they wait for, which does not make them fail.
set -euo pipefail
out=$(realpath "${1:?usage: run-all.sh OUT.jsonl [MINUTES [SEED]]}") minutes=${2:-60} seed=${3:-0}
cd "$(dirname "$0")/../.."
cargo build --release --bin superoffload
binary=$(cargo test --release --no-run --test superoffload-campaign 2>&1 | sed -n 's/^ *Executable .* (\(.*\))$/\1/p')
nice -n 19 "$binary" --all --minutes "$minutes" --seed "$seed" --program target/release/superoffload --out "$out" || true
echo "then: mv $out tests/campaigns/reliability.jsonl && $binary --report > docs/reliability.md"
