"""Every inner tile of an instruction set as an object file for Arm, and one product to check it with.

Compiled on the machine that runs the tests, where that takes a second; run in the emulator, where Numba would take minutes.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.codec import CHUNK, Codec, pack_groups, pack_integers
from edgeq.targets.cpu.kernels import microkernel_int as tile

ROWS = 48
CASES = list(itertools.product(range(2, 9), (0, 1), (0, 1), (0, 1), (1, 4)))
"""bits, a16, zero points, groups of 16, tokens."""


def symbol(case: tuple[int, ...]) -> str:
    return "tile_" + "_".join(map(str, case))


def write_objects(folder: Path, board: str, isa: str) -> None:
    from edgeq.tools.lab import arm_roofline

    folder.mkdir(parents=True, exist_ok=True)
    for bits, mode16, zero, half, tokens in CASES:
        name = symbol((bits, mode16, zero, half, tokens))
        emitter = arm_roofline.tile(isa, bits, bool(mode16), bool(zero), bool(half), tokens)
        target, module = arm_roofline.compiled(arm_roofline.CORES[board], emitter.emit, name)
        (folder / f"{name}.o").write_bytes(target.emit_object(module))


def product(function: Any, case: tuple[int, ...], extreme: bool) -> tuple[np.ndarray, np.ndarray]:
    """What the tile gives for the last of three blocks and what it should, f32 and f64 [tokens, 16].

    extreme: all integers at their limits, activations of one sign, so that sums in 16 and 32 bits are as large as they can be.
    """
    bits, mode16, zero, half, tokens = case
    rng = np.random.default_rng(bits)
    # One scale a row over two activation blocks, the second short; or groups of 16, with half a chunk at the end.
    columns, block = (80, 16) if half else (160, 128)
    codec = Codec("int", bits, 16 if half else 0, not zero)
    limit = 32767 if mode16 else 127
    q = rng.integers(0, 1 << bits, (ROWS, columns), dtype=np.uint8)
    x = rng.integers(-limit, limit + 1, (tokens, columns))
    if extreme:
        q[::2], q[1::2], x[:] = (1 << bits) - 1, 0, limit
        x[1:2] = -limit
    scale = rng.uniform(0.5, 2, (ROWS, codec.groups(columns))).astype(np.float16)
    zeros = rng.integers(0, 1 << bits, scale.shape, dtype=np.uint8)
    blocks = -(-columns // block)
    xscale = rng.uniform(0.5, 2, (blocks, tokens)).astype(np.float32)
    xsum = np.stack([x[:, i * block : (i + 1) * block].sum(1) for i in range(blocks)]).astype(np.int32)
    chunks = -(-columns // CHUNK)
    whole = np.zeros((tokens, chunks * CHUNK), np.int16 if mode16 else np.int8)
    whole[:, :columns] = x
    quads = whole.reshape(tokens, chunks * 8, 4).transpose(1, 0, 2)
    arrays = {
        tile.X: quads[:, :, [0, 2, 1, 3]] if mode16 else quads, tile.X_SCALE: xscale, tile.X_SUM: xsum,
        tile.W: pack_integers(q, bits), tile.SCALE: pack_groups(scale), tile.ZERO: pack_groups(zeros),
    }  # fmt: skip
    words, kept = np.zeros(tile.WORDS, np.int64), []
    for word, array in arrays.items():
        room = np.zeros(array.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        room[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        words[word] = room.ctypes.data + start
        kept.append(room)
    groups = scale.shape[1]
    words[tile.X_BLOCKS], words[tile.CHUNKS], words[tile.PER_BLOCK] = (
        blocks,
        chunks,
        max(1, block // CHUNK),
    )
    words[tile.W_BLOCK] = 64 * bits * chunks
    words[tile.SCALE_BLOCK], words[tile.SCALE_STEP] = 32 * groups, 32 * half
    words[tile.ZERO_BLOCK], words[tile.ZERO_STEP] = 16 * groups, 16 * half
    out = np.zeros((tokens, 16), np.float32)
    function(words.ctypes.data, 2, 0, out.ctypes.data)
    step = columns // groups
    center = np.repeat(zeros.astype(np.float64) if zero else np.full(scale.shape, codec.center), step, axis=1)
    w = ((q - center) * np.repeat(scale.astype(np.float64), step, axis=1))[32:]
    return out, (x * np.repeat(xscale.T.astype(np.float64), block, axis=1)[:, :columns]) @ w.T
