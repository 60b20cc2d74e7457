"""Trains the model of figure E in PyTorch with AdamW's moments in three formats: float32, this program's 8 bits, and FlashOptim's 8 bits.

    python3 formats.py --seeds 1 2 3 --moments float32 int8 flashoptim --out results/formats.jsonl

Needs a GPU, torch, transformers and tokenizers, and the text of figure D. The formats are emulated: a step computes moments in float32 and
rounds them to the values that the format can store. The model, the settings and the text equal those of figure E; rows are drawn in another
order than by the program.
"""

import argparse
import json
import math
import pathlib
import time

import torch
import transformers
from tokenizers import Tokenizer

FIGURES = pathlib.Path(__file__).resolve().parents[1]
STEPS, ROWS, LENGTH, WARMUP = 2000, 7, 512, 200
RATE, BETA1, BETA2, EPS, DECAY, NORM = 1e-3, 0.9, 0.999, 1e-8, 0.1, 1.0
BLOCK = 32
ALIGN = 128  # Tensors start at multiples, so that no block holds elements of two tensors.


def tokens(name):
    made = Tokenizer.from_file(str(FIGURES / "fig-e_moments-in-16-bits/data/tokenizer.json"))
    end = made.token_to_id("<|endoftext|>")
    texts = [json.loads(line)["text"] for line in (FIGURES / f"fig-d_fp8-accuracy/data/{name}.jsonl").read_text().splitlines()]
    ids = [id for encoding in made.encode_batch(texts) for id in [*encoding.ids, end]]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH).cuda()


def int8(m, v):
    """Shared exponents: 4 exponent and 3 mantissa bits of m to nearest, 5 and 3 of v by random bits. Codes are never zero beside others."""
    bits = v.view(torch.int32).view(-1, BLOCK)
    bits = bits + torch.randint_like(bits, 1 << 20)
    e = (bits.amax(1, keepdim=True) >> 23).clamp(min=31) - 31
    v = ((((bits >> 20) - 8 * e).clamp(0, 255) + 8 * e) << 20).view(-1).view(torch.float32)
    bits = m.view(torch.int32).view(-1, BLOCK)
    size = (bits & 0x7FFFFFFF) + 0x80000
    e = (size.amax(1, keepdim=True) >> 23).clamp(min=15) - 15
    code = ((size >> 20) - 8 * e).clamp(0, 127)
    m = torch.where(code > 0, (bits & -0x80000000) | (code + 8 * e) << 20, 0).view(-1).view(torch.float32)
    return m, v


def flashoptim(m, v):
    """Scales in float16: m as int8 of 2x / (1 + |x|), v as uint8 of its root, both to nearest. Codes of v may be zero."""
    blocks = m.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12).half().float().clamp(min=6e-8)
    x = (blocks / scale).clamp(-1, 1)
    code = (127 * (2 * x / (1 + x.abs()))).round() / 127
    m = (code / (2 - code.abs()) * scale).view(-1)
    roots = v.sqrt().view(-1, BLOCK)
    scale = roots.amax(1, keepdim=True).clamp(min=1e-12).half().float().clamp(min=6e-8)
    v = ((255 * (roots / scale).clamp(0, 1)).round() / 255 * scale).square().view(-1)
    return m, v


FORMATS = {"float32": lambda m, v: (m, v), "int8": int8, "flashoptim": flashoptim}


