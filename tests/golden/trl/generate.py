"""What TRL trains: token ids, masks, rows and ten losses of its SFTTrainer.

    python generate.py        # trl 1.16.0, transformers 5.23.0, torch 2.15.0, datasets 5.2.0; CPU, one thread

model/        a tiny Qwen3 with random weights, and the tokenizer of ../chat
CASE.jsonl    conversations of each of three templates, which lie in ../chat/templates
records.json  ids and mask that TRL makes of each record, before it packs them
losses.json   for each template and packing the settings, the loss of every step: the mean over the trained tokens of the step; and that of all
              rows before the first step, as its evaluation says it

Where TRL and this program differ, data and order are such that both mean the same:

- Wrapped rows. Of a row of S tokens TRL learns S - 1, never the first one; here it is the target of the row before. S is chosen so that
  no row begins with a trained token. What is less than a row at the end is dropped here: TRL's last row is taken away.
- Rows of whole documents (bfd). Both fill rows alike, but TRL deals the row of the longest document first, and here that of the first
  document: TRL's rows are put in this order.
- A step is whole: the number of rows is a multiple of those of a step.
"""

import json
import os
import pathlib
import random
import shutil
import tempfile

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

import datasets
import torch
import transformers
import trl

HERE = pathlib.Path(__file__).parent
CHAT = HERE.parent / "chat"
STEPS, ROWS, MICRO_BATCHES = 10, 2, 2
STEP_ROWS = ROWS * MICRO_BATCHES
RECORDS_MAX = 60
# Its template, and whether its records are messages or a prompt and its completion.
CASES = {"marks": ("qwen2_5_training", True), "reasoning": ("qwen3", False), "plain": ("llama3", False)}
WORDS = "please what is the weather in Zürich today and how many days of rain were there 12 37 one two thanks".split()

torch.set_num_threads(1)
datasets.disable_progress_bars()


def sentence(dice, most):
    return " ".join(dice.choice(WORDS) for _ in range(dice.randint(2, most)))


def conversation(dice, number, case):
    turn = lambda role, most: {"role": role, "content": sentence(dice, most)}
    messages = [turn("system", 6)] if dice.random() < 0.3 else []
    for _ in range(dice.randint(0, 1)):
        messages += [turn("user", 8), turn("assistant", 8)]
    # The number makes every record another one.
    messages += [{"role": "user", "content": f"{number}: {sentence(dice, 8)}"}, turn("assistant", 14)]
    if case == "reasoning" and dice.random() < 0.6:
        messages[-1]["reasoning_content"] = sentence(dice, 8)
    return messages


def records(case):
    dice = random.Random(case)
    chats = [conversation(dice, number, case) for number in range(RECORDS_MAX)]
    if CASES[case][1]:
        return [{"messages": messages} for messages in chats]
    return [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in chats]


def model():
    torch.manual_seed(7)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(CHAT / "model")
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2,
        dtype="float32", bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(HERE / "model")
    (HERE / "model" / "generation_config.json").unlink(missing_ok=True)
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(CHAT / "model" / name, HERE / "model" / name)


class Trainer(trl.SFTTrainer):
    """Keeps the loss of each step, unrounded."""

    losses = []

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses[-1].append(loss.item())
        return loss


class NewStep(transformers.TrainerCallback):
    def on_step_begin(self, *_, **__):
        Trainer.losses.append([])


def trainer(case, data, packing, length, directory):
    template, is_messages = CASES[case]
    config = trl.SFTConfig(
        output_dir=directory, max_length=length, packing=packing is not None, packing_strategy=packing or "bfd",
        assistant_only_loss=is_messages, per_device_train_batch_size=ROWS, gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=STEPS, learning_rate=2e-3, lr_scheduler_type="linear", warmup_steps=2, weight_decay=0.1, max_grad_norm=1.0,
        train_sampling_strategy="sequential", gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True, logging_steps=1, seed=1,
        # All rows in one batch: the mean over batches of other sizes is not the mean over tokens.
        per_device_eval_batch_size=RECORDS_MAX,
    )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(HERE / "model")
    tokenizer.chat_template = (CHAT / "templates" / f"{template}.jinja").read_text()
    network = transformers.AutoModelForCausalLM.from_pretrained(HERE / "model", dtype=torch.float32)
    return Trainer(network, config, train_dataset=datasets.Dataset.from_list(data), processing_class=tokenizer, callbacks=[NewStep])


