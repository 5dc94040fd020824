"""The heads of attention as op records: one pass over a layer's heads that prepares and caches them, one that attends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.kernels.attention import attention, attention_bf16, bf16_panel, bf16_vectors, kv_layout, rope_kv_write
from edgeq.targets.cpu.kernels.rows import elementwise, norms
from edgeq.targets.cpu.lowering.context import Context
from edgeq.targets.cpu.lowering.fuse import Fusion, HeadChange, wider_than_a_head
from edgeq.targets.cpu.threads.optable import PARTS_A_THREAD, kernel
from edgeq.targets.family_operations import ValueNorm

FINER = 4
"""Times as many work items for attention over many rows: they share nothing, and after a long context one takes
milliseconds."""

HIGH = 6
"""Queries of a tile against sixteen positions: twelve sums, two vectors of numbers and a weight are in AVX2's registers."""


def head_change(context: Context, o: op.HeadNorm | op.HeadRotate) -> None:
    """Deferred: fused into the cache-write kernel of this layer, but for a norm over several heads."""
    if isinstance(o, op.HeadNorm) and wider_than_a_head(context, o):
        x, stride = context.place(o.x)
        args = norms.HeadNormArgs(
            x=x + 4 * o.offset, x_stride=stride, heads=o.heads, head_dim=o.head_dim, gain=context.memory.floats(o.gain),
            epsilon=o.eps,
        )  # fmt: skip
        context.emit(kernel(norms.head_norm), args)


def value_norm(context: Context, o: ValueNorm) -> None:
    x, stride = context.place(o.x)
    args = norms.ValueNormArgs(
        x=x + 4 * o.offset, x_stride=stride, heads=o.heads, head_dim=o.head_dim, out=x + 4 * o.out, epsilon=o.eps
    )
    context.emit(kernel(norms.value_norm), args, parts=context.options.threads)
    context.invalidate(o.x)


def rope_rotate(context: Context, o: op.RopeRotate) -> None:
    """Deferred but for the angles, which all layers with the same frequencies share."""
    _angles(context, o)


def _angles(context: Context, o: op.RopeRotate) -> dict[str, int]:
    """The arguments that name cosines and sines, computed by the first layer that needs them."""

    def compute() -> dict[str, int]:
        memory, pairs = context.memory, len(o.frequencies)
        values, stored = memory.array(pairs, np.float64)
        values[:] = o.frequencies
        axes = memory.copied(np.array(o.axes, np.int32)) if o.axes else 0
        stride = 4 * padded(pairs)
        cosines, sines = (memory.reserve(context.max_rows * stride) for _ in range(2))
        args = elementwise.AnglesArgs(
            positions=context.positions, axis_stride=4 * context.max_rows, axes=axes,
            frequencies=stored, pairs=pairs,
            cosines=cosines, sines=sines, stride=stride, factor=o.factor,
        )  # fmt: skip
        context.emit(kernel(elementwise.angles), args)
        return {"cosines": cosines, "sines": sines, "angles_stride": stride, "rope_pairs": pairs}

    # Rows that were selected have angles of their own.
    return context.once(("angles", context.positions, o.frequencies, o.factor, o.axes), compute)


def cache_write(context: Context, o: op.CacheWrite, fusion: Fusion) -> None:
    """One pass over the heads of a row: norms, rotary positions and rotation in place, then keys and values into the cache."""
    changes = fusion.heads
    # Queries that nothing changes are left alone.
    heads, q_offset = next(((c.heads, c.offset) for c in changes if c.offset != o.k_offset), (0, 0))
    gains = _gains(context, changes)
    args = rope_kv_write.RopeKvWriteArgs(
        **_cache_args(context, o, heads), **_change_args(context, changes),
        q_offset=4 * q_offset, k_offset=4 * o.k_offset, v_offset=4 * o.v_offset,
        q_gain=gains.get(q_offset, 0), k_gain=gains.get(o.k_offset, 0),
    )  # fmt: skip
    kv = context.options.kv
    function = kernel(rope_kv_write.rope_kv_write, kv_layout.KV_CODES[kv.kind], (1 << kv.bits) - 1)
    context.emit(function, args, parts=context.options.threads)
    context.invalidate(o.x)


def _gains(context: Context, changes: Sequence[HeadChange]) -> dict[int, int]:
    """Where heads begin in a row -> the address of the gain of their norm."""
    return {change.offset: context.memory.floats(change.gain) for change in changes if isinstance(change, op.HeadNorm)}


def _change_args(context: Context, changes: Sequence[HeadChange]) -> dict[str, Any]:
    """The arguments that say how heads change: norms, rotary positions, and a matrix that rotates them."""
    norm = next((change for change in changes if isinstance(change, op.HeadNorm)), None)
    rope = next((change for change in changes if isinstance(change, op.RopeRotate)), None)
    rotation = next((change for change in changes if isinstance(change, op.HeadRotate)), None)
    return {
        **(_angles(context, rope) if rope else {}), **_rotation_args(context, rotation),
        "epsilon": norm.eps if norm else 0.0, "rope_first": int(bool(norm) and isinstance(changes[0], op.RopeRotate)),
    }  # fmt: skip


