"""What the blocks of decoders and towers are made of: norms, fused layers or their parts, the way back to the stream."""

from __future__ import annotations

from collections.abc import Iterator

from edgeq.format.manifest import fused_shapes
from edgeq.format.metadata import Metadata
from edgeq.network.stack import Stack
from edgeq.targets.graph import LayerNorm, Linear, NormAdd, Operation, RmsNorm


def norm(metadata: Metadata, config: Stack, layer: int, x: str, name: str, out: str) -> Operation:
    """The norm of the stack's kind whose gain is the array `name`."""
    arrays, eps = metadata.arrays, config.rms_norm_eps
    if config.layer_norm:
        return LayerNorm(layer, x, arrays[name], arrays[f"{name}_bias"], eps, out)
    return RmsNorm(layer, x, arrays[name], eps, out)


def residual(metadata: Metadata, config: Stack, layer: int, x: str, linear: str, post_norm: str) -> Iterator[Operation]:
    """x += linear(...), or x += norm(linear(...)) where blocks end in a norm."""
    if config.norms_after(layer):
        yield Linear(layer, x, metadata.linears[linear], "branch")
        yield NormAdd(layer, "branch", metadata.arrays[post_norm], config.rms_norm_eps, "x")
    else:
        yield Linear(layer, x, metadata.linears[linear], "x", add=True)


def projection(metadata: Metadata, config: Stack, layer: int, x: str, fused: str, out: str) -> Iterator[Operation]:
    """The fused layer if the file has it, else its parts side by side in the same buffer."""
    if fused in metadata.linears:
        yield Linear(layer, x, metadata.linears[fused], out)
        return
    offset = 0
    for name, (rows, _) in dict(fused_shapes(config, layer))[fused].items():
        yield Linear(layer, x, metadata.linears[name], out, offset)
        offset += rows
