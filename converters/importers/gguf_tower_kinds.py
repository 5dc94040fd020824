"""The towers that llama.cpp's projector types mean: their tensors, and what their keys are in transformers' files.

Read in llama.cpp's converters, old and new, and in the code that runs such files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from edgeq.converters.importers.gguf_keys import GgufKeys, Settings
from edgeq.converters.importers.gguf_settings import rope_sections
from edgeq.converters.importers.gguf_tensors import GgufTensor
from edgeq.errors import CheckpointError
from edgeq.network.config import MAX_VISION_SIZES
from edgeq.network.stack import MAX_SIZES

CLASS, POSITIONS, SECOND = "v.class_embd", "v.position_embd.weight", "mm.2.weight"
UP, DOWN = "v.blk.0.ffn_up.weight", "v.blk.0.ffn_down.weight"
MERGE, WINDOW = 2, 112
"""Patches that are joined to a side, and pixels of a side of a window, of Qwen's towers whose files do not say it."""
QWEN2_PIXELS, QWEN3_PIXELS = (56 * 56, 28 * 28 * 16384), (256 * 256, 4096 * 4096)
"""The smallest and the largest picture of published checkpoints, where the file does not say it."""
QWEN_EPSILON = 1e-6
"""A constant in transformers."""
QKV = {f"attn_{part}": f"attn.{part}" for part in ("q", "k", "v", "qkv")}
QWEN_BLOCK = {"ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj"} | QKV
QWEN2_ENDS = {"v.post_ln": "visual.merger.ln_q", "mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"}
QWEN3_ENDS = {"v.post_ln": "visual.merger.norm", "mm.0": "visual.merger.linear_fc1", "mm.2": "visual.merger.linear_fc2"}
PARTS = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}


@dataclass
class TowerFile:
    """keys     of the tower;  decoder  those of its language model, read before, whose config.json is `config`
    stored   all tensors by llama.cpp's names
    swapped  up and down of its MLPs have each other's names, as in files of llama.cpp's first converters
    """

    keys: GgufKeys
    decoder: GgufKeys
    config: Settings
    stored: Mapping[str, GgufTensor]
    swapped: bool = False

    def size(self, key: str, most: int = 1 << 20) -> int:
        found = self.keys.integer(f"vision.{key}")
        if not 1 <= found <= most:
            raise self.keys.wrong(f"vision.{key}", found, f"an integer from 1 to {most}")
        return found

    @property
    def layers(self) -> int:
        return self.size("block_count", MAX_SIZES["num_hidden_layers"])

    @property
    def inner(self) -> int:
        """Channels inside an MLP."""
        return self.shape(DOWN if self.swapped else UP)[0]

    def shape(self, name: str) -> tuple[int, ...]:
        """CheckpointError: no matrix of this name."""
        tensor = self.stored.get(name)
        if tensor is None or len(tensor.shape) != 2:
            found = "missing" if tensor is None else f"of the shape {tensor.shape}"
            raise CheckpointError(f"{self.keys.place}: tensor {name} is {found}; expected a matrix: the file is incomplete")
        return tensor.shape

    def activation(self, gelu: str = "gelu", neither: str = "quick_gelu") -> str:
        """By two keys, of which at most one is true.  `gelu`: which one that name means;  neither  if none is true."""
        use = {name: self.keys.flag(f"use_{name}", False) for name in ("gelu", "silu")}
        if all(use.values()):
            raise self.keys.wrong("use_silu", True, "false, as clip.use_gelu is true")
        return gelu if use["gelu"] else "silu" if use["silu"] else neither

    def merge(self, default: int, most: int = MAX_VISION_SIZES["merge"]) -> int:
        """Patches that are joined to a side;  default: where the file does not say it."""
        found = self.keys.integer("vision.projector.scale_factor", default)
        if not 1 <= found <= most:
            raise self.keys.wrong("vision.projector.scale_factor", found, f"an integer from 1 to {most}")
        return found

    def check(self, key: str, expected: int) -> None:
        """CheckpointError: the key is there and says something else than the tensors."""
        if (found := self.keys.integer(f"vision.{key}", expected)) != expected:
            raise self.keys.wrong(f"vision.{key}", found, f"{expected}, as the tensors have it")


@dataclass(frozen=True)
class Whole:
    """What transformers calls a tensor, how many dimensions it has there, and what llama.cpp adds to it."""

    name: str
    dimensions: int
    gain: float = 0.0

    def of(self, tensor: GgufTensor) -> GgufTensor:
        """Dimensions of 1 before the others, which converters drop or keep, are as many as transformers has."""
        shape = tensor.shape
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        shape = (1,) * (self.dimensions - len(shape)) + shape
        return replace(tensor.part(0, shape), added=-self.gain)


