"""Vision towers in GGUF files of their own, which llama.cpp calls mmproj and whose general.architecture is "clip".

A tower becomes keys of config.json and tensors beside those of its language model, as in the checkpoint that both were made of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from edgeq.converters.checkpoint.source import StoredTensor
from edgeq.converters.importers.gguf_families.proportional_towers import GEMMA4, LFM2
from edgeq.converters.importers.gguf_families.towers import GEMMA3, IDEFICS3, INTERNVL
from edgeq.converters.importers.gguf_keys import GgufKeys, Keys, Settings
from edgeq.converters.importers.gguf_tensors import FlatPatchTensor, GgufTensor, PatchTensor
from edgeq.converters.importers.gguf_tower_kinds import CLASS, DOWN, QWEN_AND_LLAVA, TowerFile, TowerKind, tapped
from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.pictures.preprocessor import CLIP_MEAN, CLIP_STD

TOWERS = QWEN_AND_LLAVA | {"internvl": INTERNVL, "gemma3": GEMMA3, "idefics3": IDEFICS3, "lfm2": LFM2, "gemma4v": GEMMA4}
"""llama.cpp's name in `clip.projector_type`; none is "mlp"."""
CLIP = "clip"
PATCH = "v.patch_embd"
AUDIO = ("a.", "mm.a.")
"""What the names of tensors of a tower for audio begin with."""
TOKENS = "tokenizer.ggml.tokens"
_LAYER = re.compile(r"v\.blk\.(\d{1,4})\.([a-z0-9_]+)\.(weight|bias)")
_TAP = re.compile(r"v\.deepstack\.(\d{1,4})\.(fc1|fc2|norm)\.(weight|bias)")
_END = re.compile(r"([a-z0-9_.]+)\.(weight|bias)")
_TAP_MODULES = {"fc1": "linear_fc1", "fc2": "linear_fc2", "norm": "norm"}
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


@dataclass(frozen=True)
class GgufTower:
    """config        keys of config.json, of the language model with its tower
    preprocessor  keys of preprocessor_config.json
    tensors       those of the tower, under transformers' names
    picture       as in TowerKind
    """

    config: Settings
    preprocessor: Settings
    tensors: Mapping[str, StoredTensor]
    picture: str


def read_tower(metadata: Keys, stored: Mapping[str, GgufTensor], place: str, decoder: GgufKeys, config: Settings) -> GgufTower:
    """The tower of a file with these metadata and tensors, for a language model.

    place    of the file, for messages
    decoder  keys of the language model, whose config.json is `config`

    CheckpointError: a key or a tensor is missing, or they contradict each other or the language model.  UnsupportedError: no
    tower, one that edgeq does not run, or a setting of it.
    """
    if not isinstance(name := metadata.get("general.architecture"), str) or name != CLIP:
        raise UnsupportedError(
            f"{place}: general.architecture is {str(name)[:60]!r}, expected {CLIP!r}: --mmproj takes the file of the tower, "
            "which is published beside the language model as mmproj-....gguf"
        )
    keys = GgufKeys(metadata, CLIP, place, {name: tensor.shape for name, tensor in stored.items()})
    kind = _kind(keys, decoder)
    audio = kind.audio and keys.flag("has_audio_encoder", False)
    if audio:
        keys.read.update(key.removeprefix(f"{CLIP}.") for key in metadata if key.startswith(f"{CLIP}.audio."))
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith(AUDIO)}
    file = TowerFile(keys, decoder, config, stored)
    file.swapped = kind.swaps and file.shape(DOWN)[1] == file.size("embedding_length")
    settings = {**kind.settings(file), "architectures": [kind.family], "model_type": kind.model_type}
    image = {**kind.image(file), "image_mean": _three(keys, "image_mean"), "image_std": _three(keys, "image_std")}
    if audio:
        settings["audio_config"] = {}
    for key, value in (("has_vision_encoder", True), ("has_audio_encoder", audio), ("has_text_encoder", False)):
        keys.only(key, value)
    keys.value("has_llava_projector")
    keys.only("vision.mm_patch_merge_type", "flat")
    keys.check_all_read()
    if (rows := file.shape(kind.last)[1 if kind.turned else 0]) != config["hidden_size"]:
        raise CheckpointError(
            f"{place}: {kind.last} gives {rows} channels, and {decoder.architecture}.embedding_length of {decoder.place} is "
            f"{config['hidden_size']}: give the tower of this language model"
        )
    settings[kind.token_key] = _placeholder(kind, decoder)
    return GgufTower(settings, image, _renamed(file, kind), kind.picture)


