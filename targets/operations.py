"""The network as data: a flat list of operations over named buffers, and the rows it is run over.

`runtime/model.py` writes the list once per model; a target compiles it into a Program.  An operation names buffers and sizes
and never holds numbers of its own, so the same list can be interpreted, walked by threads or captured into a graph.

A buffer is float32 [rows, width].  A *row* is one token of one session: decode is one row, a prefill chunk many, a batch of
sessions one row each; so there is one loop and not five.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgeq.linear import ArrayRef, KvCodec, LinearSpec

PAGE = 64
"""Cache positions in a page."""


@dataclass(frozen=True)
class Operation:
    """`layer` is -1 before and after the decoder layers; with the class name it is all a profiler needs."""

    layer: int


@dataclass(frozen=True)
class Embed(Operation):
    """out[r] = table[token of row r]; the table is an array [vocab, width] or the tied head."""

    table: ArrayRef | LinearSpec
    out: str


@dataclass(frozen=True)
class RmsNorm(Operation):
    """out = x / sqrt(mean(x^2) + eps) * gain (Zhang and Sennrich 2019)."""

    x: str
    gain: ArrayRef
    eps: float
    out: str


@dataclass(frozen=True)
class Linear(Operation):
    """out[:, offset : offset + rows of W] = W x + bias; with `add` it is added to what is there (the residual)."""

    x: str
    linear: LinearSpec
    out: str
    offset: int = 0
    add: bool = False


@dataclass(frozen=True)
class HeadNorm(Operation):
    """RmsNorm over each head of x[:, offset : offset + heads * head_dim], in place (Qwen3)."""

    x: str
    offset: int
    heads: int
    head_dim: int
    gain: ArrayRef
    eps: float


@dataclass(frozen=True)
class RopeRotate(Operation):
    """Rotary positions on `heads` heads of x from `offset`, in place.

    Halves are rotated: (a, b) = (x[:d/2], x[d/2:]) of a head become (a cos - b sin, b cos + a sin) with the angle
    position * frequencies[i].  `frequencies` has head_dim / 2 entries, in radians per position.
    """

    x: str
    offset: int
    heads: int
    head_dim: int
    frequencies: tuple[float, ...]


@dataclass(frozen=True)
class CacheWrite(Operation):
    """Keys x[:, k_offset:] and values x[:, v_offset:] of every row into its slot of the cache of `layer`."""

    x: str
    k_offset: int
    v_offset: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Attention(Operation):
    """out = softmax(q k^T * scale) v over the slots that the row sees: 0 ... its own slot, with `window` only the last that
    many.

    Queries are x[:, q_offset : q_offset + heads * head_dim]; query head h reads key/value head h // (heads / kv_heads).
    """

    x: str
    q_offset: int
    out: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int


@dataclass(frozen=True)
class SwiGlu(Operation):
    """out = silu(x[:, :width]) * x[:, width : 2 width] (Shazeer 2020)."""

    x: str
    width: int
    out: str


@dataclass(frozen=True)
class Select(Operation):
    """out = the rows of x for which logits are wanted; every later operation runs over these."""

    x: str
    out: str


@dataclass(frozen=True)
class Graph:
    """A network: buffer widths, operations in order, and the buffer that holds the logits after the last."""

    buffers: dict[str, int]
    operations: tuple[Operation, ...]
    logits: str
    layers: int
    kv_heads: int
    head_dim: int

    def page_bytes(self, kv: KvCodec) -> int:
        """Bytes of one page of the cache: keys and values of PAGE positions in all layers."""
        head = 2 * self.head_dim if kv == "f16" else self.head_dim + 4
        return self.layers * 2 * self.kv_heads * PAGE * head


@dataclass
class Rows:
    """What a Program runs over: R rows of one or more sessions.

    tokens      int32 [R]
    positions   int32 [R]     rotary position
    slots       int32 [R]     where the row's keys and values go in its session's cache; it sees slots 0 ... its own
    sessions    int32 [R]     index into `pages`
    pages       per session   its cache pages, enough for the largest slot
    logits      int32 [L]     rows whose logits are wanted, ascending
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    sessions: NDArray[np.int32]
    pages: Sequence[Sequence[Page]]
    logits: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.tokens)


class Page:
    """PAGE cache positions of one session; what is inside is the program's that made it."""
