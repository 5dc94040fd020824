"""Records of what several kernels read: weights, quantized inputs, norms, low-rank parts."""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.targets.cuda.arguments.record import Address, Arguments, Float32, Int32

RMS, LAYER = 1, 2
"""Norms of an input; 0: none."""


@dataclass(frozen=True, kw_only=True)
class WeightArguments(Arguments, run=()):
    """A block of weights, in file order (edgeq/format/codec.py).

    q        integers;  s: scales f16, or u8 where they have four bits;  z: zero points u8, or a table i8 for each block of 16
             output channels;  u: scales of output channels f16, by which those of four bits are multiplied; where the codec
             has them
    chunks   of 32 input channels in a row
    """

    q: Address
    s: Address
    z: Address
    u: Address
    chunks: Int32


@dataclass(frozen=True, kw_only=True)
class QuantizedInputArguments(Arguments, run=()):
    """Scales and sums of a quantized input (kernels/quantize_input.py).

    xs, xn   f32 and i32 [groups][padded]
    padded   token rows for which there is room
    """

    xs: Address
    xn: Address
    groups: Int32
    padded: Int32


@dataclass(frozen=True, kw_only=True)
class NormArguments(Arguments, run=()):
    """The norm of an input.

    norm          RMS, LAYER or 0
    gain, shift   f32 [columns]; shift of LayerNorm alone
    """

    norm: Int32 = 0
    eps: Float32 = 0.0
    gain: Address = 0
    shift: Address = 0


@dataclass(frozen=True, kw_only=True)
class LowRankPartArguments(Arguments, run=()):
    """The low-rank part that is added to a product, b inner.

    inner      f32 [tokens][rank], as the kernel low_rank made it
    low_b      b in file order;  low_kind: 1 f16, 2 bf16, 3 f32; 0: there is no such part
    """

    inner: Address = 0
    low_b: Address = 0
    low_kind: Int32 = 0
    rank: Int32 = 0
