"""DPO steps of TRL with `OffloadAdamW` beside DeepSpeed's ZeRO-2 offload: a JSON line for each system, in turns.

    python3 microbench/compare/bench_dpo.py --model qwen3-4b --pairs 4 --seq 2048 --rounds 2

Each system trains in a process of its own by TRL's DPOTrainer, with the same random weights, the same pairs of synthetic tokens, a reference model,
compiled layers and gradient checkpointing. A step is timed from the end of the step before to its own end, with the GPU idle at both. A system that
cannot be imported is left out, and stderr names the package. Needs trl, and for the baseline deepspeed with a C++ compiler.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_offload_adamw as bench  # noqa: E402

w = bench.w
WORDS = 200


def tokenizer():
    """A tokenizer of one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: index for index, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{n}" for n in range(WORDS))])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")


def pairs(count, seq):
    """Pairs whose chosen and rejected sequences fill `seq` tokens: a quarter is the prompt."""
    import random

    draw = random.Random(1)
    text = lambda tokens: " ".join(f"w{draw.randrange(WORDS)}" for _ in range(tokens))  # noqa: E731
    return [{"prompt": text(seq // 4), "chosen": " " + text(seq), "rejected": " " + text(seq)} for _ in range(count)]


def deepspeed(options):
    import deepspeed

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29518")
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True}
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": True},
        "steps_per_print": 10**9, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    }  # fmt: skip
    return {"deepspeed": config}, {"deepspeed": deepspeed.__version__}


def mixin(options):
    return {"optim_args": f"bucket_mib={options.bucket_mib},moments={options.moments}"}, {}


SYSTEMS = {"superoffload": mixin, "deepspeed": deepspeed}


def clock(wait):
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        ends = []

        def on_step_end(self, *_, **__):
            wait()
            self.ends.append(time.perf_counter())

    return Clock()


def measure(torch, name, options, device):
    import transformers
    import trl
    from datasets import Dataset

    more, versions = SYSTEMS[name](options)
    if options.gpu_gib is not None:
        torch.cuda.set_per_process_memory_fraction(options.gpu_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    config = bench.MODELS[options.model]()
    steps = options.warmup + options.steps
    with tempfile.TemporaryDirectory() as output:
        args = trl.DPOConfig(
            output_dir=output, max_steps=steps, per_device_train_batch_size=options.pairs, gradient_accumulation_steps=options.accumulation,
            learning_rate=w.LEARNING_RATE, adam_beta1=w.BETAS[0], adam_beta2=w.BETAS[1], adam_epsilon=w.EPSILON, weight_decay=w.WEIGHT_DECAY,
            max_grad_norm=options.clip, logging_steps=1, report_to=[], save_strategy="no", bf16=True, use_cpu=device == "cpu", gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False}, max_length=options.seq, disable_tqdm=True, **more,
        )  # fmt: skip
        policy, reference = (bench.build(torch, config, options, device) for _ in range(2))
        reference.eval()
        base = trl.DPOTrainer
        if name == "superoffload":
            from superoffload.torch import SuperOffloadTrainerMixin

            base = type("OffloadDPOTrainer", (SuperOffloadTrainerMixin, trl.DPOTrainer), {})
        rows = Dataset.from_list(pairs(options.pairs * options.accumulation * steps, options.seq))
        trainer = base(model=policy, ref_model=reference, args=args, train_dataset=rows, processing_class=tokenizer())
        watch = clock(torch.cuda.synchronize if device == "cuda" else int)
        trainer.add_callback(watch)
        facts = w.machine(torch)
        with w.attention_by_cudnn(torch):
            trainer.train()
    times = [1e3 * (end - began) for began, end in zip(watch.ends, watch.ends[1:])][options.warmup - 1 :]
    history = [row for row in trainer.state.log_history if "loss" in row]
    median = statistics.median(times)
    tokens = 2 * options.pairs * options.accumulation * options.seq
    line = {
        "bench": "dpo", "date": datetime.date.today().isoformat(), "machine": facts, "system": name, "model": options.model,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__, **versions},
        "settings": {"pairs": options.pairs, "seq": options.seq, "accumulation": options.accumulation, "clip": options.clip,
                     "moments": options.moments if name == "superoffload" else "float32", "gpu_gib": options.gpu_gib,
                     "checkpointing": True, "compile": options.compile, "warmup": options.warmup, "steps": options.steps},
        "params": sum(p.numel() for p in policy.parameters()), "step_ms": {"median": median, "min": min(times), "max": max(times), "samples": times},
        "tokens_per_second": 1e3 * tokens / median, "loss": [row["loss"] for row in history],
        "grad_norm": [float(row["grad_norm"]) for row in history if "grad_norm" in row],
        "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }  # fmt: skip
    print(json.dumps(line), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=bench.MODELS, default="qwen3-4b")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of a micro-batch")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a prompt with its reply")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=1, help="how often each system has its turn")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--bucket-mib", type=float, default=64)
    parser.add_argument("--moments", choices=["float32", "bfloat16", "int8"], default="float32", help="format of OffloadAdamW's moments")
    parser.add_argument("--gpu-gib", type=float, help="limit of GPU memory")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.checkpointing = False  # The trainer turns it on.
    bench.in_turns(options, __file__, lambda torch, name, device: measure(torch, name, options, device))


if __name__ == "__main__":
    main()
