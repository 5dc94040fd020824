"""The reference's attention: norms and rotations of heads, what a cache page holds and how it is rounded, softmax(q k) v."""

from __future__ import annotations

from itertools import accumulate
from math import prod

import numpy as np
from numpy.typing import NDArray

from edgeq.format.records import KvCodec
from edgeq.targets.family_operations import ValueNorm
from edgeq.targets.graph import Attention, CacheWrite, Graph, HeadNorm, HeadRotate, RopeRotate
from edgeq.targets.reference.context import RunContext, State
from edgeq.targets.reference.layers import normalized
from edgeq.targets.rows import PAGE, Page, PagePart, Rows

ArrayF32 = NDArray[np.float32]

F16_MAX = 65504.0
MASKED_SCORE = np.float32(-1e30)
"""Targets use it for positions that a query does not see."""


class ReferencePart(PagePart):
    """Some layers of PAGE cache positions: numbers of the cache's codec held as float32.

    data     all of them, one after another
    layers   by index, keys [kv_heads, PAGE, head_dim] and values [kv_heads, PAGE, value_dim], views of `data`
    """

    __slots__ = ("data", "layers")

    def __init__(self, graph: Graph, windowed: bool) -> None:
        cache = {index: layer for index, layer in enumerate(graph.cache) if bool(layer.window) is windowed}
        shapes = [(each.kv_heads, PAGE, width) for each in cache.values() for width in (each.head_dim, each.value_dim)]
        ends = list(accumulate(map(prod, shapes), initial=0))
        self.data = np.zeros(ends[-1], np.float32)
        views = [self.data[at : at + prod(shape)].reshape(shape) for at, shape in zip(ends, shapes, strict=False)]
        self.layers = dict(zip(cache, zip(views[::2], views[1::2], strict=True), strict=True))


def new_page(graph: Graph, windowed: bool = True) -> Page:
    return Page(ReferencePart(graph, False), ReferencePart(graph, True) if windowed else None)


def data_of(page: Page) -> list[ArrayF32]:
    """The numbers of a page's parts."""
    return [part.data for part in page.parts if isinstance(part, ReferencePart)]


def heads_of(x: ArrayF32, offset: int, heads: int, head_dim: int) -> ArrayF32:
    """x[:, offset:] as a view [rows, heads, head_dim]."""
    return x[:, offset : offset + heads * head_dim].reshape(len(x), heads, head_dim)


def layer_of(context: RunContext, cache: int, rows: Rows, row: int, index: int) -> tuple[ArrayF32, ArrayF32]:
    """Keys and values of a layer in page `index` of a row's session."""
    page = rows.pages[rows.sessions[row]][index]
    part = page.windowed if context.graph.cache[cache].window else page.full
    assert isinstance(part, ReferencePart)
    return part.layers[cache]


