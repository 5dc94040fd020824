"""A small model with a vision tower and random weights, written without a converter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from edgeq.format.codec import Codec, pack_floats
from edgeq.format.manifest import array_shapes, fused_shapes, patch_contents, projector_contents
from edgeq.format.metadata import Metadata
from edgeq.format.records import LinearSpec, Weight
from edgeq.format.writer import Writer
from edgeq.network.config import ModelConfig, VisionConfig
from edgeq.network.delta_net import DeltaNet
from edgeq.network.image_config import ImageConfig
from edgeq.network.rope import Rope
from edgeq.pictures.image import Picture

IMAGE_TOKEN = 90
VISION = VisionConfig(
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=24,
    rms_norm_eps=1e-6,
    rope=Rope(10000.0, kind="axial", sections=(6, 6)),
    hidden_act="quick_gelu",
    layer_norm=True,
    image=ImageConfig(sizing="factor", mean=(0.5,) * 3, std=(0.3,) * 3, min_pixels=64, max_pixels=4096),
    image_token_id=IMAGE_TOKEN,
    patch_size=4,
    temporal_patch_size=2,
    merge=2,
    project_norm="patch",
    project_size=192,
    project_act="gelu",
    out_hidden_size=64,
)
CONFIG = ModelConfig(
    model_type="random",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope=Rope(10000.0, sections=(4, 6, 6)),
    max_position_embeddings=256,
    tie_word_embeddings=False,
    vision=VISION,
)
STATES = replace(
    CONFIG,
    rope=Rope(10000.0, sections=(3, 3, 2), interleaved=True, partial_rotary_factor=0.5),
    delta_net=DeltaNet((0,), key_heads=1, value_heads=2, key_dim=12, value_dim=10, taps=3),
)
"""The same with a layer that has a state, as Qwen3.5 has them."""


def no_texts(text: str) -> list[int]:
    raise AssertionError(f"{text!r} beside a picture of a model that has none")


def write(path: Path, config: ModelConfig = CONFIG) -> Path:
    """The file at `path`; the same bytes every time."""
    writer, rng, linears = Writer(path), np.random.default_rng(0), dict[str, LinearSpec]()

    def linear(name: str, rows: int, columns: int) -> None:
        values = pack_floats((rng.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32), "f32")
        linears[name] = LinearSpec(name, (Weight(Codec("f32"), rows, columns, {"q": writer.array(values, "f32")}),))

    stacks = [(VISION, range(VISION.num_hidden_layers)), (config, range(config.num_hidden_layers))]
    fused = [part for stack, layers in stacks for layer in layers for part in fused_shapes(stack, layer)]
    fused += [
        (n, p) for part in (patch_contents(VISION), projector_contents(VISION)) for n, p in part.items() if isinstance(p, dict)
    ]
    for name, parts in fused:
        linear(name, sum(rows for rows, _ in parts.values()), next(iter(parts.values()))[1])
    linear("head", config.vocab_size, config.hidden_size)
    arrays = {}
    for name, shape in array_shapes(config).items():
        values = np.zeros(shape) if name.endswith("_bias") else np.ones(shape)
        values = rng.standard_normal(shape) if name == "embedding" or name.endswith("delta_conv") else values
        # A state that remembers tens of tokens.
        values = values - 4 if name.endswith("decay_log") else values
        arrays[name] = writer.array(values.astype(np.float32), "f32")
    writer.finish(Metadata(config, {"eos_token_ids": [1]}, {"method": "none"}, "a16", linears, arrays))
    return path


def picture(rows: int, columns: int, seed: int) -> Picture:
    """A picture of rows x columns tokens of noise."""
    grid = (1, rows * VISION.merge, columns * VISION.merge)
    patches = np.random.default_rng(seed).standard_normal((grid[1] * grid[2], VISION.patch_width)).astype(np.float32)
    return Picture(patches, grid, seed.to_bytes(16, "little"))
