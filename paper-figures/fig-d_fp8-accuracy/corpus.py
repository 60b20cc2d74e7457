"""Makes `data/` of this folder: the text of 1,950 proposals, a tokenizer trained on it, and the model's shape. Figures E and F train on the same
text, with the shapes that this script writes into their folders.

    git clone https://github.com/python/peps; git clone https://github.com/rust-lang/rfcs; git clone https://github.com/ethereum/EIPs
    pip install tokenizers; python3 corpus.py peps rfcs EIPs

PEPs and EIPs are in the public domain, RFCs under MIT or Apache-2.0. The commits are pinned, so that everyone trains on the same bytes.
"""

import json
import pathlib
import subprocess
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

COMMITS = {
    "PEPs": "ba4deeb7969588d937da609008d05bb83a47b1ab",
    "RFCs": "354518a8c9025f40be6f730452c1bfe71a12dc22",
    "EIPs": "f767a1e8078e17c9b381a91d35a09492189ede1b",
}
SUFFIXES = (".md", ".rst", ".txt")
LEAST_BYTES = 2000  # Shorter files say that a proposal moved.
EVALUATED = 40  # One document in so many is for evaluation.
VOCABULARY = 32768
END = "<|endoftext|>"
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SMALLER = {"hidden_size": 768, "num_hidden_layers": 14, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048}
EXPERTS = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 256,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def documents(clone: str, commit: str) -> list[str]:
    git = lambda *words: subprocess.run(["git", "-C", clone, *words], check=True, capture_output=True).stdout
    names = git("ls-tree", "-r", "-z", "--name-only", commit).decode().split("\0")
    contents = [git("show", f"{commit}:{name}") for name in sorted(names) if name.endswith(SUFFIXES)]
    return [text.decode(errors="replace") for text in contents if len(text) > LEAST_BYTES]


def tokenizer(texts: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return made


def main(clones: list[str]) -> None:
    out = pathlib.Path(__file__).resolve().parent / "data"
    out.mkdir(exist_ok=True)
    texts = [text for clone, commit in zip(clones, COMMITS.values(), strict=True) for text in documents(clone, commit)]
    parts = {"eval": texts[::EVALUATED], "train": [text for index, text in enumerate(texts) if index % EVALUATED]}
    for name, part in parts.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    made = tokenizer(parts["train"])
    end = made.token_to_id(END)
    of = lambda figure: out.parents[1] / figure / "data"
    shapes = ((out, MODEL), (of("fig-e_moments-in-16-bits"), MODEL | SMALLER), (of("fig-f_moments-in-8-bits"), EXPERTS))
    for folder, shape in shapes:
        folder.mkdir(exist_ok=True)
        made.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text(json.dumps(shape | {"eos_token_id": end, "bos_token_id": end}, indent=2) + "\n")
    tokens = {name: sum(len(encoding) for encoding in made.encode_batch(part)) for name, part in parts.items()}
    print(", ".join(f"{name}: {len(part)} documents of {tokens[name]} tokens" for name, part in parts.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
