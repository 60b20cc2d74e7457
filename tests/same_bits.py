"""Whether programs of different commits train the same bits: trains the demo and every early preset, made small, in many ways with each. Rollback by algebra is
left out: how often it rounds depends on time.

    python3 tests/same_bits.py OLD NEW [NEW...] >>tests/campaigns/same-bits.jsonl

The programs are built by hand, for instance by `tests/build.sh COMMIT`. Leaves a JSON line with the digests of OLD, names each case on
stderr whose digests differ, and exits with 1 then.
"""

import datetime
import json
import pathlib
import subprocess
import sys
import tempfile

PRESETS = pathlib.Path(__file__).parent.parent / "src/model/presets"
SETTINGS = {
    "as it is": [],
    "zero-offload": ["--strategy=zero-offload"],
    "float16": ["--dtype=float16"],
    "streamed": ["--weights=flow"],
    "every state on the CPU": ["--resident-buckets=0"],
    "every state resident": ["--resident-buckets=all"],
    "recomputed": ["--activations=recompute-block"],
    "one thread": ["--threads=1"],
    "scalar": ["--isa=scalar"],
    "clipped always": ["--max-grad-norm=0.001"],
    "never clipped": ["--max-grad-norm=1000"],
    "two micro-batches": ["--gradient-accumulation-steps=2"],
    "small buckets": ["--bucket-mib=0.05"],
    "without speculation": ["--without=stv"],
    "without order": ["--without=deadline-order"],
    "without early commits": ["--without=early-commit"],
    "without weight flow": ["--without=weight-flow"],
}


def small(preset, directory):
    """Two layers and a 32nd of the width."""
    config = json.loads((PRESETS / f"{preset}.json").read_text())
    gpt = config["model_type"] == "gpt2"
    keys = {"n_layer": 2, "n_embd": 96, "n_head": 4, "n_positions": 64, "vocab_size": 256} if gpt else {
        "num_hidden_layers": 2,
        "hidden_size": config["hidden_size"] // 32,
        "intermediate_size": config["intermediate_size"] // 32,
        "head_dim": 16,
        "num_attention_heads": config["num_attention_heads"] // 4,
        "num_key_value_heads": config["num_key_value_heads"] // 4,
        "vocab_size": 256,
    }
    directory.mkdir()
    (directory / "text.txt").write_bytes((PRESETS.parents[2] / "LICENSE-APACHE").read_bytes())
    (directory / "config.json").write_text(json.dumps({**config, **keys}))
    return ["--model", str(directory), "--init=random", "--tokenizer=bytes", f"--data={directory / 'text.txt'}", "--seq-length=32"]


def digest(program, flags):
    with tempfile.TemporaryDirectory() as output:
        command = [program, "train", "--device=cpu", "--max-steps=10", "--digest", f"--output-dir={output}/run", *flags]
        run = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in run.stdout.splitlines() if line.startswith("digest: ")]
    return lines[0].removeprefix("digest: ") if run.returncode == 0 and lines else f"exit {run.returncode}: {run.stderr.strip()[-200:]}"


def main(programs):
    versions = [subprocess.run([program, "--version"], capture_output=True, text=True).stdout.split("\n")[0] for program in programs]
    with tempfile.TemporaryDirectory() as models:
        cases = {f"demo, {name}": flags for name, flags in SETTINGS.items()}
        for preset in ["qwen3-4b", "llama-8b", "qwen3-14b", "gpt-5b"]:
            cases[f"{preset}, two small layers"] = small(preset, pathlib.Path(models) / preset)
        found = {name: [digest(program, flags) for program in programs] for name, flags in cases.items()}
    differ = {name: digests for name, digests in found.items() if len(set(digests)) > 1 or len(digests[0]) != 64}
    for name, digests in differ.items():
        print(f"{name}: {digests}", file=sys.stderr)
    digests = {name: digests[0] for name, digests in found.items()}
    print(json.dumps({"date": str(datetime.date.today()), "programs": versions, "steps": 10, "digests": digests, "differ": len(differ)}))
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
