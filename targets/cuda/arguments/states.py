"""Records of the kernels of layers with a state, which takes the rows of a session one after another, and of their gates."""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.targets.cuda.arguments.record import Address, Arguments, Float32, Int32


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


@dataclass(frozen=True, kw_only=True)
class RowBeforeArguments(Arguments, run=("sessions", "numbers")):
    """x        f32 [tokens][stride], of which `width` channels are kept; not read where nothing is
    out      f32 [tokens][width]
    padded   numbers of a row of the state
    """

    x: Address
    out: Address
    rows: StateRowsArguments
    stride: Int32
    width: Int32
    padded: Int32


@dataclass(frozen=True, kw_only=True)
class StateScanArguments(Arguments, run=("sessions", "numbers")):
    """A delta rule, or the scan of a state space, which has B for keys, C for queries and u for values.

    x           f32 [tokens][stride]: from q_first and k_first on queries and keys of `dim` channels, each for of_keys heads;
                from v_first on values [heads][value_dim]
    rates       f32 [tokens][rates_stride]: of a delta rule b and a [heads], of a state space dt [heads]
    decay       f32 [heads], -exp(decay_log);  dt_bias: f32 [heads];  skip: f32 [heads], read of a state space
    out         f32 [tokens][heads * value_dim]
    value_row   value_dim, padded
    log         numbers before the log in the states of a session, and log_row those of its rows: keys, each for `shared` heads,
                from log_values on what rows added [heads][value_row], and from log_g on logarithms of decays [heads]
    query_scale, beta_scale   factors of queries, and of beta in a delta rule;  least, most: limits of the step of a state space
    """

    x: Address
    rates: Address
    decay: Address
    dt_bias: Address
    skip: Address
    out: Address
    rows: StateRowsArguments
    stride: Int32
    rates_stride: Int32
    heads: Int32
    dim: Int32
    value_dim: Int32
    value_row: Int32
    of_keys: Int32
    shared: Int32
    q_first: Int32
    k_first: Int32
    v_first: Int32
    log: Int32
    log_row: Int32
    log_values: Int32
    log_g: Int32
    query_scale: Float32
    beta_scale: Float32
    least: Float32
    most: Float32


@dataclass(frozen=True, kw_only=True)
class GatedNormArguments(Arguments):
    """x, out     f32 [tokens][heads * head_dim];  gate: f32 [tokens][gate_stride], of which as many numbers are read
    gain       f32 [head_dim], or [heads * head_dim] where gain_step is head_dim in place of 0
    """

    x: Address
    gate: Address
    gain: Address
    out: Address
    gate_stride: Int32
    heads: Int32
    head_dim: Int32
    gain_step: Int32
    eps: Float32
