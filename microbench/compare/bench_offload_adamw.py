"""`superoffload.torch.OffloadAdamW` beside torch on the GPU alone, torchao's and DeepSpeed's offload: a JSON line for each, in turns.

    python3 microbench/compare/bench_offload_adamw.py --model qwen3-4b --batch 4 --seq 4096 --clip 1

Each system trains the same model from random weights, in a process of its own, with compiled layers. First, `check`: a small model must end in
one digest with and without speculation, and its losses must be those of torch's AdamW with float32 weights. A system that cannot be imported is
left out, and stderr says so. torchao cannot clip; its line has `clip` 0. FLOPs are the model's, attention counted as causal, as in
`paper-figures/baselines`, whose models and counts these are.
"""

import argparse
import datetime
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "paper-figures/baselines"))
import workload as w  # noqa: E402

HYPER = {"lr": w.LEARNING_RATE, "betas": w.BETAS, "eps": w.EPSILON, "weight_decay": w.WEIGHT_DECAY}
MODELS = {
    "qwen3-0.6b": lambda: w.qwen3(28, 1024, 3072, 16, 8, 151936),
    "qwen3-1.7b": lambda: w.qwen3(28, 2048, 6144, 16, 8, 151936),
    "qwen3-4b": w.WORKLOADS["W1"][0],
    "llama-8b": w.WORKLOADS["W2"][0],
    "tiny": w.WORKLOADS["tiny"][0],
}


class Plain:
    """Loss, backward, step."""

    def __init__(self, model):
        self.model = model

    def loss(self, ids):
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def step(self, ids):
        loss = self.loss(ids)
        loss.backward()
        self.update()
        return loss.detach()

    def facts(self):
        return {}


class Offload(Plain):
    def __init__(self, torch, model, options, speculate=True):
        from superoffload.torch import OffloadAdamW

        super().__init__(model)
        self.optimizer = OffloadAdamW(
            model.parameters(), **HYPER, max_grad_norm=options.clip, speculate=speculate, bucket_mib=options.bucket_mib, threads=options.threads
        )
        self.optimizer.overlap_forward(w.layers_of(model))
        self.exposed, self.verdicts, self.last = [], [], None

    def update(self):
        # Of the step before, whose weights forward has waited for by now.
        if self.last is not None:
            self.exposed.append(self.last.exposed_ms)
        self.optimizer.step()
        self.last = self.optimizer.last
        self.verdicts.append(self.last.verdict)

    def facts(self):
        return {
            "exposed_ms": {"median": statistics.median(self.exposed[2:] or self.exposed), "samples": self.exposed},
            "verdicts": self.verdicts, "buckets_speculated": self.last.speculated, "grad_norm": self.last.grad_norm,
            "threads": self.optimizer.threads,
        }  # fmt: skip


class Waits(Offload):
    """The same, every step after all its gradients."""

    def __init__(self, torch, model, options):
        super().__init__(torch, model, options, speculate=False)


class Gpu(Plain):
    """Everything on the GPU: float32 weights and moments by torch's fused AdamW."""

    def __init__(self, torch, model, options):
        super().__init__(model)
        self.torch, self.clip = torch, options.clip
        self.weights = list(model.parameters())
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        self.adam = torch.optim.AdamW(self.masters, fused=True, **HYPER)

    def update(self):
        if self.clip:
            self.torch.nn.utils.clip_grad_norm_(self.weights, self.clip)
        for weight, master in zip(self.weights, self.masters):
            master.grad, weight.grad = weight.grad.float(), None
        self.adam.step()
        self.adam.zero_grad()
        with self.torch.no_grad():
            self.torch._foreach_copy_(self.weights, self.masters)


class Torchao(Plain):
    """bfloat16 moments and no float32 weights, as it is used: it steps what it is given."""

    def __init__(self, torch, model, options):
        from torchao.optim import CPUOffloadOptimizer

        super().__init__(model)
        self.adam = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=False, fused=True, **HYPER)
        options.clip = 0.0

    def update(self):
        self.adam.step()
        self.adam.zero_grad()


class DeepSpeed(Plain):
    """ZeRO-2 with its optimizer on the CPU."""

    def __init__(self, torch, model, options):
        import deepspeed

        super().__init__(model)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
        params = {**HYPER, "betas": list(HYPER["betas"])}
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True}
        config = {
            "train_micro_batch_size_per_gpu": options.batch, "gradient_accumulation_steps": 1, "gradient_clipping": options.clip,
            "bf16": {"enabled": True}, "steps_per_print": 10**9, "optimizer": {"type": "AdamW", "params": params}, "zero_optimization": zero,
        }  # fmt: skip
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(self, ids):
        loss = self.engine(input_ids=ids, labels=ids, use_cache=False).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


SYSTEMS = {"superoffload": Offload, "superoffload waits": Waits, "gpu": Gpu, "torchao": Torchao, "deepspeed": DeepSpeed}


