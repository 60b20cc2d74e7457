"""Writes gpt_oss_mxfp4: a tiny GPT-OSS whose experts are packed in MXFP4, and what transformers makes of it (versions: generate.py).

model.safetensors holds random codes of every value, with scales that reach subnormal numbers; unpacked.safetensors the same model as
transformers' convert_moe_packed_tensors widens it, in the form in which transformers saves it. tests/parity.rs reads both.
"""

import json
import pathlib

import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import generate

EXPERTS = "model.layers.0.mlp.experts."


def main():
    directory = pathlib.Path(__file__).parent / "gpt_oss_mxfp4"
    directory.mkdir(exist_ok=True)
    config = generate.FAMILIES["gpt_oss"]
    config.update(dict(vocab_size=8, hidden_size=64, intermediate_size=32, num_hidden_layers=1, layer_types=["sliding_attention"], num_local_experts=3))
    generator = torch.Generator().manual_seed(1234)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    generate.randomize(model, generator)
    packed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    unpacked = dict(packed)
    for name in ("gate_up_proj", "down_proj"):
        experts, columns, rows = packed.pop(EXPERTS + name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 131, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        scales[0, 0, 0], scales[-1, -1, -1] = 0, 1
        packed |= {EXPERTS + name + "_blocks": blocks, EXPERTS + name + "_scales": scales}
        unpacked[EXPERTS + name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
        assert unpacked[EXPERTS + name].shape == (experts, columns, rows)
    save_file(packed, directory / "model.safetensors")
    save_file(unpacked, directory / "unpacked.safetensors")
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    saved = config.to_dict() | dict(architectures=["GptOssForCausalLM"], dtype="bfloat16")
    saved["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=kept)
    (directory / "config.json").write_text(json.dumps(saved, indent=2) + "\n")


if __name__ == "__main__":
    main()
