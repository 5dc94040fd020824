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

from edgeq.container import ModelFile
from edgeq.records import Mode
from edgeq.targets.graph import (
    Activate,
    Attention,
    CacheWrite,
    Embed,
    Experts,
    GatedAdd,
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
    Route,
    Scale,
    Select,
)
from edgeq.targets.host import check_rows, resolved
from edgeq.targets.reference import attention, layers, requantize
from edgeq.targets.reference.attention import ReferencePage
from edgeq.targets.reference.context import Context, State
from edgeq.targets.reference.linear import linear
from edgeq.targets.reference.requantize import ReferenceWeights
from edgeq.targets.requantization import InputSums, SharedInput, Weights, shared_inputs
from edgeq.targets.rows import Page, Rows
from edgeq.targets.target import OnProgress, Options, Step, TellsTimes, in_turn, no_progress

ArrayF32 = NDArray[np.float32]


class ReferenceProgram(TellsTimes):
    """numpy's BLAS chooses its own threads; `threads` is what this file uses."""

    threads = 1
    tile = 12

    def __init__(self, graph: Graph, file: ModelFile, options: Options) -> None:
        super().__init__()
        self.options = resolved(options)
        self.context = Context(graph, file, options.mode, options.kv)
        self._graph = graph

    @cached_property
    def _inputs(self) -> tuple[SharedInput, ...]:
        return shared_inputs(self._graph)

    @property
    def description(self) -> str:
        return f"reference target: numpy, mode {self.options.mode}"

    def prepare(self, mode: Mode, on_progress: OnProgress = no_progress) -> None:
        """Nothing is compiled."""

    def new_page(self) -> Page:
        return ReferencePage(self._graph)

    def copy_page(self, page: Page) -> Page:
        assert isinstance(page, ReferencePage)
        copied = ReferencePage(self._graph)
        copied.data[:] = page.data
        return copied

    def save_page(self, page: Page) -> bytes:
        assert isinstance(page, ReferencePage)
        return page.data.astype("<f4").tobytes()

    def page_memory(self) -> NDArray[np.uint8]:
        return np.empty(ReferencePage(self._graph).data.nbytes, np.uint8)

    def load_page(self, data: NDArray[np.uint8]) -> Page:
        page = ReferencePage(self._graph)
        page.data[:] = data.view("<f4").reshape(page.data.shape)
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
        return context.out(state, self._graph.result, len(here))


OPERATIONS: dict[type[Operation], Callable[[Context, Any, Rows, State], None]] = {
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
}
