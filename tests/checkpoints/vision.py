"""Tiny checkpoints with a vision tower, random and trained, and what transformers computes from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

TRAINED = Path(__file__).parents[2] / "models" / "tiny-qwen2vl"
START, IMAGE, END = 2048, 2049, 2050
BEGIN = "<start_of_image>"
COMMON: dict[str, Any] = {
    "vocab_size": 2052,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Sizes that differ from each other; the second has widths that are no multiple of 16, other patches and a head of its own.
MODELS: dict[str, dict[str, Any]] = {
    "head80": {
        "text": {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2},
        "rope": {"mrope_section": [4, 6, 6], "rope_theta": 10000.0, "rope_type": "default"},
        "vision": {"depth": 2, "embed_dim": 160, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
        "tied": True,
    },
    "padded": {
        "text": {"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 3, "num_key_value_heads": 1},
        "rope": {"mrope_section": [2, 4, 6], "rope_theta": 1000.0, "rope_type": "default"},
        "vision": {"depth": 3, "embed_dim": 120, "num_heads": 3, "mlp_ratio": 3, "patch_size": 6},
        "tied": False,
    },
    "windows": {
        "kind": "Qwen2_5_VL",
        "text": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
        "rope": {"mrope_section": [2, 3, 3], "rope_theta": 10000.0, "rope_type": "default"},
        "vision": {
            "depth": 3,
            "hidden_size": 96,
            "num_heads": 4,
            "intermediate_size": 84,
            "patch_size": 6,
            "out_hidden_size": 64,
        }
        | {"window_size": 24, "fullatt_block_indexes": [1]},
        "tied": True,
    },
    # Heads of 72 and 24 channels; as many taps as the decoder has layers, one of them after the last of the tower.
    "taps": {
        "kind": "Qwen3VL",
        "text": {
            "hidden_size": 80,
            "intermediate_size": 100,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
        },
        "rope": {"mrope_section": [6, 3, 3], "rope_theta": 10000.0, "rope_type": "default"},
        "vision": {"depth": 3, "hidden_size": 144, "num_heads": 2, "intermediate_size": 84, "patch_size": 6}
        | {"out_hidden_size": 80, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
        "tied": False,
    },
    # Layers with a state; a part of each head turns, by axes whose pairs alternate.
    "states": {
        "kind": "Qwen3_5",
        "text": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 40}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 20}
        | {"linear_conv_kernel_dim": 3, "rms_norm_eps": 3e-5},
        "rope": {"mrope_section": [5, 4, 3], "rope_theta": 20000.0, "rope_type": "default", "partial_rotary_factor": 0.6}
        | {"mrope_interleaved": True},
        "vision": {"depth": 2, "hidden_size": 120, "num_heads": 3, "intermediate_size": 84, "patch_size": 6}
        | {"out_hidden_size": 64, "num_position_embeddings": 25, "hidden_act": "gelu"}
        | {"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}},
        "tied": True,
    },
    "states_experts": {
        "kind": "Qwen3_5Moe",
        "text": {"layer_types": ["linear_attention", "full_attention"], "hidden_size": 64, "moe_intermediate_size": 48}
        | {"num_experts": 5, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40, "rms_norm_eps": 3e-5}
        | {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "linear_conv_kernel_dim": 2}
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 20, "linear_value_head_dim": 36},
        "rope": {"mrope_section": [3, 3, 2], "rope_theta": 3000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        "vision": {"depth": 2, "hidden_size": 72, "num_heads": 2, "intermediate_size": 100, "patch_size": 14}
        | {"out_hidden_size": 64, "num_position_embeddings": 49},
        "tied": False,
    },
    "clip_llama": {
        "kind": "Llava",
        "text": {"model_type": "llama", "hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 20},
        "vision": {"model_type": "clip_vision_model", "num_hidden_layers": 3, "hidden_size": 160, "num_attention_heads": 2}
        | {"intermediate_size": 84, "patch_size": 6, "image_size": 24},
        "tied": False,
    },
    # The class row is a feature; a window shorter than a picture; a layer counted from the front.
    "clip_mistral": {
        "kind": "Llava",
        "text": {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "sliding_window": 9},
        "vision": {"model_type": "clip_vision_model", "num_hidden_layers": 3, "hidden_size": 72, "num_attention_heads": 3}
        | {"intermediate_size": 100, "patch_size": 14, "image_size": 42},
        "outside": {"vision_feature_layer": 1, "vision_feature_select_strategy": "full"},
        "tied": False,
    },
    # Pixels beyond the last whole patch; the stream after the last layer.
    "siglip_qwen2": {
        "kind": "Llava",
        "text": {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        | {"num_key_value_heads": 1},
        "vision": {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "hidden_size": 144, "num_attention_heads": 2}
        | {"intermediate_size": 84, "patch_size": 7, "image_size": 33, "tie_last_hidden_states": False},
        "outside": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        "tied": True,
    },
    # Pictures in tiles of six by six patches, which become four tokens.
    "tiles": {
        "kind": "SmolVLM",
        "text": {"model_type": "llama", "hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 20, "rms_norm_eps": 3e-5, "vocab_size": 2060},
        "vision": {"num_hidden_layers": 3, "hidden_size": 144, "num_attention_heads": 2, "intermediate_size": 84}
        | {"patch_size": 6, "image_size": 36, "hidden_act": "gelu", "layer_norm_eps": 3e-5},
        "outside": {"scale_factor": 3},
        "tied": True,
    },
    "tiles_mistral": {
        "kind": "Idefics3",
        "text": {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        | {"num_key_value_heads": 1, "sliding_window": 9, "vocab_size": 2056},
        "vision": {"num_hidden_layers": 2, "hidden_size": 72, "num_attention_heads": 3, "intermediate_size": 100}
        | {"patch_size": 7, "image_size": 30},
        "outside": {"scale_factor": 4},
        "tied": False,
    },
    # Tiles of four by four patches, after a class row, whose layers have a factor for each channel.
    "aspect": {
        "kind": "InternVL",
        "text": {"model_type": "qwen2", "hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 3}
        | {"num_key_value_heads": 1, "rms_norm_eps": 3e-5, "vocab_size": 2056},
        "vision": {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 84}
        | {"patch_size": [6, 6], "image_size": [24, 24], "layer_norm_eps": 3e-2, "attention_bias": True}
        | {"hidden_act": "gelu_pytorch_tanh"},
        "outside": {"projector_hidden_act": "quick_gelu", "vision_feature_layer": 2},
        "tied": False,
    },
    "aspect_rms": {
        "kind": "InternVL",
        "text": {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 24, "vocab_size": 2056},
        "vision": {"num_hidden_layers": 2, "hidden_size": 72, "num_attention_heads": 3, "intermediate_size": 100}
        | {"patch_size": [7, 7], "image_size": [30, 30], "norm_type": "rms_norm", "use_qk_norm": True},
        "outside": {"downsample_ratio": 0.25},
        "tied": True,
    },
    # Pictures of any size, and large ones in tiles before them, for layers of convolutions; a table of five by five positions.
    "naflex": {
        "kind": "Lfm2Vl",
        "text": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "hidden_size": 64}
        | {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "norm_eps": 3e-5}
        | {"block_auto_adjust_ff_dim": False, "conv_L_cache": 4, "vocab_size": 2064, "rope_theta": 5000.0},
        "vision": {"num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 84}
        | {"patch_size": 6, "num_patches": 25, "layer_norm_eps": 3e-2, "hidden_act": "gelu", "vision_use_head": False},
        "outside": {"projector_hidden_size": 80, "projector_hidden_act": "quick_gelu"},
        "tied": True,
    },
    # Four tokens of two by two patches; the window is shorter than a text, and than a picture and what comes before it.
    "averaged": {
        "kind": "Gemma3",
        "text": {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 24, "sliding_window": 6, "query_pre_attn_scalar": 17, "rms_norm_eps": 3e-5}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "vocab_size": 2056},
        "vision": {"num_hidden_layers": 2, "hidden_size": 72, "num_attention_heads": 3, "intermediate_size": 84}
        | {"patch_size": 6, "image_size": 24, "layer_norm_eps": 3e-5, "vision_use_head": False},
        "outside": {"mm_tokens_per_image": 4},
        "rope": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 30000.0, "factor": 4.0},
        },
        "tied": True,
    },
}
# Prompts that are one run, so apart from the others.
WHOLE_PROMPTS: dict[str, dict[str, Any]] = {
    "paligemma": {
        "kind": "PaliGemma",
        "text": {"model_type": "gemma", "hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 20, "rms_norm_eps": 3e-5, "rope_theta": 5000.0},
        "vision": {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "hidden_size": 144, "num_attention_heads": 2}
        | {"intermediate_size": 84, "patch_size": 7, "image_size": 33, "layer_norm_eps": 3e-5, "vision_use_head": False},
        "outside": {"projection_dim": 72},
        "tied": True,
    },
    # A window shorter than the prompt, which there sees itself all the same.
    "paligemma2": {
        "kind": "PaliGemma",
        "text": {"model_type": "gemma2", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        | {"num_key_value_heads": 1, "head_dim": 24, "sliding_window": 9, "query_pre_attn_scalar": 20}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
        "vision": {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "hidden_size": 72, "num_attention_heads": 3}
        | {"intermediate_size": 100, "patch_size": 6, "image_size": 24, "vision_use_head": False},
        "outside": {"projection_dim": 64},
        "tied": True,
    },
}
# What another has in another way, apart from the others too.
VARIANTS: dict[str, dict[str, Any]] = {
    "naflex_plain": {
        "kind": "Lfm2Vl",
        "text": {"layer_types": ["conv", "full_attention"], "hidden_size": 72, "intermediate_size": 100}
        | {"num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 2064, "block_auto_adjust_ff_dim": False},
        "vision": {"num_hidden_layers": 2, "hidden_size": 72, "num_attention_heads": 3, "intermediate_size": 100}
        | {"patch_size": 7, "num_patches": 9},
        "outside": {"projector_hidden_size": 48, "projector_bias": False, "projector_use_layernorm": False}
        | {"downsample_factor": 3},
        "tied": False,
    },
}
# Patches of 16, of which whole tiles of 512 pixels are made.
VARIANTS["naflex_16"] = MODELS["naflex"] | {"vision": MODELS["naflex"]["vision"] | {"patch_size": 16}}
GEMMA_4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 30000.0, "partial_rotary_factor": 0.5},
}
VARIANTS |= {
    # Rows of layers, and keys and values that layers share, beside pictures whose tokens see what is before them.
    "gemma4": {
        "kind": "Gemma4",
        "text": {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "pad_token_id": 7}
        | {"rms_norm_eps": 3e-5, "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": GEMMA_4_ROPE}
        | {"final_logit_softcapping": 4.0, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "vocab_size": 2056}
        | {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 2056},
        "vision": {"num_hidden_layers": 2, "hidden_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"head_dim": 24, "intermediate_size": 84, "patch_size": 6, "pooling_kernel_size": 2, "rms_norm_eps": 3e-2}
        | {"position_embedding_size": 140, "rope_parameters": {"rope_type": "axial", "rope_theta": 30.0}}
        | {"use_clipped_linears": True},
        "tied": True,
    },
    # Tokens of a picture see all of it in layers with a window; means that are scaled and shifted.
    "gemma4_whole": {
        "kind": "Gemma4",
        "text": {"num_hidden_layers": 3, "hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 3, "head_dim": 20}
        | {"num_key_value_heads": 1, "global_head_dim": 40, "sliding_window": 9, "rms_norm_eps": 3e-5, "vocab_size": 2056}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "rope_parameters": GEMMA_4_ROPE}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 3, "hidden_size_per_layer_input": 0}
        | {"vocab_size_per_layer_input": 2056, "use_bidirectional_attention": "vision"},
        "vision": {"num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3}
        | {"head_dim": 20, "intermediate_size": 100, "patch_size": 5, "pooling_kernel_size": 3, "standardize": True}
        | {"position_embedding_size": 300, "hidden_activation": "silu"},
        "tied": True,
    },
}
# As many positions as pictures of the published 280 tokens need.
for name, rows in {"gemma4": 560, "gemma4_whole": 840}.items():
    own = VARIANTS[name]
    VARIANTS[f"{name}_280"] = own | {"vision": own["vision"] | {"position_embedding_size": rows}}
TILED = ("SmolVLM", "Idefics3")
ABOVE_ONE = ("Qwen3_5", "Qwen3_5Moe", "Gemma3", "PaliGemma")
PROCESSORS = {
    "clip_vision_model": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 0}, "crop_size": 0},
    "siglip_vision_model": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 0, "width": 0}},
}


def build(folder: Path, name: str) -> Path:
    """Save a random model with a vision tower in float32; norms and biases are random too: a lost one shows."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    torch.set_num_threads(1)
    settings = (MODELS | WHOLE_PROMPTS | VARIANTS)[name]
    kind = settings.get("kind", "Qwen2VL")
    text, vision = {**COMMON, **settings["text"]}, {**settings["vision"], "initializer_range": 0.1}
    outside: dict[str, Any] = {"image_token_id": IMAGE, **settings.get("outside", {})}
    if "rope" in settings:
        text["rope_parameters"] = settings["rope"]
        if kind != "Gemma3":
            vision = {"hidden_size": text["hidden_size"], **vision, "spatial_merge_size": 2}
    if kind == "Lfm2Vl":
        text |= {"tie_word_embeddings": settings["tied"], "dtype": "float32"}
    if kind in ("Llava", "Gemma3", "PaliGemma"):
        outside["image_token_index"] = outside.pop("image_token_id")
        text["tie_word_embeddings"] = settings["tied"]
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=settings["tied"], **outside
    )
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        for key, parameter in model.named_parameters():
            if "norm" in key or "ln_q" in key or "layrnorm" in key:
                # Weights of these decoders are what gains have above 1, but for the norm of a delta net.
                above = (
                    kind in ABOVE_ONE
                    and ("language_model" in key or "soft_emb" in key)
                    and not key.endswith("linear_attn.norm.weight")
                )
                parameter.data = float(key.endswith("weight") and not above) + 0.3 * torch.randn_like(parameter)
                if kind == "Gemma4" and key.endswith(("q_norm.weight", "k_norm.weight")):
                    # Scores are not divided by the root of head_dim: gains of 1 would make them as large as no model has them.
                    parameter.data *= 0.45
            elif key.endswith(("router.scale", "per_expert_scale")):
                parameter.data = 1 + 0.3 * torch.randn_like(parameter)
            elif ".lambda_" in key:
                parameter.data = 0.5 + 0.2 * torch.randn_like(parameter)
            elif key.endswith("A_log"):
                # Memories of one token to hundreds.
                parameter.data = torch.linspace(-6, 1, len(parameter))
            elif "conv1d" in key or ".conv.conv." in key:
                parameter.data = 0.6 * torch.randn_like(parameter)
            elif key.endswith("bias"):
                parameter.data = 0.3 * torch.randn_like(parameter)
            elif any(part in key for part in ("visual", "vision", "multi_modal", "connector")):
                # Of the size that keeps the variance, so that every layer shows.
                wide = parameter[0].numel() if parameter.ndim > 1 and "pos" not in key else 1
                parameter.data = torch.randn_like(parameter) * (1.5 / wide) ** 0.5
        for key, buffer in model.named_buffers():
            if key.endswith(("input_min", "input_max", "output_min", "output_max")):
                # So near to 0 that they bite.
                bound, small = 0.8 + 0.4 * torch.rand_like(buffer), ("o_proj.", "down_proj.")
                buffer.data = bound * (-1.0 if key.endswith("min") else 1.0) * (0.3 if any(x in key for x in small) else 1.0)
            elif key.endswith(("layer_scalar", "std_scale")):
                buffer.data = 0.7 + 0.5 * torch.rand_like(buffer)
            elif key.endswith("std_bias"):
                buffer.data = 3 * torch.randn_like(buffer)
        clips = {key: buffer for key, buffer in model.named_buffers() if key.endswith(("input_min", "input_max"))}
        for key, buffer in clips.items():
            # What projections of the second layer read has the same bounds, so that they can be one.
            for part, first in (("k", "q"), ("v", "q"), ("up", "gate")):
                if f"layers.1.self_attn.{part}_proj." in key or f"layers.1.mlp.{part}_proj." in key:
                    buffer.data = clips[key.replace(f".{part}_proj.", f".{first}_proj.")].clone()
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TRAINED / file, folder / file)
    if kind == "PaliGemma":
        (folder / "chat_template.jinja").unlink()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_text((folder / file).read_text().replace("<|image_pad|>", "<image>"))
    if kind.startswith("Qwen3_5"):
        # transformers puts its own pre-tokenizer into this family's tokenizers, as tokenizer.json of the real ones has it.
        transformers.Qwen3_5Tokenizer.from_pretrained(folder, pad_token="<|end|>", unk_token=None).save_pretrained(folder)
    if kind in TILED:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens(["<fake_token_around_image>", "<global-img>", "<row_1_col_1>"])
        tokenizer.save(str(folder / "tokenizer.json"))
    if kind == "Lfm2Vl":
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        names = ["<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *(f"<|img_row_1_col_{i}|>" for i in range(1, 4))]
        tokenizer.add_special_tokens(names)
        tokenizer.save(str(folder / "tokenizer.json"))
    if kind in ("InternVL", "Gemma4"):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens(["<img>", "</img>"] if kind == "InternVL" else ["<|image>", "<image|>"])
        tokenizer.save(str(folder / "tokenizer.json"))
    if kind == "Gemma3":
        names = {
            "<|vision_start|>": "<start_of_image>",
            "<|image_pad|>": "<image_soft_token>",
            "<|vision_end|>": "<end_of_image>",
        }
        tokenizer = (folder / "tokenizer.json").read_text()
        for theirs, its in names.items():
            tokenizer = tokenizer.replace(theirs, its)
        (folder / "tokenizer.json").write_text(tokenizer)
        template = (folder / "chat_template.jinja").read_text()
        (folder / "chat_template.jinja").write_text(template.replace("<|vision_start|><|image_pad|><|vision_end|>", BEGIN))
    (folder / "preprocessor_config.json").write_text(json.dumps(_processor(settings["vision"], kind, outside)))
    return folder


def _processor(vision: dict[str, Any], kind: str, outside: dict[str, Any]) -> dict[str, Any]:
    """The settings of a processor for these towers."""
    if kind in TILED:
        sizes = {"size": {"longest_edge": 3 * vision["image_size"]}, "max_image_size": {"longest_edge": vision["image_size"]}}
        return {"image_processor_type": f"{kind}ImageProcessor", "image_mean": [0.4, 0.5, 0.6], **sizes}
    if kind == "Lfm2Vl":
        patch, merge = vision["patch_size"], outside.get("downsample_factor", 2)
        sizes = {"encoder_patch_size": patch, "downsample_factor": merge, "tile_size": 2 * patch * merge, "max_tiles": 4}
        tokens = {"min_image_tokens": 2, "max_image_tokens": 6, "max_pixels_tolerance": 1.5, "max_num_patches": 24}
        return {"image_processor_type": "Lfm2VlImageProcessorFast", "image_mean": [0.4, 0.5, 0.6], **sizes, **tokens}
    if kind == "InternVL":
        # As published files have it: processors of the family cut all the same.
        sizes = {"size": dict.fromkeys(("height", "width"), vision["image_size"][0]), "max_patches": 6}
        return {"image_processor_type": "GotOcr2ImageProcessorFast", "crop_to_patches": False, "crop_size": None, **sizes}
    if kind == "Gemma4":
        sizes = {"patch_size": vision["patch_size"], "pooling_kernel_size": vision["pooling_kernel_size"]}
        return {"image_processor_type": "Gemma4ImageProcessorFast", "max_soft_tokens": 70, **sizes}
    if kind == "Gemma3":
        sizes = {"size": dict.fromkeys(("height", "width"), vision["image_size"])}
        return {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": None, "image_seq_length": 4, **sizes}
    if "image_size" not in vision:
        found: dict[str, Any] = json.loads((TRAINED / "preprocessor_config.json").read_text())
        return found | {"patch_size": vision["patch_size"]}
    found, size = dict(PROCESSORS[vision["model_type"]]), vision["image_size"]
    sizes = {
        key: size if key == "crop_size" else dict.fromkeys(found[key], size) for key in ("size", "crop_size") if key in found
    }
    return found | sizes


def reference(folder: Path) -> Any:
    """transformers' model in float32 that rounds keys and values to f16, in the tower too, as edgeq's cache does."""
    import torch
    from transformers import AutoModelForImageTextToText

    reference_attention()
    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="rounded")
    return model.eval()


def reference_attention() -> None:
    """Enter the attention "rounded" into transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    def rounded(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **settings: Any) -> Any:
        # Some towers do not say that every head has its own keys.
        module.num_key_value_groups = getattr(module, "num_key_value_groups", 1)
        return eager_attention_forward(module, query, key.half().float(), value.half().float(), attention_mask, **settings)

    ALL_ATTENTION_FUNCTIONS.register("rounded", rounded)
    ALL_MASK_ATTENTION_FUNCTIONS.register("rounded", eager_mask)
