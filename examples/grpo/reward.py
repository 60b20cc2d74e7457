"""Gives each sample the advantage of its reward over those of its prompt. The reward is the share of vowels in the text."""

import json
import statistics
import sys

samples = [json.loads(line) for line in sys.stdin]
for sample in samples:
    sample["reward"] = sum(letter in "aeiou" for letter in sample["completion"]) / len(sample["completion_ids"])
for sample in samples:
    group = [other["reward"] for other in samples if other["prompt"] == sample["prompt"]]
    sample["advantage"] = (sample["reward"] - statistics.mean(group)) / (statistics.pstdev(group) + 1e-4)
    print(json.dumps(sample))
print(f"mean reward {statistics.mean(sample['reward'] for sample in samples):.3f}", file=sys.stderr)
