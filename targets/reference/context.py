"""What the operations of a run use: the file's arrays, the matrices, the mode, and the buffers by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import as_float32
from edgeq.format.container import ModelFile
from edgeq.format.records import ArrayRef, KvCodec, LinearSpec, Mode
from edgeq.targets.graph import Graph
from edgeq.targets.reference.matrices import Matrices
from edgeq.targets.reference.requantize import ReferenceWeights, add_squares, with_master
from edgeq.targets.requantization import InputSums
from edgeq.targets.rows import Rows, StateRows
from edgeq.targets.state_layout import StatePlace

ArrayF32 = NDArray[np.float32]
State = dict[str, ArrayF32]
"""Buffers by name, float32 [rows, width]."""


class RunContext:
    """mode, weights, sums   of the run at hand; the rest is the program's.

    weights   requantized weights to use instead of the file's
    sums      where the squares of what layers with a master read are added; such layers then use their master
    state_rows      the rows in the order in which states take them; None: the graph has no states
    state_places    where the states of the graph lie
    """

    def __init__(self, graph: Graph, file: ModelFile, mode: Mode, kv: KvCodec) -> None:
        self.graph, self.file, self.mode, self.kv = graph, file, mode, kv
        self.matrices = Matrices(file)
        self.weights: ReferenceWeights | None = None
        self.sums: InputSums | None = None
        self.state_rows: StateRows | None = None
        self.state_places: Sequence[StatePlace] = ()

    def layer(self, layer: LinearSpec, x: ArrayF32, rows: Rows) -> tuple[LinearSpec, Matrices, ArrayF32 | None]:
        """A layer as this run has it, its matrices, and what requantized weights multiply its input x by; x is counted."""
        if self.sums is not None:
            add_squares(self.sums, layer, x, rows)
            return with_master(self.sums, layer), self.matrices, None
        if self.weights is not None and layer.name in self.weights.indices:
            return layer, self.weights.matrices, self.weights.input_scales[self.weights.indices[layer.name]]
        return layer, self.matrices, None

    def out(self, state: State, name: str, count: int) -> ArrayF32:
        """Buffer `name` [count, width]; made when it is first written."""
        if name not in state:
            state[name] = np.zeros((count, self.graph.buffers[name]), np.float32)
        return state[name]

    def array(self, ref: ArrayRef) -> ArrayF32:
        return as_float32(self.file.array(ref), ref.dtype)

    def table_rows(self, table: ArrayRef | LinearSpec, indices: NDArray[np.int64]) -> ArrayF32:
        """Rows of an embedding [vocab, width], quantized or not, or of a tied head, by index."""
        if isinstance(table, ArrayRef):
            return as_float32(self.file.array(table)[indices], table.dtype)
        return self.matrices.rows(table.weights[0], indices)