def build(torch, config, options, device):
    """A model in bfloat16 with compiled layers. Not `layer.compile()`, which would take the layers' hooks into the graph."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model.train()
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.compile:
        for layer in w.layers_of(model):
            layer.forward = torch.compile(layer.forward)
    return model


def batches(torch, config, options, device):
    make = torch.Generator().manual_seed(1)
    return [torch.randint(0, config.vocab_size, (options.batch, options.seq), generator=make).to(device) for _ in range(w.BATCHES)]


def check(torch, options, device):
    """Speculation changes no bit, and losses are those of torch's AdamW. The limit clips some of the steps."""
    small = argparse.Namespace(**{**vars(options), "compile": False, "batch": 2, "seq": 64, "bucket_mib": 0.25, "clip": 4.7})
    config, losses, digests, verdicts = MODELS["tiny"](), {}, {}, []
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in ("superoffload", "superoffload waits", "gpu"):
        model = build(torch, config, small, device)
        system = SYSTEMS[name](torch, model, small)
        ids = batches(torch, config, small, device)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            losses[name] = [system.step(ids[step % len(ids)]).item() for step in range(40)]
        if isinstance(system, Offload):
            system.optimizer.synchronize()
            verdicts += system.verdicts
        digest = hashlib.sha256()
        for param in model.parameters():
            digest.update(param.detach().cpu().view(torch.uint8).numpy().tobytes())
        digests[name] = digest.hexdigest()
    torch.use_deterministic_algorithms(False)
    apart = max(abs(one - other) for one, other in zip(losses["superoffload"], losses["gpu"]))
    line = {
        "bench": "offload_adamw_check", "device": device, "digests": digests, "verdicts": {word: verdicts.count(word) for word in set(verdicts)},
        "loss": {name: losses[name][-1] for name in losses}, "largest_loss_difference": apart,
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    if digests["superoffload"] != digests["superoffload waits"] or losses["superoffload"] != losses["superoffload waits"]:
        sys.exit("check: speculation changes bits")
    if not apart < 0.02:
        sys.exit(f"check: losses are {apart} from those of torch's AdamW")


def measure(torch, name, options, device):
    import transformers

    config = MODELS[options.model]()
    free = w.memory_available()
    model = build(torch, config, options, device)
    matrices, model_flops, _ = w.flops(config, model, options.batch, options.seq, options.checkpointing)
    facts = w.machine(torch)
    system = SYSTEMS[name](torch, model, options)
    ids = batches(torch, config, options, device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, losses, least = [], [], free
    gc.collect()
    with w.attention_by_cudnn(torch):
        for step in range(options.warmup + options.steps):
            wait()
            began = time.perf_counter()
            loss = system.step(ids[step % len(ids)])
            wait()
            times.append(1e3 * (time.perf_counter() - began))
            losses.append(round(loss.item(), 4))
            least = min(least, w.memory_available())
            print(f"{name}: step {step}: {times[-1]:.0f} ms, loss {losses[-1]}", file=sys.stderr, flush=True)
    times = times[options.warmup :]
    median = statistics.median(times)
    line = {
        "bench": "offload_adamw", "date": datetime.date.today().isoformat(), "machine": facts, "system": name, "model": options.model,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "settings": {"batch": options.batch, "seq": options.seq, "clip": options.clip, "checkpointing": options.checkpointing,
                     "compile": options.compile, "warmup": options.warmup, "steps": options.steps, "bucket_mib": options.bucket_mib},
        "params": sum(p.numel() for p in model.parameters()), "matmul_params": matrices,
        "step_ms": {"median": median, "min": min(times), "max": max(times), "samples": times},
        "tokens_per_second": 1e3 * options.batch * options.seq / median, "model_tflops": model_flops / median / 1e9, "loss": losses,
        "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None, "host_gib": (free - least) / 2**30,
        **system.facts(),
    }  # fmt: skip
    print(json.dumps(line), flush=True)


def in_turns(options, program, run):
    """Start `program` once for each turn of a system, in a process whose memory ends with it; in such a process, call `run`."""
    if not options.here:
        for name in options.systems * options.rounds:
            command = [sys.executable, program, *sys.argv[1:], "--here", "--systems", name]
            if subprocess.run(command, check=False).returncode:
                print(f"{name}: failed", file=sys.stderr)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    (name,) = options.systems
    try:
        run(torch, name, "cuda" if torch.cuda.is_available() else "cpu")
    except ImportError as error:
        print(f"{name}: left out, {error}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-4b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--clip", type=float, default=1.0, help="0: no clipping")
    parser.add_argument("--systems", nargs="+", choices=["check", *SYSTEMS], default=["check", *SYSTEMS])
    parser.add_argument("--rounds", type=int, default=1, help="how often each system has its turn")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--bucket-mib", type=float, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()

    def run(torch, name, device):
        check(torch, options, device) if name == "check" else measure(torch, name, options, device)

    in_turns(options, __file__, run)


if __name__ == "__main__":
    main()
