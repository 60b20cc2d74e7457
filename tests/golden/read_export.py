"""Reads an export with transformers, version 4 or 5, and compares what it finds with the JSON that is given. No torch is needed."""

import json
import sys

from transformers import AutoConfig, AutoTokenizer, GenerationConfig


def rotation(config):
    """The base and the factor of a config, under the names of this version."""
    new = getattr(config, "rope_parameters", None)
    if new:
        return new["rope_theta"], new.get("factor")
    return config.rope_theta, (config.rope_scaling or {}).get("factor")


def main(path, expected):
    tokenizer = AutoTokenizer.from_pretrained(path)
    config = AutoConfig.from_pretrained(path)
    stops = GenerationConfig.from_pretrained(path).eos_token_id
    theta, factor = rotation(config)
    if "eos" in expected:
        assert tokenizer.eos_token == expected["eos"], tokenizer.eos_token
        assert tokenizer.eos_token_id in (stops if isinstance(stops, list) else [stops]), stops
    if "chat" in expected:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
        assert chat == expected["chat"], chat
    if "templates" in expected:
        assert sorted(tokenizer.chat_template) == expected["templates"], tokenizer.chat_template
    if "theta" in expected:
        assert theta == expected["theta"], theta
    if "factor" in expected:
        assert factor == expected["factor"], factor


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
