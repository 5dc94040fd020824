"""Round to nearest in numpy: a weight matrix becomes the integers of a codec.

Per group of a row of b bits:

    asymmetric   scale (max - min) / (2^b - 1), zero = clamp(-rint(min / scale), 0, 2^b - 1); the range need not hold 0
    symmetric    scale max|w| / (2^(b-1) - 1), zero 2^(b-1)
    q            clamp(rint(w / scale) + zero, 0, 2^b - 1)

Everything is float32; the scale is rounded to f16 before it is used; halves go to even.  Converters round so by default, and
whoever makes weights anew on the device does it bit for bit the same.
"""

from __future__ import annotations

import numpy as np

from edgeq.codec import AnyArray, ArrayF32, Codec, pack_groups, pack_integers

SMALLEST_RANGE = 1e-5
"""Over the largest number of steps, 255, this still rounds to an f16 above 0: no scale is ever 0."""
LARGEST_SCALE = 65504.0
"""Of an f16: larger weights are clipped."""


def rounded(w: ArrayF32, codec: Codec) -> dict[str, AnyArray]:
    """w float32 [rows, columns] as the arrays of an integer codec, packed: "q", "scale", and "zero" where it has one."""
    rows, columns = w.shape
    size = codec.group_size or columns
    # The last group may be shorter: its last weight, repeated, changes neither its least nor its greatest.
    groups = np.pad(w, ((0, 0), (0, -columns % size)), "edge").reshape(rows, -1, size)
    top = np.float32((1 << codec.bits) - 1)
    if codec.symmetric:
        span, steps = np.abs(groups).max(axis=2), np.float32(codec.center - 1)
    else:
        low = groups.min(axis=2)
        span, steps = groups.max(axis=2) - low, top
    wide = np.maximum(span, np.float32(SMALLEST_RANGE)) / steps
    stored = np.minimum(wide, np.float32(LARGEST_SCALE)).astype(np.float16)
    scale = stored.astype(np.float32)
    zero = np.full_like(scale, codec.center) if codec.symmetric else np.clip(-np.rint(low / scale), 0, top)
    q = np.clip(np.rint(groups / scale[:, :, None]) + zero[:, :, None], 0, top)
    q = q.reshape(rows, -1)[:, :columns].astype(np.uint8)
    packed = {"q": pack_integers(q, codec.bits), "scale": pack_groups(stored)}
    return packed if codec.symmetric else packed | {"zero": pack_groups(zero.astype(np.uint8))}
