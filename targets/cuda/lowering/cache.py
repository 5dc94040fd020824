"""Layers of the cache that kernels reach by one page table: those of one shape in one part of a page, side by side."""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.format.records import KvCodec
from edgeq.targets.graph import CacheSpec, Graph
from edgeq.targets.rows import PAGE


@dataclass(frozen=True)
class CacheKind:
    """start   bytes from the begin of the part to the first of these layers;  layers: their indices in Graph.cache"""

    windowed: bool
    start: int
    layers: tuple[int, ...]


def cache_kinds(graph: Graph, kv: KvCodec) -> list[CacheKind]:
    """Layers of other shapes have tables of their own: kernels count layers of one shape."""
    shapes = dict[tuple[bool, int, int, int], list[int]]()
    for index, layer in enumerate(graph.cache):
        shapes.setdefault(_shape(layer), []).append(index)
    found, ends = list[CacheKind](), {False: 0, True: 0}
    for (windowed, *_), layers in shapes.items():
        found.append(CacheKind(windowed, ends[windowed], tuple(layers)))
        ends[windowed] += PAGE * sum(graph.cache[index].position_bytes(kv) for index in layers)
    return found


def kind_of(graph: Graph, kv: KvCodec, index: int) -> CacheKind:
    """The kind that a layer of the cache is of."""
    return next(kind for kind in cache_kinds(graph, kv) if index in kind.layers)


def _shape(layer: CacheSpec) -> tuple[bool, int, int, int]:
    return bool(layer.window), layer.kv_heads, layer.head_dim, layer.value_dim
