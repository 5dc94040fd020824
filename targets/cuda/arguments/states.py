"""Records of the kernels of layers with a state, which takes the rows of a session one after another."""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.targets.cuda.arguments.record import Address, Arguments, Int32


@dataclass(frozen=True, kw_only=True)
class StateRowsArguments(Arguments, run=()):
    """The rows of a run as states take them (run/states.py), and where one state of the graph lies (state_layout.py).

    order      i32 [tokens], token rows by session and slot
    begins     i32 [sessions + 1], where those of each session begin in `order`
    slots      i32 [tokens], places of token rows in their session
    states     i64 [sessions], where the states of each session begin, in numbers
    snapshots  i64 [tokens], where the snapshot begins that is taken after a token row, in numbers; 0: none
    state, snapshot   numbers before those of this state, in the states of a session and in a snapshot
    """

    order: Address
    begins: Address
    slots: Address
    states: Address
    snapshots: Address
    state: Int32
    snapshot: Int32


@dataclass(frozen=True, kw_only=True)
class ShortConvArguments(Arguments, run=("sessions", "numbers")):
    """x        f32 [tokens][stride]: `width` channels, of a gated one b, c and u of as many each
    weight   f32 [width][taps];  bias: f32 [width], read where `has_bias`
    out      f32 [tokens][width]
    padded   numbers of a row of the state and of a snapshot
    """

    x: Address
    weight: Address
    bias: Address
    out: Address
    rows: StateRowsArguments
    stride: Int32
    width: Int32
    padded: Int32
    taps: Int32
    has_bias: Int32
