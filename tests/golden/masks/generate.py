"""Which tokens transformers and TRL train, over the chat templates of ../chat/templates.

    python generate.py        # transformers 5.24.0, trl 1.16.0, torch 2.15.0, datasets 5.2.0; CPU

bytes/, words/  tiny tokenizers with the control tokens of all templates: byte-level BPE, as Qwen's and Llama-3's, and BPE with a mark for
                spaces, as Llama-2's; both have the token " positive", and bytes/ has tokens of several spaces and digits
marked.jsonl    for the templates with {% generation %}: `return_assistant_tokens_mask` of transformers
prompts.jsonl   prompt and completion as TRL's SFTTrainer masks them, texts and messages: the common prefix of the ids
columns.jsonl   masks beside token ids as SFTTrainer obeys them

A line has the number of a sample's tokens, and where runs of trained tokens begin and end. What refuses a conversation is left out.
"""

import json
import os
import pathlib
import re
import tempfile

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

import datasets
import tokenizers
import torch
import transformers
import trl

HERE = pathlib.Path(__file__).parent
TEMPLATES = HERE.parent / "chat" / "templates"
EOS = "<|endoftext|>"
SPECIAL = {"bos_token": "<s>", "eos_token": EOS, "pad_token": "<pad>"}
WORDS = ["the mood is positive", "a b", "question answer yes no one two", "user assistant system tool", "2+2 is 4, 12345 or 12"]

datasets.disable_progress_bars()
transformers.logging.set_verbosity_error()


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"id": "call_0001", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
CONVERSATIONS = {
    "one": [turn("user", "Is it?"), turn("assistant", "Yes, it is.")],
    "two": [turn("user", "One?"), turn("assistant", "yes"), turn("user", "Two?"), turn("assistant", "no")],
    "system": [turn("system", "Be kind."), turn("user", " 2+2? "), turn("assistant", " 4\n")],
    "open": [turn("user", "One?"), turn("assistant", "yes"), turn("user", "Two?")],
    "joined": [turn("user", "One?"), turn("assistant", "yes"), turn("assistant", "and no")],
    "reasoned": [
        turn("user", "1+1?"),
        turn("assistant", "2", reasoning_content="one and one"),
        turn("user", "2+2?"),
        turn("assistant", "<think>\ntwo and two\n</think>\n\n4"),
    ],
    "tools": [
        turn("user", "2+2?"),
        turn("assistant", "", tool_calls=[CALL]),
        turn("tool", "4", tool_call_id="call_0001", name="add"),
        turn("assistant", "It is 4."),
        turn("user", "Sure?"),
        turn("assistant", "Yes."),
    ],
    "emoji": [turn("user", "日本 🙂?"), turn("assistant", "🙂語"), turn("user", "é"), turn("assistant", "é́")],
}
# What stands on both sides of the end of a prompt.
TEXTS = [
    ("The mood is ", "positive"),
    ("The mood is", " positive"),
    ("The mood is:\n", "positive"),
    ("The mood is  ", "positive"),
    ("It is   ", "12345"),
    ("It is 12", "345"),
    ("posi", "tive"),
    ("a", "a b"),
    ("is ", "\n\nyes"),
    ("日本", "語 🙂"),
    ("", "yes"),
    ("The mood is <|im_start|>", "positive"),
]
PLAIN = ["qwen2_5", "qwen3", "llama3", "gemma", "phi3", "phi3_5", "cohere", "deepseekv3", "deepseek_r1_distill", "lfm2", "qwen3_instruct_2507"]


def control_tokens():
    found = set()
    for path in sorted(TEMPLATES.glob("*.jinja")):
        found |= set(re.findall(r"<[|｜][^<>\s'\"{}]{1,40}[|｜]>|</?(?:think|start_of_turn|end_of_turn|turn|tool_call|eos|s)>", path.read_text()))
    return ["<unk>", "<s>", "<pad>", EOS] + sorted(found - {"<s>", EOS})


