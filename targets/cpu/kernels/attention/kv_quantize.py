"""How a head's numbers are rounded into a page of the cache (kv_layout.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from edgeq.targets.cpu.jit.deferred import inline, types
from edgeq.targets.cpu.jit.simd import (
    ADDRESS,
    I8,
    I16,
    LANES,
    VF16,
    VI32,
    VOID,
    constant,
    f32x16,
    get_f32,
    primitive,
    put_f16,
    put_f16s,
    put_f32,
    put_i8,
    rint,
    scatter,
    vdiv,
    vload,
    vmax,
    vmaximum,
    vmin,
    vminimum,
    vmul,
    vrint,
    vsplat,
    vsub,
)
from edgeq.targets.cpu.kernels.attention.kv_layout import POSITIONS, pair_bytes, scales_at
from edgeq.targets.cpu.kernels.rows.elementwise import zero_if_finite

F16_MAX = 65504.0


@primitive(VOID, f32x16, ADDRESS, types.intp)
def put_bytes(b: Any, x: Any, address: Any, stride: Any) -> None:
    """Sixteen whole numbers from -128 to 255 as bytes, `stride` bytes apart."""
    scatter(b, b.trunc(b.fptosi(x, VI32), ir.VectorType(I8, LANES)), address, stride)


@primitive(VOID, f32x16, ADDRESS, types.intp)
def put_scattered_halves(b: Any, x: Any, address: Any, stride: Any) -> None:
    """Sixteen numbers as f16, `stride` bytes apart."""
    scatter(b, b.bitcast(b.fptrunc(x, VF16), ir.VectorType(I16, LANES)), address, stride, 2)


@primitive(VOID, f32x16, ADDRESS, types.intp)
def put_nibbles(b: Any, x: Any, address: Any, stride: Any) -> None:
    """Sixteen whole numbers from 0 to 15 as eight bytes, `stride` bytes apart; the first of two in the low half."""
    words = b.bitcast(b.trunc(b.fptosi(x, VI32), ir.VectorType(I8, LANES)), ir.VectorType(I16, LANES // 2))
    octets = b.or_(words, b.lshr(words, constant(words.type, 4)))
    scatter(b, b.trunc(octets, ir.VectorType(I8, LANES // 2)), address, stride)


@inline
def extremes(x, count):
    """The least and the largest of `count` > 0 numbers."""
    least, most = get_f32(x), get_f32(x)
    if count >= 16:
        low, high = vload(x), vload(x)
        for i in range(16, count - 15, 16):
            low, high = vmin(low, vload(x + 4 * i)), vmax(high, vload(x + 4 * i))
        least, most = vminimum(low), vmaximum(high)
    for i in range(count // 16 * 16, count):
        least, most = min(least, get_f32(x + 4 * i)), max(most, get_f32(x + 4 * i))
    return least, most


@inline
def mark_of(key, value, dim):
    """0, or NaN where a key or its value is not finite; the key then becomes NaN and the value 0.

    Scores of positions that a query does not see are replaced before their weights are taken, so NaN in a key reaches the
    queries that see it and no other; NaN in a value would reach every query of the page, since 0 times NaN is NaN.
    """
    mark = zero_if_finite(key, dim) + zero_if_finite(value, dim)
    if mark != mark:
        for i in range(dim):
            put_f32(key + 4 * i, mark)
            put_f32(value + 4 * i, 0.0)
    return mark


@inline
def put_halves(x, dim, base, step):
    """A head's numbers as f16 to base, base + step ...; the order of the operands of vmin and vmax keeps NaN."""
    whole, most = dim // 16 * 16, vsplat(F16_MAX)
    least = vsub(vsplat(0.0), most)
    for i in range(0, whole, 16):
        value = vmin(most, vmax(least, vload(x + 4 * i)))
        if step == 2:
            put_f16s(base + 2 * i, value)
        else:
            put_scattered_halves(value, base + step * i, step)
    for i in range(whole, dim):
        single = get_f32(x + 4 * i)
        put_f16(base + step * i, single if single != single else min(max(single, -F16_MAX), F16_MAX))


@inline
def put_symmetric(x, dim, base, step, scale, mark):
    """A head's numbers as int8 to base, base + step ..., and what they were divided by, plus `mark`."""
    least, most = extremes(x, dim)
    largest = max(-least, most)
    inverse = 127.0 / largest if largest > 1e-30 else 0.0
    put_f32(scale, (largest / 127.0 if largest > 1e-30 else 0.0) + mark)
    whole = dim // 16 * 16
    for i in range(0, whole, 16):
        put_bytes(vrint(vmul(vload(x + 4 * i), vsplat(inverse))), base + step * i, step)
    for i in range(whole, dim):
        put_i8(base + step * i, int(rint(get_f32(x + 4 * i) * np.float32(inverse))))


@inline
def put_codes(x, count, codes, with_zero, out, scale, mark):
    """Codes of `count` numbers over their range, a byte for each or (4 bits) two of them, to base,
    base + step ...; the scale plus `mark`, and POSITIONS numbers after it the offset.

    codes   bits and the largest code;  out   base and step
    """
    (bits, largest_code), (base, step) = codes, out
    least, most = extremes(x, count)
    if with_zero:
        least, most = min(least, np.float32(0)), max(most, np.float32(0))
    least, most = np.float32(min(max(least, -F16_MAX), F16_MAX)), np.float32(min(max(most, -F16_MAX), F16_MAX))
    levels = np.float32(largest_code)
    unit = (most - least) / levels
    put_f32(scale, unit + mark)
    put_f32(scale + 4 * POSITIONS, least)
    divisor = unit if unit > 0 else np.float32(1)
    whole = count // 16 * 16
    for i in range(0, whole, 16):
        code = vrint(vdiv(vsub(vload(x + 4 * i), vsplat(least)), vsplat(divisor)))
        code = vmin(vmax(code, vsplat(0.0)), vsplat(levels))
        if bits == 4:
            put_nibbles(code, base + step * (i // 2), step)
        else:
            put_bytes(code, base + step * i, step)
    for i in range(whole, count):
        single = int(min(max(rint((get_f32(x + 4 * i) - least) / divisor), np.float32(0)), levels))
        if bits == 8:
            put_i8(base + step * i, single)
        elif i % 2 == 0:
            following = 0
            if i + 1 < count:
                following = int(min(max(rint((get_f32(x + 4 * i + 4) - least) / divisor), np.float32(0)), levels))
            put_i8(base + step * (i // 2), single | following << 4)


@inline
def put_mixed(x, head, largest_code, with_zero, out, half, mark):
    """A head's numbers to a lane of a half of an int4 page.

    head   dimensions, and those in 8 bits;  out   address of the first byte, bytes to the next;  half   its address, the lane
    """
    (dim, high), (base, step), (address, lane) = head, out, half
    low_scale, high_scale = scales_at(address, dim, high)
    if high < dim:
        put_codes(x, dim - high, (4, largest_code), with_zero, out, low_scale + 4 * lane, mark)
    if high > 0:
        first = base + step * pair_bytes(dim, high)
        put_codes(x + 4 * (dim - high), high, (8, 255), with_zero, (first, step), high_scale + 4 * lane, mark)
