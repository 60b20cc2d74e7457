"""`superoffload.torch.CPUAdamW` beside torch's and DeepSpeed's AdamW on the CPU, in turns in one process: a JSON line for each.

    python3 microbench/compare/bench_cpu_adam.py --params 100000000 --threads 16

Parameters are float32, in the shapes of a decoder. Two cases: float32 gradients; and bfloat16 gradients, which the others must widen first
(the widening is in their times). DeepSpeed (`pip install deepspeed`, and a C++ compiler) is left out where it cannot be imported, and stderr
says so. Before anything is timed, all optimizers step the same small parameters and must agree.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time

import adam


def ours(torch, params):
    from superoffload.torch import CPUAdamW

    return CPUAdamW(params, **adam.HYPER)


def torch_foreach(torch, params):
    return torch.optim.AdamW(params, foreach=True, **adam.HYPER)


MAKERS = {"superoffload": ours, "torch fused": adam.torch_fused, "torch foreach": torch_foreach, "deepspeed": adam.deepspeed}


def machine(torch):
    return {**adam.machine(), "python": platform.python_version(), "torch": torch.__version__}


def shapes(params):
    """Of decoder layers, a dozen or so, until about `params` are reached."""
    width = 64
    while 12 * 13 * (2 * width) ** 2 <= params:
        width *= 2
    layer = [(width,), (3 * width, width), (width, width), (width,), (4 * width, width), (4 * width, width), (width, 4 * width)]
    of_layer = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in layer)
    return layer * max(1, round(params / of_layer))


class Contender:
    """Parameters of its own and their optimizer."""

    def __init__(self, torch, name, shapes, dtype):
        self.torch, self.name = torch, name
        make = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(shape, generator=make)) for shape in shapes]
        self.grads = [(1e-3 * torch.randn(shape, generator=make)).to(dtype) for shape in shapes]
        takes_any = name == "superoffload" and hasattr(torch.Tensor, "grad_dtype")
        self.widens = dtype != torch.float32 and not takes_any
        for param, grad in zip(self.params, self.grads):
            if takes_any:
                param.grad_dtype = dtype
            if not self.widens:
                param.grad = grad
        self.optimizer = MAKERS[name](torch, self.params)

    def step(self):
        if self.widens:
            for param, grad in zip(self.params, self.grads):
                param.grad = grad.to(self.torch.float32)
        self.optimizer.step()


def verify(torch, names):
    contenders = [Contender(torch, name, [(33, 65), (7,)], torch.float32) for name in names]
    for contender in contenders:
        contender.step()
        for param, first in zip(contender.params, contenders[0].params):
            assert torch.allclose(param, first, rtol=1e-6, atol=1e-7), f"{contender.name} steps otherwise than {contenders[0].name}"


def measure(torch, names, params, dtype, rounds, facts):
    contenders = [Contender(torch, name, shapes(params), dtype) for name in names]
    times = {name: [] for name in names}
    for turn in range(rounds + 2):
        for contender in contenders:
            began = time.perf_counter()
            contender.step()
            if turn >= 2:
                times[contender.name].append(time.perf_counter() - began)
    elems = sum(param.numel() for param in contenders[0].params)
    for contender in contenders:
        median = statistics.median(times[contender.name])
        line = {
            "bench": "cpu_adamw", "unix_seconds": int(time.time()), "machine": facts, "optimizer": contender.name, "threads": torch.get_num_threads(),
            "params": elems, "tensors": len(contender.params), "grads": str(dtype).split(".")[-1], "widens_first": contender.widens,
            "steps": rounds, "median_ms": round(1e3 * median, 3), "best_ms": round(1e3 * min(times[contender.name]), 3),
            "gparam_s": round(elems * 1e-9 / median, 4), "of_superoffload": round(median / statistics.median(times[names[0]]), 3),
        }  # fmt: skip
        print(json.dumps(line), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch = adam.import_torch(options.threads)
    names = []
    for name, make in MAKERS.items():
        try:
            make(torch, [torch.nn.Parameter(torch.zeros(1))])
            names.append(name)
        except ImportError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)
    if names[0] != "superoffload":
        sys.exit("superoffload.torch cannot be imported: install the wheel that packaging/build.sh makes")
    verify(torch, names)
    for dtype in (torch.float32, torch.bfloat16):
        measure(torch, names, options.params, dtype, options.rounds, machine(torch))


if __name__ == "__main__":
    main()
