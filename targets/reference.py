"""The reference target: every operation in plain numpy, complete and slow; the oracle that other targets are tested against.

The arithmetic of a row does not depend on the rows beside it: a matrix is multiplied row by row with matrix-vector products of
a fixed shape (a BLAS matrix product chooses its summation order by the number of rows), and attention takes one row at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.codec import ROWS, from_bf16
from edgeq.codec import dequantize as dequantize_codec
from edgeq.codec import dequantize_rows as dequantize_codec_rows
from edgeq.container import ModelFile
from edgeq.errors import UnsupportedError
from edgeq.linear import ArrayRef, KvCodec, LinearSpec, Weight
from edgeq.targets import Options, Report, silent
from edgeq.targets.operations import (
    PAGE,
    Attention,
    CacheWrite,
    Embed,
    Graph,
    HeadNorm,
    Linear,
    Operation,
    Page,
    RmsNorm,
    RopeRotate,
    Rows,
    Select,
    SwiGlu,
)

ArrayF32 = NDArray[np.float32]
State = dict[str, ArrayF32]

KEEP_BYTES = 1 << 30
"""Dequantized matrices kept between runs; what does not fit is dequantized again, block by block, each time it is used."""
BLOCK_ELEMENTS = 1 << 22
MAX_ACTIVATION_GROUP = 128
F16_MAX = 65504.0


class ReferencePage(Page):
    """PAGE cache positions: [layers, 2 (keys, values), kv_heads, PAGE, head_dim], numbers of the cache's codec held as
    float32."""

    def __init__(self, graph: Graph) -> None:
        self.data = np.zeros((graph.layers, 2, graph.kv_heads, PAGE, graph.head_dim), np.float32)


class ReferenceTarget:
    name = "reference"

    def refusal(self) -> str | None:
        return None

    def compile(self, graph: Graph, file: ModelFile, options: Options, report: Report = silent) -> ReferenceProgram:
        """UnsupportedError: an instruction set was asked for; numpy has its own."""
        if options.isa is not None:
            raise UnsupportedError(f"the reference target has no isa {options.isa!r}; leave it out or use the cpu target")
        return ReferenceProgram(graph, file, options)


class ReferenceProgram:
    """A graph interpreted operation by operation.  numpy's BLAS chooses its own threads; `threads` is what this file uses."""

    threads = 1

    def __init__(self, graph: Graph, file: ModelFile, options: Options) -> None:
        self.options = options
        self._graph = graph
        self._file = file
        self._kept: dict[str, list[ArrayF32]] = {}
        self._kept_bytes = 0

    @property
    def description(self) -> str:
        return f"reference target: numpy, mode {self.options.mode}"

    def new_page(self) -> Page:
        return ReferencePage(self._graph)

    def run(self, rows: Rows) -> ArrayF32:
        """Logits float32 [len(rows.logits), vocab].  ValueError: more rows than the options allow."""
        if not 0 < len(rows) <= self.options.max_rows or len(rows.logits) > self.options.max_logits:
            limits = f"at most {self.options.max_rows} and {self.options.max_logits}"
            raise ValueError(f"{len(rows)} rows with {len(rows.logits)} logits; {limits}")
        state: State = {}
        for operation in self._graph.operations:
            OPERATIONS[type(operation)](self, operation, rows, state)
        return state[self._graph.logits]

    def out(self, state: State, name: str, count: int) -> ArrayF32:
        """Buffer `name` [count, width]; made when it is first written."""
        if name not in state:
            state[name] = np.zeros((count, self._graph.buffers[name]), np.float32)
        return state[name]

    def array(self, ref: ArrayRef) -> ArrayF32:
        return as_float32(self._file.array(ref), ref.dtype)

    def table_rows(self, table: ArrayRef | LinearSpec, indices: NDArray[np.int64]) -> ArrayF32:
        """Rows of an embedding [vocab, width] or of a tied head, by index."""
        if isinstance(table, ArrayRef):
            return as_float32(self._file.array(table)[indices], table.dtype)
        weight = table.weights[0]
        q, scale, zero = self._parts(weight)
        return dequantize_codec_rows(weight.codec, weight.columns, indices, q, scale, zero)

    def blocks(self, linear: LinearSpec) -> Iterator[ArrayF32]:
        """The dequantized matrix as consecutive blocks of rows.  Block sizes never vary, so neither does a row's arithmetic."""
        if linear.name in self._kept:
            yield from self._kept[linear.name]
            return
        weight = linear.weights[0]
        keep = self._kept_bytes + weight.rows * weight.columns * 4 <= KEEP_BYTES
        kept = []
        step = max(1, BLOCK_ELEMENTS // (weight.columns * ROWS))  # in blocks of 16 rows
        q, scale, zero = self._parts(weight)
        for start in range(0, len(q), step):
            cut = slice(start, start + step)
            rows = min((start + step) * ROWS, weight.rows) - start * ROWS
            parts = [None if a is None else a[cut] for a in (scale, zero)]
            block = dequantize_codec(weight.codec, rows, weight.columns, q[cut], *parts)
            if keep:
                kept.append(block)
            yield block
        if keep:
            self._kept[linear.name] = kept
            self._kept_bytes += weight.rows * weight.columns * 4

    def _parts(self, weight: Weight) -> tuple[Any, Any, Any]:
        return (
            self._file.array(weight.q),
            None if weight.scale is None else self._file.array(weight.scale),
            None if weight.zero is None else self._file.array(weight.zero),
        )


def as_float32(a: NDArray[Any], dtype: str) -> ArrayF32:
    return from_bf16(a) if dtype == "bf16" else np.asarray(a, np.float32)


def quantize_activations(x: ArrayF32, group_size: int) -> ArrayF32:
    """x [rows, channels] as mode a8 sees it: int8 per row and block of channels, dequantized again.

    A block is min(group_size or 128, 128) consecutive channels, the last one perhaps shorter.  scale = max|x| / 127,
    q = rint(x / scale), symmetric; a block of zeros has scale 0.
    """
    rows, channels = x.shape
    size = min(group_size or MAX_ACTIVATION_GROUP, MAX_ACTIVATION_GROUP)
    blocks = np.pad(x, ((0, 0), (0, -channels % size))).reshape(rows, -1, size)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    # The limit matters only where the scale is so small that it was itself rounded.
    q = np.rint(blocks / np.where(scale > 0, scale, np.float32(1))).clip(-127, 127)
    return np.ascontiguousarray((q * scale).reshape(rows, -1)[:, :channels])


def embed(program: ReferenceProgram, op: Embed, rows: Rows, state: State) -> None:
    state[op.out] = program.table_rows(op.table, rows.tokens.astype(np.int64))


def rms_norm(program: ReferenceProgram, op: RmsNorm, rows: Rows, state: State) -> None:
    state[op.out] = normalized(state[op.x], program.array(op.gain), op.eps)


def normalized(x: ArrayF32, gain: ArrayF32, eps: float) -> ArrayF32:
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    return np.asarray((x / np.sqrt(mean + eps)).astype(np.float32) * gain)


def linear(program: ReferenceProgram, op: Linear, rows: Rows, state: State) -> None:
    x, codec = state[op.x], op.linear.weights[0].codec
    if program.options.mode == "a8" and codec.kind == "int":
        x = quantize_activations(x, codec.group_size)
    y = np.empty((len(x), op.linear.rows), np.float32)
    at = 0
    for block in program.blocks(op.linear):
        for r in range(len(x)):
            y[r, at : at + len(block)] = block @ x[r].copy()
        at += len(block)
    if op.linear.bias is not None:
        y += program.array(op.linear.bias)
    out = program.out(state, op.out, len(x))[:, op.offset : op.offset + op.linear.rows]
    out[:] = out + y if op.add else y


def head_norm(program: ReferenceProgram, op: HeadNorm, rows: Rows, state: State) -> None:
    x = heads_of(state[op.x], op.offset, op.heads, op.head_dim)
    x[:] = normalized(x.copy(), program.array(op.gain), op.eps)


def heads_of(x: ArrayF32, offset: int, heads: int, head_dim: int) -> ArrayF32:
    """x[:, offset:] as a view [rows, heads, head_dim]."""
    return x[:, offset : offset + heads * head_dim].reshape(len(x), heads, head_dim)


def rope_rotate(program: ReferenceProgram, op: RopeRotate, rows: Rows, state: State) -> None:
    # Angles in float64: in float32 a position of 100,000 is already wrong in the third decimal.
    angle = rows.positions.astype(np.float64)[:, None] * np.array(op.frequencies, np.float64)
    cos, sin = (f(angle).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))  # [rows, 1, head_dim / 2]
    x = heads_of(state[op.x], op.offset, op.heads, op.head_dim)
    half = op.head_dim // 2
    a, b = x[:, :, :half].copy(), x[:, :, half:].copy()
    x[:, :, :half] = a * cos - b * sin
    x[:, :, half:] = b * cos + a * sin


