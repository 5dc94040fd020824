"""The group-wise quantizer, in torch float32.

Two presets (Lin et al. 2023, AWQ, arXiv 2306.00978; the ranges are those of its code, not of its Eq. 1), per group of a row:

    awq-asymmetric   scale = max(max - min, 1e-5) / (2^b - 1);  zero = clamp(-round(min / scale), 0, 2^b - 1)
                     the range is not forced to contain 0: a group of only positive weights gets zero 0 and its top is clipped
    awq-symmetric    scale = max(|w|max, 1e-5) / (2^(b-1) - 1); q in -2^(b-1) ... 2^(b-1) - 1, stored plus 2^(b-1)

Rounding is half to even.  The scale is rounded to f16 *before* q is computed, so what a search measured is what the file holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgeq.codec import Codec
from edgeq.errors import CheckpointError

# 1e-5 over the largest number of steps (255) still rounds to a nonzero f16, so no scale is ever 0.
SMALLEST_RANGE = 1e-5


@dataclass(frozen=True)
class Quantized:
    """q uint8 [rows, columns]; scale f16 and zero u8 (asymmetric only) [rows, groups]: what edgeq.codec packs."""

    q: Tensor
    scale: Tensor
    zero: Tensor | None


def preset(codec: Codec) -> str:
    """The name under which results of this quantizer are reported."""
    return "awq-symmetric" if codec.symmetric else "awq-asymmetric"


def quantize(weight: Tensor, codec: Codec, name: str) -> Quantized:
    """Weight float32 [rows, columns] -> stored integers.  CheckpointError: a scale of tensor `name` overflows f16."""
    groups = _grouped(weight, codec)
    scale, zero = _grid(groups, codec)
    if not torch.isfinite(scale).all():
        raise CheckpointError(f"{name} has weights too large for a 16-bit scale at {codec.bits} bits; use --method none")
    q = _round(groups, scale, zero, codec).to(torch.uint8).reshape(weight.shape)
    return Quantized(q, scale.half(), None if codec.symmetric else zero.to(torch.uint8))


def fake(weight: Tensor, codec: Codec) -> Tensor:
    """Weight float32 [rows, columns] after a round trip through `codec`: bit for bit what edgeq.codec.dequantize gives."""
    groups = _grouped(weight, codec)
    scale, zero = _grid(groups, codec)
    return ((_round(groups, scale, zero, codec) - zero[..., None]) * scale[..., None]).reshape(weight.shape)


def _grouped(weight: Tensor, codec: Codec) -> Tensor:
    rows, columns = weight.shape
    count = codec.groups(columns)
    return weight.reshape(rows, count, columns // count)


def _grid(groups: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """scale (already rounded to f16) and zero point, float32 [rows, groups]."""
    if codec.symmetric:
        span = groups.abs().amax(-1).clamp(min=SMALLEST_RANGE)
        scale = (span / ((1 << (codec.bits - 1)) - 1)).half().float()
        return scale, torch.full_like(scale, codec.center)
    top = (1 << codec.bits) - 1
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low).clamp(min=SMALLEST_RANGE) / top).half().float()
    return scale, (-torch.round(low / scale)).clamp(0, top)


def _round(groups: Tensor, scale: Tensor, zero: Tensor, codec: Codec) -> Tensor:
    """Stored integers as float32 [rows, groups, group_size]."""
    return groups.div(scale[..., None]).round_().add_(zero[..., None]).clamp_(0, (1 << codec.bits) - 1)
