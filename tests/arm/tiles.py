"""Every inner tile of an instruction set as an object file for Arm, and one product to check it with.

Compiled on the machine that runs the tests, where that takes a second; run in the emulator, where Numba would take minutes.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.format.codec import CHUNK, Codec, pack_groups, pack_integers
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.kernels.args import ProductArgs

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
        emitter = arm_roofline.tile(isa, bits, bool(mode16), bool(zero), int(half), tokens)
        target, module = arm_roofline.compiled(arm_roofline.CORES[board], emitter.emit, name)
        (folder / f"{name}.o").write_bytes(target.emit_object(module))


def in_store(quads: np.ndarray, isa: str, case: tuple[int, ...]) -> np.ndarray:
    """Integers [quad, token, 4] as a tile of that case reads them."""
    bits, mode16, *_ = case
    if not mode16:
        return quads.astype(np.int8)
    if next(each for each in all_isas() if each.name == isa).takes_pairs(bits):
        return quads[:, :, [0, 2, 1, 3]].astype(np.int16)
    return np.stack([quads, quads + 128 >> 8], axis=2).astype(np.int8)


def product(function: Any, isa: str, case: tuple[int, ...], extreme: bool) -> tuple[np.ndarray, np.ndarray]:
    """What the tile gives for the last of three blocks and what it should, f32 and f64 [tokens, 16].

    extreme: all integers at their limits, activations of one sign, so that sums in 16 and 32 bits are as large as they can be.
    """
    bits, mode16, zero, half, tokens = case
    rng = np.random.default_rng(bits)
    # One scale a row over two activation blocks, the second short; or groups of 16, with half a chunk at the end.
    columns, block = (80, 16) if half else (160, 128)
    codec = Codec("int", bits, 16 if half else 0, not zero)
    limit = 256 * 127 + 127 if mode16 else 127
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
    whole = np.zeros((tokens, chunks * CHUNK), np.int64)
    whole[:, :columns] = x
    quads = whole.reshape(tokens, chunks * 8, 4).transpose(1, 0, 2)
    arrays = {
        "x": in_store(quads, isa, case), "x_scales": xscale, "x_sums": xsum,
        "weights": pack_integers(q, bits), "scales": pack_groups(scale), "zeros": pack_groups(zeros),
    }  # fmt: skip
    places, kept = dict[str, int](), []
    for name, array in arrays.items():
        room = np.zeros(array.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        room[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        places[name] = room.ctypes.data + start
        kept.append(room)
    groups = scale.shape[1]
    args = ProductArgs(
        **places, x_stride=0, x_blocks=blocks, chunks=chunks, chunks_per_block=max(1, block // CHUNK),
        weights_block=64 * bits * chunks, scales_block=32 * groups, scales_step=32 * half,
        output_channels=ROWS, group_blocks=1, y=0, y_stride=0, scratch=0,
    )  # fmt: skip
    record, out = np.array(args.record(), np.int64), np.zeros((tokens, 16), np.float32)
    function(record.ctypes.data, 2, 0, out.ctypes.data)
    step = columns // groups
    center = np.repeat(zeros.astype(np.float64) if zero else np.full(scale.shape, codec.center), step, axis=1)
    w = ((q - center) * np.repeat(scale.astype(np.float64), step, axis=1))[32:]
    return out, (x * np.repeat(xscale.T.astype(np.float64), block, axis=1)[:, :columns]) @ w.T
