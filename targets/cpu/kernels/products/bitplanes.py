"""Packed integers of the file's order (edgeq/format/codec.py) as vectors of bytes: planes of bits put together."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.format.codec import LINE, PLANES, QUADS
from edgeq.targets.cpu.jit.simd import I8, I16, I64, constant, load


def unpack(b: Any, address: Any, bits: int, part: int, width: int, shifts_bytes: bool = False) -> list[Any]:
    """The eight quads of the chunk at `address`, for rows [part * lanes, (part + 1) * lanes): vectors of `width` bytes.

    shifts_bytes   whether one instruction shifts every byte.  LLVM would put `gf2p8affineqb` in its place, for which an AVX-512
                   processor has no units but those of the dot products
    """
    vector = ir.VectorType(I8, width)
    moved = vector if shifts_bytes else ir.VectorType(I16, width // 2)
    quads: list[Any] = [None] * QUADS
    line, low = 0, 0
    for plane in PLANES[bits]:
        per_line = 8 // plane
        for i in range(plane):
            stored = load(b, b.add(address, ir.Constant(I64, (line + i) * LINE + part * width)), vector, width)
            for k in range(per_line):
                value, right = b.bitcast(stored, moved), k * plane - low
                value = b.lshr(value, constant(moved, right)) if right > 0 else value
                value = b.shl(value, constant(moved, -right)) if right < 0 else value
                value = b.bitcast(value, vector)
                if low or k < per_line - 1 or (k and not shifts_bytes):
                    value = b.and_(value, constant(vector, ((1 << plane) - 1) << low))
                j = i * per_line + k
                quads[j] = b.or_(quads[j], value) if low else value
        line, low = line + plane, low + plane
    return quads
