"""The reference target: every operation in plain numpy, complete and slow; the oracle that other targets are tested against.

The arithmetic of a row does not depend on the rows beside it: a matrix is multiplied row by row with matrix-vector products of
a fixed shape (a BLAS matrix product chooses its summation order by the number of rows), and attention takes one row at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.codec import from_bf16
from edgeq.container import ModelFile
from edgeq.errors import UnsupportedError
from edgeq.records import ArrayRef, LinearSpec, Mode
from edgeq.targets import Options, Report, Step, StepTimes, silent
from edgeq.targets.graph import (
    PAGE,
    Attention,
    CacheWrite,
    Embed,
    Experts,
    GatedAdd,
    GeGlu,
    Graph,
    HeadNorm,
    HeadRotate,
    LayerNorm,
    Linear,
    NormAdd,
    Operation,
    Page,
    PositionAdd,
    Relu,
    RmsNorm,
    RopeRotate,
    Route,
    Rows,
    Scale,
    Select,
    SwiGlu,
)
from edgeq.targets.reference import layers, requantize
from edgeq.targets.reference.attention import ReferencePage, cache_write, head_rotate, heads_of, page_of
from edgeq.targets.reference.layers import normalized, swiglu
from edgeq.targets.reference.linear import Matrices, linear
from edgeq.targets.reference.requantize import ReferenceWeights
from edgeq.targets.requantization import InputSums, SharedInput, Weights, shared_inputs

ArrayF32 = NDArray[np.float32]
State = dict[str, ArrayF32]


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
        self.file = file
        self.mode = options.mode
        self.matrices = Matrices(file)
        self._copy: Weights | None = None
        self._sums: InputSums | None = None

    @cached_property
    def _inputs(self) -> tuple[SharedInput, ...]:
        return shared_inputs(self._graph)

    @property
    def description(self) -> str:
        return f"reference target: numpy, mode {self.options.mode}"

    def prepare(self, mode: Mode, report: Report = silent) -> None:
        """Nothing is compiled."""

    def new_page(self) -> Page:
        return ReferencePage(self._graph)

    def new_sums(self) -> InputSums:
        return InputSums(self._inputs)

    def new_weights(self) -> ReferenceWeights:
        return ReferenceWeights(self._inputs)

    def requantize(self, weights: Weights, scales: Sequence[ArrayF32]) -> None:
        assert isinstance(weights, ReferenceWeights)
        requantize.requantize(self.file, self._inputs, weights, scales)

    def run(
        self,
        rows: Rows,
        mode: Mode | None = None,
        *,
        times: list[StepTimes] | None = None,
        weights: Weights | None = None,
        sums: InputSums | None = None,
    ) -> ArrayF32:
        """Logits float32 [len(rows.logits), vocab].  ValueError: more rows than the options allow, or weights and sums."""
        if not 0 < len(rows) <= self.options.max_rows or len(rows.logits) > self.options.max_logits:
            limits = f"at most {self.options.max_rows} and {self.options.max_logits}"
            raise ValueError(f"{len(rows)} rows with {len(rows.logits)} logits; {limits}")
        if weights is not None and sums is not None:
            raise ValueError("sums are taken with the masters, not with a copy of the weights")
        self.mode, self._copy, self._sums = mode or self.options.mode, weights, sums
        state: State = {}
        steps: list[Step] = []
        clock = [perf_counter()]
        here = rows
        for operation in self._graph.operations:
            kernel = OPERATIONS[type(operation)]
            kernel(self, operation, here, state)
            if isinstance(operation, Select):
                here = rows.selected()
            steps.append((operation, kernel.__name__))
            clock.append(perf_counter())
            if len(here) == 0:
                break
        if times is not None:
            seconds = np.diff(clock)
            times.append(StepTimes(steps, np.stack([seconds, np.zeros_like(seconds)], 1)))
        if sums is not None:
            sums.tokens += len(rows) if rows.counted is None else int(rows.counted.sum())
        return self.out(state, self._graph.logits, len(rows.logits))

    def layer(self, layer: LinearSpec, x: ArrayF32, rows: Rows) -> tuple[LinearSpec, Matrices, ArrayF32 | None]:
        """A layer as this run has it, its matrices, and what a copy multiplies its input x by; x is counted."""
        if self._sums is not None:
            requantize.add_squares(self._sums, layer, x, rows)
            return requantize.with_master(self._sums, layer), self.matrices, None
        if isinstance(self._copy, ReferenceWeights) and layer.name in self._copy.scale_of:
            return layer, self._copy.matrices, self._copy.input_scales[self._copy.scale_of[layer.name]]
        return layer, self.matrices, None

    def out(self, state: State, name: str, count: int) -> ArrayF32:
        """Buffer `name` [count, width]; made when it is first written."""
        if name not in state:
            state[name] = np.zeros((count, self._graph.buffers[name]), np.float32)
        return state[name]

    def array(self, ref: ArrayRef) -> ArrayF32:
        return as_float32(self.file.array(ref), ref.dtype)

    def table_rows(self, table: ArrayRef | LinearSpec, indices: NDArray[np.int64]) -> ArrayF32:
        """Rows of an embedding [vocab, width] or of a tied head, by index."""
        if isinstance(table, ArrayRef):
            return as_float32(self.file.array(table)[indices], table.dtype)
        return self.matrices.rows(table.weights[0], indices)


def as_float32(a: NDArray[Any], dtype: str) -> ArrayF32:
    return from_bf16(a) if dtype == "bf16" else np.asarray(a, np.float32)


def embed(program: ReferenceProgram, op: Embed, rows: Rows, state: State) -> None:
    state[op.out] = program.table_rows(op.table, rows.tokens.astype(np.int64))


def rms_norm(program: ReferenceProgram, op: RmsNorm, rows: Rows, state: State) -> None:
    state[op.out] = normalized(state[op.x], program.array(op.gain), op.eps)


def head_norm(program: ReferenceProgram, op: HeadNorm, rows: Rows, state: State) -> None:
    x = heads_of(state[op.x], op.offset, op.heads, op.head_dim)
    x[:] = normalized(x.copy(), program.array(op.gain), op.eps)


def rope_rotate(program: ReferenceProgram, op: RopeRotate, rows: Rows, state: State) -> None:
    # Angles in float64: in float32 a position of 100,000 is already wrong in the third decimal.
    angle = rows.positions.astype(np.float64)[:, None] * np.array(op.frequencies, np.float64)
    cos, sin = ((f(angle) * op.factor).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))  # [rows, 1, pairs]
    x = heads_of(state[op.x], op.offset, op.heads, op.head_dim)
    half = len(op.frequencies)
    a, b = x[:, :, :half].copy(), x[:, :, half : 2 * half].copy()
    x[:, :, :half] = a * cos - b * sin
    x[:, :, half : 2 * half] = b * cos + a * sin


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


def select(program: ReferenceProgram, op: Select, rows: Rows, state: State) -> None:
    chosen = {name: state[name][rows.logits] for name in op.buffers}
    state.clear()
    state.update(chosen)


OPERATIONS: dict[type[Operation], Callable[[ReferenceProgram, Any, Rows, State], None]] = {
    Embed: embed,
    RmsNorm: rms_norm,
    NormAdd: layers.norm_add,
    LayerNorm: layers.layer_norm,
    Scale: layers.scale,
    PositionAdd: layers.position_add,
    Linear: linear,
    HeadNorm: head_norm,
    RopeRotate: rope_rotate,
    HeadRotate: head_rotate,
    CacheWrite: cache_write,
    Attention: attention,
    SwiGlu: swiglu,
    Route: layers.route,
    Experts: layers.experts,
    GatedAdd: layers.gated_add,
    GeGlu: layers.geglu,
    Relu: layers.relu,
    Select: select,
}
