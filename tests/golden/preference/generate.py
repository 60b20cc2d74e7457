"""What TRL's DPOTrainer computes: losses, rewards and log-probabilities of pairs of answers.

    python generate.py        # trl 1.16.0, transformers 5.24.0, torch 2.15.0, datasets 5.2.0, accelerate 1.15.0; CPU, one thread

The model and the templates are those of ../trl and ../chat.

text.jsonl    prompts with two answers, plain text; one-token answers, equal answers, and answers that are cut
chat.jsonl    conversations with the prompt in both answers
steps.json    for each case the settings, and for each step the numbers of TRL. A step takes all pairs, so that rows and micro-batches may
              hold any of them. simpo and cpo are CPOTrainer's losses, and orpo is ORPOTrainer's, on the tokens of DPOTrainer, with the
              cross-entropy of micro-batches of one pair; simpo has none.
"""

import json
import math
import os
import pathlib
import random
import tempfile
import types

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

import datasets
import torch
import transformers
import trl
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

HERE = pathlib.Path(__file__).parent
PAIRS = 12
WORDS = "please what is the weather in Zürich today and how many days of rain were there 12 37 one two thanks".split()
NUMBERS = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"]
LOSSES = ["sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "sigmoid_norm"]
WITHOUT_REFERENCE = ["simpo", "cpo", "orpo"]

torch.set_num_threads(1)
datasets.disable_progress_bars()


def sentence(dice, least, most):
    return " ".join(dice.choice(WORDS) for _ in range(dice.randint(least, most)))


def texts():
    dice = random.Random("text")
    pairs = [
        {"prompt": f"{number}: {sentence(dice, 2, 9)}?", "chosen": " " + sentence(dice, 1, 12), "rejected": " " + sentence(dice, 1, 12)}
        for number in range(PAIRS - 3)
    ]
    same = " " + sentence(dice, 3, 3)
    long = {"prompt": sentence(dice, 4, 4), "chosen": " " + sentence(dice, 40, 40), "rejected": " " + sentence(dice, 2, 2)}
    return pairs + [dict(prompt="one", chosen="", rejected=" two"), dict(prompt="is", chosen=same, rejected=same), long]


def chats():
    dice, pairs = random.Random("chat"), []
    for number in range(PAIRS):
        prompt = [{"role": "user", "content": f"{number}: {sentence(dice, 2, 8)}"}]
        if number % 3 == 0:
            prompt += [{"role": "assistant", "content": sentence(dice, 1, 4)}, {"role": "user", "content": sentence(dice, 1, 4)}]
        answer = lambda: [{"role": "assistant", "content": f"{sentence(dice, 1, 8)}"}]
        pairs.append({"chosen": prompt + answer(), "rejected": prompt + answer()})
    return pairs


def recorded(trainer_class):
    class Trainer(trainer_class):
        """Keeps the numbers of each step, unrounded."""

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            # Before the trainer logs and clears them.
            numbers = {name: float(self._metrics["train"][name][-1]) for name in NUMBERS}
            self.steps.append({"loss": loss.item(), **numbers})
            return loss

    Trainer.steps = []
    return Trainer


def tokenizer():
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(HERE.parent / "trl/model")
    tokenizer.chat_template = (HERE.parent / "chat/templates/llama3.jinja").read_text()
    return tokenizer


def train(data, loss, steps, length):
    network = transformers.AutoModelForCausalLM.from_pretrained(HERE.parent / "trl/model", dtype=torch.float32)
    with tempfile.TemporaryDirectory() as directory:
        config = trl.DPOConfig(
            output_dir=directory, max_length=length, loss_type=loss, beta=0.3, label_smoothing=0.2 if loss == "robust" else 0.0,
            per_device_train_batch_size=PAIRS, max_steps=steps, learning_rate=2e-3, lr_scheduler_type="constant", weight_decay=0.1,
            max_grad_norm=1.0, gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
            disable_tqdm=True, logging_steps=1, seed=1,
        )
        trainer = recorded(trl.DPOTrainer)(
            network, args=config, train_dataset=datasets.Dataset.from_list(data), processing_class=tokenizer()
        )
        trainer.train()
    return trainer.steps


SETTINGS = types.SimpleNamespace(alpha=0.0, beta=0.3, label_smoothing=0.0, simpo_gamma=0.5, accelerator=types.SimpleNamespace(device="cpu"))


def losses(loss, sums, means, logps, mask, attended):
    """Losses of pairs by TRL's functions, and the rewards of both answers. `mask` has the tokens of answers, `attended` all tokens."""
    chosen = len(logps) // 2
    if loss == "orpo":
        negative, *rewards = ORPOTrainer.odds_ratio_loss(SETTINGS, *means.chunk(2))[:3]
        of_pairs, alpha, counted = -negative, 1.0, attended
    else:
        settings = types.SimpleNamespace(**vars(SETTINGS), loss_type="simpo" if loss == "simpo" else "sigmoid")
        of_pairs, *rewards = CPOTrainer.cpo_loss(settings, *(means if loss == "simpo" else sums).chunk(2))
        alpha, counted = 0.0 if loss == "simpo" else 1.0, mask
    cross_entropy = -((logps * counted).sum(1) / counted.sum(1))[:chosen]
    return of_pairs + alpha * cross_entropy, rewards


def without_reference(data, loss, steps, length):
    """Steps of a loss of CPOTrainer or ORPOTrainer on the tokens of DPOTrainer."""
    network = transformers.AutoModelForCausalLM.from_pretrained(HERE.parent / "trl/model", dtype=torch.float32)
    with tempfile.TemporaryDirectory() as directory:
        config = trl.DPOConfig(output_dir=directory, max_length=length, bf16=False, use_cpu=True, report_to="none")
        trainer = trl.DPOTrainer(network, args=config, train_dataset=datasets.Dataset.from_list(data), processing_class=tokenizer())
        batch = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    names = [n for n, p in network.named_parameters() if p.dim() > 1]
    groups = [dict(params=[p for n, p in network.named_parameters() if (n in names) == is_matrix], weight_decay=0.1 * is_matrix) for is_matrix in (True, False)]
    optimizer, found = torch.optim.AdamW(groups, lr=2e-3), []
    for _ in range(steps):
        logits = network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        mask, attended = batch["completion_mask"][:, 1:], batch["attention_mask"][:, 1:]
        logps = torch.log_softmax(logits, -1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        sums, means = (logps * mask).sum(1), (logps * mask).sum(1) / mask.sum(1)
        c_sum, r_sum = sums.chunk(2)
        of_pairs, (c_reward, r_reward) = losses(loss, sums, means, logps, mask, attended)
        value = of_pairs.mean()
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        numbers = [c_reward, r_reward, c_reward - r_reward, (c_reward > r_reward).float(), c_sum, r_sum]
        found.append({"loss": value.item(), **{name: number.mean().item() for name, number in zip(NUMBERS, numbers)}})
    return found


def main():
    data, cases = {"text": texts(), "chat": chats()}, []
    for name, rows in data.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (HERE / f"{name}.jsonl").write_text(lines)
        for loss in LOSSES + WITHOUT_REFERENCE:
            steps, length = 10 if loss in ("sigmoid", "cpo", "orpo") else 3, 48 if name == "text" else 64
            found = (without_reference if loss in WITHOUT_REFERENCE else train)(rows, loss, steps, length)
            assert all(math.isfinite(number) for step in found for number in step.values())
            cases.append({"data": name, "loss": loss, "max_length": length, "steps": found})
    (HERE / "steps.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
