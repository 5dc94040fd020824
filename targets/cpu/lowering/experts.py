"""A layer of experts as operations of the table: dispatch, then stage by stage of all experts that have rows, then the sum.

The operations of one expert are lowered like those of any layer, over buffers that hold the rows of all experts one behind the
other.  Every address in its table rows that lies in such a buffer then moves, at run time, to where the expert's rows begin.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import UnsupportedError
from edgeq.records import ArrayRef
from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.buffers import Memory, padded
from edgeq.targets.cpu.jit.optable import ROW_WORDS, Variant, kernel
from edgeq.targets.cpu.kernels import elementwise
from edgeq.targets.cpu.kernels import experts as kernels
from edgeq.targets.cpu.lowering import linear
from edgeq.targets.cpu.lowering.layers import buffer

if TYPE_CHECKING:
    from edgeq.targets.cpu.lowering.context import Lowering

X, INNER, Y = "expert x", "expert inner", "expert y"
OF_THREADS = ("scratch", linear.PAIRS)
"""What belongs to threads, not to rows, in the memory of a lowering."""


@dataclass
class RowMemory(Memory):
    """Memory of the experts: all its shared arrays but the threads' have `rows` rows; areas: address -> bytes, and of a row."""

    memory: Memory
    rows: int
    areas: dict[int, tuple[int, int]] = field(default_factory=dict)

    def shared(self, name: Hashable, nbytes: int) -> int:
        if name in OF_THREADS:
            return self.memory.shared(name, nbytes)
        address = self.memory.shared(("experts", name), nbytes)
        self.areas[address] = (nbytes, nbytes // self.rows)
        return address

    def copied(self, values: NDArray[Any]) -> int:
        return self.memory.copied(values)

    def array(self, count: int, dtype: Any) -> tuple[NDArray[Any], int]:
        return self.memory.array(count, dtype)

    def stored(self, ref: ArrayRef | None) -> int:
        return self.memory.stored(ref)

    def floats(self, ref: ArrayRef) -> int:
        return self.memory.floats(ref)

    def row_bytes_at(self, address: int) -> int:
        """Bytes from one row to the next of the array in which `address` lies; 0 if it is none of these."""
        return next((step for start, (size, step) in self.areas.items() if start <= address < start + size), 0)


@dataclass
class Stages:
    """Table rows of all experts: per stage an array [experts, ROW_WORDS], its kernels, and parts for one row.

    moves   per expert: address of a word, the number there for place 0, what it grows by per place
    """

    tables: list[NDArray[np.int64]]
    functions: list[list[Variant]]
    parts: list[int]
    moves: list[list[tuple[int, int, int]]]


def route(lowering: Lowering, o: op.Route) -> None:
    out = buffer(lowering, o.out)
    lowering.emit(kernel(kernels.route, int(o.normalized)), *buffer(lowering, o.x), o.experts, o.chosen, *out)
    lowering.wrote(o.out)


def experts(lowering: Lowering, o: op.Experts) -> None:
    memory, count = lowering.memory, len(o.downs)
    # The rows of every expert begin at a multiple of four: its last ones may have a tile of four to themselves.
    places = padded(lowering.most * o.chosen + 3 * count, 4)
    row_memory = RowMemory(memory, places)
    sizes = {"rows": 8 * count, "ends": 8 * count, "sum": 8, "rows of places": 4 * places, "places of rows": 4 * places}
    rows, ends, total, row_of, place_of = (memory.shared(("experts", name), size) for name, size in sizes.items())
    stages = lowered(lowering, o, row_memory, rows)
    lowering.expert_stages.append(stages)
    firsts, first_address = memory.array(count + 1, np.int64)
    firsts[1:] = np.cumsum([len(moves) for moves in stages.moves])
    flat, move_address = memory.array(3 * int(firsts[-1]), np.int64)
    flat[:] = np.array([move for moves in stages.moves for move in moves], np.int64).ravel()

    routing, x, width = buffer(lowering, o.routing), buffer(lowering, o.x), lowering.graph.buffers[o.x]
    words = (*routing, count, o.chosen, rows, ends, total, row_of, place_of, first_address, move_address)
    lowering.emit(kernel(kernels.dispatch), *words)
    spread = lowering.emit(kernel(elementwise.select), *x, width, row_memory.shared(("buffer", X), places * x[1]), x[1], row_of)
    lowering.rows[spread][1] = total
    for table, parts in zip(stages.tables, stages.parts, strict=True):
        lowering.emit(kernel(kernels.each), int(table.ctypes.data), count, 8 * ROW_WORDS, parts=parts)
    out = buffer(lowering, o.out)
    y = (row_memory.shared(("buffer", Y), places * out[1]), out[1])
    lowering.emit(kernel(kernels.gather_add), *y, lowering.graph.buffers[o.out], *out, *routing, o.chosen, place_of)
    lowering.wrote(o.out)


def lowered(lowering: Lowering, o: op.Experts, memory: RowMemory, rows: int) -> Stages:
    """The table rows of every expert; `rows`: where the numbers of their rows will be.

    UnsupportedError: the experts' layers do not have the same parts.
    """
    hidden, size = lowering.graph.buffers[o.x], len(o.downs)
    buffers = {X: hidden, "gate_up": 2 * o.width, INNER: o.width, Y: lowering.graph.buffers[o.out]}
    options = replace(lowering.options, max_rows=memory.rows, max_logits=1)
    stages: Stages | None = None
    for expert in range(size):
        graph = replace(lowering.graph, buffers=buffers, operations=tuple(operations(o, expert)), result=Y)
        arrays = replace(lowering.arrays, rows=rows + 8 * expert)
        one = type(lowering)(graph, lowering.file, options, lowering.isa, memory, arrays)
        # The table rows of an expert do not stand behind one another, and a thread's row is not one of its places.
        one.joins = False
        one.lower()
        if stages is None:
            empty = [lowering.memory.array(size * ROW_WORDS, np.int64)[0].reshape(size, ROW_WORDS) for _ in one.rows]
            stages = Stages(empty, [[] for _ in one.rows], [1] * len(one.rows), [])
        if len(one.rows) != len(stages.tables):
            raise UnsupportedError(
                f"{o.downs[expert].name}: its expert has other parts than the first one; run with --target reference"
            )
        moves = []
        for stage, (table, words) in enumerate(zip(stages.tables, one.rows, strict=True)):
            table[expert, : len(words)] = words
            stages.functions[stage].append(one.functions[stage])
            stages.parts[stage] = max(stages.parts[stage], one.decode_parts[stage])
            steps = ((index, memory.row_bytes_at(value)) for index, value in enumerate(words))
            address = int(table[expert].ctypes.data)
            moves += [(address + 8 * index, words[index], step) for index, step in steps if step]
        stages.moves.append(moves)
    assert stages is not None
    return stages


def operations(o: op.Experts, expert: int) -> Iterator[op.Operation]:
    """down(silu(gate x) * up x) of one expert, over its own buffers."""
    offset = 0
    for layer in o.projections[expert]:
        yield op.Linear(o.layer, X, layer, "gate_up", offset)
        offset += layer.rows
    yield op.SwiGlu(o.layer, "gate_up", o.width, INNER)
    yield op.Linear(o.layer, INNER, o.downs[expert], Y)


def gated_add(lowering: Lowering, o: op.GatedAdd) -> None:
    width, gate = lowering.graph.buffers[o.out], buffer(lowering, o.gate)
    lowering.emit(kernel(kernels.gated_add), *buffer(lowering, o.x), width, *buffer(lowering, o.out), *gate)
    lowering.wrote(o.out)
