"""Evaluates a model in transformers: loss of held-out answers, and the share of multiple-choice questions with the right answer.

    python3 score.py MODEL DATA

DATA is a directory that `conversations.py` made. The answer of the model to a question is the choice with the highest probability. All products are
in float32. Prints one JSON object. Needs torch and transformers.
"""

import argparse
import json
import math
import pathlib

IGNORED = -100


def read(path, most=None):
    return [json.loads(line) for line in path.read_text().splitlines()[:most]]


def tokens(tokenizer, messages, **more):
    return tokenizer.apply_chat_template(messages, return_dict=True, **more)["input_ids"]


def labelled(tokenizer, messages):
    """Ids of a conversation, and as labels the ids of the answers with their ends."""
    ids = tokens(tokenizer, messages)
    labels = [IGNORED] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            begin = len(tokens(tokenizer, messages[:index], add_generation_prompt=True))
            end = len(tokens(tokenizer, messages[: index + 1]))
            labels[begin:end] = ids[begin:end]
    return ids, labels


def losses(torch, model, rows, size):
    """Sum of the losses and number of the labels of each row, in the order of the rows."""
    found = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda index: len(rows[index][0]))
    for batch in (order[at : at + size] for at in range(0, len(order), size)):
        longest = len(rows[batch[-1]][0])
        ids, labels = (
            torch.tensor([rows[index][part] + [pad] * (longest - len(rows[index][part])) for index in batch], device=model.device)
            for part, pad in ((0, 0), (1, IGNORED))
        )
        # Padding comes last, and no token attends to later ones.
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, :-1].float()
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")
        for index, loss, count in zip(batch, each.sum(1).tolist(), (labels[:, 1:] != IGNORED).sum(1).tolist()):
            found[index] = loss, count
    return found


def choices(tokenizer, question):
    """A row for each choice of the question. The labels are the choice and the text after it."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question["question"]}], tokenize=False, add_generation_prompt=True)
    begin = tokenizer(prompt + question["before"], add_special_tokens=False)["input_ids"]
    for choice in question["choices"]:
        end = tokenizer(choice + question["after"], add_special_tokens=False)["input_ids"]
        yield begin + end, [IGNORED] * len(begin) + end


def evaluate(folder, data, device="cpu", most=None, size=64):
    """Held-out loss, number of questions, and the share of them with the right answer. `most` bounds the records of both files."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    held_out = [labelled(tokenizer, record["messages"]) for record in read(data / "held-out.jsonl", most)]
    sums = losses(torch, model, held_out, size)
    task = read(data / "task.jsonl", most)
    rows = [list(choices(tokenizer, question)) for question in task]
    found = iter(losses(torch, model, [row for group in rows for row in group], size))
    right = 0
    for question, group in zip(task, rows):
        costs = [next(found)[0] for _ in group]
        right += costs.index(min(costs)) == question["answer"]
    loss = math.fsum(loss for loss, _ in sums) / sum(count for _, count in sums)
    return {"held_out_loss": loss, "held_out_conversations": len(held_out), "questions": len(task), "score": right / len(task)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--device", default="cpu", help="device of torch, such as cuda")
    parser.add_argument("--most", type=int, help="records of each file at most")
    options = parser.parse_args()
    print(json.dumps(evaluate(options.model, options.data, options.device, options.most)))


if __name__ == "__main__":
    main()