def _kind(keys: GgufKeys, decoder: GgufKeys) -> TowerKind:
    """By the projector type, which some files have among the keys of the tower."""
    inner = keys.value("vision.projector_type")
    found = keys.value("projector_type", "mlp" if inner is None else inner)
    if inner is not None and isinstance(found, str) and (not isinstance(inner, str) or inner != found):
        raise keys.wrong("vision.projector_type", inner, f"{found!r:.60}, as clip.projector_type")
    kind = TOWERS.get(found) if isinstance(found, str) else None
    if kind is None:
        raise UnsupportedError(f"{keys.place}: clip.projector_type is {found!r:.60}; supported: {', '.join(TOWERS)}")
    if decoder.architecture not in kind.decoders:
        raise UnsupportedError(
            f"{keys.place}: clip.projector_type is {found!r}, which goes with {' and '.join(kind.decoders)}, and "
            f"general.architecture of {decoder.place} is {decoder.architecture!r}: give the tower of this language model"
        )
    family, model_type = kind.families.get(decoder.architecture, (kind.family, kind.model_type))
    return replace(kind, family=family, model_type=model_type)


def _three(keys: GgufKeys, name: str) -> list[float]:
    """The numbers of three channels, in the decimals that whoever wrote them had: CLIP's, or else the shortest."""
    found = keys.value(f"vision.{name}")
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f" or found.shape != (3,):
        raise keys.wrong(f"vision.{name}", found, "three numbers")
    for usual in (CLIP_MEAN, CLIP_STD):
        if np.array_equal(found, np.array(usual, np.float32)):
            return list(usual)
    return [float(str(number)) for number in found]


def _placeholder(kind: TowerKind, decoder: GgufKeys) -> int:
    """The id of the token in whose place a picture comes."""
    tokens = decoder.metadata.get(TOKENS)
    if not isinstance(tokens, list) or kind.placeholder not in tokens:
        raise CheckpointError(
            f"{decoder.place}: {TOKENS} has no {kind.placeholder!r}, in whose place a picture comes: take a file that was made "
            "of the whole checkpoint"
        )
    return tokens.index(kind.placeholder)


def _renamed(file: TowerFile, kind: TowerKind) -> dict[str, StoredTensor]:
    """Tensors under transformers' names.  UnsupportedError: one that has no place."""
    found: dict[str, StoredTensor] = {}
    frames, ends = [f"{PATCH}.weight", f"{PATCH}.weight.1"][: kind.frames], {**kind.ends, PATCH: kind.patch}
    taps, layers = tapped(file), file.layers
    wholes = {
        name.format(layer): replace(whole, name=whole.name.format(layer))
        for name, whole in kind.wholes.items()
        for layer in range(layers if "{}" in name else 1)
    }
    for name, tensor in file.stored.items():
        if whole := wholes.get(name):
            found[whole.name] = whole.of(tensor)
            continue
        layer, tap, end = _LAYER.fullmatch(name), _TAP.fullmatch(name), _END.fullmatch(name)
        if layer and int(layer[1]) < layers:
            module = kind.blocks.get(_SWAPPED.get(layer[2], layer[2]) if file.swapped else layer[2])
            ours = module and f"{kind.layers}{int(layer[1])}.{module}.{layer[3]}"
        elif tap and int(tap[1]) in taps:
            ours = f"visual.deepstack_merger_list.{taps.index(int(tap[1]))}.{_TAP_MODULES[tap[2]]}.{tap[3]}"
        elif name == CLASS and kind.frames == 1:
            ours = "vision_tower.embeddings.class_embedding"
        elif name in frames:
            continue
        else:
            module = ends.get(end[1]) if end else None
            ours = module and end and f"{module}.{end[2]}"
        if not ours:
            raise UnsupportedError(f"{file.keys.place}: tensor {name:.80} has no place in the tower of a {kind.family}")
        found[ours] = tensor
    found[f"{kind.patch}.weight"] = _patch(file, frames, kind.flat)
    return found


def _patch(file: TowerFile, frames: list[str], flat: bool) -> PatchTensor | FlatPatchTensor:
    """The patch embedding.  CheckpointError: a frame is missing, or has another shape than the first."""
    pixels = (3, *(file.size("patch_size"),) * 2)
    for name in frames:
        tensor, first = file.stored.get(name), file.stored.get(frames[0])
        whole = tensor is not None and len(tensor.shape) == 4 and (not flat or tensor.shape[1:] == pixels)
        if tensor is None or first is None or not whole or tensor.shape != first.shape:
            found = "missing" if tensor is None else f"of the shape {tensor.shape}"
            raise CheckpointError(
                f"{file.keys.place}: tensor {name} is {found}; expected {len(frames)} of the shape (channels, 3, rows, columns)"
            )
    stored = tuple(file.stored[name] for name in frames)
    return FlatPatchTensor(stored[0]) if flat else PatchTensor(stored)
