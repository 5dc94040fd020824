"""The rows of the tables for the heads of attention: one pass that prepares and caches them, one that attends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.jit.optable import float_bits, kernel
from edgeq.targets.cpu.kernels import attention, elementwise, kv_layout, rope_kv_write

if TYPE_CHECKING:
    from edgeq.targets.cpu.lowering.context import Lowering


def head_change(lowering: Lowering, o: op.HeadNorm | op.HeadRotate) -> None:
    """Done with the write into the cache of the same layer."""
    lowering.head_changes.append(o)


def rope_rotate(lowering: Lowering, o: op.RopeRotate) -> None:
    """The angles, for all layers that have the same; the rest with the write into the cache."""
    memory = lowering.memory
    if (o.frequencies, o.factor) not in lowering.angles:
        count = len(o.frequencies)
        values, stored = memory.array(count, np.float64)
        values[:] = o.frequencies
        width = 4 * padded(count)
        cosines, sines = (memory.reserve(lowering.options.max_rows * width) for _ in range(2))
        words = (lowering.arrays.positions, stored, count, cosines, sines, width, float_bits(o.factor))
        lowering.emit(kernel(elementwise.angles), *words)
        lowering.angles[o.frequencies, o.factor] = (cosines, sines, width, count)
    lowering.head_changes.append(o)


def cache_write(lowering: Lowering, o: op.CacheWrite) -> None:
    """Ends what head norms and rotations of the same layer began: one pass over the heads of a row."""
    changes = lowering.head_changes
    # Queries that nothing changes are left alone.
    heads, q_offset = next(((c.heads, c.offset) for c in changes if c.offset != o.k_offset), (0, 0))
    norms = {change.offset: change for change in changes if isinstance(change, op.HeadNorm)}
    gains = {offset: lowering.memory.floats(change.gain) for offset, change in norms.items()}
    epsilon = next((change.eps for change in norms.values()), 0.0)
    rope = next((change for change in changes if isinstance(change, op.RopeRotate)), None)
    angles = lowering.angles[rope.frequencies, rope.factor] if rope else (0, 0, 0, 0)
    rotation = next((change for change in changes if isinstance(change, op.HeadRotate)), None)
    words = [
        *shared_words(lowering, o.x, heads, o.kv_heads, o.head_dim, o.layer),
        4 * q_offset, 4 * o.k_offset, 4 * o.v_offset, *angles,
        gains.get(q_offset, 0), gains.get(o.k_offset, 0), float_bits(epsilon), *matrix_words(lowering, rotation),
    ]  # fmt: skip
    code = kv_layout.KV_CODES[lowering.options.kv.kind]
    most_code = (1 << lowering.options.kv.bits) - 1
    lowering.emit(kernel(rope_kv_write.rotate, code, most_code), *words, parts=lowering.options.threads)
    lowering.head_changes = []
    lowering.wrote(o.x)


def matrix_words(lowering: Lowering, o: op.HeadRotate | None) -> tuple[int, int, int]:
    """Matrix, bits of its scale and room for a head of every thread; zeros for none."""
    if o is None:
        return 0, 0, 0
    matrix, scale = lowering.file.array(o.matrix), lowering.file.array(o.scale)
    room = lowering.memory.shared("rotated head", 4 * padded(o.head_dim) * lowering.threads)
    return lowering.memory.copied(matrix), float_bits(float(scale[0])), room


def shared_words(lowering: Lowering, x: str, heads: int, kv_heads: int, head_dim: int, layer: int) -> list[int]:
    """The words that `rotate` and `attend` share."""
    kv = lowering.options.kv
    rows = (lowering.buffers[x], lowering.row_bytes[x], heads, kv_heads, head_dim, padded(head_dim))
    return [*rows, lowering.slots, lowering.page_tables, layer * kv_layout.layer_bytes(lowering.graph, kv), kv.high]


def attend(lowering: Lowering, o: op.Attention) -> None:
    kv = lowering.options.kv
    code = kv_layout.KV_CODES[kv.kind]
    step = attention.state_bytes(o.head_dim, kv.high, code)
    queries = attention.ROWS_TOGETHER * (o.heads // o.kv_heads)
    states = lowering.memory.shared("attention", lowering.threads * queries * step)
    words = [
        *shared_words(lowering, o.x, o.heads, o.kv_heads, o.head_dim, o.layer),
        4 * o.q_offset, lowering.buffers[o.out], lowering.row_bytes[o.out], o.window, float_bits(o.scale), states, step,
    ]  # fmt: skip
    # What the registers hold: 4 x 4 vectors of AVX-512, 2 x 2 pairs of narrower ones.
    tile = 4 if lowering.isa.lanes == 16 and lowering.isa.needs else 2
    lowering.finer.append(lowering.emit(kernel(attention.attend, code, tile, tile), *words, parts=o.kv_heads))
    lowering.wrote(o.out)
