"""How keys and values lie in a page of the cache.

A page holds 64 positions of all layers, those with a window in a part of their own.  For each layer and key/value head first
the keys, [head_dim][64], so that a dot product with a query runs over positions in lanes and needs no horizontal sum; then the
values, [64][head_dim].

    f16     numbers as they are, limited to the largest f16; head_dim is padded to 16
    int8    numbers / scale, with an f32 scale per position after the keys, and one after the values; head_dim is padded to 16
    int4    codes, a number is offset + scale * code: dimensions 2j and 2j + 1 of a position in the low and the high half of
            byte j, then each of the `high` last ones in a byte of its own; keys are [bytes][64] and values [64][bytes].
            After either f32 [64] scales and [64] offsets, of the dimensions in 4 bits and of those in 8, where there are any.
            Nothing is padded: what reads sixteen bytes of the last position reads on into the scales
"""

from __future__ import annotations

from edgeq.errors import UnsupportedError
from edgeq.format.records import KvCodec, KvKind
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import get_i64
from edgeq.targets.graph import CacheSpec, Graph
from edgeq.targets.rows import PAGE

POSITIONS = PAGE
F16_KV, INT8_KV, INT4_KV = 0, 1, 2
KV_CODES: dict[KvKind, int] = {"f16": F16_KV, "int8": INT8_KV, "int4": INT4_KV}


@inline
def pair_bytes(dim, high):
    """Bytes of the 4-bit codes of one position of an int4 cache."""
    return (dim - high + 1) // 2


@inline
def half_bytes(dim, high, code):
    """Bytes of the keys, or of the values, of one head in a page."""
    if code == INT4_KV:
        numbers = (8 if high < dim else 0) + (8 if high > 0 else 0)
        return POSITIONS * (pair_bytes(dim, high) + high + numbers)
    padded = (dim + 15) // 16 * 16
    return POSITIONS * (padded + 4) if code == INT8_KV else 2 * POSITIONS * padded


@inline
def scales_at(half, dim, high):
    """Address of the scales of a half of an int4 page, of its dimensions in 4 bits and of those in 8; offsets follow."""
    first = half + POSITIONS * (pair_bytes(dim, high) + high)
    return first, first + (8 * POSITIONS if high < dim else 0)


@inline
def keys_at(args, r, slot, head, code):
    """Address of the keys of `head` in the page of row r that holds `slot`; the values are `half_bytes` after them."""
    page = get_i64(get_i64(args.page_tables + 8 * r) + 8 * (slot // POSITIONS))
    return page + args.layer_offset + head * 2 * half_bytes(args.head_dim, args.high, code)


def layer_bytes(layer: CacheSpec, kv: KvCodec) -> int:
    """Bytes of a layer in a page.  UnsupportedError: kernels take keys and values of one width."""
    if layer.value_dim != layer.head_dim:
        raise UnsupportedError(
            f"the cpu target does not have values of {layer.value_dim} numbers beside keys of {layer.head_dim} yet; "
            "run with --target reference"
        )
    return layer.kv_heads * 2 * int(half_bytes.py_func(layer.head_dim, kv.high, KV_CODES[kv.kind]))


def part_bytes(graph: Graph, kv: KvCodec) -> tuple[int, int]:
    """Bytes of the parts of a page: layers without a window, and those with one."""
    return _bytes(graph.cache, kv, False), _bytes(graph.cache, kv, True)


def layer_offset(graph: Graph, index: int, kv: KvCodec) -> int:
    """Where a layer begins in its part."""
    return _bytes(graph.cache[:index], kv, bool(graph.cache[index].window))


def _bytes(layers: tuple[CacheSpec, ...], kv: KvCodec, windowed: bool) -> int:
    return sum(layer_bytes(layer, kv) for layer in layers if bool(layer.window) is windowed)
