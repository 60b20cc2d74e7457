"""torch's and DeepSpeed's AdamW on the CPU, in lines with the fields of `host_adam`'s, to be run beside it in turns.

    python3 microbench/compare/adam.py --params 1073741824 --threads 16

Needs torch; DeepSpeed (`pip install deepspeed`, and a C++ compiler for its kernel) only for its row. Both step fp32 parameters
with fp32 gradients and write no 16-bit weights: 28 bytes a parameter, as many as this engine's step from 16-bit gradients to
16-bit weights. A small step is compared with float64 arithmetic before anything is timed.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time

BYTES_PER_PARAM = 28
HYPER = dict(lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def torch_fused(torch, params):
    return torch.optim.AdamW(params, fused=True, **HYPER)


def deepspeed(torch, params):
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, **HYPER)


def machine():
    with open("/proc/cpuinfo") as lines:
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), None)
    return {"cpu": cpu, "arch": platform.machine(), "usable_cpus": len(os.sched_getaffinity(0)), "kernel": platform.release()}


def verify(torch, make):
    """The first step of AdamW in float64: m and v hold one gradient, so that their ratio is its sign."""
    start, grad = torch.linspace(-1, 1, 4096), torch.linspace(-3, 5, 4096)
    param = torch.nn.Parameter(start.clone())
    param.grad = grad.clone()
    make(torch, [param]).step()
    wide = start.double() * (1 - HYPER["lr"] * HYPER["weight_decay"]) - HYPER["lr"] * grad.double() / (grad.double().abs() + HYPER["eps"])
    assert torch.allclose(param.detach().double(), wide, rtol=0, atol=2e-7), "the step is not AdamW's"


def measure(torch, name, make, params, seconds):
    verify(torch, make)
    param = torch.nn.Parameter(torch.full((params,), 0.01))
    param.grad = torch.full((params,), 1e-3)
    optimizer = make(torch, [param])
    optimizer.step()
    times, started = [], time.perf_counter()
    while not times or time.perf_counter() - started < seconds:
        begun = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begun)
    median = statistics.median(times)
    return {
        "bench": "compare_adam", "unix_seconds": int(time.time()), "machine": machine(),
        "settings": {"params": params, "threads": torch.get_num_threads(), "seconds": seconds},
        "pass": "step", "kernels": name, "threads": torch.get_num_threads(), "jobs": len(times), "bucket_params": params,
        "bytes_per_param": BYTES_PER_PARAM, "gparam_s": params * len(times) * 1e-9 / sum(times), "median_gparam_s": params * 1e-9 / median,
        "gb_s": BYTES_PER_PARAM * params * len(times) * 1e-9 / sum(times),
    }


def import_torch(threads):
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        import torch
    except ImportError as error:
        sys.exit(f"{error}: pip install torch")
    torch.set_num_threads(threads)
    return torch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=1 << 30)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    torch = import_torch(options.threads)
    for name, make in (("torch " + torch.__version__ + " fused", torch_fused), ("deepspeed", deepspeed)):
        try:
            print(json.dumps(measure(torch, name, make, options.params, options.seconds)), flush=True)
        except ImportError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
