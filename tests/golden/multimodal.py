"""Writes the golden values of multimodal models, of which tests/parity.rs trains the text parts: with the tower frozen, and on text alone.

Made with torch 2.15.0, transformers 5.24.0 and safetensors 0.8.0, like those of generate.py, whose docstring lists the tensors:

    python multimodal.py [FAMILY...]            # writes the folders
    python multimodal.py --check SOURCE EXPORT  # compares an export that changed no weight with its source, in transformers

The final parameters are those of the text part: no step changes the others.
"""

import copy
import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

import generate

TEXT = dict(generate.SIZES, num_key_value_heads=2, initializer_range=0.2, attention_dropout=0.0, use_cache=False)
TOKENS = dict(image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63)
SIGLIP = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
PIXTRAL = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4, head_dim=8)
QWEN = dict(depth=1, num_heads=2, patch_size=4, spatial_merge_size=2)
MROPE = dict(rope_type="default", rope_theta=1000.0, mrope_section=[1, 1, 2])
# Tensors that are not trained: towers, and layers that predict further tokens.
TOWERS = ("visual.", "vision_tower.", "embed_vision.", "multi_modal_projector.", "mtp.")

FAMILIES = {
    "gemma3_vision": lambda: transformers.Gemma3Config(
        text_config=dict(
            TEXT, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=12, max_position_embeddings=131072,
            sliding_window=5, layer_types=["sliding_attention", "sliding_attention", "full_attention"], pad_token_id=None,
        ),
        vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=60, boi_token_index=61, eoi_token_index=62,
    ),
    "gemma4_vision": lambda: transformers.Gemma4Config(
        text_config=dict(
            TEXT, num_hidden_layers=3, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=5,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"], hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0, pad_token_id=60, final_logit_softcapping=30.0, rms_norm_eps=0.1,
        ),
        vision_config=dict(
            hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
            position_embedding_size=16, patch_size=4,
        ),
        audio_config=None, image_token_id=60, video_token_id=61, boi_token_id=62, eoi_token_id=63,
    ),
    "gemma4_moe_vision": lambda: transformers.Gemma4Config(
        text_config=dict(
            TEXT, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=5,
            layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
            pad_token_id=60, final_logit_softcapping=30.0, rms_norm_eps=0.1, enable_moe_block=True, num_experts=6, top_k_experts=2,
            moe_intermediate_size=12,
        ),
        vision_config=dict(
            hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
            position_embedding_size=16, patch_size=4,
        ),
        audio_config=None, image_token_id=60, video_token_id=61, boi_token_id=62, eoi_token_id=63,
    ),
    "mistral3_vision": lambda: transformers.Mistral3Config(
        text_config=dict(TEXT, model_type="mistral", head_dim=8, sliding_window=None, rms_norm_eps=1e-5, rope_theta=100.0),
        vision_config=dict(PIXTRAL, model_type="pixtral"), image_token_index=60, tie_word_embeddings=False,
    ),
    "ministral3_vision": lambda: transformers.Mistral3Config(
        text_config=dict(
            TEXT, model_type="ministral3", head_dim=8, rms_norm_eps=1e-5, pad_token_id=None, rope_parameters=dict(generate.MINISTRAL_ROPE)
        ),
        vision_config=dict(PIXTRAL, model_type="pixtral"), image_token_index=60, tie_word_embeddings=False,
    ),
    "qwen2_vl": lambda: transformers.Qwen2VLConfig(
        text_config=dict(TEXT, rope_parameters=MROPE), tie_word_embeddings=True,
        vision_config=dict(QWEN, embed_dim=16, hidden_size=32, mlp_ratio=2), **TOKENS,
    ),
    "qwen2_5_vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config=dict(TEXT, rope_parameters=MROPE),
        vision_config=dict(QWEN, hidden_size=16, intermediate_size=20, out_hidden_size=32, window_size=16, fullatt_block_indexes=[0]), **TOKENS,
    ),
    "qwen3_vl": lambda: transformers.Qwen3VLConfig(
        text_config=dict(TEXT, head_dim=16, rope_parameters=dict(MROPE, mrope_section=[4, 2, 2], mrope_interleaved=True)),
        tie_word_embeddings=True,
        vision_config=dict(
            QWEN, hidden_size=16, intermediate_size=20, out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0]
        ),
        **TOKENS,
    ),
}

