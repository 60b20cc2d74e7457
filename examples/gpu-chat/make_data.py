"""Makes what the run in this folder trains on: conversations about the functions of Python packages, and a tokenizer and a model for them.

    pip install torch transformers sympy tokenizers
    python3 make_data.py DIR

Questions are templates; answers are the packages' own documentation. Every function with a docstring gives one conversation of one to three
turns. The tokenizer is a byte-level BPE learnt from the answers. The same versions give the same files.
"""

import hashlib
import importlib
import inspect
import json
import pathlib
import pkgutil
import sys
import warnings

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PACKAGES = ["torch", "transformers", "numpy", "sympy", "asyncio", "collections", "concurrent", "email", "http", "importlib", "json", "logging",
            "multiprocessing", "unittest", "urllib", "xml"]
VOCAB_SIZE = 16384
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The shape of Qwen3-0.6B, with a vocabulary of this size.
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": VOCAB_SIZE, "eos_token_id": 2, "bos_token_id": None,
}


def modules(package):
    """The package and all in it that can be imported and is no test."""
    root = importlib.import_module(package)
    yield root
    for found in pkgutil.walk_packages(getattr(root, "__path__", []), package + ".", onerror=lambda name: None):
        if any(part.startswith("_") or "test" in part for part in found.name.split(".")):
            continue
        try:
            yield importlib.import_module(found.name)
        except BaseException:  # What a platform lacks is left out.
            continue


def documented(module):
    """Names of functions, classes and methods that are defined in it, with their signatures and documentation."""
    def entry(name, thing):
        doc = inspect.getdoc(thing)
        try:
            signature = str(inspect.signature(thing))
        except (TypeError, ValueError):
            signature = None
        return (f"{module.__name__}.{name}", signature, doc) if doc and len(doc) > 40 else None

    for name, thing in sorted(vars(module).items()):
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(thing):
            yield entry(name, thing)
            for method, code in sorted(vars(thing).items()):
                if inspect.isfunction(code) and not method.startswith("_"):
                    yield entry(f"{name}.{method}", code)
        elif inspect.isfunction(thing):
            yield entry(name, thing)


def conversation(name, signature, doc):
    """What somebody might ask about it, in an order that its name decides."""
    first, _, rest = doc.partition("\n\n")
    ask = lambda text, answer: [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    turns = [ask(f"What does `{name}` do?", first.strip())]
    if rest.strip():
        turns.append(ask("Tell me more.", rest.strip()[:6000]))
    if signature and len(signature) < 600:
        turns.append(ask("How is it called?", f"`{name.rsplit('.', 1)[-1]}{signature}`"))
    return {"messages": sum(turns, [])}


def main(folder):
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    found, texts = {}, set()
    for module in (module for package in PACKAGES for module in modules(package)):
        for name, signature, doc in filter(None, documented(module)):
            if doc not in texts:  # Inherited words are told once.
                texts.add(doc)
                found[name] = conversation(name, signature, doc)
    order = sorted(found, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    with open(folder / "chat.jsonl", "w") as file:
        file.writelines(json.dumps(found[name]) + "\n" for name in order)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator((message["content"] for name in order for message in found[name]["messages"]), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps(MODEL, indent=1))
    print(f"{len(order)} conversations in {folder}")


main(pathlib.Path(sys.argv[1]))
