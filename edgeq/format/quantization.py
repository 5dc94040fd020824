"""The rules of rounding weights and activations, in numpy; round to nearest of a converter or a device gives the same bits.

Weights, per group of a row, to the integers of a codec of b bits:

    asymmetric   scale (max - min) / (2^b - 1), zero = clamp(-rint(min / scale), 0, 2^b - 1); the range need not hold 0
    symmetric    scale max|w| / (2^(b-1) - 1), zero 2^(b-1)
    q            clamp(rint(w / scale) + zero, 0, 2^b - 1)

A group with a number that is not finite has the scale NaN.

Activations, in the modes a8 and a4, per token (`input_rule` says which rule holds, `quantized_input` follows it):

    a layer's `activation` part     one scale per weight block, in the bits that it names (`quantize_tokens`), or constant ones
                                    (`quantize_static`)
    without one                     symmetric, one scale per block of `activation_block` channels, in integers up to
                                    `activation_limit` (`quantize_blocks`)

Everything is float32; the scale of a weight is rounded to f16 before it is used; halves go to even.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgeq.errors import FormatError
from edgeq.format.codec import AnyArray, ArrayF32, Codec, Kind, pack_groups, pack_integers
from edgeq.format.records import Activation, ArrayRef, LinearSpec, Mode

MIN_RANGE = 1e-5
"""Smallest range of a group of weights: over 255, the largest number of steps, it still rounds to an f16 above 0."""
MAX_SCALE = 65504.0
"""The largest f16: larger weights are clipped."""
MIN_SPAN = 1e-30
"""Smallest range of a token's activations; a smaller one counts as zero, since its inverse may overflow."""
MAX_ACTIVATION_BLOCK = 128
"""The most channels of an activation that share a scale: an int32 holds the sum of that many products of 8 by 16 bits."""
MAX_A8 = 127
MAX_A8_4_BIT_WEIGHTS = 120
MAX_A4 = 7


def rounded(w: ArrayF32, codec: Codec) -> dict[str, AnyArray]:
    """w float32 [rows, columns] as the packed arrays of an integer codec: "q", "scale", and "zero" where the codec has one."""
    rows, columns = w.shape
    size = codec.group_size or columns
    # The last group may be shorter: its last weight, repeated, changes neither its minimum nor its maximum.
    groups = np.pad(w, ((0, 0), (0, -columns % size)), "edge").reshape(rows, -1, size)
    top = np.float32((1 << codec.bits) - 1)
    if codec.symmetric:
        span, steps = np.abs(groups).max(axis=2), np.float32(codec.center - 1)
    else:
        low = groups.min(axis=2)
        with np.errstate(invalid="ignore", over="ignore"):
            span, steps = groups.max(axis=2) - low, top
    wide = np.maximum(span, np.float32(MIN_RANGE)) / steps
    wide = np.where(np.isfinite(groups).all(axis=2), np.minimum(wide, np.float32(MAX_SCALE)), np.float32(np.nan))
    stored = wide.astype(np.float16)
    scale = stored.astype(np.float32)
    with np.errstate(invalid="ignore"):
        zero = np.full_like(scale, codec.center) if codec.symmetric else _integers(-np.rint(low / scale), top)
        q = _integers(np.rint(groups / scale[:, :, None]) + zero[:, :, None], top)
    codes = q.reshape(rows, -1)[:, :columns].astype(np.uint8)
    packed = {"q": pack_integers(codes, codec.bits), "scale": pack_groups(stored)}
    return packed if codec.symmetric else packed | {"zero": pack_groups(zero.astype(np.uint8))}


ROUNDINGS: Mapping[Kind, Callable[[ArrayF32, Codec], dict[str, AnyArray]]] = {"int": rounded}
"""How a device rounds weights, by the kind of codec; those that are not here are rounded by a converter only."""


def _integers(x: ArrayF32, top: np.float32) -> ArrayF32:
    return np.where(np.isnan(x), np.float32(0), np.clip(x, 0, top))


def activation_block(codec: Codec) -> int:
    """Channels of an activation that share a scale, for weights of `codec`: one group of weights, but at most 128."""
    return min(codec.group_size or MAX_ACTIVATION_BLOCK, MAX_ACTIVATION_BLOCK)


def activation_limit(codec: Codec, mode: Literal["a8", "a4"]) -> int:
    """The largest integer of activations with a scale per block, for weights of `codec`; the smallest is its negative.

    a4   7
    a8   127; for weights of 4 bits 120.  The sum of an activation and a 4-bit weight, centered (-8 ... 7), then fits a signed
         byte, and Winograd's inner product, which halves the multiplications, needs such sums.  It costs 6 % of the resolution
         of an activation, far below that of the weights.  The limit belongs to the mode and not to the kernels that use it, so
         that every target computes the same numbers.
    """
    if mode == "a4":
        return MAX_A4
    return MAX_A8_4_BIT_WEIGHTS if codec.multiplied_bits == 4 else MAX_A8


