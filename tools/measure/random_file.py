"""Files of a shape with random weights, in one codec or a part in another: as fast and as large as a conversion's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.budget.part_names import HEAD, TABLE, part_of
from edgeq.format.codec import MAX_ENTRY, Codec
from edgeq.format.manifest import FLOAT_PARTS, Shape, array_shapes, draft_input, fused_shapes, layer_contents, table_shapes
from edgeq.format.metadata import Metadata
from edgeq.format.records import ArrayRef, LinearSpec, Weight
from edgeq.format.writer import Writer
from edgeq.network.config import ModelConfig
from edgeq.network.delta_net import DeltaNet
from edgeq.network.draft_stack import DraftStack
from edgeq.network.ssd import StateSpace

Net = TypeVar("Net", DeltaNet, StateSpace)
NOISE = 1 << 22
"""Random bytes that a file repeats."""
Codecs = Mapping[str, Codec]
"""Codecs by part, of those that have one of their own."""
EVERY: Codecs = MappingProxyType({})
"""No part has."""
SUB_SCALE = 32
"""Scales and offsets of groups in two levels."""
TABLE_BITS = 2
"""Bits of an embedding that is not the head: a token reads next to nothing of it."""


def with_layers(config: ModelConfig, count: int) -> ModelConfig:
    """The decoder with its first `count` layers; without a vision tower."""
    space = config.ssd and replace(config.ssd, mlp_layers=tuple(layer for layer in config.ssd.mlp_layers if layer < count))
    return replace(
        config,
        num_hidden_layers=count,
        sliding_windows=config.sliding_windows[:count],
        layers_without_rope=tuple(layer for layer in config.layers_without_rope if layer < count),
        conv_layers=tuple(layer for layer in config.conv_layers if layer < count),
        num_kv_shared_layers=(shared := max(0, config.num_kv_shared_layers - max(0, config.num_hidden_layers - count))),
        use_double_wide_mlp=config.use_double_wide_mlp and shared > 0,
        delta_net=_with_layers(config.delta_net, count),
        ssd=_with_layers(space, count),
        vision=None,
    )


def _with_layers(net: Net | None, count: int) -> Net | None:
    layers = tuple(layer for layer in net.layers if layer < count) if net else ()
    return replace(net, layers=layers) if net and layers else None


def file_bytes(config: ModelConfig, codec: Codec) -> int:
    """Bytes of the linear layers."""
    return sum(stored.nbytes(*shape) for _, shape, stored in _linears(config, codec))


def linears_read(config: ModelConfig, codec: Codec, parts: Codecs = EVERY) -> Iterator[tuple[Shape, Codec, Fraction]]:
    """Shape, codec and the share that a token reads of every linear layer: of experts those that it uses, of a table and of
    the layer that drafts nothing."""
    used = Fraction(config.num_experts_per_tok, config.num_experts or 1)
    for name, shape, stored in _linears(config, codec, parts):
        unread = name in (TABLE, "layer_rows") or name.startswith(DraftStack.prefix)
        yield shape, stored, Fraction(0) if unread else used if ".experts." in name else Fraction(1)


def bytes_per_token(config: ModelConfig, codec: Codec, floats: bool = True) -> int:
    """Those that a token reads.

    floats   with the layers that stay in floats whatever the codec
    """
    every = [each for each in linears_read(config, codec) if floats or each[1].integer]
    return int(sum((share * stored.nbytes(*shape) for shape, stored, share in every), Fraction(0)))


def write_random(path: Path, config: ModelConfig, codec: Codec, parts: Codecs = EVERY) -> None:
    """Write a file with random weights, parts in codecs of their own.  ResourceError: there is no room for it."""
    writer, linears, arrays = Writer(path), dict[str, LinearSpec](), dict[str, ArrayRef]()
    noise = np.random.default_rng(0).integers(0, 256, NOISE, np.uint8)
    for name, (rows, columns), stored in _linears(config, codec, parts):
        refs: dict[str, ArrayRef] = {}
        for part, array in stored.parts(rows, columns).items():
            if part == "q" and stored.integer:
                refs[part] = writer.stream(_repeated(noise, array.nbytes), "u8", array.shape)
            elif part == "q":
                # A router of zeros: every token uses the first experts, as many as of any.
                refs[part] = writer.array(np.zeros(array.shape, np.uint16), "bf16")
            elif part == "table":
                entries = np.rint(np.linspace(-1, 1, array.shape[1]) * MAX_ENTRY[stored.wide])
                refs[part] = writer.array(np.broadcast_to(entries.astype(np.int8), array.shape), array.stored)
            elif part == "zero":
                refs[part] = writer.array(np.full(array.shape, stored.center, np.uint8), "u8")
            else:
                # Outputs keep the size of inputs; an offset makes the middle of the integers zero.
                size = columns**-0.5 / 2 ** (stored.multiplied_bits - 1) * (-stored.center if part.endswith("offset") else 1)
                if stored.coded and part == "scale":
                    size = 0  # The largest share.
                if stored.kind == "two-level":
                    size = size / SUB_SCALE if part.startswith("super") else SUB_SCALE
                refs[part] = writer.array(np.full(array.shape, size, array.dtype), array.stored)
        linears[name] = LinearSpec(name, (Weight(stored, rows, columns, refs),))
    for name, dims in array_shapes(config).items():
        if name != TABLE:
            value = 0.0 if name.endswith("_bias") or name == "positions" else 1.0
            arrays[name] = writer.array(np.full(dims, value, np.float32), "f32")
    writer.finish(Metadata(config, {"eos_token_ids": []}, {"method": "random"}, "a8", linears, arrays))


def _linears(config: ModelConfig, codec: Codec, parts: Codecs = EVERY) -> Iterator[tuple[str, Shape, Codec]]:
    """Name, shape and codec of every linear layer: that of its part, else `codec`; of those that stay in floats bf16."""
    for name, fused in _of_layers(config):
        rows, columns = sum(rows for rows, _ in fused.values()), next(iter(fused.values()))[1]
        floats = name.split(".")[-1] in FLOAT_PARTS
        yield name, (rows, columns), Codec("bf16") if floats else parts.get(part_of(name), codec)
    for name, shape in table_shapes(config).items():
        yield name, shape, Codec("bf16") if name in FLOAT_PARTS else replace(codec, bits=TABLE_BITS)
    if not config.tie_word_embeddings:
        yield TABLE, (config.vocab_size, config.hidden_size), replace(codec, bits=TABLE_BITS)
    yield HEAD, (config.vocab_size, config.hidden_size), parts.get(HEAD, codec)


def _of_layers(config: ModelConfig) -> Iterator[tuple[str, dict[str, Shape]]]:
    """The fused linear layers of the decoder's layers and of the one that drafts."""
    for layer in range(config.num_hidden_layers):
        yield from fused_shapes(config, layer)
    if draft := config.draft:
        contents = draft_input(draft) | layer_contents(draft, 0)
        yield from ((name, part) for name, part in contents.items() if isinstance(part, dict))


def _repeated(noise: NDArray[np.uint8], count: int) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, count, len(noise)):
        yield noise[: count - start]
