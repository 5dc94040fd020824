"""Vision towers, each for the language model beside it."""

from __future__ import annotations

from gguf_networks.decoders import METADATA, NETWORKS, SHAPES, VOCABULARY
from gguf_networks.entries import WORDS, Entries, norms

LLAVA: Entries = {
    "general.architecture": "clip",
    "clip.has_vision_encoder": True,
    "clip.projector_type": "mlp",
    "clip.use_gelu": False,
    "clip.vision.image_size": 8,
    "clip.vision.patch_size": 4,
    "clip.vision.embedding_length": 32,
    "clip.vision.feed_forward_length": 64,
    "clip.vision.block_count": 1,
    "clip.vision.feature_layer": [1],
    "clip.vision.attention.head_count": 2,
    "clip.vision.attention.layer_norm_epsilon": 1e-5,
    "clip.vision.image_mean": [0.5, 0.5, 0.5],
    "clip.vision.image_std": [0.5, 0.5, 0.5],
}
LLAVA_SHAPES: Entries = {
    "v.class_embd": [0, [32]],
    "v.patch_embd.weight": [1, [32, 3, 4, 4]],
    "v.position_embd.weight": [0, [5, 32]],
    **{f"v.pre_ln.{kind}": [0, [32]] for kind in ("weight", "bias")},
    **{f"v.blk.0.{norm}.{kind}": [0, [32]] for norm in ("ln1", "ln2") for kind in ("weight", "bias")},
    **{f"v.blk.0.attn_{part}.weight": [8, [32, 32]] for part in ("q", "k", "v", "out")},
    **{f"v.blk.0.attn_{part}.bias": [0, [32]] for part in ("q", "k", "v", "out")},
    **{"v.blk.0.ffn_up.weight": [1, [64, 32]], "v.blk.0.ffn_up.bias": [0, [64]]},
    **{"v.blk.0.ffn_down.weight": [1, [32, 64]], "v.blk.0.ffn_down.bias": [0, [32]]},
    **{"mm.0.weight": [8, [256, 32]], "mm.0.bias": [0, [256]], "mm.2.weight": [8, [256, 256]], "mm.2.bias": [0, [256]]},
}
SIGLIP: Entries = {
    **{key: value for key, value in LLAVA.items() if not key.endswith("feature_layer")},
    **{"clip.use_gelu": True, "clip.vision.image_size": 16, "clip.vision.projector.scale_factor": 2},
}
SIGLIP_SHAPES: Entries = {
    **{name: entry for name, entry in LLAVA_SHAPES.items() if not name.startswith(("mm.", "v.class", "v.pre_ln"))},
    **{f"v.post_ln.{kind}": [0, [32]] for kind in ("weight", "bias")},
    **{"v.patch_embd.bias": [0, [32]], "v.position_embd.weight": [0, [16, 32]]},
}
INTERN_SHAPES: Entries = {
    **{name: entry for name, entry in LLAVA_SHAPES.items() if not name.startswith(("mm.", "v.pre_ln"))},
    **{"v.class_embd": [0, [1, 1, 32]], "v.position_embd.weight": [0, [1, 17, 32]], "v.patch_embd.bias": [0, [32]]},
    **{f"v.blk.0.ls{i}.weight": [0, [32]] for i in (1, 2)},
    **{f"mm.model.mlp.0.{kind}": [0, [128]] for kind in ("weight", "bias")},
    **{"mm.model.mlp.1.weight": [8, [256, 128]], "mm.model.mlp.1.bias": [0, [256]]},
    **{"mm.model.mlp.3.weight": [8, [256, 256]], "mm.model.mlp.3.bias": [0, [256]]},
}
GEMMA4: Entries = {
    **{key: value for key, value in SIGLIP.items() if key not in ("clip.projector_type", "clip.use_gelu")},
    **{"clip.vision.projector_type": "gemma4v", "clip.has_audio_encoder": True, "clip.audio.block_count": 1},
}
GEMMA4_SHAPES: Entries = {
    **{"v.patch_embd.weight": [1, [32, 3, 4, 4]], "v.position_embd.weight": [0, [2, 560, 32]]},
    **{f"v.blk.0.{norm}.weight": [0, [32]] for norm in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm")},
    **{f"v.blk.0.attn_{part}_norm.weight": [0, [16]] for part in "qk"},
    **{f"v.blk.0.attn_{part}.weight": [8, [32, 32]] for part in ("q", "k", "v", "out")},
    **{f"v.blk.0.ffn_{part}.weight": [1, [64, 32]] for part in ("gate", "up")},
    **{"v.blk.0.ffn_down.weight": [1, [32, 64]], "v.std_bias": [0, [32]], "v.std_scale": [0, [32]]},
    **{"mm.input_projection.weight": [8, [64, 32]], "a.blk.0.attn_q.weight": [8, [32, 32]]},
}
LFM2_SHAPES: Entries = {
    **SIGLIP_SHAPES,
    **{f"mm.input_norm.{kind}": [0, [128]] for kind in ("weight", "bias")},
    **{"mm.1.weight": [8, [96, 128]], "mm.1.bias": [0, [96]], "mm.2.weight": [8, [64, 96]], "mm.2.bias": [0, [64]]},
}
TOWERS: dict[str, tuple[Entries, Entries]] = {
    "mlp": (LLAVA, LLAVA_SHAPES),
    "internvl": (SIGLIP | {"clip.projector_type": "internvl"}, INTERN_SHAPES),
    "idefics3": (
        SIGLIP | {"clip.projector_type": "idefics3"},
        SIGLIP_SHAPES | {"mm.model.fc.weight": [8, [256, 128]]},
    ),
    "gemma3": (
        SIGLIP | {"clip.projector_type": "gemma3"},
        SIGLIP_SHAPES | {"mm.input_projection.weight": [0, [32, 256]], "mm.soft_emb_norm.weight": [0, [32]]},
    ),
    "lfm2": (SIGLIP | {"clip.projector_type": "lfm2"}, LFM2_SHAPES),
    "gemma4v": (GEMMA4, GEMMA4_SHAPES),
}
"""Projector type -> metadata of the tower and its tensors, for a language model of 256 channels, or of those of OWN."""
PLACEHOLDERS = {"internvl": "<IMG_CONTEXT>", "gemma3": "<image_soft_token>", "gemma4v": "<|image|>"}
OWN = {"lfm2": "lfm2", "gemma4v": "gemma4"}
"""Projector type -> the network that its language model is."""


def language_model(kind: str) -> tuple[Entries, Entries]:
    """The one that a tower of a projector type goes with."""
    tokens = {"tokenizer.ggml.tokens": [*WORDS[:-1], PLACEHOLDERS.get(kind, "<image>")]}
    if kind in OWN:
        network, shapes = NETWORKS[OWN[kind]]
        return {**network, **VOCABULARY, **tokens}, {"token_embd.weight": [8, [len(WORDS), 64]], **shapes}
    metadata = {**METADATA, **tokens}
    if kind != "gemma3":
        return metadata, SHAPES
    own = {key.replace("llama.", "gemma3."): value for key, value in metadata.items()}
    own |= {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 8}
    own |= {f"gemma3.attention.{part}_length": 64 for part in ("key", "value")}
    gains = norms("blk.0.post_attention_norm", "blk.0.post_ffw_norm", size=256)
    return own, SHAPES | gains | norms("blk.0.attn_q_norm", "blk.0.attn_k_norm", size=64)
