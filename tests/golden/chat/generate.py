"""Golden renderings, token ids and masks of chat templates, as transformers makes them.

    python generate.py        # transformers 5.24.0, jinja2 3.1.6, tokenizers 0.23; no torch

templates/         the chat templates of TRL 1.16.0 (trl/chat_templates in its wheel), Apache License 2.0: templates/LICENSE
renderings.json    what jinja2 makes of ALL conversations with each, or null where it refuses
parts.json         what a processor makes of content in parts with templates of multimodal models, and of the joined text with others
tokens.json        ids and masks of three templates as TRL has them: `assistant_masks` of the training templates, and the prompt's
                   length for prompt and completion
model/             a tiny tokenizer for these
"""

import datetime
import json
import pathlib

import tokenizers
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent
DATE = datetime.datetime(2026, 11, 23)
SPECIAL = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a <place> & \"day\", in °C",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town's name"},
                "days": {"type": "integer", "enum": [1, 3], "default": 1},
            },
            "required": ["place"],
        },
    },
}


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"id": "call_001", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich", "days": 1}}}
CONVERSATIONS = {
    "plain": {"messages": [turn("user", " What is 2+2? "), turn("assistant", "4.\n")]},
    "turns": {
        "messages": [
            turn("system", "Be brief."),
            turn("user", "Hi\n\nthere"),
            turn("assistant", "Hello <b>you</b> & 'me'"),
            turn("user", "Bye"),
            turn("assistant", "日本語 🙂"),
        ]
    },
    "reasoning": {
        "messages": [
            turn("user", "1+1?"),
            turn("assistant", "2", reasoning_content="one and one"),
            turn("user", "2+2?"),
            turn("assistant", "<think>\ntwo and two\n</think>\n\n4"),
        ]
    },
    "tools": {
        "tools": [WEATHER],
        "messages": [
            turn("user", "Weather in Zürich?"),
            turn("assistant", "", tool_calls=[CALL]),
            turn("tool", '{"celsius": 7.5}', tool_call_id="call_001", name="weather"),
            turn("assistant", "7.5 °C."),
        ],
    },
    "order": {"messages": [turn("assistant", "First!"), turn("assistant", "Second!"), turn("user", "?")]},
}
# What data sets hold and few templates were made for.
STRANGE = {
    "null": {"tools": [WEATHER], "messages": [turn("user", "And?"), turn("assistant", None, tool_calls=[CALL]), turn("tool", "7")]},
    "nothing": {"messages": [turn("user", "Say nothing."), turn("assistant", None)]},
    "empty": {"messages": [turn("system", ""), turn("user", ""), turn("assistant", "", tool_calls=[])], "tools": []},
    "parts": {
        "messages": [
            turn("user", [{"type": "text", "text": "One 'part'"}, {"type": "text", "text": "and\n\"another\""}]),
            turn("assistant", [{"type": "text", "text": "Both."}]),
        ]
    },
    "calls": {
        "tools": [WEATHER, {**WEATHER, "function": {**WEATHER["function"], "name": "other", "strict": True, "returns": None}}],
        "messages": [
            turn("user", "Both?"),
            turn(
                "assistant",
                "",
                tool_calls=[
                    CALL,
                    {"type": "function", "function": {"name": "other", "arguments": '{"place": "Rom"}'}},
                    {
                        "id": "x",
                        "type": "function",
                        "function": {"name": "odd", "arguments": {"yes": True, "none": None, "x": 1.0, "y": 1e-7, "z": [1, {"é": "'"}]}},
                    },
                ],
            ),
        ],
    },
    "system": {"messages": [turn("system", "Alone.")]},
    "developer": {"messages": [turn("developer", "Be kind."), turn("user", "Hi", name="Ada"), turn("assistant", "Hi, Ada")]},
}
ALL = CONVERSATIONS | STRANGE


class Fixed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return DATE


chat_template_utils.datetime = Fixed


