"""The network as data: a flat list of operations over named buffers.

`runtime/network/decoder.py` writes the list once per model; a target compiles it into a Program.  An operation names buffers
and sizes and holds no arrays, so the same list can be interpreted, walked by threads or captured into a CUDA graph.  A buffer
is float32 [rows, width]; rows.py says what a row is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from edgeq.format.records import ArrayRef, KvCodec, LinearSpec
from edgeq.targets.column_ranges import without
from edgeq.targets.rows import PAGE
from edgeq.targets.states import StateSpec


@dataclass(frozen=True)
class Operation:
    """One step of the network.  `layer` is -1 before and after the decoder layers.

    reads, writes   the buffers whose contents an operation uses, and those that it changes, perhaps in part; an operation that
                    works in place has its buffer in both
    """

    layer: int

    READS: ClassVar[tuple[str, ...]] = ("x",)
    """Names of the fields that hold what `reads` gives."""
    WRITES: ClassVar[tuple[str, ...]] = ("out",)

    def reads(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in self.READS)

    def writes(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in self.WRITES)

    def columns(self, width: int) -> tuple[int, int]:
        """The columns [begin, end) that it writes of a buffer of that width."""
        return 0, width


@dataclass(frozen=True)
class Embed(Operation):
    """out[r] = table[token of row r]; the table is an array [vocab, width], the tied head, or quantized."""

    table: ArrayRef | LinearSpec
    out: str

    READS = ()


@dataclass(frozen=True)
class RmsNorm(Operation):
    """out = x / sqrt(mean(x^2) + eps) * gain (Zhang and Sennrich 2019).

    As in every norm, a row whose squares add up to more than a float32 holds becomes NaN.
    """

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

    READS = ("x", "out")


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
    """out = x times a constant; with 1 a copy."""

    x: str
    factor: float
    out: str


@dataclass(frozen=True)
class PositionAdd(Operation):
    """x[r] += table[first position of row r], in place; the table is an array [positions, width] (learned positions)."""

    x: str
    table: ArrayRef

    WRITES = ("x",)


@dataclass(frozen=True)
class InjectVectors(Operation):
    """out[r] = v[offset : offset + width of out], or with `add` out[r] += that, where v is the vector that row r brings.

    Rows that bring none stay as they are.  Pixels of a patch, features of an image.
    """

    out: str
    offset: int = 0
    add: bool = False

    READS = ("out",)


@dataclass(frozen=True)
class Linear(Operation):
    """out[:, offset : offset + rows of W] = W x + bias; with `add` it is added to what is there (the residual)."""

    x: str
    linear: LinearSpec
    out: str
    offset: int = 0
    add: bool = False

    def reads(self) -> tuple[str, ...]:
        return (self.x, self.out) if self.add else (self.x,)

    def columns(self, width: int) -> tuple[int, int]:
        return self.offset, self.offset + self.linear.rows


@dataclass(frozen=True)
class HeadNorm(Operation):
    """RmsNorm over each head of x[:, offset : offset + heads * head_dim], in place (Qwen3)."""

    x: str
    offset: int
    heads: int
    head_dim: int
    gain: ArrayRef
    eps: float

    WRITES = ("x",)


@dataclass(frozen=True)
class RopeRotate(Operation):
    """Rotary positions on `heads` heads of x from `offset`, in place.

    Halves are rotated: (a, b) = (x[:d/2], x[d/2:d]) of a head become (a cos - b sin, b cos + a sin) with the angle
    position * frequencies[i], cosines and sines times `factor`.  `frequencies` has d/2 entries, in radians per position;
    where d is less than head_dim, the rest of a head stays as it is.

    axes   for each frequency, which of a row's positions it multiplies (M-RoPE: time, height, width); empty: the first
    """

    x: str
    offset: int
    heads: int
    head_dim: int
    frequencies: tuple[float, ...]
    factor: float = 1.0
    axes: tuple[int, ...] = ()

    WRITES = ("x",)


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

    WRITES = ("x",)


@dataclass(frozen=True)
class CacheWrite(Operation):
    """Keys x[:, k_offset:] and values x[:, v_offset:] of every row into its slot of the cache.

    cache   index of the layer in `Graph.cache`
    """

    x: str
    k_offset: int
    v_offset: int
    kv_heads: int
    head_dim: int
    cache: int

    WRITES = ()


@dataclass(frozen=True)
class Attention(Operation):
    """out = softmax(q k^T * scale) v over the slots that the row sees.

    span     -1, causal: slots 0 ... its own, with a `window` above 0 the last that many; else which kind of `Rows.spans`, and
             the same in a run that has none
    cache    index of the layer in `Graph.cache`;  ahead: ranges of a span are causal, with this `window`, but of pictures
    sinks    array [heads]: scores whose shares go nowhere (gpt-oss);  cap: scores z become cap tanh(z / cap) (Gemma 2)
    slopes   of each head, or none: then slope * (slot of the key - the last that the row sees) is added to a score (ALiBi)

    Queries are x[:, q_offset : q_offset + heads * head_dim]; query head h reads key/value head h // (heads / kv_heads).
    Where all scores of a query are -1e30 or less, its result is NaN.
    """

    x: str
    q_offset: int
    out: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    cache: int
    span: int = -1
    sinks: ArrayRef | None = None
    cap: float | None = None
    ahead: bool = False
    slopes: tuple[float, ...] = ()


Function = Literal["silu", "gelu_pytorch_tanh", "gelu", "quick_gelu", "relu", "relu2"]
"""Functions of one number.

