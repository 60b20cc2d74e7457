"""Speed of `OffloadAdamW` and `CPUAdamW` on this machine, in turns. `torch.sh` runs it; it prints a row for each measurement.

    tests/gpu/torch_rows.py [--model qwen3-4b] [--seconds N]

Rows of `OffloadAdamW`: a model of transformers with compiled layers and a limit of the norm that clips no step or each step, by default and without
speculation. The row "no sample" leaves out the sample that finds changes through .data. The rows of one optimizer take turns on it, so that they
differ in nothing else. A row for which no time is left is named. `CPUAdamW` steps 10,000 tensors of 16 elements with one thread, and so does torch's fused AdamW.
"""

import argparse
import contextlib
import gc
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "microbench/compare"))
import bench_offload_adamw as bench  # noqa: E402

from superoffload import _cpu_adam  # noqa: E402
from superoffload.torch import CPUAdamW, OffloadAdamW  # noqa: E402

WARMUP, STEPS, TURNS = 2, 4, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Unseen:
    """In place of the sample: sees nothing."""

    def __init__(self, *_):
        pass

    def changed(self):
        return set()


def without_sample():
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch("superoffload._offload.Seen", Unseen))
    stack.enter_context(mock.patch("superoffload._buckets.Part.note", lambda *_: None))
    return stack


# Name, limit of the norm, and a context.
ROWS = (("no step clipped", 1e3, contextlib.nullcontext), ("no sample", 1e3, without_sample), ("each step clipped", 1e-3, contextlib.nullcontext))


def offload_rows(options, ends):
    config = bench.MODELS[options.model]()
    model = bench.build(torch, config, options, DEVICE)
    _, flops, _ = bench.w.flops(config, model, options.batch, options.seq, options.checkpointing)
    ids = bench.batches(torch, config, options, DEVICE)
    for speculate in (True, False):
        name = "by default" if speculate else "without speculation"
        if time.monotonic() > ends - 60:
            print(f"LEFT OUT: {options.model} {name}: no time is left", flush=True)
            continue
        optimizer = OffloadAdamW(model.parameters(), **bench.HYPER, max_grad_norm=1.0, speculate=speculate)
        optimizer.overlap_forward(bench.w.layers_of(model))
        times = {row: [] for row, *_ in ROWS}
        lasts = {}
        for turn in range(TURNS):
            for row, limit, context in ROWS:
                if turn and time.monotonic() > ends - 30:
                    break
                # Speculation does not rest because of the steps of another row.
                optimizer.max_grad_norm, optimizer._history = limit, _cpu_adam.History()
                with context():
                    times[row] += steps(model, optimizer, ids, STEPS, WARMUP)
                lasts[row] = optimizer.last
        for row, _, _ in ROWS:
            last, median = lasts[row], statistics.median(times[row])
            print(
                f"{options.model} {options.batch} x {options.seq}, {name}, {row}: {flops / median / 1e9:.0f} TFLOP/s, step {median:.1f} ms "
                f"(of {len(times[row])}, least {min(times[row]):.1f}), exposed {last.exposed_ms:.1f} ms, {last.verdict}, "
                f"{last.speculated} buckets speculated",
                flush=True,
            )
        optimizer.synchronize()
        del optimizer
        gc.collect()


def steps(model, optimizer, ids, count, warmup):
    wait = torch.cuda.synchronize if DEVICE == "cuda" else int
    times = []
    for step in range(warmup + count):
        wait()
        began = time.perf_counter()
        batch = ids[step % len(ids)]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        wait()
        times.append(1e3 * (time.perf_counter() - began))
    return times[warmup:]


def small_tensors():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sides = {}
    for name, make in (("torch fused", lambda own: torch.optim.AdamW(own, fused=True)), ("CPUAdamW", lambda own: CPUAdamW(own, threads=1))):
        own = [torch.nn.Parameter(torch.ones(16)) for _ in range(10_000)]
        for param in own:
            param.grad = torch.full_like(param, 1e-3)
        sides[name] = make(own), []
    for _ in range(12):
        for optimizer, times in sides.values():
            began = time.perf_counter()
            optimizer.step()
            times.append(1e3 * (time.perf_counter() - began))
    torch.set_num_threads(threads)
    best = {name: min(times) for name, (_, times) in sides.items()}
    ratio = best["torch fused"] / best["CPUAdamW"]
    print("10,000 tensors of 16, 1 thread: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in best.items()) + f", ratio {ratio:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=bench.MODELS, default="qwen3-4b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=240, help="no row begins after this time")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    small_tensors()
    if DEVICE == "cpu" and options.model != "tiny":
        print(f"LEFT OUT: the rows of OffloadAdamW with {options.model}, because there is no GPU")
        return
    with bench.w.attention_by_cudnn(torch):
        offload_rows(options, ends)


if __name__ == "__main__":
    main()
