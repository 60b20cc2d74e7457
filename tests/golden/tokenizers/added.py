"""Writes added.json, golden values of tests/tokenizers.rs: added tokens that stand beside tokenizer.json, as transformers adds them.

Made with transformers 5.24.0 and with transformers 4.57.1; needs no torch:

    python added.py        # once with each of the two, in any order

A case holds the files of a model directory, a text, and its ids by both versions; null where a version refuses the files.
"""

import json
import pathlib
import tempfile

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

HERE = pathlib.Path(__file__).parent
TEXT = "a <t> b<u>c <V> d </s> e<pad> <unk><s>A <T> <img>"
VOCABULARY = {"<unk>": 0, "a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "<s>": 6, "</s>": 7, "<w>": 8}


def token(content, **flags):
    return dict(content=content, lstrip=False, rstrip=False, normalized=False, single_word=False, special=True) | flags


def words():
    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>"])
    return json.loads(made.to_str())


def lower():
    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    return json.loads(made.to_str())


def byte_level():
    made = Tokenizer(models.BPE({character: id for id, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    return json.loads(made.to_str())


TOKENIZERS = {"words": words(), "lower": lower(), "byte level": byte_level()}
KNOWN = {"6": token("<s>"), "7": token("</s>")}
# Content of tokenizer_config.json, special_tokens_map.json and added_tokens.json.
CASES = {
    "nothing": ({}, None, None),
    "decoder": (dict(added_tokens_decoder={"20": token("<t>"), "9": token("<u>", special=False)}), None, None),
    "decoder, lacking flags": (dict(added_tokens_decoder={"9": {"content": "<t>"}, "10": {"content": "<u>", "special": True}}), None, None),
    "decoder strips": (dict(added_tokens_decoder={"9": token("<t>", lstrip=True, rstrip=True), "10": token("<u>", single_word=True)}), None, None),
    "decoder with other flags": (dict(added_tokens_decoder={"6": token("<s>", lstrip=True), "7": token("</s>")}), None, None),
    "decoder with a word of the vocabulary": (dict(added_tokens_decoder={"0": token("<unk>"), "9": token("<t>")}), None, None),
    "decoder normalizes": (dict(added_tokens_decoder={"9": token("<T>", normalized=True, special=False), "10": token("<V>")}), None, None),
    "additional": (dict(additional_special_tokens=["<t>", "<u>"]), None, None),
    "additional, described": (dict(additional_special_tokens=[dict(__type="AddedToken", **token("<t>", rstrip=True)), "<u>"]), None, None),
    "additional beside decoder": (dict(additional_special_tokens=["<u>", "<t>"], added_tokens_decoder=KNOWN | {"9": token("<t>")}), None, None),
    "extra list": (dict(extra_special_tokens=["<t>", "<u>"]), None, None),
    "extra list before additional": (dict(extra_special_tokens=["<t>"], additional_special_tokens=["<u>"]), None, None),
    "extra empty, and additional": (dict(extra_special_tokens={}, additional_special_tokens=["<u>"]), None, None),
    "extra named": (dict(extra_special_tokens=dict(image_token="<img>", t_token="<t>")), None, None),
    "extra named, and additional": (dict(extra_special_tokens=dict(image_token="<img>"), additional_special_tokens=["<u>"]), None, None),
    "named": (dict(pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"), None, None),
    "named, out of order": (dict(mask_token="<t>", cls_token="<u>", pad_token="<pad>"), None, None),
    "named, described": (dict(pad_token=dict(__type="AddedToken", **token("<pad>", lstrip=True))), None, None),
    "named by the model": (dict(image_token="<img>", pad_token="<pad>"), None, None),
    "null": (dict(pad_token=None, additional_special_tokens=None, extra_special_tokens=None), None, None),
    "map": (dict(), dict(pad_token="<pad>", mask_token=token("<t>", lstrip=True)), None),
    "map, additional": (dict(), dict(additional_special_tokens=["<t>", "<u>"]), None),
    "map beside config": (dict(pad_token="<pad>", mask_token="<u>"), dict(pad_token="<t>"), None),
    "map is not read beside a decoder": (dict(added_tokens_decoder=KNOWN), dict(pad_token="<pad>"), None),
    "added_tokens.json": (dict(), None, {"<t>": 10, "<u>": 9}),
    "added_tokens.json beside a named one": (dict(pad_token="<u>"), None, {"<u>": 9, "<T>": 10}),
    "added_tokens.json has an id of tokenizer.json": (dict(), None, {"<t>": 6, "<u>": 11}),
    "added_tokens.json is not read beside a decoder": (dict(added_tokens_decoder=KNOWN), None, {"<t>": 9}),
    "all": (
        dict(additional_special_tokens=["<V>"], image_token="<img>", bos_token="<s>", eos_token="</s>"),
        dict(pad_token="<pad>"),
        {"<u>": 11, "<t>": 10},
    ),
    "split": (dict(split_special_tokens=True), None, None),
    "split, added": (dict(split_special_tokens=True, added_tokens_decoder={"9": token("<t>"), "10": token("<u>", special=False)}), None, None),
    "not split": (dict(split_special_tokens=False, pad_token="<pad>"), None, None),
}


def files(tokenizer, config, special_tokens_map, added_tokens):
    contents = {
        "tokenizer.json": TOKENIZERS[tokenizer],
        "tokenizer_config.json": dict(tokenizer_class="PreTrainedTokenizerFast", **config),
        "special_tokens_map.json": special_tokens_map,
        "added_tokens.json": added_tokens,
    }
    return {name: content for name, content in contents.items() if content is not None}


def ids(contents):
    with tempfile.TemporaryDirectory() as directory:
        for file, content in contents.items():
            (pathlib.Path(directory) / file).write_text(json.dumps(content))
        try:
            return AutoTokenizer.from_pretrained(directory)(TEXT, add_special_tokens=False).input_ids
        except Exception:
            return None


def main():
    path = HERE / "added.json"
    known = {case["name"]: case for case in json.loads(path.read_text())["cases"]} if path.exists() else {}
    version, cases = transformers.__version__.split(".")[0], []
    for tokenizer in TOKENIZERS:
        for name, content in CASES.items():
            name = f"{tokenizer}: {name}"
            case = known.get(name, {"name": name})
            made = files(tokenizer, *content)
            del made["tokenizer.json"]
            case = dict(name=name, tokenizer=tokenizer, files=made, **{f"transformers {n}": case.get(f"transformers {n}") for n in "54"})
            case[f"transformers {version}"] = ids(files(tokenizer, *content))
            cases.append(case)
    tokenizers = ",\n".join(f"{json.dumps(name)}: {json.dumps(content)}" for name, content in TOKENIZERS.items())
    lines = ",\n".join(json.dumps(case) for case in cases)
    path.write_text(f'{{"text": {json.dumps(TEXT)}, "tokenizers": {{\n{tokenizers}\n}}, "cases": [\n{lines}\n]}}\n')


main()