@dataclass(frozen=True)
class TowerKind:
    """A projector type, which is that of the tower before it too.

    decoders     general.architecture of its language model
    family       as in `architectures` of config.json;  model_type  there
    families     those two of checkpoints with another of the decoders, by its name
    placeholder  the token in whose place a picture comes;  token_key  what config.json calls its id
    settings     keys of config.json
    image        keys of preprocessor_config.json
    layers       what transformers' names of tensors in layers begin with
    blocks, ends   llama.cpp's name -> transformers', in a layer and outside of them
    wholes       tensors that differ in more than a module's name, by llama.cpp's; {} stands for the number of a layer
    last         the tensor whose rows, or columns where it is `turned`, are as many as the channels of the language model
    patch        what transformers calls the patch embedding
    frames       neighbours in time of a patch, each a tensor of its own
    flat         whether transformers has a patch as one row, its pixels side by side with their colours
    swaps        whether there are files in which up and down have each other's names
    audio        whether there are files with a tower for audio too, which is left out
    picture      what the family's own chat template writes for a picture, if there are files with one of the language model,
                 which knows of none
    """

    decoders: tuple[str, ...]
    family: str
    model_type: str
    settings: Callable[[TowerFile], Settings]
    image: Callable[[TowerFile], Settings]
    blocks: Mapping[str, str]
    ends: Mapping[str, str]
    layers: str = "visual.blocks."
    patch: str = "visual.patch_embed.proj"
    placeholder: str = "<|image_pad|>"
    token_key: str = "image_token_id"
    frames: int = 2
    swaps: bool = True
    wholes: Mapping[str, Whole] = field(default_factory=dict)
    last: str = SECOND
    turned: bool = False
    families: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    flat: bool = False
    audio: bool = False
    picture: str = ""


def _qwen(file: TowerFile, **vision: object) -> Settings:
    """What all of Qwen's towers have, around them the decoder's keys.  `feed_forward_length` is another number in some."""
    keys = file.keys
    keys.only("vision.attention.layer_norm_epsilon", QWEN_EPSILON)
    keys.value("vision.image_size")
    keys.value("vision.feed_forward_length")
    features = file.shape(SECOND)[0]
    file.check("projection_dim", features)
    common = {
        "depth": file.layers,
        "num_heads": file.size("attention.head_count"),
        "patch_size": file.size("patch_size"),
        "temporal_patch_size": 2,
        "spatial_merge_size": keys.integer("vision.spatial_merge_size", MERGE),
    }
    rope = {"rope_type": "default", "mrope_section": rope_sections(file.decoder)}
    return {**file.config, "rope_scaling": rope, "vision_config": {**common, **vision}}