QWEN3_VL_MOE = dict(
    text_config=dict(
        TEXT, num_hidden_layers=3, head_dim=16, moe_intermediate_size=12, num_experts=8, num_experts_per_tok=3, mlp_only_layers=[0],
        rope_parameters=dict(MROPE, mrope_section=[4, 2, 2], mrope_interleaved=True),
    ),
    vision_config=dict(
        QWEN, hidden_size=16, intermediate_size=20, out_hidden_size=32, num_position_embeddings=16, deepstack_visual_indexes=[0]
    ),
    **TOKENS,
)
FAMILIES |= {
    "qwen3_vl_moe": lambda: transformers.Qwen3VLMoeConfig(**copy.deepcopy(QWEN3_VL_MOE)),
    "qwen3_vl_moe_4_57": lambda: transformers.Qwen3VLMoeConfig(**copy.deepcopy(QWEN3_VL_MOE)),
    "qwen3_5_vision": lambda: transformers.Qwen3_5Config(
        text_config=dict(
            TEXT, num_hidden_layers=3, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
            linear_value_head_dim=8, layer_types=["linear_attention", "linear_attention", "full_attention"],
            rope_parameters=dict(MROPE, mrope_section=[1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.25),
            rms_norm_eps=generate.DELTA_EPSILON,
        ),
        vision_config=dict(QWEN, hidden_size=16, intermediate_size=20, out_hidden_size=32, num_position_embeddings=16),
        tie_word_embeddings=True, **TOKENS,
    ),
}


QWEN3_5_MOE_TEXT = {key: value for key, value in TEXT.items() if key not in ("intermediate_size", "num_hidden_layers")}
FAMILIES["qwen3_5_moe_vision"] = lambda: transformers.Qwen3_5MoeConfig(
    text_config=dict(
        QWEN3_5_MOE_TEXT, num_hidden_layers=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"], moe_intermediate_size=12,
        shared_expert_intermediate_size=20, num_experts=6, num_experts_per_tok=2,
        rope_parameters=dict(MROPE, mrope_section=[1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.25),
        rms_norm_eps=generate.DELTA_EPSILON,
    ),
    vision_config=dict(QWEN, hidden_size=16, intermediate_size=20, out_hidden_size=32, num_position_embeddings=16), **TOKENS,
)


def is_of_tower(name):
    return name.removeprefix("model.").startswith(TOWERS)


def rewrite(directory, config=lambda config: None, tensors=lambda tensors: tensors):
    """Changes the files of a saved model."""
    path = directory / "config.json"
    values = json.loads(path.read_text())
    config(values)
    path.write_text(json.dumps(values, indent=2) + "\n")
    file = directory / "model.safetensors"
    save_file(tensors(load_file(file)), file, metadata={"format": "pt"})


def without_defaults(config):
    """As google published: values that the class has by default are not there."""
    for key in ["num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "query_pre_attn_scalar",
                "hidden_activation", "attention_bias", "attention_dropout", "tie_word_embeddings"]:
        config["text_config"].pop(key, None)


def with_global_heads(config):
    """As google published: heads of full attention by keys of their own, not layer by layer; and values of the class by default."""
    text = config["text_config"]
    del text["per_layer_config"]
    text |= dict(global_head_dim=16, num_global_key_value_heads=1)
    for key in ["max_position_embeddings", "hidden_activation", "attention_bias", "attention_dropout", "tie_word_embeddings"]:
        text.pop(key, None)


def silent_on_ties(config):
    for level in [config, config["text_config"]]:
        level.pop("tie_word_embeddings", None)


def flat(config):
    """As published: the keys of the text part beside those of the model."""
    text = config.pop("text_config")
    text.pop("model_type", None)
    rope = text.pop("rope_parameters")
    config |= {key: value for key, value in text.items() if key not in config}
    config |= dict(rope_theta=rope["rope_theta"], rope_scaling=dict(type="mrope", mrope_section=rope["mrope_section"]))


def layout_of_4_52(tensors):
    def name(name):
        if name.startswith("visual."):
            return "model." + name
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name

    return {name(key): value for key, value in tensors.items()}


def transposed_experts(tensors):
    """As transformers 4.57 saved and as published: [experts, in, out]."""
    return {name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor for name, tensor in tensors.items()}


def moe_of_4_57(config):
    """As published."""
    text = config["text_config"]
    text |= dict(num_experts=text.pop("num_local_experts"), norm_topk_prob=True)
    rope = text.pop("rope_parameters")
    text |= dict(rope_theta=rope.pop("rope_theta"), rope_scaling=rope)


def published_qwen3_5(tensors):
    """With a layer that predicts further tokens; neither it nor the tower has the format of the text part."""
    layer = {"mtp.fc.weight": torch.arange(32 * 64).reshape(32, 64) / 4096, "mtp.norm.weight": torch.ones(32)}
    return {name: tensor.bfloat16() if is_of_tower(name) else tensor for name, tensor in (tensors | layer).items()}


def stacked_experts(tensors):
    """As published: one tensor for all first matrices of a layer, and one for all second matrices."""
    first, rest = {}, {}
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            rest[name] = tensor
            continue
        path, expert, kind, _ = name.rsplit(".", 3)
        first.setdefault(path, {}).setdefault(int(expert), {})[kind] = tensor
    for path, experts in first.items():
        in_order = [experts[expert] for expert in sorted(experts)]
        rest[f"{path}.gate_up_proj"] = torch.stack([torch.cat([each["gate_proj"], each["up_proj"]]) for each in in_order])
        rest[f"{path}.down_proj"] = torch.stack([each["down_proj"] for each in in_order])
    return rest


def tower_in_bfloat16(tensors):
    return {name: tensor.bfloat16() if is_of_tower(name) else tensor for name, tensor in tensors.items()}


# Scores of Gemma 4 have no factor, and its softmax is sharp: with most seeds, torch's float32 norms are off by 1e-6 and more from those in float64.
SEEDS = {"gemma4_vision": 1235, "gemma4_moe_vision": 1236}
EDITS = {
    "gemma3_vision": dict(config=without_defaults),
    "gemma4_moe_vision": dict(config=with_global_heads, tensors=lambda tensors: tower_in_bfloat16(tensors)),
    "gemma4_vision": dict(config=with_global_heads, tensors=lambda tensors: tower_in_bfloat16(tensors)),
    "mistral3_vision": dict(config=silent_on_ties),
    "qwen2_vl": dict(tensors=layout_of_4_52),
    "qwen2_5_vl": dict(config=flat),
    "qwen3_vl": dict(tensors=tower_in_bfloat16),
    "qwen3_5_vision": dict(tensors=published_qwen3_5),
    "qwen3_5_moe_vision": dict(tensors=stacked_experts),
    "qwen3_vl_moe_4_57": dict(config=moe_of_4_57, tensors=transposed_experts),
}


def load(directory):
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_of_tower(name))
    return model


def write(family, root):
    directory = root / family
    directory.mkdir(exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    generator = torch.Generator().manual_seed(SEEDS.get(family, 1234))
    model = transformers.AutoModelForImageTextToText.from_config(FAMILIES[family](), attn_implementation="eager").float().eval()
    generate.randomize(model, generator)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    rewrite(directory, **EDITS.get(family, {}))
    text = torch.randint(0, 60, (generate.STEPS, generate.BATCH, generate.SEQUENCE + 1), generator=generator, dtype=torch.int32)
    tokens, targets = text[..., :-1].contiguous(), text[..., 1:].contiguous()
    model = load(directory)
    logits, losses, norms = generate.train(model, tokens, targets, None, 0.0)
    golden = dict(tokens=tokens, targets=targets, logits=logits)
    golden |= dict(loss=torch.tensor(losses, dtype=torch.float64), grad_norm=torch.tensor(norms, dtype=torch.float64))
    golden |= {f"final.{name}": tensor for name, tensor in generate.saved(model).items() if not is_of_tower(name)}
    save_file(golden, directory / "golden.safetensors")
    print(f"{family}: loss {losses[0]:.4f} to {losses[-1]:.4f}, gradient norm {min(norms):.2f} to {max(norms):.2f}")


def check(source, export):
    """An export that changed no weight has the source's tensors to the bit, and gives its logits."""
    have, want = ({name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}
                  for folder in [export, source])
    assert have.keys() == want.keys(), have.keys() ^ want.keys()
    for name in want:
        assert have[name].dtype == want[name].dtype and torch.equal(have[name], want[name]), name
    tokens = torch.arange(16).unsqueeze(0)
    with torch.no_grad():
        logits = [load(folder)(tokens).logits for folder in [source, export]]
    assert torch.equal(*logits)
    print(f"{export}: {len(want)} tensors and the logits of {source}")


def main():
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if sys.argv[1:2] == ["--check"]:
        return check(*map(pathlib.Path, sys.argv[2:4]))
    for family in sys.argv[1:] or FAMILIES:
        write(family, pathlib.Path(__file__).parent)


if __name__ == "__main__":
    main()
