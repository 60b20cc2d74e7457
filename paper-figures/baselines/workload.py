"""What every baseline trains, and the line that it prints: models, batches, timing, memory.

A system's script gives `measure` a function that wraps the model and returns three calls: forward(ids) -> loss,
backward(loss), update(). Everything else is the same for all of them. Under torchrun each process has a GPU and batches of its own;
the first one prints, and model FLOPs are those of one GPU.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import time

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 1e-5, (0.9, 0.95), 1e-8, 0.1
BATCHES = 4
# Of torchrun; one process alone has none of these.
RANK, LOCAL_RANK, RANKS = (int(os.environ.get(name, other)) for name, other in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))


def arguments(**defaults):
    """Flags that every script takes; `defaults` adds a system's own as name=default."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="W1")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="0: no clipping")
    parser.add_argument("--no-checkpointing", action="store_true", help="layers keep their activations")
    parser.add_argument("--out", help="append the line to this file")
    for name, default in defaults.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser.parse_args()


def qwen3(layers, hidden, ffn, heads, kv_heads, vocab, tied=True):
    from transformers import Qwen3Config

    return Qwen3Config(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads,
                       num_key_value_heads=kv_heads, head_dim=128, vocab_size=vocab, tie_word_embeddings=tied,
                       max_position_embeddings=40960, use_cache=False)


def llama(layers):
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=layers, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                       num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
                       max_position_embeddings=131072, use_cache=False)


def gpt(layers, hidden):
    from transformers import GPT2Config

    return GPT2Config(n_layer=layers, n_embd=hidden, n_head=32, n_positions=1024, vocab_size=50432, resid_pdrop=0.0,
                      embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)


def olmoe():
    from transformers import OlmoeConfig

    return OlmoeConfig(num_hidden_layers=16, hidden_size=2048, intermediate_size=1024, num_attention_heads=16, num_key_value_heads=16,
                       num_experts=64, num_experts_per_tok=8, vocab_size=50304, tie_word_embeddings=False,
                       max_position_embeddings=4096, use_cache=False, experts_implementation="grouped_mm")


def qwen3_5_4b():
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(num_hidden_layers=32, hidden_size=2560, intermediate_size=9216, num_attention_heads=16, num_key_value_heads=4,
                             head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, vocab_size=248320, tie_word_embeddings=True,
                             use_cache=False)


# Name: configuration, sequences of a batch, tokens of a sequence.
WORKLOADS = {
    "W1": (lambda: qwen3(36, 2560, 9728, 32, 8, 151936), 4, 4096),
    "W2": (lambda: llama(32), 4, 4096),
    "W2c": (lambda: llama(24), 4, 4096),
    "W3": (lambda: gpt(44, 3072), 8, 1024),
    "W4": (lambda: qwen3(40, 5120, 17408, 40, 8, 151936, tied=False), 4, 4096),
    "OLMoE": (olmoe, 8, 4096),
    "Qwen3.5-4B": (qwen3_5_4b, 4, 4096),
    "L128k": (lambda: llama(32), 1, 131072),
    "tiny": (lambda: qwen3(2, 256, 512, 2, 1, 512), 2, 64),
    "tiny-long": (lambda: qwen3(2, 256, 512, 2, 1, 512), 1, 8192),
}


