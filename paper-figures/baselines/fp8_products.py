"""Recipes of FP8 by cuBLASLt, as PyTorch calls it: rates and errors of products of Llama-8B's layers, 4 x 4096 tokens.

A scale for each matrix, for each row, or for blocks: 1 x 128 of what enters and 128 x 128 of the weight. Sums in fp32 (no fast accumulation), as
the engine has them. Each rate is that of two seconds. Errors are of matrices with the outliers that models have: rows whose size differs, and
a few columns that are 30 times as large. One JSON line a product and recipe.
"""

import json
import sys
import time

import torch
import workload

TOKENS, SECONDS, BLOCK, E4M3 = 4 * 4096, 2.0, 128, torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SHAPES = {"qkv": (4096, 6144), "gate and up": (4096, 28672), "down": (14336, 4096)}


def narrowed(x, block):
    """x in 8 bits, and scales of blocks of `block` rows and columns."""
    rows, cols = block
    blocks = x.float().unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
    return (blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1).to(E4M3), scales


def tensor(x, w):
    (a, a_scale), (b, b_scale) = narrowed(x, x.shape), narrowed(w, w.shape)
    return lambda: torch._scaled_mm(a, b.t(), a_scale.squeeze(), b_scale.squeeze(), out_dtype=torch.bfloat16, use_fast_accum=False)


def row(x, w):
    (a, a_scale), (b, b_scale) = narrowed(x, (1, x.shape[1])), narrowed(w, (1, w.shape[1]))
    return lambda: torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=False)


def block(x, w):
    (a, a_scale), (b, b_scale) = narrowed(x, (1, BLOCK)), narrowed(w, (BLOCK, BLOCK))
    a_scale = a_scale.t().contiguous().t()
    return lambda: torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=False)


def bfloat16(x, w):
    return lambda: torch.mm(x, w.t())


def rate(product, flops):
    count, began = 0, time.time()
    while time.time() - began < SECONDS:
        for _ in range(8):
            product()
        torch.cuda.synchronize()
        count += 8
    return flops * count / (time.time() - began) / 1e12


def main(out):
    torch.manual_seed(0)
    for name, (k, n) in SHAPES.items():
        x = torch.randn(TOKENS, k, device="cuda") * torch.randn(TOKENS, 1, device="cuda").exp()
        x[:, torch.randperm(k, device="cuda")[: k // 1000]] *= 30
        x, w = x.bfloat16(), (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
        want = x.float() @ w.float().t()
        for recipe in (bfloat16, tensor, row, block):
            line = {"bench": "fp8 products", "product": name, "tokens": TOKENS, "k": k, "n": n, "recipe": recipe.__name__, "seconds": SECONDS}
            product = recipe(x, w)
            got = product().float()
            error = ((got - want).norm() / want.norm()).item()
            of_rows = ((got - want).norm(dim=1) / want.norm(dim=1)).median().item()
            line |= {"tflops": rate(product, 2 * TOKENS * k * n), "relative_error": error, "median_error_of_rows": of_rows}
            line |= {"machine": workload.machine(torch), "versions": {"torch": torch.__version__}}
            print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    main(open(sys.argv[1], "a") if len(sys.argv) > 1 else sys.stdout)