def qwen2_vl(file: TowerFile) -> Settings:
    hidden, inner = file.size("embedding_length"), file.inner
    if inner % hidden:
        raise CheckpointError(f"{file.keys.place}: {UP}: {inner} channels are not a multiple of the {hidden} of the tower")
    own = {"embed_dim": hidden, "mlp_ratio": inner // hidden, "hidden_size": file.shape(SECOND)[0]}
    return _qwen(file, **own, hidden_act=file.activation())


def qwen2_5_vl(file: TowerFile) -> Settings:
    own = {"hidden_size": file.size("embedding_length"), "intermediate_size": file.inner}
    window = file.keys.integer("vision.window_size", WINDOW)
    whole = {"window_size": window, "fullatt_block_indexes": _whole_layers(file), "out_hidden_size": file.shape(SECOND)[0]}
    return _qwen(file, **own, **whole, hidden_act=file.activation())


def _whole_layers(file: TowerFile) -> list[int]:
    """Layers in which a patch sees all others: every so many-th, or a list, which has had two names."""
    keys, layers, found = file.keys, file.layers, dict[str, list[int]]()
    if (period := keys.value("vision.n_wa_pattern")) is not None:
        if type(period) is not int or not 1 <= period <= layers:
            raise keys.wrong("vision.n_wa_pattern", period, f"an integer from 1 to clip.vision.block_count, {layers}")
        found["vision.n_wa_pattern"] = list(range(period - 1, layers, period))
    for key in ("vision.wa_layer_indexes", "vision.fullatt_block_indexes"):
        if keys.value(key) is not None:
            found[key] = keys.integers(key, layers)
    if not found:
        raise keys.wrong("vision.n_wa_pattern", None, "which layers have no window")
    (_, first), *others = found.items()
    for key, other in others:
        if sorted(other) != sorted(first):
            raise keys.wrong(key, other, f"{str(first):.60}, as clip.{next(iter(found))} says")
    return first


def qwen3_vl(file: TowerFile) -> Settings:
    keys, layers = file.keys, file.layers
    own = {"hidden_size": file.size("embedding_length"), "intermediate_size": file.inner}
    taps, declared = tapped(file), file.decoder.integer("n_deepstack_layers", 0)
    if len(taps) != declared:
        raise keys.wrong(
            "vision.is_deepstack_layers",
            taps,
            f"{declared} of {layers} layers, as {file.decoder.architecture}.n_deepstack_layers of {file.decoder.place}",
        )
    ends = {"num_position_embeddings": file.shape(POSITIONS)[0], "out_hidden_size": file.shape(SECOND)[0]}
    return _qwen(file, **own, **ends, deepstack_visual_indexes=taps, hidden_act=file.activation("gelu_pytorch_tanh"))


def tapped(file: TowerFile) -> list[int]:
    """Layers whose patches are projected too."""
    found = file.keys.value("vision.is_deepstack_layers")
    if found is None:
        return []
    if not isinstance(found, np.ndarray) or found.dtype != np.bool_ or len(found) != file.layers:
        raise file.keys.wrong("vision.is_deepstack_layers", found, f"{file.layers} times true or false")
    return [int(layer) for layer in np.flatnonzero(found)]


def layer_sizes(file: TowerFile, *activations: str) -> Settings:
    """What all towers but Qwen's have;  activations: as `TowerFile.activation`."""
    file.check("feed_forward_length", file.inner)
    return {
        "num_hidden_layers": file.layers,
        "hidden_size": file.size("embedding_length"),
        "intermediate_size": file.inner,
        "num_attention_heads": file.size("attention.head_count"),
        "patch_size": file.size("patch_size"),
        "hidden_act": file.activation(*activations),
    }


def sizes(file: TowerFile, gelu: str) -> Settings:
    """What towers have whose pictures have one size, or tiles of one;  gelu: which one that name means."""
    return layer_sizes(file, gelu) | {
        "image_size": file.size("image_size"),
        "layer_norm_eps": file.keys.number("vision.attention.layer_norm_epsilon"),
    }


def beside_text(file: TowerFile, vision: Settings, **outside: object) -> Settings:
    tied = file.config["tie_word_embeddings"]
    return {"text_config": file.config, "vision_config": vision, "tie_word_embeddings": tied, **outside}


def edges(file: TowerFile) -> Settings:
    return dict.fromkeys(("height", "width"), file.size("image_size"))


def llava(file: TowerFile) -> Settings:
    """CLIP's tower, which has a class row, or SigLIP's; of either all layers of the file, or as many as it says.

    llama.cpp's converter leaves the last layer out, which LLaVA-1.5 does not use.
    """
    keys, layers = file.keys, file.layers
    feature = keys.integers("vision.feature_layer", layers + 1) if keys.value("vision.feature_layer") is not None else [layers]
    # Of CLIP, whose last projection is not used.
    keys.value("vision.projection_dim")
    sees = CLASS in file.stored
    vision = sizes(file, "gelu" if sees else "gelu_pytorch_tanh")
    return beside_text(
        file,
        vision | {"model_type": "clip_vision_model" if sees else "siglip_vision_model"},
        vision_feature_layer=feature,
        vision_feature_select_strategy="default" if sees else "full",
        projector_hidden_act="gelu",
    )


def any_size(pixels: tuple[int, int]) -> Callable[[TowerFile], Settings]:
    """Qwen's processor; `pixels`: its limits where the file has none."""

    def image(file: TowerFile) -> Settings:
        least, most = (
            file.keys.integer(f"vision.image_{end}_pixels", default)
            for end, default in zip(("min", "max"), pixels, strict=True)
        )
        return {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": least, "longest_edge": most}}

    return image


def one_size(file: TowerFile) -> Settings:
    """CLIP's processor, which crops, and SigLIP's."""
    if CLASS in file.stored:
        shortest = {"shortest_edge": file.size("image_size")}
        return {"image_processor_type": "CLIPImageProcessor", "size": shortest, "crop_size": edges(file)}
    return {"image_processor_type": "SiglipImageProcessor", "size": edges(file)}


QWEN_AND_LLAVA = {
    "mlp": TowerKind(
        ("llama", "qwen2"),
        "LlavaForConditionalGeneration",
        "llava",
        llava,
        one_size,
        {
            "ln1": "layer_norm1",
            "ln2": "layer_norm2",
            "attn_out": "self_attn.out_proj",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        }
        | PARTS,
        # The name is spelled so in every checkpoint.
        {"v.pre_ln": "vision_tower.pre_layrnorm", "v.position_embd": "vision_tower.embeddings.position_embedding"}
        | {"mm.0": "multi_modal_projector.linear_1", "mm.2": "multi_modal_projector.linear_2"},
        layers="vision_tower.encoder.layers.",
        patch="vision_tower.embeddings.patch_embedding",
        placeholder="<image>",
        token_key="image_token_index",
        frames=1,
        picture="<image>\n",
    ),
    "qwen2vl_merger": TowerKind(
        ("qwen2vl",),
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        qwen2_vl,
        any_size(QWEN2_PIXELS),
        QWEN_BLOCK | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        QWEN2_ENDS,
    ),
    "qwen2.5vl_merger": TowerKind(
        ("qwen2vl",),
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        qwen2_5_vl,
        any_size(QWEN2_PIXELS),
        QWEN_BLOCK | {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
        QWEN2_ENDS,
    ),
    "qwen3vl_merger": TowerKind(
        ("qwen3vl", "qwen35", "qwen35moe"),
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        qwen3_vl,
        any_size(QWEN3_PIXELS),
        QWEN_BLOCK | {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        QWEN3_ENDS | {"v.position_embd": "visual.pos_embed"},
        swaps=False,
        families={
            "qwen35": ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
            "qwen35moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
        },
    ),
}