def layers_of(model):
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def flops(config, model, batch, seq_length, is_checkpointed):
    """(model, hardware) FLOPs of a step: causal attention; hardware adds one more forward pass of every layer. Experts count that a token takes."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    tokens = batch * seq_length
    embedding = config.vocab_size * config.hidden_size
    positions = config.n_positions * config.hidden_size if config.model_type == "gpt2" else 0
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    idle = experts - experts * config.num_experts_per_tok // config.num_experts if experts else 0
    matrices = sum(p.numel() for p in model.parameters()) - idle - positions - (0 if config.tie_word_embeddings else embedding)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    linear = kinds.count("linear_attention")
    attention = 6 * (layers - linear) * heads * head_dim * seq_length * tokens
    if linear:
        # The gated delta rule as a recurrence: three products of a head's state with a row.
        state = config.linear_key_head_dim * config.linear_value_head_dim * config.linear_num_value_heads
        attention += 18 * linear * state * tokens
    once = 6 * matrices * tokens + attention
    again = 2 * (matrices - embedding) * tokens + attention // 3
    return matrices, once, once + (again if is_checkpointed else 0)


def memory_available():
    with open("/proc/meminfo") as lines:
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}["MemAvailable"]


def machine(torch):
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), None)
    gpu = {"name": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if torch.cuda.is_available() else None
    return {"cpu": cpu, "cpus": len(os.sched_getaffinity(0)), "kernel": platform.release(), "gpu": gpu}


def attention_by_cudnn(torch):
    """cuDNN's fused attention first; it is twice as fast as the default on Hopper."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not torch.cuda.is_available():
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


def measure(system, name, args, prepare, dtype="bfloat16", shares_sequences=False):
    """Builds the workload's model, lets `prepare(torch, model, batch)` wrap it, times steps, prints one JSON line.

    `prepare` returns (forward, backward, update, settings); `settings` goes into the line. Ranks that share sequences all get the same ones,
    and each has its part of their FLOPs.
    """
    import torch
    import transformers

    make, batch, seq_length = WORKLOADS[args.workload]
    config, device = make(), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(LOCAL_RANK)
    free = memory_available()
    torch.manual_seed(0)
    with torch.device(device):
        # The same 16-bit initial values in every system.
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model.train().to(getattr(torch, dtype))
    if not args.no_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sharing = RANKS if shares_sequences else 1
    matrices, *both = flops(config, model, batch, seq_length, not args.no_checkpointing)
    model_flops, hardware_flops = (count // sharing for count in both)
    params = sum(p.numel() for p in model.parameters())
    # Before a system narrows the CPUs of this process.
    facts = machine(torch)
    forward, backward, update, settings = prepare(torch, model, batch)

    generator = torch.Generator().manual_seed(1 + (0 if shares_sequences else RANK))
    ids = [torch.randint(0, config.vocab_size, (batch, seq_length), generator=generator).to(device) for _ in range(BATCHES)]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, losses, least = [], [], free
    with attention_by_cudnn(torch):
        for step in range(args.warmup + args.steps):
            wait()
            start = time.perf_counter()
            loss = forward(ids[step % BATCHES])
            backward(loss)
            update()
            wait()
            times.append(1e3 * (time.perf_counter() - start))
            losses.append(round(float(loss.detach()), 4))
            least = min(least, memory_available())
    if RANKS > 1:
        torch.distributed.destroy_process_group()
    if RANK > 0:
        return
    times, losses = times[args.warmup:], losses[args.warmup:]
    median = statistics.median(times)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__} | settings.pop("versions", {})
    line = {
        "bench": "baseline", "date": datetime.date.today().isoformat(), "machine": facts, "system": system,
        "name": name, "workload": args.workload, "gpus": RANKS, "versions": versions,
        "settings": {"per_device_train_batch_size": batch, "seq_length": seq_length, "max_grad_norm": args.max_grad_norm,
                     "checkpointing": not args.no_checkpointing, "warmup": args.warmup, "steps": args.steps, **settings},
        "model": {"params": params, "matmul_params": matrices},
        "step_ms": {"median": median, "min": min(times), "max": max(times), "samples": times},
        "tokens_per_second": 1e3 * (RANKS // sharing) * batch * seq_length / median,
        "speed": {"model_flops": model_flops, "model_tflops": model_flops / median / 1e9,
                  "hardware_tflops": hardware_flops / median / 1e9},
        "loss": losses,
        "memory": {"gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
                   "host_gib": (free - least) / 2**30},
    }
    text = json.dumps(line)
    print(text)
    if args.out:
        with open(args.out, "a") as out:
            out.write(text + "\n")
