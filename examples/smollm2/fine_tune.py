"""Fine-tunes a model with `superoffload train` or with TRL's SFTTrainer at equal settings, and evaluates it before and after.

    python3 fine_tune.py MODEL DATA --system superoffload --seed 1 --out lines.jsonl
    python3 fine_tune.py MODEL DATA --system trl --seed 1 --out lines.jsonl

MODEL is a directory that `dequantise.py` made, and DATA one that `conversations.py` made. Both systems get the same rows of token ids in the same
order: conversations, shuffled by the seed in each pass, one after the other, cut into rows. Both train the answers alone, with AdamW, clipping at
norm 1, matrix products in bfloat16 and float32 master weights. The trained model is evaluated in transformers. Appends a JSON line to the file.
`--within SECONDS` trains two steps first and takes as many steps as fit into that time, at most `--steps`.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import score  # noqa: E402

WARMUP_SHARE, WEIGHT_DECAY, BETAS, EPSILON, CLIP = 0.06, 0.01, (0.9, 0.999), 1e-8, 1.0


def kept(path, make):
    """The value in a file of JSON, which is made the first time."""
    if not path.exists():
        path.write_text(json.dumps(make()))
    return json.loads(path.read_text())


def tokenized(options, tokenizer):
    """Ids and labels of each conversation."""
    made = lambda: [score.labelled(tokenizer, record["messages"]) for record in score.read(options.data / "train.jsonl")]  # noqa: E731
    return kept(options.work / "tokenized.json", made)


def rows(documents, seed, count, length):
    """Rows of `length` ids with their labels: whole passes over the conversations, each in another order."""
    draw, ids, labels = random.Random(seed), [], []
    while len(ids) < count * length:
        draw.shuffle(documents)
        for document in documents:
            ids += document[0]
            labels += document[1]
    cuts = [slice(at, at + length) for at in range(0, count * length, length)]
    return [{"input_ids": ids[cut], "labels": labels[cut]} for cut in cuts]


def warmup(options):
    return max(1, round(WARMUP_SHARE * options.steps))


def superoffload(options, made, out):
    data, run = out / "rows.jsonl", out / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in made))
    flags = {
        "model": options.model, "data": data, "output-dir": run, "device": options.device, "packing": "off", "seq-length": options.length,
        "per-device-train-batch-size": options.rows, "gradient-accumulation-steps": 1, "max-steps": options.steps, "save-steps": options.steps,
        "learning-rate": options.learning_rate, "lr-scheduler-type": "cosine", "warmup-steps": warmup(options), "weight-decay": WEIGHT_DECAY,
        "adam-beta1": BETAS[0], "adam-beta2": BETAS[1], "adam-epsilon": EPSILON, "max-grad-norm": CLIP, "seed": options.seed, "dtype": "bfloat16",
        "logging-steps": 1, "report-to": "none",
    }  # fmt: skip
    threads = [f"--threads={options.threads}"] if options.threads else []
    command = [options.program, "train", "--no-shuffle", *threads, *(f"--{key}={value}" for key, value in flags.items())]
    with open(out / "train.log", "w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    subprocess.run([options.program, "export", "--dtype=float32", run, out / "model"], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    version = subprocess.run([options.program, "--version"], check=True, capture_output=True, text=True).stdout.partition(", features")[0]
    return [line["loss"] for line in steps], [line["step_ms"] for line in steps], {"superoffload": version.removeprefix("superoffload ").strip()}


def trl(options, made, out):
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Clock(TrainerCallback):
        times = []

        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            if options.device == "cuda":
                torch.cuda.synchronize()
            self.times.append(1e3 * (time.perf_counter() - self.began))

    class InOrder(trl.SFTTrainer):
        def _get_train_sampler(self, *_, **__):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def collate(records):
        batch = {key: torch.tensor([record[key] for record in records]) for key in ("input_ids", "labels")}
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}

    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    args = trl.SFTConfig(
        output_dir=str(out / "run"), max_steps=options.steps, per_device_train_batch_size=options.rows, gradient_accumulation_steps=1,
        learning_rate=options.learning_rate, lr_scheduler_type="cosine", warmup_steps=warmup(options), weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPSILON, max_grad_norm=CLIP, seed=options.seed, bf16=True,
        use_cpu=options.device == "cpu", gradient_checkpointing=False, max_length=options.length, packing=False, loss_type="nll", logging_steps=1,
        report_to=[], save_strategy="no", disable_tqdm=True, remove_unused_columns=False, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    trainer = InOrder(model=model, args=args, train_dataset=Dataset.from_list(made), processing_class=tokenizer, data_collator=collate, callbacks=[Clock()])
    trainer.train()
    trainer.save_model(str(out / "model"))
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], Clock.times, {"trl": trl.__version__}


SYSTEMS = {"superoffload": superoffload, "trl": trl}


def machine(torch):
    with open("/proc/cpuinfo") as lines:
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), None)
    gpu = {"name": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if torch.cuda.is_available() else None
    return {"cpu": cpu, "cpus": len(os.sched_getaffinity(0)), "kernel": platform.release(), "gpu": gpu}


def trained(options, tokenizer, evaluated_on):
    """Losses, times of steps, versions and the evaluation of one run."""
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        out = pathlib.Path(folder)
        made = rows(tokenized(options, tokenizer), options.seed, options.steps * options.rows, options.length)
        began = time.perf_counter()
        try:
            losses, times, versions = SYSTEMS[options.system](options, made, out)
        except subprocess.CalledProcessError as error:
            log = out / "train.log"
            sys.exit(f"{error}\n" + (log.read_text()[-3000:] if log.exists() else ""))
        whole = time.perf_counter() - began
        after = score.evaluate(out / "model", options.data, evaluated_on, options.most) if evaluated_on else None
        if options.keep:
            shutil.copytree(out / "model", options.keep, dirs_exist_ok=True)
    return losses, times, whole, versions, after


def steps_within(options, tokenizer):
    """Steps that fit into the time, from the second of two steps."""
    _, times, *_ = trained(argparse.Namespace(**{**vars(options), "steps": 2, "keep": None}), tokenizer, None)
    return max(2, min(options.steps, int(1e3 * options.within / times[-1])))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--system", choices=SYSTEMS, default="superoffload")
    parser.add_argument("--program", default="superoffload", help="path of the program")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="device that trains")
    parser.add_argument("--seed", type=int, default=1, help="order of the conversations")
    parser.add_argument("--steps", type=int, default=170)
    parser.add_argument("--within", type=float, help="seconds for the steps; fewer steps are taken if they take longer")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, help="threads that train")
    parser.add_argument("--most", type=int, help="records of an evaluation's files at most")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("lines.jsonl"), help="file to append to")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("work"), help="directory for runs, and for files that runs of one model and data share")
    parser.add_argument("--keep", type=pathlib.Path, help="directory for the trained model; deleted without it")
    options = parser.parse_args()

    import torch
    import transformers

    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first = kept(options.work / "before.json", lambda: score.evaluate(options.model, options.data, device, options.most))
    if options.within:
        options.steps = steps_within(options, tokenizer)
    losses, times, whole, versions, after = trained(options, tokenizer, device)
    tokens = options.rows * options.length
    line = {
        "bench": "fine-tune", "date": datetime.date.today().isoformat(), "machine": machine(torch), "system": options.system, "seed": options.seed,
        "device": options.device, "model": "smollm2-135m-instruct",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, **versions},
        "settings": {"steps": options.steps, "rows": options.rows, "seq": options.length, "lr": options.learning_rate, "lr_scheduler": "cosine",
                     "warmup": warmup(options), "weight_decay": WEIGHT_DECAY, "betas": BETAS, "eps": EPSILON, "clip": CLIP, "dtype": "bfloat16",
                     "threads": options.threads},
        "tokens": options.steps * tokens, "before": first, "after": after, "seconds": {"steps": sum(times) / 1e3, "whole": whole},
        "step_ms": {"median": sorted(times)[len(times) // 2], "min": min(times), "max": max(times)}, "loss": [round(loss, 4) for loss in losses],
    }  # fmt: skip
    with open(options.out, "a") as out:
        out.write(json.dumps(line) + "\n")
    print(f"{options.system} seed {options.seed}: held-out loss {first['held_out_loss']:.4f} -> {after['held_out_loss']:.4f}, "
          f"score {first['score']:.3f} -> {after['score']:.3f}, {sum(times) / 1e3:.1f} s of steps, {whole:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main()