def tokenized(case, data):
    """Ids and labels of each record as TRL has them before it packs."""
    with tempfile.TemporaryDirectory() as directory:
        data = trainer(case, data, None, 4096, directory).train_dataset
    return [(list(row["input_ids"]), list(row["labels"])) for row in data]


def wrapped_length(documents):
    """A row's length at which no row begins with a trained token and steps are whole; and the number of rows."""
    ids = [token for ids, _ in documents for token in ids]
    labels = [label for _, labels in documents for label in labels]
    for length in range(100, 400):
        rows = (len(ids) - 1) // length
        starts = [labels[row * length] for row in range(rows + 1)]
        learned = [any(label != -100 for label in labels[row * length + 1 : (row + 1) * length]) for row in range(rows)]
        if rows % STEP_ROWS == 0 and rows >= 2 * STEP_ROWS and all(label == -100 for label in starts) and all(learned):
            return length, rows
    return None


def in_our_order(rows, documents):
    """The rows by their first document."""
    place = {tuple(ids): number for number, (ids, _) in enumerate(documents)}

    def first(row):
        bounds = [sum(row["seq_lengths"][:end]) for end in range(len(row["seq_lengths"]) + 1)]
        return min(place[tuple(row["input_ids"][start:end])] for start, end in zip(bounds, bounds[1:]))

    return rows.select(sorted(range(len(rows)), key=lambda number: first(rows[number])))


def bfd_length(documents):
    for length in range(max(len(ids) for ids, _ in documents), 400):
        data = datasets.Dataset.from_dict({"input_ids": [ids for ids, _ in documents], "labels": [labels for _, labels in documents]})
        rows = trl.pack_dataset(data, length, "bfd")
        if len(rows) % STEP_ROWS == 0 and len(rows) >= 2 * STEP_ROWS and max(map(len, rows["seq_lengths"])) > 1:
            return length
    raise SystemExit("no length of rows fits: other records are needed")


def losses(case, data, packing, documents):
    length, count = wrapped_length(documents) if packing == "wrapped" else (bfd_length(documents), None)
    with tempfile.TemporaryDirectory() as directory:
        run = trainer(case, data, packing, length, directory)
        rows = run.train_dataset
        run.train_dataset = rows.select(range(count)) if packing == "wrapped" else in_our_order(rows, documents)
        count = len(run.train_dataset)
        # Of packed rows it keeps documents apart in training alone: they are evaluated one in a row.
        evaluator = run if packing == "wrapped" else trainer(case, data, None, length, directory)
        evaluated = evaluator.evaluate(eval_dataset=evaluator.train_dataset)["eval_loss"]
        Trainer.losses = []
        run.train()
    steps = [sum(micro) for micro in Trainer.losses]
    assert len(steps) == STEPS and all(len(micro) == MICRO_BATCHES for micro in Trainer.losses)
    found = {"eval_loss": evaluated, "losses": steps}
    return {"case": case, "template": CASES[case][0], "packing": packing, "seq_length": length, "rows": count, **found}


def main():
    model()
    all_records, all_losses = [], []
    for case, (template, _) in CASES.items():
        data = records(case)
        documents = tokenized(case, data)
        count = next(count for count in range(16, RECORDS_MAX) if wrapped_length(documents[:count]))
        data, documents = data[:count], documents[:count]
        (HERE / f"{case}.jsonl").write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in data))
        for record, (ids, labels) in zip(data, documents, strict=True):
            trained = [int(label != -100) for label in labels]
            all_records.append({"template": f"{template}.jinja", "record": record, "ids": ids, "trained": trained})
        all_losses += [losses(case, data, packing, documents) for packing in ["wrapped", "bfd"]]
    (HERE / "records.json").write_text("[\n" + ",\n".join(json.dumps(r, ensure_ascii=False) for r in all_records) + "\n]\n")
    (HERE / "losses.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in all_losses) + "\n]\n")


if __name__ == "__main__":
    main()
