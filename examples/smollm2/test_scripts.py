"""Tests of the scripts in this folder. `SUPEROFFLOAD` is the path of the program; tests whose packages or program are missing are skipped.

    SUPEROFFLOAD=target/release/superoffload python3 -m unittest discover -s examples/smollm2
"""

import importlib.util
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = os.environ.get("SUPEROFFLOAD")
sys.path.insert(0, str(HERE))


def has(*packages):
    return all(importlib.util.find_spec(package) for package in packages)


if has("numpy"):
    import dequantise
    import numpy

TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"  # noqa: E501
WIDTH, HEADS, GROUPS, INNER, LAYERS = 64, 2, 1, 96, 2


def script(name, *args):
    command = [sys.executable, "-W", "ignore", HERE / name, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})


def alphabet():
    """The letters of byte-level tokens, in the order of their bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def tokens():
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet(), "th", "the", "12"]


def metadata():
    words = tokens()
    return {
        "general.architecture": "llama", "llama.block_count": LAYERS, "llama.context_length": 256, "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": INNER, "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": GROUPS, "llama.rope.freq_base": 1e5,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(words) - 3), "tokenizer.ggml.merges": ["t h", "th e", "1 2"], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 2, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip


def encoded(value):
    """Type and bytes of a value of metadata."""
    if isinstance(value, str):
        return 8, struct.pack("<Q", len(value.encode())) + value.encode()
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    kinds, parts = zip(*map(encoded, value))
    return 9, struct.pack("<IQ", kinds[0], len(parts)) + b"".join(parts)


def tensors():
    """Name, shape in GGUF's order, format and bytes."""
    draw = numpy.random.default_rng(1)

    def matrix(name, rows, columns):
        blocks = rows * columns // 32
        scales = numpy.tile(numpy.array([0.01, -0.075], "<f2"), blocks).view(numpy.uint8).reshape(blocks, 4)
        return name, (columns, rows), 3, numpy.concatenate([scales, draw.integers(0, 256, (blocks, 16), numpy.uint8)], axis=1).tobytes()

    def norm(name):
        return name, (WIDTH,), 0, numpy.ones(WIDTH, "<f4").tobytes()

    narrow = WIDTH * GROUPS // HEADS
    yield matrix("token_embd.weight", len(tokens()), WIDTH)
    yield norm("output_norm.weight")
    for layer in (f"blk.{index}." for index in range(LAYERS)):
        yield from (norm(layer + "attn_norm.weight"), norm(layer + "ffn_norm.weight"))
        for name, rows, columns in (
            ("attn_q", WIDTH, WIDTH), ("attn_k", narrow, WIDTH), ("attn_v", narrow, WIDTH), ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", INNER, WIDTH), ("ffn_up", INNER, WIDTH), ("ffn_down", WIDTH, INNER),
        ):  # fmt: skip
            yield matrix(f"{layer}{name}.weight", rows, columns)


def gguf(changed=(), kind=None):
    """A file with a small model. `changed` replaces metadata, and `kind` the number of every format."""
    entries, parts, table, at = {**metadata(), **dict(changed)}, [], b"", 0
    rows = list(tensors())
    for name, shape, number, data in rows:
        table += encoded(name)[1] + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number if kind is None else kind, at)
        parts.append(data + bytes(-len(data) % 32))
        at += len(parts[-1])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(entries))
    for key, value in entries.items():
        number, data = encoded(value)
        head += encoded(key)[1] + struct.pack("<I", number) + data
    head += table
    return head + bytes(-len(head) % 32) + b"".join(parts)


