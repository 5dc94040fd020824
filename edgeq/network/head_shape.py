"""The heads of a layer with attention: how many there are, and how wide."""

from __future__ import annotations

from typing import NamedTuple


class HeadShape(NamedTuple):
    """Heads of a layer with attention: of queries, of keys and of values, and channels of each."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    def norm_sizes(self, kind: str) -> tuple[int, int]:
        """Channels of the norms of queries and of keys, of a `qk_norm_kind`."""
        return (self.query_size, self.kv_size) if kind == "whole" else (self.head_dim, self.head_dim)