def cache_write(context: RunContext, op: CacheWrite, rows: Rows, state: State) -> None:
    spec = context.graph.cache[op.cache]
    for part, (offset, width) in enumerate(((op.k_offset, spec.head_dim), (op.v_offset, spec.value_dim))):
        values = cached(heads_of(state[op.x], offset, spec.kv_heads, width), context.kv, keys=part == 0)
        for r, slot in enumerate(rows.slots):
            layer_of(context, op.cache, rows, r, int(slot) // PAGE)[part][:, slot % PAGE] = values[r]


def cached(x: ArrayF32, kv: KvCodec, keys: bool) -> ArrayF32:
    """x [rows, kv_heads, head_dim] as the cache gives it back.

    f16; int8 with one scale max|x| / 127 per row and head; int4 over the range of a row and head, with the last `high`
    dimensions in 8 bits over a range of their own.  An infinity counts as NaN: limited to the range it would go unnoticed.
    """
    x = np.where(np.isinf(x), np.float32(np.nan), x)
    if kv.kind == "f16":
        return x.clip(-F16_MAX, F16_MAX).astype(np.float16).astype(np.float32)
    if kv.kind == "int4":
        low = x.shape[2] - kv.high
        return np.concatenate([in_range(x[:, :, :low], kv.bits, keys), in_range(x[:, :, low:], 8, keys)], axis=2)
    scale = np.abs(x).max(axis=2, keepdims=True) / np.float32(127)
    restored: ArrayF32 = np.rint(x / np.where(scale > 0, scale, np.float32(1))).clip(-127, 127) * scale
    return restored


def in_range(x: ArrayF32, bits: int, with_zero: bool) -> ArrayF32:
    """x [rows, heads, n] as offset + scale * code, with 2^bits codes over the range of a head (arXiv 2412.14363, equation 1).

    offset is the least number and scale (max - min) / (2^bits - 1), with the numbers limited as in f16.  `with_zero`: the
    range has 0 in it, as keys' has and values' has not.  A head that is one number has scale 0.
    """
    if not x.shape[2]:
        return x
    x, levels = x.clip(-F16_MAX, F16_MAX), np.float32((1 << bits) - 1)
    least, most = x.min(axis=2, keepdims=True), x.max(axis=2, keepdims=True)
    if with_zero:
        least, most = np.minimum(least, np.float32(0)), np.maximum(most, np.float32(0))
    scale = (most - least) / levels
    code = np.rint((x - least) / np.where(scale > 0, scale, np.float32(1))).clip(0, levels)
    restored: ArrayF32 = code * scale + least
    return restored


def head_rotate(context: RunContext, op: HeadRotate, rows: Rows, state: State) -> None:
    """The products are of whole numbers below 2^24, so float32 holds their sum exactly, in any order."""
    x = heads_of(state[op.x], op.offset, op.heads, op.head_dim)
    least, most = np.minimum(x.min(axis=2, keepdims=True), 0), np.maximum(x.max(axis=2, keepdims=True), 0)
    scale = (most - least) / np.float32(255)
    divisor = np.where(scale > 0, scale, np.float32(1))
    zero = np.rint(-least / divisor)
    whole = (np.rint(x / divisor) + zero).clip(0, 255) - zero
    x[:] = np.matmul(whole, context.array(op.matrix)) * (scale * context.array(op.scale))


def head_norm(context: RunContext, op: HeadNorm, rows: Rows, state: State) -> None:
    x = heads_of(state[op.x], op.offset, op.heads, op.head_dim)
    x[:] = normalized(x.copy(), context.array(op.gain), op.eps)


def value_norm(context: RunContext, op: ValueNorm, rows: Rows, state: State) -> None:
    normed = normalized(heads_of(state[op.x], op.offset, op.heads, op.head_dim), np.ones(op.head_dim, np.float32), op.eps)
    heads_of(state[op.x], op.out, op.heads, op.head_dim)[:] = normed


def rope_rotate(context: RunContext, op: RopeRotate, rows: Rows, state: State) -> None:
    # Angles in float64: in float32 a position of 100,000 is already wrong in the third decimal.
    axes = np.array(op.axes or (0,) * len(op.frequencies))
    positions = rows.positions[axes if len(rows.positions) > 1 else np.zeros_like(axes)]
    angle = positions.T.astype(np.float64) * np.array(op.frequencies, np.float64)  # [rows, pairs]
    cos, sin = ((f(angle) * op.factor).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))  # [rows, 1, pairs]
    x = heads_of(state[op.x], op.offset, op.heads, op.head_dim)
    half = len(op.frequencies)
    a, b = x[:, :, :half].copy(), x[:, :, half : 2 * half].copy()
    x[:, :, :half] = a * cos - b * sin
    x[:, :, half : 2 * half] = b * cos + a * sin


def visible_range(op: Attention, rows: Rows, row: int) -> tuple[int, int]:
    """The first slot that a row sees, and the one after the last."""
    if op.span >= 0 and rows.spans is not None:
        first, end = rows.spans[op.span, :, row].tolist()
        return first, end
    end = int(rows.slots[row]) + 1
    return max(0, end - op.window) if op.window else 0, end


def attention(context: RunContext, op: Attention, rows: Rows, state: State) -> None:
    queries = heads_of(state[op.x], op.q_offset, op.heads, op.head_dim)
    out = context.out(state, op.out, len(rows))
    for r in range(len(rows)):
        first, end = visible_range(op, rows, r)
        pages = [layer_of(context, op.cache, rows, r, i) for i in range(first // PAGE, (end - 1) // PAGE + 1)]
        start = first - first // PAGE * PAGE
        # [kv_heads, positions, head_dim] and [kv_heads, positions, value_dim]
        keys, values = (np.concatenate(part, axis=1)[:, start : start + end - first] for part in zip(*pages, strict=True))
        q = queries[r].reshape(op.kv_heads, -1, op.head_dim)
        scores = np.matmul(q, keys.transpose(0, 2, 1)) * np.float32(op.scale)  # [kv_heads, heads / kv_heads, positions]
        if op.cap is not None:
            scores = np.tanh(scores / np.float32(op.cap)) * np.float32(op.cap)
        if op.slopes:
            slopes = np.array(op.slopes, np.float32).reshape(op.kv_heads, -1, 1)
            scores += slopes * np.arange(first + 1 - end, 1, dtype=np.float32)
        if op.sinks is not None:
            sinks = np.broadcast_to(context.array(op.sinks).reshape(op.kv_heads, -1, 1), (*scores.shape[:2], 1))
            scores = np.concatenate([scores, sinks], axis=2)
        largest = scores.max(axis=2, keepdims=True)
        weights = np.exp(scores - np.where(largest > MASKED_SCORE, largest, np.float32(np.nan)))
        weights = (weights / weights.sum(axis=2, keepdims=True))[:, :, : end - first]
        out[r] = np.matmul(weights, values).reshape(-1)
