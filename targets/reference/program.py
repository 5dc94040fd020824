"""A graph interpreted operation by operation.

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

from edgeq.format.container import ModelFile
from edgeq.format.records import Mode
from edgeq.targets.family_operations import (
    ArrayScale,
    DeltaRule,
    Gate,
    GatedAdd,
    GatedNorm,
    Limit,
    Route,
    RowBefore,
    RowMean,
    ScaleAdd,
    ScaleShift,
    ShareScale,
    ShortConv,
    SiluConv,
    SoftCap,
    SsdScan,
    ValueNorm,
)
from edgeq.targets.graph import (
    Activate,
    Attention,
    CacheWrite,
    Embed,
    Experts,
    Graph,
    HeadNorm,
    HeadRotate,
    InjectVectors,
    LayerNorm,
    Linear,
    NormAdd,
    Operation,
    PositionAdd,
    RmsNorm,
    RopeRotate,
    Scale,
    Select,
)
from edgeq.targets.host import check_rows, resolved
from edgeq.targets.host_states import HostStates
from edgeq.targets.reference import attention, layers, requantize, states
from edgeq.targets.reference.context import RunContext, State
from edgeq.targets.reference.linear import linear
from edgeq.targets.reference.requantize import ReferenceWeights
from edgeq.targets.requantization import InputSums, SharedInput, Weights, shared_inputs
from edgeq.targets.rows import Page, Rows, StateRows, parts_of
from edgeq.targets.states import snapshot_pages
from edgeq.targets.target import OnProgress, Options, ProgramFacts, no_progress
from edgeq.targets.times import RecordsRuns, Step, in_turn

ArrayF32 = NDArray[np.float32]


class ReferenceProgram(RecordsRuns, HostStates):
    """numpy's BLAS chooses its own threads; `threads` is what this file uses."""

    threads = 1
    tile = 12
    most_largest = 0

    def __init__(self, graph: Graph, file: ModelFile, options: Options) -> None:
        RecordsRuns.__init__(self)
        HostStates.__init__(self, graph.states, lambda nbytes: np.zeros(nbytes, np.uint8))
        self.options = resolved(options)
        self.context = RunContext(graph, file, options.mode, options.kv)
        self.context.state_places = self.places
        self._graph, self.window = graph, graph.window
        self.snapshot_pages = snapshot_pages(graph.states, graph.page_bytes(options.kv))
        full, windowed = (data.nbytes for data in attention.data_of(self.new_page()))
        self._part_bytes = full, windowed

    @cached_property
    def _inputs(self) -> tuple[SharedInput, ...]:
        return shared_inputs(self._graph)

    @property
    def description(self) -> str:
        return f"reference target: numpy, mode {self.options.mode}"

    def facts(self) -> ProgramFacts:
        return ProgramFacts()

    def prepare(self, mode: Mode, on_progress: OnProgress = no_progress) -> None:
        """Nothing is compiled."""

    def new_page(self) -> Page:
        return attention.new_page(self._graph)

    def copy_page(self, page: Page) -> Page:
        copied = attention.new_page(self._graph, page.windowed is not None)
        for data, its in zip(attention.data_of(copied), attention.data_of(page), strict=True):
            data[:] = its
        return copied

    def save_page(self, page: Page) -> bytes:
        return b"".join(data.astype("<f4").tobytes() for data in attention.data_of(page))

    def page_memory(self, windowed: bool = True) -> NDArray[np.uint8]:
        return np.empty(sum(self._part_bytes[: 1 + windowed]), np.uint8)

    def load_page(self, data: NDArray[np.uint8]) -> Page:
        full, windowed = parts_of(data, self._part_bytes)
        page = attention.new_page(self._graph, windowed is not None)
        for numbers, its in zip(attention.data_of(page), (full, windowed), strict=False):
            numbers[:] = np.empty(0) if its is None else its.view("<f4")
        return page

    def read_bandwidth(self, refresh: bool = False) -> float | None:
        """None: the speed of the oracle is not measured against anything."""
        return None

    def new_sums(self) -> InputSums:
        return InputSums(self._inputs)

    def new_weights(self) -> ReferenceWeights:
        return ReferenceWeights(self._inputs)

    def requantize(self, weights: Weights, scales: Sequence[ArrayF32]) -> None:
        assert isinstance(weights, ReferenceWeights)
        requantize.requantize(self.context.file, self._inputs, weights, scales)

    def run(self, rows: Rows, mode: Mode | None = None) -> ArrayF32:
        """The rows of the result, float32 [wanted, width].  ValueError: more rows than the options allow."""
        return self._run(rows, mode, None, None)

    def run_requantized(self, rows: Rows, weights: Weights, mode: Mode | None = None) -> ArrayF32:
        assert isinstance(weights, ReferenceWeights)
        return self._run(rows, mode, weights, None)

    def run_summing(self, rows: Rows, sums: InputSums, mode: Mode | None = None) -> ArrayF32:
        return self._run(rows, mode, None, sums)

    def _run(self, rows: Rows, mode: Mode | None, weights: ReferenceWeights | None, sums: InputSums | None) -> ArrayF32:
        check_rows(rows, self.options, self._graph.together)
        context = self.context
        context.mode, context.weights, context.sums = mode or self.options.mode, weights, sums
        if self.snapshot_pages:
            context.state_rows = StateRows.of(rows)
            context.state_rows.begin(rows.states)
        state: State = {}
        steps: list[Step] = []
        clock = [perf_counter()]
        here = rows
        for operation in self._graph.operations:
            kernel = OPERATIONS[type(operation)]
            kernel(context, operation, here, state)
            if isinstance(operation, Select):
                here = rows.selected(operation.together)
            steps.append(Step(operation, kernel.__name__, isinstance(operation, Linear)))
            clock.append(perf_counter())
            if len(here) == 0:
                break
        if self._recording:
            self._note(in_turn(steps, clock), context.mode, rows)
        if sums is not None:
            sums.tokens += len(rows) if rows.counted is None else int(rows.counted.sum())
        if context.state_rows:
            context.state_rows.end(rows.states)
        return context.out(state, self._graph.result, len(here))


OPERATIONS: dict[type[Operation], Callable[[RunContext, Any, Rows, State], None]] = {
    Embed: layers.embed,
    RmsNorm: layers.rms_norm,
    NormAdd: layers.norm_add,
    LayerNorm: layers.layer_norm,
    Scale: layers.scale,
    PositionAdd: layers.position_add,
    InjectVectors: layers.inject_vectors,
    Linear: linear,
    HeadNorm: attention.head_norm,
    RopeRotate: attention.rope_rotate,
    HeadRotate: attention.head_rotate,
    CacheWrite: attention.cache_write,
    Attention: attention.attention,
    Activate: layers.activate,
    Route: layers.route,
    Experts: layers.experts,
    GatedAdd: layers.gated_add,
    Select: layers.select,
    Gate: layers.gate,
    GatedNorm: layers.gated_norm,
    ShortConv: states.short_conv,
    SiluConv: states.silu_conv,
    RowBefore: states.row_before,
    DeltaRule: states.delta_rule,
    SsdScan: states.ssd_scan,
    ValueNorm: attention.value_norm,
    ArrayScale: layers.array_scale,
    ScaleAdd: layers.scale_add,
    ShareScale: layers.share_scale,
    SoftCap: layers.soft_cap,
    Limit: layers.limit,
    RowMean: layers.row_mean,
    ScaleShift: layers.scale_shift,
}