silu                x / (1 + exp(-x))
gelu                x/2 (1 + erf(x / sqrt(2))) (Hendrycks and Gimpel 2016)
gelu_pytorch_tanh   x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), nearly the same
quick_gelu          x / (1 + exp(-1.702 x)), nearly the same
relu                max(x, 0)
relu2               its square (So et al. 2021, arXiv 2109.08668)
"""


@dataclass(frozen=True)
class Activate(Operation):
    """out = f(x[:, :width]); `gated`: times x[:, width : 2 width] (Shazeer 2020).

    clamp   (alpha, limit): of these two g, at most limit, and u, within +-limit, out = g sigmoid(alpha g) (u + 1) (gpt-oss)
    """

    x: str
    width: int
    out: str
    function: Function = "silu"
    gated: bool = True
    clamp: tuple[float, float] | None = None

    @property
    def swiglu(self) -> bool:
        return self.gated and self.function == "silu" and self.clamp is None


@dataclass(frozen=True)
class Experts(Operation):
    """out += sum over the experts e that `routing` names for the row of share * down_e(silu(gate_e x) * up_e x).

    projections   of each: gate and up in one layer, one after the other, or up alone;  width and what comes last: of Activate
    """

    x: str
    routing: str
    chosen: int
    projections: tuple[tuple[LinearSpec, ...], ...]
    downs: tuple[LinearSpec, ...]
    width: int
    out: str
    clamp: tuple[float, float] | None = None
    function: Function = "silu"
    gated: bool = True

    READS = ("x", "routing", "out")


@dataclass(frozen=True)
class Select(Operation):
    """outs[i][r] = the rows wanted[r * together] ... wanted[(r + 1) * together - 1] of buffers[i], side by side.

    Every later operation runs over the rows of the result, and what other buffers hold is lost.  `wanted` is the run's
    (rows.py), and so is its order: with `together` neighbouring rows become one, as where a vision tower merges patches.

    outs   empty: the same names
    """

    buffers: tuple[str, ...]
    outs: tuple[str, ...] = ()
    together: int = 1

    def reads(self) -> tuple[str, ...]:
        return self.buffers

    def writes(self) -> tuple[str, ...]:
        return self.outs or self.buffers


@dataclass(frozen=True)
class CacheSpec:
    """What the cache holds of a layer, for each position.

    kv_heads    keys, and values;  head_dim: numbers of a key;  value_dim: of a value
    window      a row sees no slot but its own and those right before it, this many together; None: it may see all
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None

    def position_bytes(self, kv: KvCodec) -> int:
        """Bytes of one position, without padding."""
        return self.kv_heads * (kv.head_bytes(self.head_dim) + kv.head_bytes(self.value_dim))


@dataclass(frozen=True)
class Graph:
    """A network: buffer widths, operations in order, and the buffer that holds the result after the last: a decoder's logits.

    cache, states   of its layers, which operations name by their index; those of states come before any Select
    """

    buffers: dict[str, int]
    operations: tuple[Operation, ...]
    result: str
    cache: tuple[CacheSpec, ...]
    states: tuple[StateSpec, ...] = ()

    @cached_property
    def together(self) -> int:
        """Wanted rows of a run that make one row of the result."""
        return next((o.together for o in self.operations if isinstance(o, Select)), 1)

    @cached_property
    def span_windows(self) -> tuple[int, ...]:
        """The window of the layers of each kind of `Rows.spans`, in a run that has none."""
        found = {o.span: o.window for o in self.operations if isinstance(o, Attention)}
        return tuple(found.get(kind, 0) for kind in range(1 + max(found, default=-1)))

    def readers(self, at: int, buffer: str) -> list[int]:
        """The operations from index `at` on that read anything of what `buffer` holds before `at`, in order.

        Where it is the result and some of it is left after the last operation, `len(operations)` is among them.
        """
        found, left = list[int](), [(0, self.buffers[buffer])]
        for index in range(at, len(self.operations)):
            operation = self.operations[index]
            if buffer in operation.reads():
                found.append(index)
            if buffer in operation.writes():
                left = without(left, *operation.columns(self.buffers[buffer]))
                if not left:
                    return found
        return [*found, len(self.operations)] if buffer == self.result else found

    def changes(self, first: int, last: int, buffer: str) -> bool:
        """Whether one of the operations [first, last) writes to `buffer`."""
        return any(buffer in operation.writes() for operation in self.operations[first:last])

    def page_bytes(self, kv: KvCodec) -> int:
        """Bytes of one page of the cache: keys and values of PAGE positions in all layers."""
        return sum(self.part_bytes(kv))

    def part_bytes(self, kv: KvCodec) -> tuple[int, int]:
        """Bytes of the two parts of a page: layers without a window, and those with one."""
        whole, windowed = (sum(each.position_bytes(kv) for each in self.cache if bool(each.window) == w) for w in (False, True))
        return PAGE * whole, PAGE * windowed

    @property
    def window(self) -> int:
        """Positions that rows see in layers with a window, their own included, at most; 0: no layer has one."""
        return max((layer.window or 0 for layer in self.cache), default=0)
