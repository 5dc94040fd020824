"""Pairs of GGUF files of tiny checkpoints with a tower, as llama.cpp's converters lay them out.

The converter of LLaVA's towers is the old one: it leaves out the layers that are not used, and calls fc1 of an MLP ffn_down.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from tests.converters.importers.gguf_files import Array, add, write_gguf

Keys = dict[str, Any]
Tensors = dict[str, Array]
PROJECTORS = {"qwen2_vl": "qwen2vl_merger", "qwen2_5_vl": "qwen2.5vl_merger", "qwen3_vl": "qwen3vl_merger", "llava": "mlp"}
PROJECTORS |= {name: name for name in ("internvl", "gemma3", "idefics3")}
PROJECTORS |= {"qwen3_5": "qwen3vl_merger", "qwen3_5_moe": "qwen3vl_merger", "lfm2_vl": "lfm2", "gemma4": "gemma4v"}
"""`model_type` of config.json -> llama.cpp's name."""
QWEN = [
    ("visual.patch_embed.proj.", "v.patch_embd."),
    ("visual.pos_embed.", "v.position_embd."),
    (r"visual.merger.(ln_q|norm)\.", "v.post_ln."),
    (r"visual.merger.(mlp\.0|linear_fc1)\.", "mm.0."),
    (r"visual.merger.(mlp\.2|linear_fc2)\.", "mm.2."),
    (r"visual.blocks.(\d+)\.", r"v.blk.\1."),
    ("norm1", "ln1"),
    ("norm2", "ln2"),
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    (r"mlp\.(fc1|linear_fc1|up_proj)\.", "ffn_up."),
    (r"mlp\.(fc2|linear_fc2|down_proj)\.", "ffn_down."),
    (r"mlp\.gate_proj\.", "ffn_gate."),
]
LLAVA = [
    (r"vision_tower\.vision_model\.|vision_tower\.", "v."),
    ("v.embeddings.class_embedding", "v.class_embd"),
    ("v.embeddings.patch_embedding.", "v.patch_embd."),
    ("v.embeddings.position_embedding.", "v.position_embd."),
    ("v.pre_layrnorm.", "v.pre_ln."),
    ("multi_modal_projector.linear_1.", "mm.0."),
    ("multi_modal_projector.linear_2.", "mm.2."),
    (r"v.encoder.layers.(\d+)\.", r"v.blk.\1."),
    ("layer_norm", "ln"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    ("self_attn.out_proj", "attn_out"),
    ("mlp.fc1.", "ffn_down."),
    ("mlp.fc2.", "ffn_up."),
]
INTERNVL = [
    ("vision_tower.embeddings.cls_token", "v.class_embd"),
    ("vision_tower.embeddings.position_embeddings", "v.position_embd.weight"),
    (r"vision_tower.embeddings.patch_embeddings.projection\.", "v.patch_embd."),
    (r"vision_tower.encoder.layer.(\d+)\.", r"v.blk.\1."),
    (r"lambda_(\d)", r"ls\1.weight"),
    ("layernorm_before", "ln1"),
    ("layernorm_after", "ln2"),
    (r"attention\.([qkv])_(proj|norm)", r"attn_\1_\2"),
    (r"(attn_[qkv])_proj", r"\1"),
    ("attention.projection_layer", "attn_out"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("multi_modal_projector.layer_norm", "mm.model.mlp.0"),
    ("multi_modal_projector.linear_1", "mm.model.mlp.1"),
    ("multi_modal_projector.linear_2", "mm.model.mlp.3"),
]
SIGLIP = [
    ("vision_model.", "vision_tower."),
    ("vision_tower.vision_tower.", "vision_tower."),
    ("vision_tower.post_layernorm", "v.post_ln"),
    ("mlp.fc1.", "ffn_up."),
    ("mlp.fc2.", "ffn_down."),
    ("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm"),
    ("multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"),
    ("connector.modality_projection.proj", "mm.model.fc"),
    *LLAVA,
]
LFM2 = [
    ("multi_modal_projector.layer_norm", "mm.input_norm"),
    (r"multi_modal_projector.linear_(\d)", r"mm.\1"),
    *SIGLIP,
]
GEMMA4 = [
    (r"vision_tower.encoder.layers.(\d+)\.", r"v.blk.\1."),
    ("vision_tower.patch_embedder.input_proj", "v.patch_embd"),
    ("vision_tower.patch_embedder.position_embedding_table", "v.position_embd.weight"),
    ("vision_tower.std_", "v.std_"),
    ("embed_vision.embedding_projection", "mm.input_projection"),
    (r"\.linear\.", "."),
    ("self_attn.o_proj", "attn_out"),
    (r"self_attn\.([qkv])_(proj|norm)", r"attn_\1_\2"),
    (r"(attn_[qkv])_proj", r"\1"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
    ("input_layernorm", "ln1"),
    ("post_attention_layernorm", "attn_post_norm"),
    ("pre_feedforward_layernorm", "ln2"),
    ("post_feedforward_layernorm", "ffn_post_norm"),
]
PATTERNS = {"llava": LLAVA, "internvl": INTERNVL, "gemma3": SIGLIP, "idefics3": SIGLIP, "lfm2_vl": LFM2, "gemma4": GEMMA4}
"""Patterns in transformers' names, and what llama.cpp has there; those of Qwen's towers for all others."""
PLACEHOLDERS = {"llava": "<image>", "internvl": "<IMG_CONTEXT>", "gemma3": "<image_soft_token>", "idefics3": "<image>"}
PLACEHOLDERS |= {"lfm2_vl": "<image>", "gemma4": "<|image|>"}
"""The token in whose place a picture comes; other checkpoints call it so themselves."""


TOWER_PARTS = ("visual.", "vision_tower.", "vision_model.", "multi_modal", "connector.", "embed_vision.")
MODELS = {"qwen3_vl": "qwen3vl", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
"""`model_type` -> llama.cpp's name of the language model, of Qwen's; of others "qwen2vl"."""


def nothing(*found: Any) -> None:
    pass


def floats(name: str, values: Array) -> Type:
    return Type.F32


def write_pair(
    folder: Path,
    model: Path,
    mmproj: Path,
    choose: Callable[[str, Array], Type] = floats,
    change: Callable[[Keys, Tensors], None] = nothing,
    change_model: Callable[[Keys], None] = nothing,
) -> None:
    """Write the checkpoint in `folder`; `choose`: type of a tensor; `change`: keys and tensors of the tower."""
    config = json.loads((folder / "config.json").read_text())
    text = {
        re.sub(r"^(model\.)?(language_model|text_model)\.(model\.)?", "model.", name).replace(
            "model.lm_head", "lm_head"
        ): values
        for name, values in load_file(folder / "model.safetensors").items()
        if not any(part in name for part in TOWER_PARTS)
    }

    def add_keys(keys: Keys) -> None:
        keys |= _model_keys(config, folder)
        change_model(keys)

    with tempfile.TemporaryDirectory() as place:
        save_file(text, Path(place) / "model.safetensors")
        (Path(place) / "config.json").write_text(json.dumps(config["text_config"]))
        write_gguf(Path(place), model, choose, add_keys)
    write_mmproj(folder, mmproj, choose, change)


def write_mmproj(
    folder: Path,
    path: Path,
    choose: Callable[[str, Array], Type] = floats,
    change: Callable[[Keys, Tensors], None] = nothing,
) -> None:
    config = json.loads((folder / "config.json").read_text())
    keys = _tower_keys(config, json.loads((folder / "preprocessor_config.json").read_text()))
    tensors = _tower_tensors(config, folder)
    change(keys, tensors)
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in keys.items():
        add(writer, key, value)
    for name, values in tensors.items():
        kind = choose(name, values) if values.ndim == 2 else Type.F32
        raw = np.ascontiguousarray(values) if kind == Type.F32 else gguf.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _model_keys(config: Mapping[str, Any], folder: Path) -> Keys:
    """Those that the decoder's own configuration does not give, and the vocabulary of the demo model."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"] | {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    control = {each["id"] for each in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    if config["model_type"] in PLACEHOLDERS:
        at = config.get("image_token_index") or config["image_token_id"]
        tokens[at] = PLACEHOLDERS[config["model_type"]]
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    found = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges, "add_bos_token": False}
    found |= {"token_type": [3 if i in control else 1 for i in range(len(tokens))], "bos_token_id": 0, "eos_token_id": 1}
    template = (folder / "chat_template.jinja").read_text().replace("<|image_pad|>", tokens[2049])
    keys = {f"tokenizer.ggml.{key}": value for key, value in found.items()} | {"tokenizer.chat_template": template}
    if config["model_type"] == "gemma3":
        rope = config["text_config"]["rope_parameters"]["sliding_attention"]
        keys |= {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": rope["rope_theta"]}
    if config["model_type"] not in PLACEHOLDERS:
        own = MODELS.get(config["model_type"], "qwen2vl")
        keys[f"{own}.rope.dimension_sections"] = [*config["text_config"]["rope_parameters"]["mrope_section"], 0]
    if config["model_type"] == "gemma4":
        keys["tokenizer.ggml.padding_token_id"] = config["text_config"].get("pad_token_id", 0)
    if config["model_type"] == "qwen3_vl":
        keys["qwen3vl.n_deepstack_layers"] = len(config["vision_config"]["deepstack_visual_indexes"])
    return keys


def _tower_keys(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Keys:
    vision, text, kind = dict(config["vision_config"]), config["text_config"], config["model_type"]
    for key in ("image_size", "patch_size"):
        vision |= {key: vision[key][0]} if isinstance(vision.get(key), list) else {}
    default = preprocessor["image_processor_type"].startswith(("Siglip", "Gemma3", "SmolVLM", "Lfm2Vl"))
    mean, std = preprocessor.get("image_mean"), preprocessor.get("image_std")
    mean = mean or ([0.5] * 3 if default else [0.48145466, 0.4578275, 0.40821073])
    std = std or ([0.5] * 3 if default else [0.26862954, 0.26130258, 0.27577711])
    keys: Keys = {
        "image_size": vision.get("image_size", 560),
        "patch_size": vision["patch_size"],
        "embedding_length": vision.get("embed_dim", vision.get("hidden_size")),
        # The converter of Qwen2-VL has another number here.
        "feed_forward_length": vision.get("intermediate_size", vision["hidden_size"]),
        "projection_dim": text["hidden_size"] if kind != "llava" else 768,
        "block_count": vision.get("depth") or _layers(config),
        "attention.head_count": vision.get("num_heads") or vision["num_attention_heads"],
        "attention.layer_norm_epsilon": vision.get("layer_norm_eps", vision.get("rms_norm_eps", 1e-6)),
        "image_mean": mean,
        "image_std": std,
    }
    if kind == "gemma4":
        keys |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "projector.scale_factor": vision["pooling_kernel_size"]}
    if kind == "lfm2_vl":
        keys["projector.scale_factor"] = config["downsample_factor"]
    if kind not in PLACEHOLDERS:
        limits = preprocessor["size"]
        keys |= {"image_min_pixels": limits["shortest_edge"], "image_max_pixels": limits["longest_edge"]}
    if kind == "qwen2_5_vl":
        keys |= {"n_wa_pattern": vision["fullatt_block_indexes"][0] + 1, "window_size": vision["window_size"]}
    if PROJECTORS[kind] == "qwen3vl_merger":
        keys["spatial_merge_size"] = vision["spatial_merge_size"]
        taps = vision.get("deepstack_visual_indexes", [])
        keys["is_deepstack_layers"] = [i in taps for i in range(vision["depth"])]
    if kind == "internvl":
        keys |= {"projector.scale_factor": round(1 / config["downsample_ratio"])}
        keys |= {"preproc_min_tiles": 1, "preproc_max_tiles": preprocessor["max_patches"]}
    if kind == "gemma3":
        side = vision["image_size"] // vision["patch_size"]
        keys["projector.scale_factor"] = side // math.isqrt(config["mm_tokens_per_image"])
    if kind == "idefics3":
        keys |= {"projector.scale_factor": config["scale_factor"], "preproc_image_size": preprocessor["size"]["longest_edge"]}
    found = {f"clip.vision.{key}": value for key, value in keys.items()}
    if kind == "gemma4":
        # Nor does the converter name an activation.
        return found | {"clip.has_vision_encoder": True, "clip.vision.projector_type": PROJECTORS[kind]}
    act = vision["hidden_act"]
    found |= {"clip.has_vision_encoder": True, "clip.projector_type": PROJECTORS[kind]}
    return found | {"clip.use_gelu": act.startswith("gelu"), "clip.use_silu": act == "silu"}


def _layers(config: Mapping[str, Any]) -> int:
    """Layers of a tower that are used: of LLaVA's not all."""
    tapped, layers = config.get("vision_feature_layer", -1), config["vision_config"]["num_hidden_layers"]
    return int(tapped if tapped > 0 else layers + 1 + tapped)


def _tower_tensors(config: Mapping[str, Any], folder: Path) -> Tensors:
    """The tower's under llama.cpp's names."""
    kind, found = config["model_type"], Tensors()
    for name, tensor in load_file(folder / "model.safetensors").items():
        values, name = tensor.float().numpy(), name.removeprefix("model.")
        if not name.startswith(TOWER_PARTS):
            continue
        if name.startswith("visual.deepstack_merger_list."):
            _, _, index, module, end = name.split(".")
            layer = config["vision_config"]["deepstack_visual_indexes"][int(index)]
            found[f"v.deepstack.{layer}.{module.removeprefix('linear_')}.{end}"] = values
            continue
        for theirs, ours in PATTERNS.get(kind, QWEN):
            name = re.sub(theirs, ours, name)
        layer = re.match(r"v\.blk\.(\d+)\.", name)
        unused = kind == "llava" and (name.startswith(("v.post_l", "v.head.")) or layer and int(layer[1]) >= _layers(config))
        if unused:
            continue
        values = values + 1 if "soft_emb" in name else values
        if kind in ("lfm2_vl", "gemma4") and name == "v.patch_embd.weight":
            side = config["vision_config"]["patch_size"]
            values = values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        values = values.reshape(1) if values.ndim == 0 else values
        if name == "v.patch_embd.weight" and kind not in PLACEHOLDERS:
            found |= {name: values[:, :, 0], f"{name}.1": values[:, :, 1]}
        elif "attn_qkv" in name and PROJECTORS[kind] != "qwen3vl_merger":
            found |= {name.replace("qkv", part): each for part, each in zip("qkv", np.split(values, 3), strict=True)}
        else:
            found[name] = values
    return found