@dataclass(frozen=True)
class InputRule:
    """How the input of a weight block is rounded.

    kind     "block": one scale per token and activation block (`quantize_blocks`); "token", "token_zero": one per token,
             symmetric or with a zero point (`quantize_tokens`); "static": constant ones (`quantize_static`)
    bits     of the integers
    limit    the largest integer; the smallest is its negative, with a zero point 0
    scales   "static": the array of the scales, f32 [1] or one for each modality
    """

    kind: Literal["block", "token", "token_zero", "static"]
    bits: int
    limit: int
    scales: ArrayRef | None = None


def input_rule(layer: LinearSpec, index: int, mode: Mode) -> InputRule | None:
    """How the input of weight block `index` of a layer is rounded in `mode`.

    None: it stays as it is, in a16 and in every mode where the block's weights are floats.
    """
    codec, activation = layer.weights[index].codec, layer.activation
    if mode == "a16" or not codec.integer:
        return None
    if activation is None:
        return InputRule("block", 4 if mode == "a4" else 8, activation_limit(codec, mode))
    if activation.scales is not None:
        return InputRule("static", activation.bits, static_limit(activation, codec), activation.scales)
    bits = activation.high_bits if index else activation.bits
    if activation.symmetric:
        return InputRule("token", bits, (1 << (bits - 1)) - 1)
    return InputRule("token_zero", bits, (1 << bits) - 1)


def quantized_input(x: ArrayF32, layer: LinearSpec, index: int, mode: Mode, scales: ArrayF32 | None = None) -> ArrayF32:
    """x float32 [tokens, channels], the input of weight block `index` in `mode`: quantized and dequantized again.

    scales   float32 [tokens], of a layer with constant ones
    """
    rule = input_rule(layer, index, mode)
    if rule is None:
        return x
    if rule.kind == "static":
        assert scales is not None
        return quantize_static(x, scales, rule.limit)
    if rule.kind == "block":
        return quantize_blocks(x, activation_block(layer.weights[index].codec), rule.limit)
    return quantize_tokens(x, rule.bits, symmetric=rule.kind == "token")


def static_limit(activation: Activation, codec: Codec) -> int:
    """The largest integer of activations with constant scales, for weights of `codec`.

    In 8 bits that of mode a8, so that products with 4-bit weights may go by Winograd's method.
    """
    return min((1 << (activation.bits - 1)) - 1, activation_limit(codec, "a8"))


def quantize_static(x: ArrayF32, scales: ArrayF32, limit: int) -> ArrayF32:
    """x float32 [tokens, channels] in integers of -limit ... limit by given scales float32 [tokens], dequantized again.

    q = rint(x * (1 / scale)), limited; a number that is not finite stays one.
    """
    scale = scales[:, None]
    with np.errstate(invalid="ignore"):
        q = np.rint(x * (np.float32(1) / scale)).clip(-limit, limit)
    return np.where(np.isfinite(x), q * scale, np.float32(np.nan))


def check_scales(name: str, scales: ArrayF32) -> None:
    """FormatError unless the constant activation scales of a layer are positive numbers whose inverses are, too."""
    if not ((scales > MIN_SPAN) & (scales < 1 / MIN_SPAN)).all():
        raise FormatError(f"{name}: its activation scales are {scales.tolist()}; expected positive numbers")


def quantize_blocks(x: ArrayF32, size: int, limit: int) -> ArrayF32:
    """x float32 [tokens, channels] in integers from -limit to limit, one scale per token and block, dequantized again.

    A block is `size` consecutive channels, the last one perhaps shorter.  scale = max|x| / limit,
    q = rint(x / scale), symmetric; a block of zeros has scale 0.
    """
    tokens, channels = x.shape
    blocks = np.pad(x, ((0, 0), (0, -channels % size))).reshape(tokens, -1, size)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(limit)
    # The limit matters only where the scale is so small that it was itself rounded.
    q = np.rint(blocks / np.where(scale > 0, scale, np.float32(1))).clip(-limit, limit)
    return np.ascontiguousarray((q * scale).reshape(tokens, -1)[:, :channels])


def quantize_tokens(x: ArrayF32, bits: int, symmetric: bool) -> ArrayF32:
    """x float32 [tokens, channels] in integers of `bits`, one scale per token, dequantized again (arXiv 2412.14363, section 4).

    symmetric   scale = max|x| / (2^(bits-1) - 1), q = rint(x / scale)
    else        over the range that x and 0 span: scale = (max - min) / (2^bits - 1), zero = rint(-min / scale),
                q = clamp(rint(x / scale) + zero, 0, 2^bits - 1), x = scale * (q - zero)

    A token of zeros, or of numbers whose range is at most MIN_SPAN, has scale 0.
    """
    if symmetric:
        levels = np.float32((1 << (bits - 1)) - 1)
        least, span = -levels, np.abs(x).max(axis=1, keepdims=True)
    else:
        levels = np.float32((1 << bits) - 1)
        low, high = (f(x, axis=1, initial=0, keepdims=True) for f in (np.min, np.max))
        span = high - low
    some = span > MIN_SPAN
    inverse = np.where(some, levels / np.where(some, span, np.float32(1)), np.float32(0))
    if not symmetric:
        least = -np.rint(-low * inverse)
    greatest = levels if symmetric else levels + least
    q = np.rint(x * inverse).clip(least, greatest)
    return np.asarray(q * np.where(some, span / levels, np.float32(0)), np.float32)