@unittest.skipUnless(has("numpy"), "numpy is missing")
class Blocks(unittest.TestCase):
    def test_a_block_of_four_bits_has_low_halves_before_high_halves(self):
        data = struct.pack("<ee", 0.5, -2.0) + bytes(low | (15 - low) << 4 for low in range(16))
        self.assertEqual(dequantise.q4_1(data).tolist(), [0.5 * n - 2 for n in range(16)] + [0.5 * (15 - n) - 2 for n in range(16)])

    def test_each_block_has_a_scale_and_a_minimum_of_its_own(self):
        data = struct.pack("<ee", 1.0, 0.0) + bytes([0x21] * 16) + struct.pack("<ee", 0.25, 8.0) + bytes([0xF0] * 16)
        self.assertEqual(dequantise.q4_1(data).tolist(), [1.0] * 16 + [2.0] * 16 + [8.0] * 16 + [11.75] * 16)

    def test_a_block_of_eight_bits_has_signed_values(self):
        data = struct.pack("<e", 0.125) + struct.pack("32b", *range(-16, 16))
        self.assertEqual(dequantise.q8_0(data).tolist(), [n / 8 for n in range(-16, 16)])

    def test_rows_of_heads_take_the_order_of_hugging_face(self):
        rows = numpy.arange(8, dtype=numpy.float32).reshape(8, 1)
        self.assertEqual(dequantise.halves_from_pairs(rows, 1)[:, 0].tolist(), [0, 2, 4, 6, 1, 3, 5, 7])
        self.assertEqual(dequantise.halves_from_pairs(rows, 2)[:, 0].tolist(), [0, 2, 1, 3, 4, 6, 5, 7])

    def test_bfloat16_takes_the_nearest_value_and_ties_go_to_even(self):
        values = numpy.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -2.0], numpy.float32)
        self.assertEqual(dequantise.rounded(values).tolist(), [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xC000])


class Folder(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = pathlib.Path(made.name)

    def converted(self, data, *more):
        (self.folder / "model.gguf").write_bytes(data)
        return script("dequantise.py", self.folder / "model.gguf", self.folder / "model", *more)


@unittest.skipUnless(has("numpy", "tokenizers"), "numpy or tokenizers is missing")
class Conversion(Folder):
    def test_a_file_becomes_a_directory_with_weights_configuration_and_tokenizer(self):
        outcome = self.converted(gguf(), "--dtype=float32")
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        made = self.folder / "model"
        data = (made / "model.safetensors").read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        begin, end = header["model.layers.1.mlp.down_proj.weight"]["data_offsets"]
        stored = next(row for row in tensors() if row[0] == "blk.1.ffn_down.weight")[3]
        self.assertEqual(data[8 + size + begin : 8 + size + end], dequantise.q4_1(stored).tobytes())
        self.assertEqual(header["model.embed_tokens.weight"]["shape"], [len(tokens()), WIDTH])
        self.assertEqual(len(header), 1 + 2 + 9 * LAYERS)
        config = json.loads((made / "config.json").read_text())
        self.assertEqual((config["rms_norm_eps"], config["tie_word_embeddings"], config["eos_token_id"]), (1e-5, True, 2))

        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(made / "tokenizer.json")).encode("<|im_start|>the 12").ids
        self.assertEqual([tokens()[index] for index in ids], ["<|im_start|>", "the", "\u0120", "1", "2"])

    def test_unreadable_files_are_one_line(self):
        whole = gguf()
        cases = [
            (b"PK\x03\x04", "does not begin with the bytes GGUF"), (whole[:3], "ends at byte 3"), (whole[:-40], "ends at byte"),
            (whole[:4] + b"\x09" + whole[5:], "version 9"), (gguf({"general.architecture": "bert"}), "architecture bert"),
            (gguf({"tokenizer.ggml.pre": "qwen2"}), "qwen2"), (gguf(kind=12), "format 12"),
            (gguf({"llama.attention.head_count": 5}), "5 heads"), (whole.replace(b"chat_template", b"chat_tempered"), "chat_template is missing"),
            (whole.replace(b"blk.1.ffn_up", b"blk.1.ffn_it"), "blk.1.ffn_it.weight is no part"), (whole[:40] + b"\xff" + whole[41:], "UTF-8"),
        ]  # fmt: skip
        for data, cause in cases:
            outcome = self.converted(data)
            with self.subTest(cause):
                self.assertEqual(outcome.returncode, 1)
                self.assertRegex(outcome.stderr.strip(), f"^cannot convert .*{cause}[^\n]*$")


