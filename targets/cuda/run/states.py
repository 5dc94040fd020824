"""States of sessions and their snapshots on the device, laid out as targets/state_layout.py says; what a run sends of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.cuda.device.device import Device
from edgeq.targets.cuda.lowering.states import BEGINS, ORDER, SNAPSHOTS, STATES
from edgeq.targets.cuda.run.storage import CudaPart, Pool
from edgeq.targets.rows import PAGE, Rows
from edgeq.targets.state_layout import StateLayout
from edgeq.targets.states import LOG, SessionState, StateSpec


class CudaState(SessionState):
    """part   the memory of all its numbers"""

    __slots__ = ("part",)

    def __init__(self, part: CudaPart, slot: int = 0, written: int = 0) -> None:
        super().__init__(slot, written)
        self.part = part


class States:
    """Makes and fills them; memory grows by one, since they are large, and what was dropped is used again."""

    def __init__(self, device: Device, specs: Sequence[StateSpec]) -> None:
        self._device, self._layout = device, StateLayout(specs)
        self.state_bytes, self.snapshot_bytes = 4 * self._layout.numbers, 4 * self._layout.snapshot_numbers
        self._states, self._snapshots = (Pool(device, size, 1) for size in (self.state_bytes, self.snapshot_bytes))

    @property
    def nbytes(self) -> int:
        return self._states.nbytes + self._snapshots.nbytes

    def state(self, slot: int = 0, written: int = 0) -> CudaState:
        """Zeros, for a session without rows or to be filled."""
        return CudaState(self._states.part(), slot, written)

    def snapshot(self) -> CudaPart:
        return self._snapshots.part()

    def copied(self, state: CudaState) -> CudaState:
        made = self.state(state.slot, state.written)
        self._device.copy(made.part.address, state.part.address, self.state_bytes)
        return made

    def begun(self, snapshot: CudaPart, slot: int) -> CudaState:
        """The states after `slot` rows, a whole number of pages, when the snapshot was taken."""
        made = self.state(slot, slot + LOG)
        for span in self._layout.spans(slot):
            target, source = made.part.address + 4 * span.state, snapshot.address + 4 * span.snapshot
            self._device.copy(target, source, 4 * span.count)
        return made

    def contents(self, part: CudaPart, nbytes: int) -> bytes:
        data = np.empty(nbytes, np.uint8)
        self._device.read(part.address, data)
        return data.tobytes()

    def fill(self, part: CudaPart, data: NDArray[np.uint8], nbytes: int) -> None:
        if len(data) != nbytes:
            raise ValueError(f"{len(data)} bytes for {nbytes}")
        self._device.write(part.address, np.ascontiguousarray(data))


def sent_of_states(rows: Rows, count: int, base: int) -> Mapping[str, NDArray[Any]]:
    """What the kernels of states read of a run, by its name, for `count` rows: those that the run has not have no state.

    rows   with the order in which states take them;  base: the address from which states and snapshots count
    """
    taken, sessions = rows.in_order, len(rows.states)
    assert taken is not None
    order, begins = np.zeros(count, np.int32), np.full(count + 1, taken.begins[-1], np.int32)
    states, snapshots = np.zeros(count, np.int64), np.zeros(count, np.int64)
    begins[: sessions + 1] = taken.begins
    order[: len(taken.order)] = taken.order
    states[:sessions] = [(state.part.address - base) // 4 for state in rows.states if isinstance(state, CudaState)]
    for row in np.flatnonzero(rows.slots % PAGE == PAGE - 1).tolist():
        session = int(rows.sessions[row])
        snapshot = rows.pages[session][int(rows.slots[row]) // PAGE].snapshot if session < sessions else None
        if isinstance(snapshot, CudaPart):
            snapshots[row] = (snapshot.address - base) // 4
    return {ORDER: order, BEGINS: begins, STATES: states, SNAPSHOTS: snapshots}
