"""What some programs can do beside running rows: keep states, requantize weights, find the largest numbers of a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgeq.format.records import Mode
from edgeq.targets.requantization import InputSums, Weights
from edgeq.targets.rows import PagePart, Rows
from edgeq.targets.states import SessionState
from edgeq.targets.target import Program


@runtime_checkable
class HoldsStates(Program, Protocol):
    """A Program of a graph with states (states.py)."""

    def new_state(self) -> SessionState:
        """The states of a session without rows.  ResourceError: there is no memory for them."""
        ...

    def fork_state(self, state: SessionState) -> SessionState:
        """States of their own with the same contents."""
        ...

    def new_snapshot(self) -> PagePart:
        """Room for a snapshot, as `Page.snapshot`."""
        ...

    def start_from(self, snapshot: PagePart, slot: int) -> SessionState:
        """The states as they were when they had taken `slot` rows, a whole number of pages: then the snapshot was taken."""
        ...

    def save_state(self, state: SessionState) -> bytes:
        """Its contents for `load_state` of the same target and model: always as many bytes."""
        ...

    def load_state(self, data: NDArray[np.uint8], slot: int, written: int) -> SessionState:
        """States with contents that `save_state` gave.  ValueError: another number of bytes."""
        ...

    def save_snapshot(self, snapshot: PagePart) -> bytes:
        """Its contents for `load_snapshot` of the same target and model: always as many bytes."""
        ...

    def load_snapshot(self, data: NDArray[np.uint8]) -> PagePart:
        """A snapshot with contents that `save_snapshot` gave; it may keep `data`.  ValueError: another number of bytes."""
        ...

    @property
    def saved_bytes(self) -> tuple[int, int]:
        """How many bytes `save_state` and `save_snapshot` give."""
        ...


@runtime_checkable
class Requantizable(Program, Protocol):
    """A Program whose target can also requantize weights for a prompt (requantization.py)."""

    def new_sums(self) -> InputSums:
        """Zeros, for `run_summing`."""
        ...

    def new_weights(self) -> Weights:
        """Room for the requantized weights of all layers with a master."""
        ...

    def requantize(self, weights: Weights, scales: Sequence[NDArray[np.float32]]) -> None:
        """Fill `weights` from the masters: W diag(s) rounded in the codec of the layer's own weights, and 1/s for its input.

        scales   s float32 [columns] of every shared input, in the order of `InputSums.inputs`

        No more than one layer's master stays in memory.  UnsupportedError: a master that cannot be read.
        """
        ...

    def run_requantized(self, rows: Rows, weights: Weights, mode: Mode | None = None) -> NDArray[np.float32]:
        """`Program.run` with requantized weights instead of the file's."""
        ...

    def run_summing(self, rows: Rows, sums: InputSums, mode: Mode | None = None) -> NDArray[np.float32]:
        """`Program.run` in which layers with a master use it, and the squares of their inputs are added to `sums`.

        They are added in the order of the rows.
        """
        ...


class Largest(NamedTuple):
    """The largest numbers of rows of a result, in order, equals in the order of their ids.

    ids      int32 [rows, count];  values: float32 [rows, count]
    finite   bool [rows]: all numbers of the row are; where one is not, its ids and values mean nothing
    """

    ids: NDArray[np.int32]
    values: NDArray[np.float32]
    finite: NDArray[np.bool_]


class Draw(NamedTuple):
    """How the token after a row is drawn from its largest numbers, by the formulas of runtime/sampling.py.

    temperature   0: it is the largest
    uniforms      numbers from 0 to, and without, 1: of this draw, and of the one after the token that it gives
    """

    temperature: float = 0.0
    top_k: int = 1
    top_p: float = 1.0
    min_p: float = 0.0
    uniforms: tuple[float, float] = (0.0, 0.0)


@runtime_checkable
class FindsLargest(Program, Protocol):
    """A Program whose device finds the largest numbers of its result, so that the host need not have all of it.

    largest_rows   of a result, at most
    """

    largest_rows: int

    def run_largest(
        self, rows: Rows, count: int, mode: Mode | None = None, weights: Weights | None = None, *, ahead: Sequence[Draw] = ()
    ) -> Largest:
        """The `count` largest numbers of each row of what `run` gives, with requantized weights if there are some.

        ahead   how the next token of each row's session is likely to be drawn, whose pages have room for it: a device may
                draw it too, and start the run of that token before the host has seen it

        Valid until the next run.  ValueError: more than `most_largest`, or none, or of more than `largest_rows` rows.
        """
        ...
