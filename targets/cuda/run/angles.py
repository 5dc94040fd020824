"""Cosines and sines of rotary positions: tables on the device, from which kernels read the row of a position.

They are computed here, once for a position as long as its row is kept, so that all targets turn by the same angles: those of a
device would differ in their last bits.  A run sends no more than which row each of its token rows reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.cuda.run.storage import Storage
from edgeq.targets.graph import Graph, RopeRotate

NEIGHBOURS = 64
"""Positions whose angles are computed at once, as a text comes to them one by one."""
BLOCKS = 128
"""Blocks of so many positions that are kept, 4 MiB for heads of 128 dimensions; a run of few rows needs no more."""
KEPT = BLOCKS * NEIGHBOURS


@dataclass(frozen=True)
class Angles:
    """What a table is of; fields as of RopeRotate."""

    frequencies: tuple[float, ...]
    factor: float
    axes: tuple[int, ...]

    @classmethod
    def of_operation(cls, op: RopeRotate) -> Angles:
        return cls(op.frequencies, op.factor, op.axes)

    @property
    def row_bytes(self) -> int:
        return 2 * 4 * len(self.frequencies)

    def of(self, positions: NDArray[np.int32]) -> NDArray[np.float32]:
        """[rows][2][pairs] for positions [axes, rows].  Angles are float64: a float32 one is wrong at large positions."""
        axes = np.array(self.axes or (0,) * len(self.frequencies))
        which = positions[axes if len(positions) > 1 else np.zeros_like(axes)]
        angle = np.ascontiguousarray(which.T, np.float64) * np.array(self.frequencies, np.float64)
        return np.stack([(f(angle) * self.factor).astype(np.float32) for f in (np.cos, np.sin)], axis=1)

    def table(self, storage: Storage, rows: int) -> int:
        """The address of the table: rows that are kept, then those of a run that brings its own."""
        return storage.named(self, (KEPT + rows) * self.row_bytes)


class AngleTables:
    """The tables of a program, all with the same positions in the same rows."""

    def __init__(self, graph: Graph, storage: Storage, rows: int) -> None:
        """rows   of a run, at most"""
        found = dict.fromkeys(Angles.of_operation(op) for op in graph.operations if isinstance(op, RopeRotate))
        self._storage, self._tables = storage, {each: each.table(storage, rows) for each in found}
        self._starts: OrderedDict[int, int] = OrderedDict()
        self._last, self._last_start = -1, 0

    def places(self, positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """The rows of the tables for the positions [axes, rows] of a run, int32 [rows]."""
        first = positions[0]
        if bool((positions == first).all()) and len(np.unique(first // NEIGHBOURS)) <= BLOCKS:
            return np.array(self.places_of_text(first.tolist()), np.int32)
        # Of pictures, whose rows and columns differ, or of more positions than are kept.
        for angles, address in self._tables.items():
            self._storage.device.write(address + KEPT * angles.row_bytes, angles.of(positions))
        return np.arange(KEPT, KEPT + len(first), dtype=np.int32)

    def places_of_text(self, positions: Sequence[int]) -> list[int]:
        """Those of rows of text, in at most BLOCKS blocks."""
        return [
            (self._last_start if position // NEIGHBOURS == self._last else self._start(position // NEIGHBOURS))
            + position % NEIGHBOURS
            for position in positions
        ]

    def _start(self, block: int) -> int:
        """The row of the first position of a block.  A run's are the last used, so of its own none makes room for another."""
        start = self._starts.get(block)
        if start is None:
            start = len(self._starts) * NEIGHBOURS
            if start == KEPT:
                # Runs that were started before still read it: the device writes after they have ended.
                _, start = self._starts.popitem(last=False)
            positions = np.arange(block * NEIGHBOURS, (block + 1) * NEIGHBOURS, dtype=np.int32)[None]
            for angles, address in self._tables.items():
                self._storage.device.write(address + start * angles.row_bytes, angles.of(positions))
            self._starts[block] = start
        else:
            self._starts.move_to_end(block)
        self._last, self._last_start = block, start
        return start
