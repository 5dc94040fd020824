"""Single rows of a stored matrix, for look-ups in tables that are too large to be anywhere but in the file."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import (
    CHUNK,
    ROWS,
    AnyArray,
    ArrayF32,
    ArrayU8,
    Codec,
    dequantize,
    dequantized,
    from_bf16,
    unpack_integers,
)


def dequantize_rows(codec: Codec, columns: int, indices: NDArray[np.int64], arrays: Mapping[str, AnyArray]) -> ArrayF32:
    """Rows of a stored matrix by index (an embedding look-up in a tied head) -> float32 [len(indices), columns].

    What is read of the arrays is those rows; of a trellis, whose rows depend on those beside them, the blocks that they are in.
    """
    blocks, rows = indices // ROWS, indices % ROWS
    if codec.coupled:
        whole = dequantize(codec, len(indices) * ROWS, columns, {name: array[blocks] for name, array in arrays.items()})
        return np.asarray(whole[np.arange(len(indices)) * ROWS + rows])
    if not codec.integer:
        picked = arrays["q"][blocks, :, rows]
        if codec.kind == "f32":
            return np.ascontiguousarray(picked)
        halves = np.ascontiguousarray(picked.reshape(len(indices), -1)[:, :columns])
        return from_bf16(halves) if codec.kind == "bf16" else halves.view(np.float16).astype(np.float32)
    natural = {name: _beside(codec, name, array, blocks, rows) for name, array in arrays.items() if name != "q"}
    return dequantized(codec, columns, {**natural, "q": _integers(arrays["q"], blocks, rows)[:, :columns]})


def _integers(packed: ArrayU8, blocks: NDArray[np.int64], rows: NDArray[np.int64]) -> ArrayU8:
    """Rows of integers packed as uint8 [blocks, chunks, bits, 64] -> uint8 [rows, chunks * 32].

    They are unpacked as a matrix with a row for each of their chunks, as the chunks of a row are packed alike.
    """
    chunks, bits = packed.shape[1:3]
    lines = packed.reshape(-1, chunks, bits, ROWS, 4)[blocks, :, :, rows].reshape(-1, bits, 4)
    count = len(lines)
    padded = np.pad(lines, ((0, -count % ROWS), (0, 0), (0, 0))).reshape(-1, ROWS, bits, 4)
    again = padded.transpose(0, 2, 1, 3).reshape(-1, 1, bits, ROWS * 4)
    return unpack_integers(again, count, CHUNK).reshape(len(rows), chunks * CHUNK)


def _beside(codec: Codec, name: str, array: AnyArray, blocks: NDArray[np.int64], rows: NDArray[np.int64]) -> AnyArray:
    """What lies beside the integers of rows, [rows, values of a row]."""
    if name == "table":
        return array[blocks]
    if codec.coded and name == "scale":
        return (array[blocks, :, rows % (ROWS // 2)] >> (rows // (ROWS // 2) * 4).astype(np.uint8)[:, None]) & 15
    return array[blocks, :, rows]