def cache_write(program: ReferenceProgram, op: CacheWrite, rows: Rows, state: State) -> None:
    for part, offset in enumerate((op.k_offset, op.v_offset)):
        values = cached(heads_of(state[op.x], offset, op.kv_heads, op.head_dim), program.options.kv)
        for r, slot in enumerate(rows.slots):
            page_of(rows, r, int(slot) // PAGE).data[op.layer, part, :, slot % PAGE] = values[r]


def cached(x: ArrayF32, kv: KvCodec) -> ArrayF32:
    """x [rows, kv_heads, head_dim] as the cache gives it back: f16, or int8 with one scale max|x| / 127 per row and head."""
    if kv == "f16":
        return x.clip(-F16_MAX, F16_MAX).astype(np.float16).astype(np.float32)
    scale = np.abs(x).max(axis=2, keepdims=True) / np.float32(127)
    restored: ArrayF32 = np.rint(x / np.where(scale > 0, scale, np.float32(1))).clip(-127, 127) * scale
    return restored


def page_of(rows: Rows, row: int, index: int) -> ReferencePage:
    page = rows.pages[rows.sessions[row]][index]
    assert isinstance(page, ReferencePage)
    return page


def attention(program: ReferenceProgram, op: Attention, rows: Rows, state: State) -> None:
    queries = heads_of(state[op.x], op.q_offset, op.heads, op.head_dim)
    out = program.out(state, op.out, len(rows))
    for r in range(len(rows)):
        last = int(rows.slots[r])
        first = max(0, last + 1 - op.window) if op.window else 0
        pages = [page_of(rows, r, i).data[op.layer] for i in range(first // PAGE, last // PAGE + 1)]
        start = first - first // PAGE * PAGE
        seen = np.concatenate(pages, axis=2)[:, :, start : start + last + 1 - first]
        keys, values = seen  # [kv_heads, positions, head_dim]
        q = queries[r].reshape(op.kv_heads, -1, op.head_dim)
        scores = np.matmul(q, keys.transpose(0, 2, 1)) * np.float32(op.scale)  # [kv_heads, heads / kv_heads, positions]
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        out[r] = np.matmul(weights, values).reshape(-1)


def swiglu(program: ReferenceProgram, op: SwiGlu, rows: Rows, state: State) -> None:
    gate, up = state[op.x][:, : op.width], state[op.x][:, op.width : 2 * op.width]
    with np.errstate(over="ignore"):  # exp(-gate) of a very negative gate is infinite, its silu rightly 0
        state[op.out] = gate / (1 + np.exp(-gate)) * up


def select(program: ReferenceProgram, op: Select, rows: Rows, state: State) -> None:
    state[op.out] = state[op.x][rows.logits]


OPERATIONS: dict[type[Operation], Callable[[ReferenceProgram, Any, Rows, State], None]] = {
    Embed: embed,
    RmsNorm: rms_norm,
    Linear: linear,
    HeadNorm: head_norm,
    RopeRotate: rope_rotate,
    CacheWrite: cache_write,
    Attention: attention,
    SwiGlu: swiglu,
    Select: select,
}
