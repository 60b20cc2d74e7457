"""Writes cases.json, the golden values of tests/tokenizers.rs: what transformers makes of small tokenizers.

Made with transformers 5.23.0 and tokenizers 0.23.3; needs no torch:

    python generate.py

A case holds the files of a model directory, a text, its ids as a document of its own (`whole`: with what the post-processor adds) and
without additions (`plain`), and the id of the end-of-text token, or null.
"""

import json
import pathlib
import tempfile

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

TEXT = "a b a c"
BOS, EOS, OTHER = ("<s>", 1), ("</s>", 2), ("<|im_end|>", 3)
VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_end|>": 3, "a": 4, "b": 5, "c": 6}


def template(single, *special):
    return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=list(special))


LLAMA = template("<s> $A", BOS)
POST_PROCESSORS = {
    "none": None,
    "bos": LLAMA,
    "bos and eos": template("<s> $A </s>", BOS, EOS),
    "eos": template("$A </s>", EOS),
    "two": template("<s> <|im_end|> $A", BOS, OTHER),
    "roberta": processors.RobertaProcessing(EOS, BOS),
    "bert": processors.BertProcessing(EOS, BOS),
    "byte level": processors.ByteLevel(trim_offsets=False),
    "sequence": processors.Sequence([processors.ByteLevel(trim_offsets=False), LLAMA]),
}
ADDED = {"1": "<s>", "2": "</s>", "3": "<|im_end|>"}
DECODER = {id: dict(content=token, lstrip=False, rstrip=False, normalized=False, single_word=False, special=True) for id, token in ADDED.items()}
# Content of tokenizer_config.json and special_tokens_map.json, beside the post-processor "bos" or none.
NAMES = {
    "config": (LLAMA, dict(eos_token="</s>"), None),
    "config, described": (LLAMA, dict(eos_token=dict(__type="AddedToken", **DECODER["3"])), None),
    "map": (LLAMA, dict(model_max_length=64), dict(eos_token="<|im_end|>")),
    "map before config": (LLAMA, dict(eos_token="</s>"), dict(eos_token="<|im_end|>")),
    "config with its tokens before map": (LLAMA, dict(eos_token="</s>", added_tokens_decoder=DECODER), dict(eos_token="<|im_end|>")),
    "add_bos_token without post-processor": (None, dict(add_bos_token=True, bos_token="<s>", eos_token="</s>"), None),
    "add_bos_token is false": (LLAMA, dict(add_bos_token=False, bos_token="<s>", eos_token="</s>"), None),
}


def tokenizer(post_processor):
    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(ADDED.values()))
    if post_processor is not None:
        made.post_processor = post_processor
    return json.loads(made.to_str())


def case(name, post_processor, config, special_tokens_map):
    files = {"tokenizer.json": tokenizer(post_processor), "tokenizer_config.json": dict(tokenizer_class="PreTrainedTokenizerFast", **config)}
    if special_tokens_map:
        files["special_tokens_map.json"] = special_tokens_map
    with tempfile.TemporaryDirectory() as directory:
        for file, content in files.items():
            (pathlib.Path(directory) / file).write_text(json.dumps(content))
        loaded = AutoTokenizer.from_pretrained(directory)
    plain = loaded(TEXT, add_special_tokens=False).input_ids
    return dict(name=name, files=files, text=TEXT, plain=plain, whole=loaded(TEXT).input_ids, eos=loaded.eos_token_id)


cases = [case(f"post-processor: {name}", processor, dict(eos_token="</s>"), None) for name, processor in POST_PROCESSORS.items()]
cases += [case(name, *files) for name, files in NAMES.items()]
lines = ",\n".join(json.dumps(case) for case in cases)
(pathlib.Path(__file__).parent / "cases.json").write_text(f"[\n{lines}\n]\n")
