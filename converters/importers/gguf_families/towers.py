"""Towers whose pictures have one size, or tiles of one: InternVL3, Gemma 3, Idefics3 and SmolVLM.

Read in llama.cpp's converter and in the code that runs such files.
"""

from __future__ import annotations

from edgeq.converters.importers.gguf_keys import Settings
from edgeq.converters.importers.gguf_tower_kinds import PARTS, TowerFile, TowerKind, Whole, beside_text, edges, sizes

INTERNVL_LAST, GEMMA3_LAST, IDEFICS3_LAST = "mm.model.mlp.3.weight", "mm.input_projection.weight", "mm.model.fc.weight"
INTERNVL_MERGE, GEMMA3_MERGE, IDEFICS3_MERGE = 2, 4, 2
"""Patches that are joined to a side, where the file does not say it."""
INTERNVL_TILES = (1, 12)
"""The fewest and the most tiles of a picture, where the file does not say it."""
IDEFICS3_TILES = 4
"""Tiles along the longest edge of a picture of published checkpoints, where the file does not say it."""


def _merge(file: TowerFile, default: int) -> int:
    return file.merge(default, file.size("image_size") // file.size("patch_size"))


def internvl(file: TowerFile) -> Settings:
    """Tensors say which norms there are, and which biases."""
    file.check("projection_dim", file.shape(INTERNVL_LAST)[0])
    vision = sizes(file, "gelu") | {
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in file.stored else "rms_norm",
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in file.stored,
        "attention_bias": "v.blk.0.attn_q.bias" in file.stored,
    }
    return beside_text(file, vision, downsample_ratio=1 / _merge(file, INTERNVL_MERGE))


def internvl_image(file: TowerFile) -> Settings:
    least, most = (
        file.keys.integer(f"vision.preproc_{end}_tiles", default)
        for end, default in zip(("min", "max"), INTERNVL_TILES, strict=True)
    )
    return {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "size": edges(file),
        "min_patches": least,
        "max_patches": most,
    }


def gemma3(file: TowerFile) -> Settings:
    file.check("projection_dim", file.shape(GEMMA3_LAST)[1])
    vision = sizes(file, "gelu_pytorch_tanh") | {"model_type": "siglip_vision_model"}
    side = vision["image_size"] // vision["patch_size"] // _merge(file, GEMMA3_MERGE)
    return beside_text(file, vision, mm_tokens_per_image=side**2)


def gemma3_image(file: TowerFile) -> Settings:
    return {"image_processor_type": "Gemma3ImageProcessor", "size": edges(file)}


def idefics3(file: TowerFile) -> Settings:
    file.check("projection_dim", file.shape(IDEFICS3_LAST)[0])
    vision = sizes(file, "gelu_pytorch_tanh")
    return beside_text(file, vision, scale_factor=_merge(file, IDEFICS3_MERGE))


def idefics3_image(file: TowerFile) -> Settings:
    side = file.size("image_size")
    longest = file.keys.integer("vision.preproc_image_size", IDEFICS3_TILES * side)
    limits = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    return {"image_processor_type": "Idefics3ImageProcessor", **limits}


SIGLIP_BLOCK = PARTS | {
    **{"ln1": "layer_norm1", "ln2": "layer_norm2", "attn_out": "self_attn.out_proj"},
    **{"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
}
SIGLIP_ENDS = {"v.position_embd": "vision_tower.embeddings.position_embedding", "v.post_ln": "vision_tower.post_layernorm"}
EMBEDDINGS, INTERN_LAYER = "vision_tower.embeddings.", "vision_tower.encoder.layer.{}."
INTERNVL = TowerKind(
    ("qwen2", "qwen3", "llama"),
    "InternVLForConditionalGeneration",
    "internvl",
    internvl,
    internvl_image,
    {
        **{"ln1": "layernorm_before", "ln2": "layernorm_after", "attn_out": "attention.projection_layer"},
        **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
        **{f"attn_{part}_norm": f"attention.{part}_norm" for part in "qk"},
        **{"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    },
    {
        "mm.model.mlp.0": "multi_modal_projector.layer_norm",
        "mm.model.mlp.1": "multi_modal_projector.linear_1",
        "mm.model.mlp.3": "multi_modal_projector.linear_2",
    },
    layers="vision_tower.encoder.layer.",
    patch=f"{EMBEDDINGS}patch_embeddings.projection",
    placeholder="<IMG_CONTEXT>",
    frames=1,
    picture="<IMG_CONTEXT>\n",
    wholes={
        "v.class_embd": Whole(f"{EMBEDDINGS}cls_token", 3),
        "v.position_embd.weight": Whole(f"{EMBEDDINGS}position_embeddings", 3),
        **{f"v.blk.{{}}.ls{i}.weight": Whole(f"{INTERN_LAYER}lambda_{i}", 1) for i in (1, 2)},
    },
    last=INTERNVL_LAST,
)
GEMMA3 = TowerKind(
    ("gemma3",),
    "Gemma3ForConditionalGeneration",
    "gemma3",
    gemma3,
    gemma3_image,
    SIGLIP_BLOCK,
    SIGLIP_ENDS,
    layers="vision_tower.encoder.layers.",
    patch=f"{EMBEDDINGS}patch_embedding",
    placeholder="<image_soft_token>",
    token_key="image_token_index",
    frames=1,
    wholes={
        GEMMA3_LAST: Whole("multi_modal_projector.mm_input_projection_weight", 2),
        "mm.soft_emb_norm.weight": Whole("multi_modal_projector.mm_soft_emb_norm.weight", 1, gain=1.0),
    },
    last=GEMMA3_LAST,
    turned=True,
)
IDEFICS3 = TowerKind(
    ("llama",),
    "Idefics3ForConditionalGeneration",
    "idefics3",
    idefics3,
    idefics3_image,
    SIGLIP_BLOCK,
    {**SIGLIP_ENDS, "mm.model.fc": "connector.modality_projection.proj"},
    layers="vision_tower.encoder.layers.",
    patch=f"{EMBEDDINGS}patch_embedding",
    placeholder="<image>",
    frames=1,
    last=IDEFICS3_LAST,
)
"""SmolVLM's too, which is the same network."""
