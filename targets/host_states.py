"""The states of sessions in host memory, as state_layout.py has them: what the targets there share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.rows import PagePart
from edgeq.targets.state_layout import StateLayout
from edgeq.targets.states import LOG, SessionState, StateSpec

ArrayF32 = NDArray[np.float32]


class HostState(SessionState):
    """data   float32, all numbers."""

    __slots__ = ("data",)

    def __init__(self, data: ArrayF32, slot: int = 0, written: int = 0) -> None:
        super().__init__(slot, written)
        self.data = data

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)


class HostSnapshot(PagePart):
    """data   float32, all numbers."""

    __slots__ = ("data",)

    def __init__(self, data: ArrayF32) -> None:
        self.data = data

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)


class HostStates:
    """The part of a program that makes, copies, saves and loads states.

    places   of the states of the graph
    """

    def __init__(self, specs: Sequence[StateSpec], zeros: Callable[[int], NDArray[np.uint8]]) -> None:
        """`zeros`: so many zero bytes."""
        self._layout, self._zeros = StateLayout(specs), zeros
        self.places = self._layout.places

    @property
    def saved_bytes(self) -> tuple[int, int]:
        """As HoldsStates."""
        return 4 * self._layout.numbers, 4 * self._layout.snapshot_numbers

    def new_state(self) -> HostState:
        return HostState(self._zeros(self.saved_bytes[0]).view(np.float32))

    def new_snapshot(self) -> HostSnapshot:
        return HostSnapshot(self._zeros(self.saved_bytes[1]).view(np.float32))

    def fork_state(self, state: SessionState) -> HostState:
        assert isinstance(state, HostState)
        return self._filled(state.data, state.slot, state.written)

    def start_from(self, snapshot: PagePart, slot: int) -> HostState:
        assert isinstance(snapshot, HostSnapshot)
        state = HostState(self._zeros(self.saved_bytes[0]).view(np.float32), slot, slot + LOG)
        for span in self._layout.spans(slot):
            numbers = snapshot.data[span.snapshot : span.snapshot + span.count]
            state.data[span.state : span.state + span.count] = numbers
        return state

    def save_state(self, state: SessionState) -> bytes:
        assert isinstance(state, HostState)
        return state.data.astype("<f4").tobytes()

    def load_state(self, data: NDArray[np.uint8], slot: int, written: int) -> HostState:
        return self._filled(_floats(data, self._layout.numbers), slot, written)

    def save_snapshot(self, snapshot: PagePart) -> bytes:
        assert isinstance(snapshot, HostSnapshot)
        return snapshot.data.astype("<f4").tobytes()

    def load_snapshot(self, data: NDArray[np.uint8]) -> HostSnapshot:
        return HostSnapshot(_floats(data, self._layout.snapshot_numbers))

    def _filled(self, numbers: ArrayF32, slot: int, written: int) -> HostState:
        state = HostState(self._zeros(self.saved_bytes[0]).view(np.float32), slot, written)
        state.data[:] = numbers
        return state


def _floats(data: NDArray[np.uint8], count: int) -> ArrayF32:
    if len(data) != 4 * count:
        raise ValueError(f"{len(data)} bytes for {4 * count}")
    return np.asarray(data.view("<f4"), np.float32)