class Trained:
    """The model with its parameters, gradients and moments as flat tensors. A step is one CUDA graph."""

    def __init__(self, seed, moments):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.from_pretrained(FIGURES / "fig-e_moments-in-16-bits/data")
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).cuda().bfloat16()
        parameters = sorted(self.model.parameters(), key=lambda p: p.dim() < 2)
        starts, total = [], 0
        for p in parameters:
            starts.append(total)
            total += (p.numel() + ALIGN - 1) // ALIGN * ALIGN
        self.weights = torch.zeros(total, dtype=torch.bfloat16, device="cuda")
        self.grads = torch.zeros_like(self.weights)
        self.decayed = next(start for p, start in zip(parameters, starts) if p.dim() < 2)
        for p, start in zip(parameters, starts):
            view = self.weights[start : start + p.numel()].view_as(p)
            view.copy_(p.data)
            p.data = view
            p.grad = self.grads[start : start + p.numel()].view_as(p)
        self.masters = self.weights.float()
        self.m, self.v = torch.zeros_like(self.masters), torch.zeros_like(self.masters)
        self.ids = torch.zeros((ROWS, LENGTH), dtype=torch.int64, device="cuda")
        self.rate, self.step = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
        self.loss, self.largest = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
        self.adamw = torch.compile(self.update(FORMATS[moments]))

    def update(self, rounded):
        def adamw(masters, grads, m, v, rate, step):
            grads = grads.float()
            grads = grads * (NORM / (grads.norm() + 1e-6)).clamp(max=1.0)
            m, v = BETA1 * m + (1 - BETA1) * grads, BETA2 * v + (1 - BETA2) * grads * grads
            update = m / (1 - BETA1**step) / ((v / (1 - BETA2**step)).sqrt() + EPS)
            decay = torch.where(torch.arange(masters.numel(), device=masters.device) < self.decayed, DECAY, 0.0)
            return masters - rate * (update + decay * masters), *rounded(m, v), update.abs().amax()

        return adamw

    def work(self):
        self.grads.zero_()
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        with torch.no_grad():
            self.step += 1
            masters, m, v, largest = self.adamw(self.masters, self.grads, self.m, self.v, self.rate, self.step)
            for old, new in ((self.masters, masters), (self.m, m), (self.v, v), (self.weights, masters), (self.loss, loss)):
                old.copy_(new)
            self.largest.copy_(torch.maximum(self.largest, largest))

    def captured(self):
        """Warms up on copies of the state, restores it, and captures the graph."""
        state = [t.clone() for t in (self.weights, self.masters, self.m, self.v, self.step, self.largest)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.work()
        torch.cuda.synchronize()
        for t, old in zip((self.weights, self.masters, self.m, self.v, self.step, self.largest), state):
            t.copy_(old)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.work()
        return graph

    @torch.no_grad()
    def evaluated(self, rows):
        losses = [self.model(input_ids=part, labels=part).loss * len(part) for part in rows.split(32)]
        return (sum(losses) / len(rows)).item()


def rate(step):
    if step < WARMUP:
        return RATE * step / WARMUP
    return RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def run(seed, moments, train, held_out, out):
    began = time.time()
    trained = Trained(seed, moments)
    graph = trained.captured()
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    for step in range(1, STEPS + 1):
        trained.ids.copy_(train[order[(step - 1) * ROWS : step * ROWS].cuda()])
        trained.rate.fill_(rate(step - 1))
        graph.replay()
        if step % 200 == 0:
            line = {"bench": "formats evaluation", "moments": moments, "seed": seed, "step": step, "eval_loss": trained.evaluated(held_out)}
            line |= {"train_loss": trained.loss.item(), "largest_update": trained.largest.item()}
            print(json.dumps(line), file=out, flush=True)
    line |= {"bench": "formats", "torch": torch.__version__, "transformers": transformers.__version__, "gpu": torch.cuda.get_device_name()}
    line |= {"unix_seconds": int(time.time()), "seconds": round(time.time() - began, 1), "rows": len(train)}
    print(json.dumps(line), file=out, flush=True)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--moments", nargs="+", choices=FORMATS, default=list(FORMATS))
    arguments.add_argument("--out", default="results/formats.jsonl")
    given = arguments.parse_args()
    train, held_out = tokens("train"), tokens("eval")
    with open(given.out, "a") as out:
        for seed in given.seeds:
            for moments in given.moments:
                run(seed, moments, train, held_out, out)


if __name__ == "__main__":
    main()
