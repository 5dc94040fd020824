"""The network as data: a flat list of operations over named buffers, and the rows it is run over.

`runtime/model.py` writes the list once per model; a target compiles it into a Program.  An operation names buffers and sizes
and never holds numbers of its own, so the same list can be interpreted, walked by threads or captured into a graph.

A buffer is float32 [rows, width].  A *row* is one token of one session: decode is one row, a prefill chunk many, a batch of
sessions one row each; so there is one loop and not five.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgeq.records import ArrayRef, KvCodec, LinearSpec, Mode

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
class NormAdd(Operation):
    """out += x / sqrt(mean(x^2) + eps) * gain: a norm between a block and the residual stream (Gemma 3)."""

    x: str
    gain: ArrayRef
    eps: float
    out: str


@dataclass(frozen=True)
class LayerNorm(Operation):
    """out = (x - mean(x)) / sqrt(var(x) + eps) * gain + bias (Ba et al. 2016)."""

    x: str
    gain: ArrayRef
    bias: ArrayRef
    eps: float
    out: str


@dataclass(frozen=True)
class Scale(Operation):
    """x times a constant, in place."""

    x: str
    factor: float


@dataclass(frozen=True)
class PositionAdd(Operation):
    """x[r] += table[position of row r], in place; the table is an array [positions, width] (learned positions)."""

    x: str
    table: ArrayRef


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

    Halves are rotated: (a, b) = (x[:d/2], x[d/2:d]) of a head become (a cos - b sin, b cos + a sin) with the angle
    position * frequencies[i], cosines and sines times `factor`.  `frequencies` has d/2 entries, in radians per position;
    where d is less than head_dim, the rest of a head stays as it is.
    """

    x: str
    offset: int
    heads: int
    head_dim: int
    frequencies: tuple[float, ...]
    factor: float = 1.0


@dataclass(frozen=True)
class HeadRotate(Operation):
    """Each head v of x[:, offset : offset + heads * head_dim] becomes v M, in place (arXiv 2412.14363, U_C).

    v is first rounded to 8 bits, asymmetric, over a range that has 0 in it.  M = scale * matrix, i8 [head_dim, head_dim] and
    f32 [1].
    """

    x: str
    offset: int
    heads: int
    head_dim: int
    matrix: ArrayRef
    scale: ArrayRef


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
class GeGlu(Operation):
    """out = gelu(x[:, :width]) * x[:, width : 2 width], gelu(g) = g/2 (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) (Shazeer 2020;
    Hendrycks and Gimpel 2016)."""

    x: str
    width: int
    out: str


@dataclass(frozen=True)
class Relu(Operation):
    """out = max(x, 0)."""

    x: str
    width: int
    out: str


@dataclass(frozen=True)
class Route(Operation):
    """out[:, :chosen] = the largest of softmax(x[:, :experts]), falling, with `normalized` divided by their sum; and
    out[:, chosen : 2 chosen] = which experts they are of, as numbers.  Of equals the first."""

    x: str
    experts: int
    chosen: int
    normalized: bool
    out: str


@dataclass(frozen=True)
class Experts(Operation):
    """out += sum over the experts e that `routing` names for the row of share * down_e(silu(gate_e x) * up_e x).

    projections   of each expert: gate and up in one layer, or one after the other;  width: channels of each
    """

    x: str
    routing: str
    chosen: int
    projections: tuple[tuple[LinearSpec, ...], ...]
    downs: tuple[LinearSpec, ...]
    width: int
    out: str


def mode_of(operation: Operation, mode: Mode) -> Mode:
    """The mode in which an operation runs in a run of `mode`.

    Behind the layers, right in front of the softmax, 4 bits would cost more than in all layers together.
    """
    return "a8" if mode == "a4" and operation.layer < 0 else mode


def buffers(operation: Operation) -> set[str]:
    """Names of the buffers that an operation reads or writes."""
    named = {getattr(operation, name) for name in ("x", "out", "routing", "gate") if hasattr(operation, name)}
    return named | set(getattr(operation, "buffers", ()))


def linears(operation: Operation) -> Iterator[LinearSpec]:
    """The linear layers that an operation may read."""
    if isinstance(operation, Linear):
        yield operation.linear
    elif isinstance(operation, Experts):
        for projection, down in zip(operation.projections, operation.downs, strict=True):
            yield from projection
            yield down


@dataclass(frozen=True)
class GatedAdd(Operation):
    """out += sigmoid(gate[:, 0]) * x."""

    x: str
    gate: str
    out: str


@dataclass(frozen=True)
class Select(Operation):
    """Of `buffers` only the rows for which logits are wanted stay, what other buffers hold is lost; every later operation runs
    over these rows."""

    buffers: tuple[str, ...]


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
        return self.layers * 2 * self.kv_heads * PAGE * kv.head_bytes(self.head_dim)


@dataclass
class Rows:
    """What a Program runs over: R rows of one or more sessions.

    tokens      int32 [R]
    positions   int32 [R]     rotary position
    slots       int32 [R]     where the row's keys and values go in its session's cache; it sees slots 0 ... its own
    sessions    int32 [R]     index into `pages`
    pages       per session   its cache pages, enough for the largest slot
    logits      int32 [L]     rows whose logits are wanted, ascending
    counted     bool [R]      rows that are added to sums, where there are any; None: all
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    sessions: NDArray[np.int32]
    pages: Sequence[Sequence[Page]]
    logits: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    counted: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def selected(self) -> Rows:
        """The rows whose logits are wanted."""
        tokens, positions, slots, sessions = (a[self.logits] for a in (self.tokens, self.positions, self.slots, self.sessions))
        return Rows(tokens, positions, slots, sessions, self.pages, np.arange(len(self.logits), dtype=np.int32))


class Page:
    """PAGE cache positions of one session; what is inside is the program's that made it."""
