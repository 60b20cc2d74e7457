"""Loads exported model directories in transformers and fails on any missing, unexpected or wrong tensor.

usage: check_export.py DIR...
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file

import generate


def check(directory):
    config = json.loads((directory / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    model, info = model_class.from_pretrained(directory, output_loading_info=True, dtype="auto")
    problems = {key: value for key, value in info.items() if value}
    assert not problems, problems
    # What it saves again: experts are one tensor in memory, and one each in files.
    state = generate.saved(model)
    for file in directory.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert state[name].dtype == tensor.dtype, (name, state[name].dtype, tensor.dtype)
            assert torch.equal(state[name], tensor), name
    with torch.no_grad():
        logits = model(torch.arange(8).unsqueeze(0)).logits
    assert torch.isfinite(logits).all()
    print(f"{directory}: {config['architectures'][0]}, {len(state)} tensors, {model.dtype}")


for argument in sys.argv[1:]:
    check(pathlib.Path(argument))
