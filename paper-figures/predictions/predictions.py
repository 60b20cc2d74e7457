#!/usr/bin/env python3
"""Predictions that were committed before their measurement. Needs no package.

    predictions.py predict PROGRAM [NAME...]   simulate each run of runs.txt by the shipped profile, and write predicted.jsonl
    predictions.py measure PROGRAM [NAME...]   time each run on this machine, and append to measured.jsonl (or to the file MEASURED names)
    predictions.py table                       print a row for each measured run, the median error and the largest

The profile was measured on another machine of the same kind, on other days. A measured run is planned as for every user.
"""

import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROFILE = "h200-pcie5"
STEPS = ["--warmup", "2", "--steps", "4"]


def runs(names):
    lines = [shlex.split(line) for line in (HERE / "runs.txt").read_text().splitlines() if not line.startswith("#")]
    return {name: flags for name, *flags in lines if name in names or not names}


def call(program, command, flags, seconds):
    """Run a command of the program. Returns its JSON line and the text of its error, one of which is None."""
    try:
        done = subprocess.run([program, *command, *STEPS, *flags], cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, f"no result in {seconds} s"
    if done.returncode:
        return None, done.stderr.strip().splitlines()[-1]
    return json.loads(done.stdout.splitlines()[-1]), None


def predict(program, names):
    with open(HERE / "predicted.jsonl", "w") as out:
        for name, flags in runs(names).items():
            line, error = call(program, ["simulate", "--json", "--hardware", PROFILE], flags, 600)
            if error:
                sys.exit(f"{name}: {error}")
            record = {"bench": "predicted", "name": name, "flags": shlex.join(flags), "hardware": PROFILE}
            record |= {"step_ms": line["step_ms"]["median"], "git_commit": line["build"]["git_commit"]}
            print(json.dumps(record), file=out)
            print(f"{name}: {record['step_ms']:.1f} ms", flush=True)


def measure(program, names):
    for name, flags in runs(names).items():
        line, error = call(program, ["bench", "step"], flags, int(os.environ.get("SECONDS_EACH", "120")))
        record = {"bench": "measured", "name": name}
        if error:
            print(f"{name}: FAILED: {error}", flush=True)
            continue
        record |= {"step_ms": line["step_ms"], "unix_seconds": line["unix_seconds"], "git_commit": line["build"]["git_commit"]}
        record |= {key: line[key] for key in ("machine", "rates", "tokens_per_second", "verdicts")}
        record |= {"adam_gb_per_s": line["adam"]["busy_gb_per_s"], "power_w": (line["gpu"] or {}).get("power_w")}
        with open(os.environ.get("MEASURED", HERE / "measured.jsonl"), "a") as out:
            print(json.dumps(record), file=out)
        print(f"{name}: {record['step_ms']['median']:.1f} ms", flush=True)


def read(name):
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def table():
    measured = {line["name"]: line["step_ms"]["median"] for line in read("measured.jsonl")}
    errors = []
    for line in read("predicted.jsonl"):
        got = measured.get(line["name"])
        if got is None:
            print(f"| {line['name']} | {line['step_ms']:.0f} | not measured | |")
            continue
        errors.append(100 * (line["step_ms"] / got - 1))
        print(f"| {line['name']} | {line['step_ms']:.0f} | {got:.0f} | {errors[-1]:+.1f} % |")
    sizes = [abs(error) for error in errors]
    print(f"median {statistics.median(sizes):.1f} %, largest {max(sizes):.1f} %, {len(sizes)} runs")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["predict", program, *names]:
            predict(program, names)
        case ["measure", program, *names]:
            measure(program, names)
        case ["table"]:
            table()
        case _:
            sys.exit(__doc__)