def trained(model, alphabet, size, name):
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=control_tokens(), initial_alphabet=sorted(alphabet), show_progress=False
    )
    model.train_from_iterator(WORDS * 4 + ["x  y   z 12 345  6"] * 3, trainer)
    (HERE / name).mkdir(exist_ok=True)
    model.save(str(HERE / name / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (HERE / name / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **SPECIAL)


def byte_level():
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return trained(model, alphabet, len(control_tokens()) + len(alphabet) + 90, "bytes")


def spaces_marked():
    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True))
    steps = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    model.normalizer = tokenizers.normalizers.Sequence(steps)
    alphabet = set("▁\n" + "".join(map(chr, range(33, 127))) + "é日本語")
    return trained(model, alphabet, len(control_tokens()) + len(alphabet) + 60, "words")


def runs(mask):
    edges = [at for at in range(len(mask) + 1) if (mask[at - 1] if at else 0) != (mask[at] if at < len(mask) else 0)]
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def case(tokenizer, template, record, mask):
    return {"tokenizer": tokenizer, "template": template, "record": record, "tokens": len(mask), "trained": runs(mask)}


def marked(encoders):
    for template in sorted(path.stem for path in TEMPLATES.glob("*.jinja") if "generation %}" in path.read_text()):
        for name, messages in CONVERSATIONS.items():
            for tokenizer, encoder in encoders.items():
                record = {"messages": messages} | ({"tools": TOOLS} if name == "tools" else {})
                try:
                    encoded = encoder.apply_chat_template(
                        messages, tools=record.get("tools"), chat_template=(TEMPLATES / f"{template}.jinja").read_text(),
                        return_dict=True, return_assistant_tokens_mask=True,
                    )
                except Exception:
                    continue
                if 1 in encoded["assistant_masks"][1:]:
                    yield case(tokenizer, template, record, encoded["assistant_masks"])


def prepared(encoder, template, data, **options):
    """Labels of each record as SFTTrainer has them before it packs."""
    encoder.chat_template = (TEMPLATES / f"{template}.jinja").read_text() if template else None
    network = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=len(encoder), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=8, eos_token_id=encoder.eos_token_id,
        )
    )
    with tempfile.TemporaryDirectory() as directory:
        config = trl.SFTConfig(output_dir=directory, max_length=None, bf16=False, use_cpu=True, report_to="none", disable_tqdm=True, **options)
        rows = trl.SFTTrainer(network, config, train_dataset=datasets.Dataset.from_list(data), processing_class=encoder).train_dataset
    return [[int(label != -100) for label in row["labels"]] for row in rows]


def prompts(encoders):
    texts = [{"prompt": prompt, "completion": completion} for prompt, completion in TEXTS]
    for tokenizer, encoder in encoders.items():
        for record, mask in zip(texts, prepared(encoder, None, texts), strict=True):
            yield case(tokenizer, None, record, mask)
        for template in PLAIN:
            for name in ["one", "two", "system", "emoji"]:
                messages = CONVERSATIONS[name]
                record = {"prompt": messages[:-1], "completion": messages[-1:]}
                try:
                    mask = prepared(encoder, template, [record], completion_only_loss=True)[0]
                except Exception:
                    continue
                yield case(tokenizer, template, record, mask)


def columns(encoders):
    ids = [5, 6, 7, 8, 9]
    for name, more in {
        "assistant_masks": {"assistant_masks": [0, 1, 0, 1, 1]},
        "completion_mask": {"completion_mask": [0, 0, 0, 1, 1]},
        "both": {"assistant_masks": [0, 1, 0, 1, 0], "completion_mask": [0, 0, 0, 1, 1]},
        "labels": {"labels": [-100, -100, 7, 8, -100]},
    }.items():
        record = {"input_ids": ids, **more}
        yield case("bytes", None, record, prepared(encoders["bytes"], None, [record], completion_only_loss=True)[0])


def main():
    torch.manual_seed(7)
    encoders = {"bytes": byte_level(), "words": spaces_marked()}
    for name, cases in {"marked": marked, "prompts": prompts, "columns": columns}.items():
        lines = [json.dumps(case, ensure_ascii=False) + "\n" for case in cases(encoders)]
        (HERE / f"{name}.jsonl").write_text("".join(lines))
        print(name, len(lines))


if __name__ == "__main__":
    main()