class Conversations(Folder):
    def made(self, name, *more):
        outcome = script("conversations.py", self.folder / name, "--packages", "email", "json", "logging", "asyncio", "--held-out=10", *more)
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        return {path.name: path.read_text() for path in (self.folder / name).iterdir()}

    def test_one_seed_gives_one_set_of_files(self):
        first, second = self.made("a"), self.made("b")
        self.assertEqual(first, second)
        self.assertNotEqual(first["train.jsonl"], self.made("c", "--seed=2")["train.jsonl"])

    def test_answers_stand_in_the_training_data_in_other_words(self):
        files = self.made("a")
        train, held_out = ([json.loads(line)["messages"] for line in files[name].splitlines()] for name in ("train.jsonl", "held-out.jsonl"))
        task = [json.loads(line) for line in files["task.jsonl"].splitlines()]
        self.assertEqual(len(held_out), 4 * 10)
        answers = {turn["content"] for record in train for turn in record if turn["role"] == "assistant"}
        asked = {turn["content"] for record in train for turn in record if turn["role"] == "user"}
        self.assertGreater(len(task), 20)
        for question in task:
            module = question["choices"][question["answer"]]
            self.assertIn(f"You find `{question['name']}` in `{module}`.", answers)
            self.assertEqual(len(set(question["choices"])), 4)
            self.assertNotIn(question["question"], asked)
        self.assertFalse({record[0]["content"] for record in held_out} & asked)

    def test_too_few_functions_are_an_error_with_a_remedy(self):
        outcome = script("conversations.py", self.folder / "a", "--packages", "json", "--held-out=1000")
        self.assertEqual(outcome.returncode, 1)
        self.assertRegex(outcome.stderr, "cannot hold out 1000 of .*name more --packages")


@unittest.skipUnless(has("numpy", "tokenizers", "torch", "transformers", "trl", "datasets") and PROGRAM, "torch, TRL or the program is missing")
class Training(Folder):
    def setUp(self):
        super().setUp()
        self.assertEqual(self.converted(gguf()).returncode, 0)
        packages = ["--packages", "email", "json", "--held-out=3", "--questions=4"]
        self.assertEqual(script("conversations.py", self.folder / "data", *packages).returncode, 0)

    def test_both_systems_train_the_same_tokens_and_are_scored(self):
        shown = subprocess.run(
            [PROGRAM, "data", "--json", "--model", "model", "data/train.jsonl", "--seq-length=4096"], cwd=self.folder, capture_output=True, text=True
        )
        short = ["--device=cpu", "--steps=3", "--rows=2", "--length=256", "--most=4", "--program", PROGRAM]
        place = [self.folder / "model", self.folder / "data", "--work", self.folder / "work", "--out", self.folder / "lines.jsonl"]
        for system in ("superoffload", "trl"):
            outcome = script("fine_tune.py", *place, *short, "--system", system)
            self.assertEqual(outcome.returncode, 0, outcome.stderr)
        ours, theirs = (json.loads(line) for line in (self.folder / "lines.jsonl").read_text().splitlines())
        self.assertEqual(ours["before"], theirs["before"])
        self.assertEqual((ours["settings"], ours["tokens"], ours["after"]["questions"]), (theirs["settings"], 1536, 4))
        for have, want in zip(ours["loss"], theirs["loss"], strict=True):
            self.assertAlmostEqual(have, want, delta=0.02)
        self.assertAlmostEqual(ours["after"]["held_out_loss"], theirs["after"]["held_out_loss"], delta=0.02)
        self.assertLess(ours["after"]["held_out_loss"], ours["before"]["held_out_loss"])
        documents = json.loads((self.folder / "work" / "tokenized.json").read_text())
        trained = sum(label != -100 for _, labels in documents for label in labels)
        self.assertEqual(json.loads(shown.stdout)["trained_tokens"], trained)


if __name__ == "__main__":
    unittest.main()
