#!/bin/sh
# Rounds of sampling, rewards and training: sh examples/grpo/rounds.sh DIR, in the repository's directory.
set -e
dir=$1
superoffload train examples/plain-text/config.yaml --device cpu --output-dir "$dir/round-0"
for round in 1 2 3 4 5; do
  before=$dir/round-$((round - 1))
  superoffload sample "$before" --json --temperature 1 --seed $round --samples 32 --max-new-tokens 24 --prompt "A " --prompt "The " |
    python3 examples/grpo/reward.py > "$dir/rollouts-$round.jsonl"
  superoffload export "$before" "$dir/model-$round"
  superoffload train examples/grpo/config.yaml --device cpu --model "$dir/model-$round" --data "$dir/rollouts-$round.jsonl" \
    --output-dir "$dir/round-$round"
done