def _rotation_args(context: Context, o: op.HeadRotate | None) -> dict[str, Any]:
    """Matrix, its scale and room for a head of every thread; none if nothing is rotated."""
    if o is None:
        return {}
    matrix, scale = context.file.array(o.matrix), context.file.array(o.scale)
    room = context.memory.shared("rotated head", 4 * padded(o.head_dim) * context.threads)
    return {"matrix": context.memory.copied(matrix), "matrix_scale": float(scale[0]), "scratch": room}


def _cache_args(context: Context, o: op.CacheWrite | op.Attention, heads: int) -> dict[str, Any]:
    """The arguments that both kernels of the cache share."""
    kv, (x, stride) = context.options.kv, context.place(o.x)
    return {
        "x": x, "x_stride": stride, "heads": heads, "kv_heads": o.kv_heads,
        "head_dim": o.head_dim, "padded_dim": padded(o.head_dim), "slots": context.slots,
        "page_tables": context.page_tables(bool(context.graph.cache[o.cache].window)),
        "layer_offset": kv_layout.layer_offset(context.graph, o.cache, kv), "high": kv.high,
    }  # fmt: skip


def attend(context: Context, o: op.Attention, fusion: Fusion) -> None:
    """Queries of a layer that reads the keys of another are changed by a pass of their own before."""
    kv, (out, stride) = context.options.kv, context.place(o.out)
    if fusion.heads:
        (gain,) = _gains(context, fusion.heads).values() or (0,)
        x, x_stride = context.place(o.x)
        change = rope_kv_write.ChangeHeadsArgs(
            x=x + 4 * o.q_offset, x_stride=x_stride, heads=o.heads, head_dim=o.head_dim, padded_dim=padded(o.head_dim),
            **_change_args(context, fusion.heads), gain=gain,
        )  # fmt: skip
        context.emit(kernel(rope_kv_write.change_heads), change, parts=context.options.threads)
        context.invalidate(o.x)
    code = kv_layout.KV_CODES[kv.kind]
    # What the registers hold: 4 x 4 vectors of AVX-512, 2 x 2 pairs of narrower ones.  AVX2 widens sixteen numbers of f16 in as
    # much time as it multiplies them with two queries, so it takes more queries to fewer numbers where there are many.
    tile = 4 if context.isa.lanes == 16 and context.isa.needs else 2
    high = HIGH if context.isa.lanes == 8 and kv.kind != "int4" else 0
    # One that has no slopes is the same as it was before others had some.
    function = kernel(attention.attend, code, high, tile, int(o.span >= 0), *((1,) if o.slopes else ()))
    unit = _bf16_unit(context, o)
    if unit is not None:
        function = kernel(attention_bf16.attend_bf16, o.head_dim, unit)
        state_bytes = bf16_panel.PanelScratch(o.head_dim, unit).nbytes
        states = context.memory.shared("attention", context.threads * state_bytes)
    else:
        state_bytes = attention.state_bytes(o.head_dim, kv.high, code)
        queries = attention.queries_per_unit.py_func(o.heads // o.kv_heads)
        states = context.memory.shared("attention", context.threads * queries * state_bytes)
    args = attention.AttentionArgs(
        **_cache_args(context, o, o.heads), q_offset=4 * o.q_offset, out=out, out_stride=stride,
        window=o.window, spans=context.spans(o.span), span_stride=context.span_stride,
        scale=o.scale, sinks=context.memory.floats(o.sinks) if o.sinks else 0, cap=o.cap or 0.0,
        scratch=states, state_bytes=state_bytes,
        slopes=context.memory.copied(np.array(o.slopes, np.float32)) if o.slopes else 0,
    )  # fmt: skip
    context.emit(function, args, parts=o.kv_heads, parts_a_thread=FINER * PARTS_A_THREAD)
    context.invalidate(o.out)


def _bf16_unit(context: Context, o: op.Attention) -> int | None:
    """What multiplies bf16 for rows that see ranges of an f16 cache; None: nothing does, or mode a16 forbids it."""
    if (
        o.span < 0
        or o.ahead
        or o.sinks
        or o.cap
        or o.slopes
        or context.options.kv.kind != "f16"
        or context.mode(o) == "a16"
        or not bf16_panel.COMPILES
    ):
        return None
    if context.isa.matrix_unit:
        return bf16_panel.MATRIX_UNIT
    vectors = context.isa.lanes == 16 and context.isa.needs and bf16_vectors.FEATURE in context.features
    return bf16_panel.VECTORS if vectors else None
