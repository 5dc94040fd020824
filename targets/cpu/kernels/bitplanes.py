"""Packed integers of the file's order (edgeq/codec.py) as vectors of bytes: planes of bits put together."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.codec import LINE, PLANES, QUADS
from edgeq.targets.cpu.jit.simd import I8, I64, constant, load


def unpack(b: Any, address: Any, bits: int, part: int, width: int) -> list[Any]:
    """The eight quads of the chunk at `address`, for rows [part * lanes, (part + 1) * lanes): vectors of `width` bytes."""
    vector = ir.VectorType(I8, width)
    quads: list[Any] = [None] * QUADS
    line, low = 0, 0
    for plane in PLANES[bits]:
        per_line = 8 // plane
        for i in range(plane):
            stored = load(b, b.add(address, ir.Constant(I64, (line + i) * LINE + part * width)), vector, width)
            for k in range(per_line):
                value = b.lshr(stored, constant(vector, k * plane)) if k else stored
                if k < per_line - 1:
                    value = b.and_(value, constant(vector, (1 << plane) - 1))
                if low:
                    value = b.shl(value, constant(vector, low))
                j = i * per_line + k
                quads[j] = b.or_(quads[j], value) if low else value
        line, low = line + plane, low + plane
    return quads
