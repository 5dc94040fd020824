"""Files of a shape with random weights, in one codec, the head perhaps in another: as fast and as large as a conversion's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeq.codec import Codec
from edgeq.config import ModelConfig
from edgeq.manifest import FLOAT_PARTS, Shape, array_shapes, fused_shapes
from edgeq.metadata import Metadata
from edgeq.records import ArrayRef, LinearSpec, Weight
from edgeq.writer import Writer

NOISE = 1 << 22
"""Random bytes that a file repeats."""
TABLE_BITS = 2
"""Bits of an embedding that is not the head: a token reads next to nothing of it."""


def with_layers(config: ModelConfig, count: int) -> ModelConfig:
    """The decoder with its first `count` layers; without a vision tower."""
    return replace(
        config,
        num_hidden_layers=count,
        sliding_windows=config.sliding_windows[:count],
        layers_without_rope=tuple(layer for layer in config.layers_without_rope if layer < count),
        vision=None,
    )


def file_bytes(config: ModelConfig, codec: Codec) -> int:
    """Bytes of the linear layers."""
    return sum(stored.nbytes(*shape) for _, shape, stored in _linears(config, codec))


def bytes_per_token(config: ModelConfig, codec: Codec, floats: bool = True) -> int:
    """Those that a token reads: of experts as many as it uses, of an embedding none.

    floats   with the layers that stay in floats whatever the codec
    """
    used = Fraction(config.num_experts_per_tok, config.num_experts or 1)
    found = Fraction(0)
    for name, shape, stored in _linears(config, codec):
        if stored.kind != "int" and not floats:
            continue
        share = used if ".experts." in name else Fraction(name != "embedding")
        found += share * stored.nbytes(*shape)
    return int(found)


def write_random(path: Path, config: ModelConfig, codec: Codec, head: Codec | None = None) -> None:
    """Write a file with random weights; `head`: its codec, if another.  ResourceError: there is no room for it."""
    writer, linears, arrays = Writer(path), dict[str, LinearSpec](), dict[str, ArrayRef]()
    noise = np.random.default_rng(0).integers(0, 256, NOISE, np.uint8)
    for name, (rows, columns), stored in _linears(config, codec, head):
        refs: dict[str, ArrayRef] = {}
        for part, array in stored.parts(rows, columns).items():
            if part == "q" and stored.kind == "int":
                refs[part] = writer.stream(_repeated(noise, array.nbytes), "u8", array.shape)
            elif part == "q":
                # A router of zeros: every token uses the first experts, as many as of any.
                refs[part] = writer.array(np.zeros(array.shape, np.uint16), "bf16")
            elif part == "zero":
                refs[part] = writer.array(np.full(array.shape, stored.center, np.uint8), "u8")
            else:
                # Outputs keep the size of inputs.
                size = columns**-0.5 / stored.center
                refs[part] = writer.array(np.full(array.shape, size, np.float16), "f16")
        linears[name] = LinearSpec(name, (Weight(stored, rows, columns, refs["q"], refs.get("scale"), refs.get("zero")),))
    for name, dims in array_shapes(config).items():
        if name != "embedding":
            value = 0.0 if name.endswith("_bias") or name == "positions" else 1.0
            arrays[name] = writer.array(np.full(dims, value, np.float32), "f32")
    writer.finish(Metadata(config, {"eos_token_ids": []}, {"method": "random"}, "a8", linears, arrays))


def _linears(config: ModelConfig, codec: Codec, head: Codec | None = None) -> Iterator[tuple[str, Shape, Codec]]:
    """Name, shape and codec of every linear layer: `codec`, but of those that stay in floats, and of the head if it has one."""
    for layer in range(config.num_hidden_layers):
        for name, parts in fused_shapes(config, layer):
            rows, columns = sum(rows for rows, _ in parts.values()), next(iter(parts.values()))[1]
            yield name, (rows, columns), Codec("bf16") if name.split(".")[-1] in FLOAT_PARTS else codec
    if not config.tie_word_embeddings:
        yield "embedding", (config.vocab_size, config.hidden_size), replace(codec, bits=TABLE_BITS)
    yield "head", (config.vocab_size, config.hidden_size), head or codec


def _repeated(noise: NDArray[np.uint8], count: int) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, count, len(noise)):
        yield noise[: count - start]
