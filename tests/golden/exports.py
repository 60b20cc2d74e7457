"""Trains small models with the program, exports them, and compares what transformers computes from each export with the program's evaluation.

    python exports.py PROGRAM        # torch 2.15.0 with transformers 4.57.1, and with 5.24.0

Each line of its output is a JSON object: versions, the case, both losses on the same tokens, and the text that the export generates. The script
fails where the losses differ by more than the tolerance of the case, where the rendered template or the rotation differs, and where generation
does not stop at the end of text.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from read_export import rotation

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 128, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
# Name, rotation in the model's configuration, base and factor that transformers must read, data type, tolerance of the loss.
CASES = [
    ("old names", {"rope_theta": 10000.0}, (10000.0, None), "float32", 2e-5),
    ("old names, scaled", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, (500000.0, 8.0), "float32", 2e-5),
    ("new names", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}}, (500000.0, 2.0), "float32", 2e-5),
    ("new names, scaled", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}, (500000.0, 8.0), "float32", 2e-5),
    ("bfloat16", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, (10000.0, None), "bfloat16", 1e-2),
]
CHATS = [[("user", question), ("assistant", answer)] for question, answer in [("hi", "yes"), ("one?", "yes"), ("well", "yes")]]


def tokenizer():
    """A tokenizer of single characters."""
    vocab = {name: number for number, name in enumerate(SPECIALS)}
    vocab |= {chr(code): len(SPECIALS) + number for number, code in enumerate([*range(32, 127), 10])}
    added = [{"id": vocab[name], "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for name in SPECIALS]
    split = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False}
    return {"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": split, "post_processor": None,
            "decoder": {"type": "Fuse"}, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}}


def messages(chat):
    return [{"role": role, "content": content} for role, content in chat]


def exported(program, home, config, dtype):
    """Trains 20 steps on the conversations, exports the run, and gives the last evaluation on them with the export's folder."""
    files = {
        "model/config.json": json.dumps(config), "model/tokenizer.json": json.dumps(tokenizer()), "chatml.jinja": CHATML,
        "model/tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[0]}),
        "chat.jsonl": "".join(json.dumps({"messages": messages(chat)}) + "\n" for chat in CHATS),
    }
    for name, text in files.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(text)
    flags = {
        "model": home / "model", "init": "random", "data": home / "chat.jsonl", "eval-data": home / "chat.jsonl", "eval-steps": 20,
        "chat-template": home / "chatml.jinja", "eos-token": SPECIALS[2], "max-steps": 20, "device": "cpu", "dtype": dtype, "seq-length": 64,
        "per-device-train-batch-size": 3, "learning-rate": 0.02, "lr-scheduler-type": "constant", "output-dir": home / "run",
    }
    subprocess.run([program, "train", *(f"--{name}={value}" for name, value in flags.items())], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([program, "export", home / "run", home / "out"], check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (home / "run/metrics.jsonl").read_text().splitlines())
    return [line["eval_loss"] for line in lines if "eval_loss" in line][-1], home / "out"


def ids(tokenizer, chat, **options):
    text = tokenizer.apply_chat_template(messages(chat), tokenize=False, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def loss(model, tokenizer):
    """The mean over the tokens of all answers."""
    total, count = 0.0, 0
    for chat in CHATS:
        prompt, whole = ids(tokenizer, chat[:-1], add_generation_prompt=True), ids(tokenizer, chat)
        with torch.no_grad():
            scores = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
        total -= sum(scores[at - 1, whole[at]].item() for at in range(len(prompt), len(whole)))
        count += len(whole) - len(prompt)
    return total / count, count


def generated(model, tokenizer, chat):
    prompt = torch.tensor([ids(tokenizer, chat[:-1], add_generation_prompt=True)])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
    return tokenizer.decode(out[0, prompt.shape[1]:])


def check(program, name, rope, read, dtype, tolerance):
    with tempfile.TemporaryDirectory() as home:
        here, out = exported(program, pathlib.Path(home), CONFIG | rope, dtype)
        tokenizer, config = AutoTokenizer.from_pretrained(out), AutoConfig.from_pretrained(out)
        model = AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, dtype), attn_implementation="eager")
        there, tokens = loss(model, tokenizer)
        text = generated(model, tokenizer, CHATS[0])
        chat = tokenizer.apply_chat_template(messages(CHATS[0][:1]), tokenize=False, add_generation_prompt=True)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, "case": name, "dtype": dtype, "tokens": tokens,
                      "program_loss": here, "transformers_loss": there, "generated": text}), flush=True)
    assert abs(here - there) <= tolerance * max(1, abs(here)), (name, here, there)
    assert rotation(config) == read, (name, rotation(config))
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", chat
    assert text.endswith(SPECIALS[2]) and text.count(SPECIALS[2]) == 1, text


if __name__ == "__main__":
    torch.manual_seed(0)
    for case in CASES:
        check(sys.argv[1], *case)
