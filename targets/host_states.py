"""The states of sessions in host memory: what the targets there share.

All numbers are float32, one state of the graph after another, rows padded to 16 with zeros:

    "sum"    in a state [2] of S, before an even log and before an odd one, and [2 LOG] rows of logs, that of slot s at s modulo
             2 LOG; in a snapshot S
    "tail"   in a state [rows + LOG] inputs, that of slot s at s modulo their number; in a snapshot [rows], oldest first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.rows import PagePart
from edgeq.targets.states import LOG, SessionState, StateSpec

ArrayF32 = NDArray[np.float32]
LANES = 16


class StatePlace(NamedTuple):
    """Where a state of the graph begins, in numbers: in the states of a session, its log there, and in a snapshot."""

    state: int
    log: int
    snapshot: int


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


def padded_rows(spec: StateSpec) -> int:
    """Numbers of S, or of the inputs, with padding."""
    return prod(spec.shape[:-1]) * padded_width(spec.shape[-1])


def padded_width(width: int) -> int:
    return -(-width // LANES) * LANES


class HostStates:
    """The part of a program that makes, copies, saves and loads states.

    places   of the states of the graph
    """

    def __init__(self, specs: Sequence[StateSpec], zeros: Callable[[int], NDArray[np.uint8]]) -> None:
        """`zeros`: so many zero bytes."""
        self._specs, self._zeros = specs, zeros
        held, logs = [], []
        for spec in specs:
            tail = spec.kind == "tail"
            held.append((spec.shape[0] + LOG) * padded_width(spec.shape[1]) if tail else 2 * padded_rows(spec))
            logs.append(2 * LOG * padded_width(spec.log))
        begins = list(accumulate((sum(each) for each in zip(held, logs, strict=True)), initial=0))
        snapshots = list(accumulate(map(padded_rows, specs), initial=0))
        self.places = [StatePlace(*each) for each in zip(begins, map(sum, zip(begins, held)), snapshots)]  # noqa: B905
        self._numbers, self._snapshot_numbers = begins[-1], snapshots[-1]

    @property
    def saved_bytes(self) -> tuple[int, int]:
        """As HoldsStates."""
        return 4 * self._numbers, 4 * self._snapshot_numbers

    def new_state(self) -> HostState:
        return HostState(self._zeros(4 * self._numbers).view(np.float32))

    def new_snapshot(self) -> HostSnapshot:
        return HostSnapshot(self._zeros(4 * self._snapshot_numbers).view(np.float32))

    def fork_state(self, state: SessionState) -> HostState:
        assert isinstance(state, HostState)
        return self._filled(state.data, state.slot, state.written)

    def start_from(self, snapshot: PagePart, slot: int) -> HostState:
        assert isinstance(snapshot, HostSnapshot)
        state = HostState(self._zeros(4 * self._numbers).view(np.float32), slot, slot + LOG)
        for spec, place in zip(self._specs, self.places, strict=True):
            numbers = snapshot.data[place.snapshot : place.snapshot + padded_rows(spec)]
            if spec.kind == "sum":
                begin = place.state + slot // LOG % 2 * len(numbers)
                state.data[begin : begin + len(numbers)] = numbers
            else:
                rows, width = spec.shape[0], padded_width(spec.shape[1])
                ring = state.data[place.state : place.state + (rows + LOG) * width].reshape(rows + LOG, width)
                ring[np.arange(slot - rows, slot) % (rows + LOG)] = numbers.reshape(rows, width)
        return state

    def save_state(self, state: SessionState) -> bytes:
        assert isinstance(state, HostState)
        return state.data.astype("<f4").tobytes()

    def load_state(self, data: NDArray[np.uint8], slot: int, written: int) -> HostState:
        return self._filled(_floats(data, self._numbers), slot, written)

    def save_snapshot(self, snapshot: PagePart) -> bytes:
        assert isinstance(snapshot, HostSnapshot)
        return snapshot.data.astype("<f4").tobytes()

    def load_snapshot(self, data: NDArray[np.uint8]) -> HostSnapshot:
        found = self.new_snapshot()
        found.data[:] = _floats(data, self._snapshot_numbers)
        return found

    def _filled(self, numbers: ArrayF32, slot: int, written: int) -> HostState:
        state = HostState(self._zeros(4 * self._numbers).view(np.float32), slot, written)
        state.data[:] = numbers
        return state


def _floats(data: NDArray[np.uint8], count: int) -> ArrayF32:
    if len(data) != 4 * count:
        raise ValueError(f"{len(data)} bytes for {4 * count}")
    return np.asarray(data.view("<f4"), np.float32)
