"""Hostile checkpoints: config.json, the index of shards, headers of safetensors files, packed integers."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mutation import VALUES, changed_bytes, changed_json, refused

from edgeq.converters.families import FAMILIES, recognise
from edgeq.converters.importers.quantized.folder import QuantizedFolder
from edgeq.converters.importers.quantized.mxfp4 import Mxfp4Tensor
from edgeq.converters.importers.quantized.packed_tensor import PackedTensor
from edgeq.converters.importers.safetensors_folder import INDEX, SafetensorsFolder
from edgeq.errors import EdgeqError
from edgeq.format.safetensors import SIZES, read_header
from edgeq.network.config import ModelConfig

SIZES_OF_STACK = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
COMMON: dict[str, Any] = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "head_dim": 16},
    **{"rope_theta": 1e4, "tie_word_embeddings": True, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    **{
        "layer_types": ["full_attention", "sliding_attention"],
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
TEXT = {"model_type": "gemma", "head_dim": 16, "max_position_embeddings": 512, **{key: COMMON[key] for key in SIZES_OF_STACK}}
POLICY: dict[str, Any] = {
    "architectures": ["PI0ForConditionalGeneration"],
    "vlm_config": {
        "model_type": "paligemma",
        "image_token_index": 5,
        "projection_dim": 64,
        "text_config": TEXT | {"vocab_size": 256, "rope_theta": 1e4, "num_key_value_heads": 1},
        "vision_config": {
            **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"model_type": "siglip_vision_model", "patch_size": 8, "image_size": 24, "vision_use_head": False},
        },
    },
    "dit_config": TEXT | {"hidden_size": 48, "intermediate_size": 80, "num_key_value_heads": 1},
    **{"chunk_size": 7, "max_state_dim": 9, "max_action_dim": 5, "num_inference_steps": 4, "min_period": 0.01},
}
PICTURES = {
    "image_processor_type": "PI0ImageProcessor",
    "size": {"max_height": 24, "max_width": 24},
    "pad_size": {"height": 24, "width": 24},
}


def policy(rng: random.Random) -> str:
    """The same of a policy, whose decoder, tower and expert have objects of their own, and of what reads its pictures."""
    pictures = changed_json(rng, PICTURES) if rng.random() < 0.2 else PICTURES

    def read() -> None:
        family, found = recognise(changed_json(rng, POLICY) if rng.random() < 0.95 else POLICY, pictures)
        if found.num_hidden_layers < 4096:
            for each in (family, family.tower, family.policy):
                assert each is not None
                each.sources()
                each.tensor_shapes()
        ModelConfig.from_json(found.to_json())

    return recognised(read)


def config(rng: random.Random) -> str:
    """config.json of a random family with some keys removed and others changed, through everything that reads no file."""
    name = rng.choice(list(FAMILIES))
    # Keys of another kind of model are refused before anything else is looked at.
    other = ("expert", "moe") if "Mo" not in name and "Mix" not in name else ("use_sliding_window", "layer_types")
    config = {key: value for key, value in COMMON.items() if rng.random() < 0.97 and not any(part in key for part in other)}
    config["architectures"] = [name]

    def read() -> None:
        family, found = recognise(changed_json(rng, config) if rng.random() < 0.95 else config)
        if found.num_hidden_layers * max(1, found.num_experts) < 4096:
            family.sources()
            family.tensor_shapes()
        json.dumps(json.loads(found.to_json()), allow_nan=False)

    return recognised(read)


def recognised(read: Callable[[], None]) -> str:
    """What became of a configuration that `read` reads."""
    try:
        read()
    except EdgeqError as error:
        return refused(error)
    except AttributeError as error:
        # The JSON value as a whole was replaced; read_json gives objects alone.
        if "has no attribute 'get'" not in str(error):
            raise
        return "no object"
    return "recognised"


def header(rng: random.Random, path: Path) -> str:
    """A safetensors file of three tensors whose header, or any byte, is changed."""
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for i, (dtype, shape, begin, end) in enumerate((("BF16", [4, 3], 0, 24), ("F32", [2], 24, 32), ("I64", [1, 1], 32, 40))):
        tensors[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(changed_json(rng, tensors, (*VALUES, "F16", "F64", [40, 48]))).encode("utf-8", "surrogatepass")
    length = rng.choice((0, 1, 2, 2**32, 2**63, 2**64 - 1, len(text) + 1)) if rng.random() < 0.1 else len(text)
    data = struct.pack("<Q", length) + text + bytes(40)
    path.write_bytes(changed_bytes(rng, data) if rng.random() < 0.4 else data)
    try:
        for tensor in read_header(path).values():
            assert 8 <= tensor.offset <= path.stat().st_size, tensor
    except EdgeqError as error:
        return refused(error)
    return "read"


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def shards(folder: Path) -> Path:
    """A folder with two small shards, for `index`."""
    folder.mkdir()
    for i, shard in enumerate(SHARDS):
        names = [f"t{i}", f"u{i}"]
        text = json.dumps({n: {"dtype": "F32", "shape": [2], "data_offsets": [8 * k, 8 * k + 8]} for k, n in enumerate(names)})
        (folder / shard).write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(16))
    return folder


def index(rng: random.Random, folder: Path) -> str:
    """model.safetensors.index.json whose entries, or bytes, are changed; then the headers of the shards that it names."""
    value = {"metadata": {"total_size": 32}, "weight_map": {f"{n}{i}": SHARDS[i] for i in (0, 1) for n in "tu"}}
    names = (*SHARDS, "../x.safetensors", "/etc/passwd", f"./{SHARDS[0]}", ".safetensors", "t9", f"{SHARDS[1]}\0")
    data = json.dumps(changed_json(rng, value, (*VALUES, *names))).encode("utf-8", "surrogatepass")
    (folder / INDEX).write_bytes(changed_bytes(rng, data) if rng.random() < 0.3 else data)
    try:
        tensors = SafetensorsFolder(folder, "shards", {}).tensors()
    except EdgeqError as error:
        return refused(error)
    assert all(tensor.path.parent == folder and tensor.path.name in SHARDS for tensor in tensors.values()), tensors
    return "read"


FORMATS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, list[int]]]]] = {
    "awq": (
        {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        {"qweight": ("I32", [64, 4]), "qzeros": ("I32", [2, 4]), "scales": ("F16", [2, 32])},
    ),
    "gptq": (
        {"bits": 4, "group_size": 32, "sym": False, "desc_act": True, "checkpoint_format": "gptq", "dynamic": {}},
        {"qweight": ("I32", [8, 32]), "qzeros": ("I32", [2, 4]), "scales": ("F16", [2, 32]), "g_idx": ("I32", [64])},
    ),
    "compressed-tensors": (
        {
            **{"format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]},
            "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
        },
        {
            **{"weight_packed": ("I32", [32, 8]), "weight_shape": ("I64", [2]), "weight_scale": ("F16", [32, 2])},
            **{"weight_zero_point": ("I32", [4, 2]), "weight_g_idx": ("I32", [64])},
        },
    ),
    "mlx": (
        {"bits": 4, "group_size": 32, "mode": "affine", "m": {"bits": 4, "group_size": 32}},
        {"weight": ("U32", [32, 8]), "scales": ("F16", [32, 2]), "biases": ("F16", [32, 2])},
    ),
    "mxfp4": ({"modules_to_not_convert": ["m"]}, {"w_blocks": ("U8", [2, 16, 2, 16]), "w_scales": ("U8", [2, 16, 2])}),
}
"""What config.json says of a format, and the tensors of one weight of 32 outputs and 64 inputs: (dtype, shape)."""


SOUND = {
    **dict.fromkeys(("scale", "scales", "biases"), np.arange(1, 30, dtype=np.float16).tobytes()),
    "shape": struct.pack("<qq", 32, 64),
    "w_scales": bytes(range(110, 140)),
    "g_idx": np.roll(np.arange(64) // 32, 5).astype(np.int32).tobytes(),
}
"""Values with which a weight is read; of other tensors any are."""


def packed(rng: random.Random, folder: Path) -> str:
    """A folder of one quantized weight: keys of its configuration, types, shapes and values of its tensors are changed."""
    folder.mkdir(exist_ok=True)
    name = rng.choice(list(FORMATS))
    keys, parts = FORMATS[name]
    keys = changed_json(rng, {**keys, "quant_method": name}) if rng.random() < 0.5 else {**keys, "quant_method": name}
    shapes: Any = {part: [dtype, shape] for part, (dtype, shape) in parts.items()}
    if rng.random() < 0.5:
        shapes = changed_json(rng, shapes, (*VALUES, "F16", "I32", "I8", "BF16", [64, 4], [32, 1], [1], 32, 2))
    header, data = dict[str, Any](), b""
    for part, tensor in (shapes if isinstance(shapes, dict) else {}).items():
        dtype, shape = tensor if isinstance(tensor, list) and len(tensor) == 2 else ("I32", [2, 2])
        sound = isinstance(shape, list) and all(type(n) is int and 0 <= n < 4096 for n in shape) and len(shape) < 5
        size = math.prod(shape) * SIZES.get(dtype, 4) if sound and isinstance(dtype, str) else 0
        values = rng.randbytes(min(size, 1 << 16)).ljust(size, b"\0")
        if (plain := SOUND.get(part.removeprefix("weight_"))) and rng.random() < 0.95:
            values = (plain * (1 + size // len(plain)))[:size]
        header[f"m.{part}"] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += values
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    try:
        place = "quantization" if name == "mlx" else "quantization_config"
        source = QuantizedFolder.of(SafetensorsFolder(folder, "packed", {place: keys}))
        if source is None:
            return "floats"
        for each in source.tensors().values():
            if isinstance(each, PackedTensor | Mxfp4Tensor):
                rows, columns = math.prod(each.shape[:-1]), each.shape[-1]
                each.read(columns, columns, "m")
                arrays = each.quantized(0, rows, "m")
                assert arrays["q"].shape == (rows, columns) and np.isfinite(arrays["scale"]).all(), arrays
                assert np.isfinite(arrays.get("offset", 0)).all(), arrays
    except EdgeqError as error:
        return refused(error)
    return "read"
