"""Towers whose pictures keep their proportion: LFM2-VL and Gemma 4.

Read in llama.cpp's converter and in the code that runs such files.
"""

from __future__ import annotations

from edgeq.converters.importers.gguf_families.towers import EMBEDDINGS, GEMMA3_LAST, SIGLIP_BLOCK, SIGLIP_ENDS
from edgeq.converters.importers.gguf_keys import Settings
from edgeq.converters.importers.gguf_tower_kinds import POSITIONS, SECOND, TowerFile, TowerKind, Whole, beside_text, layer_sizes
from edgeq.errors import CheckpointError

LFM2_FIRST = "mm.1.weight"
LFM2_MERGE, GEMMA4_MERGE = 2, 3
"""Patches that are joined to a side, where the file does not say it."""
CAUSAL_GEMMA4 = (1536, 2560)
"""Channels of the language models, E2B and E4B, in which tokens of a picture see what is before them, as everywhere."""
PAD = "tokenizer.ggml.padding_token_id"
BOUNDS = tuple(f".{side}_{end}" for side in ("input", "output") for end in ("min", "max"))
"""Ends of the names of what limits a linear layer."""


def lfm2_vl(file: TowerFile) -> Settings:
    """Activations and epsilon of the projector are those of the checkpoints; `image_size` is a number that nothing reads."""
    file.keys.value("vision.image_size")
    file.check("projection_dim", file.shape(SECOND)[0])
    vision = layer_sizes(file, "gelu_pytorch_tanh") | {
        "model_type": "siglip2_vision_model",
        "layer_norm_eps": file.keys.number("vision.attention.layer_norm_epsilon"),
        "num_patches": file.shape(POSITIONS)[0],
    }
    return beside_text(
        file,
        vision,
        downsample_factor=file.merge(LFM2_MERGE),
        projector_hidden_size=file.shape(LFM2_FIRST)[0],
        projector_bias="mm.1.bias" in file.stored,
        projector_use_layernorm="mm.input_norm.weight" in file.stored,
    )


def lfm2_vl_image(file: TowerFile) -> Settings:
    """How many tokens and tiles a picture has is as in the published checkpoints: the file does not say it."""
    sizes = {"encoder_patch_size": file.size("patch_size"), "downsample_factor": file.merge(LFM2_MERGE)}
    return {"image_processor_type": "Lfm2VlImageProcessorFast", **sizes}


def gemma4(file: TowerFile) -> Settings:
    """Heads are counted by their tensors.  The base of the rotation is that of the checkpoints; files name no activation."""
    keys, stored = file.keys, file.stored
    keys.value("vision.image_size")
    file.check("projection_dim", file.shape(GEMMA3_LAST)[0])
    sizes = layer_sizes(file, "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    table, heads = stored.get(POSITIONS), sizes["num_attention_heads"]
    if table is None or len(table.shape) != 3 or table.shape[0] != 2:
        found = "missing" if table is None else f"of the shape {table.shape}"
        raise CheckpointError(f"{keys.place}: tensor {POSITIONS} is {found}; expected two tables of positions")
    rows = file.shape("v.blk.0.attn_q.weight")[0]
    if rows % heads:
        raise keys.wrong("vision.attention.head_count", heads, f"a number that divides the {rows} rows of queries")
    bounded = any(name.endswith(BOUNDS) for name in stored)
    vision = {
        **{key: value for key, value in sizes.items() if key != "hidden_act"},
        "hidden_activation": sizes["hidden_act"],
        "head_dim": rows // heads,
        "num_key_value_heads": file.shape("v.blk.0.attn_k.weight")[0] // (rows // heads),
        "rms_norm_eps": keys.number("vision.attention.layer_norm_epsilon"),
        "pooling_kernel_size": file.merge(GEMMA4_MERGE),
        "position_embedding_size": table.shape[1],
        "standardize": "v.std_scale" in stored,
        "use_clipped_linears": bounded,
    }
    seeing = None if file.config["hidden_size"] in CAUSAL_GEMMA4 else "vision"
    text = {"pad_token_id": file.decoder.metadata.get(PAD, 0), "use_bidirectional_attention": seeing}
    return beside_text(file, vision) | {"text_config": {**file.config, **text}}


def gemma4_image(file: TowerFile) -> Settings:
    """At most 280 tokens, as in the published checkpoints: the file does not say it."""
    sizes = {"patch_size": file.size("patch_size"), "pooling_kernel_size": file.merge(GEMMA4_MERGE)}
    return {"image_processor_type": "Gemma4ImageProcessorFast", "do_normalize": True, **sizes}


LFM2 = TowerKind(
    ("lfm2",),
    "Lfm2VlForConditionalGeneration",
    "lfm2_vl",
    lfm2_vl,
    lfm2_vl_image,
    SIGLIP_BLOCK,
    SIGLIP_ENDS
    | {"mm.input_norm": "multi_modal_projector.layer_norm"}
    | {f"mm.{i}": f"multi_modal_projector.linear_{i}" for i in (1, 2)},
    layers="vision_tower.encoder.layers.",
    patch=f"{EMBEDDINGS}patch_embedding",
    placeholder="<image>",
    frames=1,
    flat=True,
    swaps=False,
)
GEMMA4_TOWER = "model.vision_tower."
GEMMA4_LAYERS = f"{GEMMA4_TOWER}encoder.layers."
GEMMA4_LINEARS = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_out": "self_attn.o_proj"}
GEMMA4_LINEARS |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
GEMMA4 = TowerKind(
    ("gemma4",),
    "Gemma4ForConditionalGeneration",
    "gemma4",
    gemma4,
    gemma4_image,
    {name: f"{module}.linear" for name, module in GEMMA4_LINEARS.items()}
    | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    | {"ln1": "input_layernorm", "attn_post_norm": "post_attention_layernorm"}
    | {"ln2": "pre_feedforward_layernorm", "ffn_post_norm": "post_feedforward_layernorm"},
    {"mm.input_projection": "model.embed_vision.embedding_projection"},
    layers=GEMMA4_LAYERS,
    patch=f"{GEMMA4_TOWER}patch_embedder.input_proj",
    placeholder="<|image|>",
    frames=1,
    wholes={
        POSITIONS: Whole(f"{GEMMA4_TOWER}patch_embedder.position_embedding_table", 3),
        **{f"v.{name}": Whole(f"{GEMMA4_TOWER}{name}", 1) for name in ("std_bias", "std_scale")},
        **{
            f"v.blk.{{}}.{name}{bound}": Whole(f"{GEMMA4_LAYERS}{{}}.{module}{bound}", 1)
            for name, module in GEMMA4_LINEARS.items()
            for bound in BOUNDS
        },
    },
    last=GEMMA3_LAST,
    flat=True,
    swaps=False,
    audio=True,
)
