"""How keys and values lie in a page of the cache.

A page holds 64 positions of all layers.  For each layer and key/value head first the keys, [head_dim][64], so that a dot
product with a query runs over positions in lanes and needs no horizontal sum; then the values, [64][head_dim].  Head_dim is
padded to 16.

    f16     numbers as they are, limited to the largest f16
    int8    numbers / scale, with an f32 scale per position behind the keys, and one behind the values
"""

from __future__ import annotations

from edgeq.linear import KvCodec
from edgeq.targets.cpu.compiled import inline, word
from edgeq.targets.cpu.memory import padded
from edgeq.targets.cpu.vector import get_i64
from edgeq.targets.operations import PAGE, Graph

POSITIONS = PAGE
F16_KV, INT8_KV = 0, 1
KV_CODES: dict[KvCodec, int] = {"f16": F16_KV, "int8": INT8_KV}

# Words of a table row that every kernel of the cache has.
X, X_ROW, HEADS, KV_HEADS, HEAD_DIM, PADDED, SLOTS, TABLES, LAYER_OFFSET = 2, 3, 4, 5, 6, 7, 8, 9, 10
"""Address and row bytes of x; heads; head_dim and its padding to 16; slots i32; page tables (i64 addresses, one per row, each
of an i64 array of page addresses); bytes from the start of a page to this layer."""


@inline
def half_bytes(width, code):  # type: ignore[no-untyped-def]
    """Bytes of the keys, or of the values, of one head in a page; `width` is the padded head_dim."""
    return POSITIONS * (width + 4) if code == INT8_KV else 2 * POSITIONS * width


@inline
def keys_at(row, r, slot, head, code):  # type: ignore[no-untyped-def]
    """Address of the keys of `head` in the page of row r that holds `slot`; the values are `half_bytes` behind."""
    page = get_i64(get_i64(word(row, TABLES) + 8 * r) + 8 * (slot // POSITIONS))
    return page + word(row, LAYER_OFFSET) + head * 2 * half_bytes(word(row, PADDED), code)


def layer_bytes(graph: Graph, kv: KvCodec) -> int:
    return graph.kv_heads * 2 * int(half_bytes.py_func(padded(graph.head_dim), KV_CODES[kv]))
