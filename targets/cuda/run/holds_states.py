"""What a program does with states between runs: it makes, copies, saves and loads them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.cuda.run.ahead import RunsAhead
from edgeq.targets.cuda.run.states import CudaState, States
from edgeq.targets.cuda.run.storage import CudaPart
from edgeq.targets.rows import PagePart
from edgeq.targets.states import SessionState


class HoldsCudaStates:
    """The part of a program that is a HoldsStates, where its graph has states."""

    _states: States
    _guard: AbstractContextManager[None]
    _ahead: RunsAhead

    @property
    def saved_bytes(self) -> tuple[int, int]:
        return self._states.state_bytes, self._states.snapshot_bytes

    def new_state(self) -> CudaState:
        with self._guard:
            self._ahead.drop()
            return self._states.state()

    def new_snapshot(self) -> CudaPart:
        with self._guard:
            self._ahead.drop()
            return self._states.snapshot()

    def fork_state(self, state: SessionState) -> CudaState:
        assert isinstance(state, CudaState)
        with self._guard:
            self._ahead.drop()
            return self._states.copied(state)

    def start_from(self, snapshot: PagePart, slot: int) -> CudaState:
        assert isinstance(snapshot, CudaPart)
        with self._guard:
            self._ahead.drop()
            return self._states.begun(snapshot, slot)

    def save_state(self, state: SessionState) -> bytes:
        assert isinstance(state, CudaState)
        with self._guard:
            return self._states.contents(state.part, self._states.state_bytes)

    def load_state(self, data: NDArray[np.uint8], slot: int, written: int) -> CudaState:
        with self._guard:
            self._ahead.drop()
            state = self._states.state(slot, written)
            self._states.fill(state.part, data, self._states.state_bytes)
            return state

    def save_snapshot(self, snapshot: PagePart) -> bytes:
        assert isinstance(snapshot, CudaPart)
        with self._guard:
            return self._states.contents(snapshot, self._states.snapshot_bytes)

    def load_snapshot(self, data: NDArray[np.uint8]) -> CudaPart:
        with self._guard:
            self._ahead.drop()
            snapshot = self._states.snapshot()
            self._states.fill(snapshot, data, self._states.snapshot_bytes)
            return snapshot
