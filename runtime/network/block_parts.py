"""What the blocks of decoders and towers are made of: norms, fused layers or their parts, the way back to the stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edgeq.format.manifest import fused_shapes
from edgeq.format.metadata import Metadata
from edgeq.network.config import VisionConfig
from edgeq.network.stack import Stack
from edgeq.pictures.tower_clips import Clip
from edgeq.targets.family_operations import Limit
from edgeq.targets.graph import LayerNorm, Linear, NormAdd, Operation, RmsNorm


def norm(metadata: Metadata, config: Stack, layer: int, x: str, name: str, out: str) -> Operation:
    """The norm of the stack's kind whose gain is the array `name`."""
    arrays, eps = metadata.arrays, config.rms_norm_eps
    if config.layer_norm:
        return LayerNorm(layer, x, arrays[name], arrays[f"{name}_bias"], eps, out)
    return RmsNorm(layer, x, arrays[name], eps, out)


def residual(metadata: Metadata, config: Stack, layer: int, x: str, linear: str, post_norm: str) -> Iterator[Operation]:
    """x += linear(...), or x += norm(linear(...)) where blocks end in a norm; nothing else reads what it reads."""
    spec, clip = metadata.linears[linear], clips_of(config, layer).get(linear.rpartition(".")[2], Clip())
    if clip.inputs:
        yield Limit(layer, x, 0, spec.columns, *clip.inputs, x)
    if config.norms_after(layer):
        yield Linear(layer, x, spec, "branch")
        if clip.outputs:
            yield Limit(layer, "branch", 0, spec.rows, *clip.outputs, "branch")
        yield NormAdd(layer, "branch", metadata.arrays[post_norm], config.rms_norm_eps, "x")
    else:
        yield Linear(layer, x, spec, "x", add=True)


def projection(metadata: Metadata, config: Stack, layer: int, x: str, fused: str, out: str) -> Iterator[Operation]:
    """The fused layer if the file has it, else its parts side by side in the same buffer.

    Each within its bounds, where it has some; what the parts of one layer read has the same ones.
    """
    clips, whole, offset = clips_of(config, layer), metadata.linears.get(fused), 0
    if whole and not clips:
        yield Linear(layer, x, whole, out)
        return
    for name, (rows, columns) in dict(fused_shapes(config, layer))[fused].items():
        clip = clips.get(name.rpartition(".")[2], Clip())
        if not whole or offset == 0:
            if clip.inputs:
                yield Limit(layer, x, 0, columns, *clip.inputs, "clipped")
            yield Linear(layer, "clipped" if clip.inputs else x, whole or metadata.linears[name], out, offset)
        if clip.outputs:
            yield Limit(layer, out, offset, rows, *clip.outputs, out)
        offset += rows


def clips_of(config: Stack, layer: int) -> Mapping[str, Clip]:
    """The bounds of the linear parts of a layer; empty: there are none."""
    return config.clips_of(layer) if isinstance(config, VisionConfig) else {}