def render(template, conversation, prompts):
    messages = chat_template_utils._alias_reasoning_fields(conversation["messages"])
    compiled = chat_template_utils._compile_jinja_template(template)
    try:
        return compiled.render(
            messages=messages, tools=conversation.get("tools"), documents=None, add_generation_prompt=prompts, **SPECIAL
        )
    except Exception:
        return None


def renderings():
    templates = {path.name: path.read_text() for path in sorted((HERE / "templates").glob("*.jinja"))}
    return {
        name: {
            key + ("+prompt" if prompts else ""): render(template, conversation, prompts)
            for key, conversation in ALL.items()
            for prompts in ([False, True] if key in ("plain", "reasoning") else [False])
        }
        for name, template in templates.items()
    }


def tokenizer():
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    names = ["<s>", "<|im_end|>", "<pad>", "<|im_start|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=names, initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    texts = [message["content"] for conversation in CONVERSATIONS.values() for message in conversation["messages"]]
    model.train_from_iterator(texts * 3 + ["user assistant system think " * 3], trainer)
    (HERE / "model").mkdir(exist_ok=True)
    model.save(str(HERE / "model" / "tokenizer.json"))
    (HERE / "model" / "tokenizer_config.json").write_text(json.dumps(SPECIAL, indent=1) + "\n")
    return PreTrainedTokenizerFast(tokenizer_object=model, **SPECIAL)


def tokens():
    encoder, cases = tokenizer(), []
    for template in ["qwen2_5_training.jinja", "qwen3_training.jinja"]:
        for key in ["plain", "turns", "reasoning", "tools"]:
            conversation = CONVERSATIONS[key]
            encoded = encoder.apply_chat_template(
                conversation["messages"],
                tools=conversation.get("tools"),
                chat_template=(HERE / "templates" / template).read_text(),
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            ids, mask = encoded["input_ids"], encoded["assistant_masks"]
            cases.append({"template": template, "record": conversation, "ids": ids, "trained": mask})
    template = "llama3.jinja"
    for key in ["plain", "turns"]:
        messages = CONVERSATIONS[key]["messages"]
        options = {"chat_template": (HERE / "templates" / template).read_text(), "return_dict": False}
        prompt = encoder.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
        ids = encoder.apply_chat_template(messages, **options)
        assert ids[: len(prompt)] == prompt
        record = {"prompt": messages[:-1], "completion": messages[-1:]}
        mask = [0] * len(prompt) + [1] * (len(ids) - len(prompt))
        cases.append({"template": template, "record": record, "ids": ids, "trained": mask})
    return cases


class TextProcessor(ProcessorMixin):
    """A processor without images."""

    def __init__(self, tokenizer=None, chat_template=None):
        super().__init__(tokenizer, chat_template=chat_template)


def parts():
    """Templates that go over parts get a list; all others would write it as Python does, and get the joined text."""
    processor, cases = TextProcessor(tokenizer()), []
    of = lambda *texts: [{"type": "text", "text": text} for text in texts]
    messages = [
        turn("system", of("Be brief.")), turn("user", of("One 'part'", " and\n\"another\"")), turn("assistant", of("Both.")),
        turn("user", of("")), turn("assistant", of("<b>No</b>")),
    ]
    joined = [turn(message["role"], "".join(part["text"] for part in message["content"])) for message in messages]
    for name in ["gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_5_think", "qwen3", "llama3_1"]:
        goes_over = name not in ["qwen3", "llama3_1"]
        template = (HERE / "templates" / f"{name}.jinja").read_text()
        text = processor.apply_chat_template(messages if goes_over else joined, chat_template=template, tokenize=False)
        cases.append({"template": f"{name}.jinja", "messages": messages, "text": text})
    return cases


def write(name, value):
    (HERE / name).write_text(json.dumps(value, ensure_ascii=False, indent=0) + "\n")


def main():
    write("conversations.json", ALL)
    write("renderings.json", renderings())
    write("tokens.json", tokens())
    write("parts.json", parts())


if __name__ == "__main__":
    main()
