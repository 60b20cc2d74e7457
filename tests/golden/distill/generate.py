"""What PyTorch computes for distillation from stored probabilities: losses, gradient norms, divergences and cross-entropies.

    python generate.py        # torch 2.15.0, transformers 5.24.0; CPU, one thread

The model is that of ../trl. The teacher is the same model with noise on its logits. The loss of a step is the weighted mean over all trained tokens
of all records, computed by autograd from the definition.

top1.jsonl, top8.jsonl, top64.jsonl   records of random tokens with labels, also of one trained token, with the teacher's most likely tokens; the
                                      numbers of tokens are ragged up to 1, 8 and 64. Some records of top64 have weights
whole.jsonl                           prompts and completions with logarithms of up to 8 probabilities that add up to 1
steps.json                            for each case the settings, and for each step the numbers. A step takes all records
"""

import json
import math
import os
import pathlib
import random

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

import torch
import transformers

HERE = pathlib.Path(__file__).parent
RECORDS = 12
STEPS = 10
CASES = [
    ("top1", 1.0),
    ("top8", 1.0),
    ("top8", 0.5),
    ("top64", 1.0),
    ("top64", 0.75),
    ("whole", 1.0),
    ("whole", 0.25),
]

torch.set_num_threads(1)


def network():
    return transformers.AutoModelForCausalLM.from_pretrained(HERE.parent / "trl/model", dtype=torch.float32)


def teachers(model, ids, dice, most, is_whole):
    """The teacher's tokens and probabilities for each token but the first, as floats of 7 digits."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    found = [([], [])]
    for row in logits:
        noisy = row + torch.tensor([dice.gauss(0, 2) for _ in row], dtype=torch.float64)
        count = most if dice.random() < 0.5 else dice.randint(1, most)
        probs, tokens = torch.softmax(noisy, -1).topk(count)
        probs = probs / probs.sum() if is_whole else probs
        found.append((tokens.tolist(), [float(f"{p:.7g}") for p in probs.tolist()]))
    return found


def records(name, seed):
    dice, model, rows = random.Random(seed), network(), []
    vocab, most = model.config.vocab_size, 8 if name == "whole" else int(name[3:])
    for number in range(RECORDS):
        ids = [dice.randrange(vocab) for _ in range(dice.randint(4, 22))]
        prompt = dice.randint(1, len(ids) - 1) if number > 1 else len(ids) - 1
        found = teachers(model, ids, dice, most, name == "whole")
        tokens, probs = [list(column) for column in zip(*found)]
        if name == "whole":
            logs = [[round(math.log(p), 6) for p in of] for of in probs[prompt:]]
            rows.append(dict(prompt_ids=ids[:prompt], completion_ids=ids[prompt:], teacher_ids=tokens[prompt:], teacher_logprobs=logs))
        else:
            labels = [-100] * prompt + ids[prompt:]
            rows.append(dict(input_ids=ids, labels=labels, teacher_ids=tokens, teacher_probs=probs))
            if name == "top64" and number % 3 == 0:
                rows[-1]["weights"] = [1.0] + [dice.choice([0.25, 0.5, 1.0]) for _ in ids[1:]]
    return rows


def numbers(model, rows, ratio):
    """Loss, divergence and cross-entropy, as weighted sums over the trained tokens, and the sum of the weights."""
    sums, trained = [0.0, 0.0, 0.0], 0.0
    for row in rows:
        is_whole = "prompt_ids" in row
        ids = row["prompt_ids"] + row["completion_ids"] if is_whole else row["input_ids"]
        first = len(row["prompt_ids"]) if is_whole else 0
        logs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        for at in range(max(first, 1), len(ids)):
            if not is_whole and row["labels"][at] == -100:
                continue
            tokens = torch.tensor(row["teacher_ids"][at - first])
            p = torch.tensor(row["teacher_logprobs"][at - first]).exp() if is_whole else torch.tensor(row["teacher_probs"][at - first])
            tail = (1 - p.double().sum()).clamp(min=0).float()
            log_q, outside = logs[at - 1], torch.ones_like(logs[at - 1], dtype=torch.bool)
            outside[tokens] = False
            log_tail = torch.logsumexp(log_q[outside], -1)
            distillation = -(p * log_q[tokens]).sum() - tail * log_tail
            entropy = -(torch.special.xlogy(p, p)).sum() - torch.special.xlogy(tail, tail)
            cross_entropy = -log_q[ids[at]]
            found = [ratio * distillation + (1 - ratio) * cross_entropy, distillation - entropy, cross_entropy]
            weight = row["weights"][at] if "weights" in row else 1.0
            sums = [a + weight * b for a, b in zip(sums, found)]
            trained += weight
    return sums, trained


def train(rows, ratio):
    model, found = network(), []
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=5e-4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss, kl, cross_entropy), trained = numbers(model, rows, ratio)
        (loss / trained).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        values = dict(loss=loss / trained, grad_norm=norm, kl=kl / trained, cross_entropy=cross_entropy / trained)
        found.append({name: value.item() for name, value in values.items()})
    return found


def main():
    data = {name: records(name, seed) for seed, name in enumerate(["top1", "top8", "top64", "whole"])}
    for name, rows in data.items():
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = [{"data": name, "kd_ratio": ratio, "steps": train(data[name], ratio)} for name, ratio in CASES]
    assert all(math.isfinite(number) for case in cases for step in case["steps"] for number in step.values())
    (HERE / "steps.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
