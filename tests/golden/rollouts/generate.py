"""What TRL's GRPOTrainer computes for stored completions: losses, gradient norms, clipped fractions and divergences.

    python generate.py        # trl 1.16.0, transformers 5.24.0, torch 2.15.0, datasets 5.2.0, accelerate 1.15.0; CPU, one thread

The model is that of ../trl. The loss of a step is GRPOTrainer's `_compute_loss`; no text is generated.

rollouts.jsonl    prompts and completions of random tokens, also of one token; advantages of completions and of tokens; log-probabilities of
                  the model and noise, so that some ratios are clipped
fresh.jsonl       the same completions with advantages alone
steps.json        for each case the settings, and for each step the numbers of TRL. A step takes all completions
"""

import json
import math
import os
import pathlib
import random
import tempfile

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

import datasets
import torch
import transformers
import trl

HERE = pathlib.Path(__file__).parent
COMPLETIONS = 14
STEPS = 10
NAMES = ["clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "kl"]
CASES = [
    ("rollouts", "dapo", 0.0),
    ("rollouts", "dapo", 0.04),
    ("rollouts", "grpo", 0.0),
    ("rollouts", "grpo", 0.04),
    ("rollouts", "dr_grpo", 0.04),
    ("fresh", "dapo", 0.0),
]

torch.set_num_threads(1)
datasets.disable_progress_bars()


def network():
    return transformers.AutoModelForCausalLM.from_pretrained(HERE.parent / "trl/model", dtype=torch.float32)


def rollouts(seed):
    """Completions with the log-probabilities of the initial model and noise."""
    dice, model, rows = random.Random(seed), network(), []
    vocab = model.config.vocab_size
    for number in range(COMPLETIONS):
        ids = lambda least, most: [dice.randrange(vocab) for _ in range(dice.randint(least, most))]
        prompt, completion = ids(1, 9), ids(1, 15) if number > 1 else ids(1, 1)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logps = torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion)[:, None])[:, 0].tolist()
        noisy = lambda width: [round(logp + dice.gauss(0, width), 4) for logp in logps]
        advantage = [round(dice.gauss(0, 1), 3) for _ in completion] if number % 5 == 3 else round(dice.gauss(0, 1), 3)
        rows.append(dict(prompt_ids=prompt, completion_ids=completion, advantage=advantage, old_logps=noisy(0.25), ref_logps=noisy(0.4)))
    return rows


def padded(lists, left=False, value=0):
    most = max(map(len, lists))
    pad = lambda items: [value] * (most - len(items))
    return torch.tensor([pad(items) + items if left else items + pad(items) for items in lists])


def inputs(rows, is_fresh):
    prompts, completions = [row["prompt_ids"] for row in rows], [row["completion_ids"] for row in rows]
    ones = lambda lists: [[1] * len(items) for items in lists]
    of_tokens = lambda row: row["advantage"] if isinstance(row["advantage"], list) else [row["advantage"]] * len(row["completion_ids"])
    batch = dict(
        prompt_ids=padded(prompts, True), prompt_mask=padded(ones(prompts), True), completion_ids=padded(completions),
        completion_mask=padded(ones(completions)), advantages=padded([of_tokens(row) for row in rows], value=0.0),
        num_items_in_batch=torch.tensor(sum(map(len, completions))),
    )
    if not is_fresh:
        batch["old_per_token_logps"] = padded([row["old_logps"] for row in rows], value=0.0)
        batch["ref_per_token_logps"] = padded([row["ref_logps"] for row in rows], value=0.0)
    return batch


def trainer(model, loss, beta, directory):
    config = trl.GRPOConfig(
        output_dir=directory, loss_type=loss, beta=beta, epsilon=0.2, epsilon_high=0.28, max_completion_length=16,
        per_device_train_batch_size=COMPLETIONS, num_generations=2, bf16=False, use_cpu=True, report_to="none",
        gradient_checkpointing=False, steps_per_generation=1,
    )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(HERE.parent / "trl/model")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or "<pad>"
    data = datasets.Dataset.from_list([{"prompt": "a"}] * 4)
    made = trl.GRPOTrainer(model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config, train_dataset=data, processing_class=tokenizer)
    made.current_gradient_accumulation_steps = 1
    return made


def distance(model, batch):
    """How near a ratio is to a bound. Roundings must not decide which ratios are clipped."""
    if "old_per_token_logps" not in batch:
        return 1.0
    ids, mask = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1), torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=length + 1).logits[:, :-1]
    logps = torch.log_softmax(logits, -1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    ratios = torch.exp(logps - batch["old_per_token_logps"])[batch["completion_mask"] == 1]
    return min((ratios - bound).abs().min().item() for bound in (0.8, 1.28))


def train(rows, is_fresh, loss, beta):
    model, found = network(), []
    with tempfile.TemporaryDirectory() as directory:
        made, batch = trainer(model, loss, beta, directory), inputs(rows, is_fresh)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
        optimizer = torch.optim.AdamW(groups, lr=5e-4)
        model.train()
        for _ in range(STEPS):
            optimizer.zero_grad()
            if distance(model, batch) < 5e-5:
                return None
            value = made._compute_loss(model, batch)
            value.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            metrics = made._metrics["train"]
            found.append({"loss": value.item(), "grad_norm": norm.item(), **{name: metrics[name][-1] for name in NAMES if metrics.get(name)}})
    return found


def main():
    for seed in range(1000):
        rows = rollouts(seed)
        results = [train(rows, data == "fresh", loss, beta) for data, loss, beta in CASES]
        if all(results):
            break
    cases = []
    fresh = [{name: row[name] for name in ("prompt_ids", "completion_ids", "advantage")} for row in rows]
    for name, lines in [("rollouts", rows), ("fresh", fresh)]:
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    for (data, loss, beta), found in zip(CASES, results):
        assert all(math.isfinite(number) for step in found for number in step.values())
        cases.append({"data": data, "loss": loss, "beta": beta, "steps": found})
    (HERE / "steps.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
