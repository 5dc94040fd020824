"""Records of the kernels over whole rows: embeddings, norms, activations, the choice of rows, the largest numbers of rows.

Widths and strides are numbers of a row; rows lie one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.targets.cuda.arguments.record import Address, Arguments, Float32, Int32, suffixed
from edgeq.targets.cuda.arguments.weights import WeightArguments


@dataclass(frozen=True, kw_only=True)
class EmbedArguments(Arguments):
    """which   i32 [tokens], rows of the table
    out     f32 [tokens][columns]
    groups  of a row of the table; `group`: channels of one, 0: all
    """

    which: Address
    weight: WeightArguments
    out: Address
    columns: Int32
    groups: Int32
    group: Int32


@dataclass(frozen=True, kw_only=True)
class EmbedFloatArguments(Arguments):
    """which   i32 [tokens], rows of the table
    q       the table in its codec, in file order
    out     f32 [tokens][columns]
    """

    which: Address
    q: Address
    out: Address
    columns: Int32


@dataclass(frozen=True, kw_only=True)
class RmsNormArguments(Arguments):
    """x, out   f32 [tokens][width];  gain: f32 [width]
    add      1: the result is added to `out`
    """

    x: Address
    gain: Address
    out: Address
    width: Int32
    add: Int32
    eps: Float32


@dataclass(frozen=True, kw_only=True)
class LayerNormArguments(Arguments):
    """x, out   f32 [tokens][width];  gain, bias: f32 [width]"""

    x: Address
    gain: Address
    bias: Address
    out: Address
    width: Int32
    eps: Float32


@dataclass(frozen=True, kw_only=True)
class ActivateArguments(Arguments):
    """x     f32 [tokens][stride]: `width` numbers, and where gated as many of the other factor
    out   f32 [tokens][width]
    """

    x: Address
    out: Address
    stride: Int32
    width: Int32


@dataclass(frozen=True, kw_only=True)
class ActivateClampedArguments(ActivateArguments):
    """alpha   of the sigmoid;  limit: of the first factor at most, and of the size of the second"""

    alpha: Float32
    limit: Float32


@dataclass(frozen=True, kw_only=True)
class ScaleArguments(Arguments):
    """x, out   f32 [tokens][width]
    add      1: the result is added to `out`
    """

    x: Address
    out: Address
    width: Int32
    add: Int32
    factor: Float32


@dataclass(frozen=True, kw_only=True)
class ArrayScaleArguments(Arguments):
    """x   f32 [tokens][width], in place;  factor: f32 [1]"""

    x: Address
    factor: Address
    width: Int32


@dataclass(frozen=True, kw_only=True)
class SoftCapArguments(Arguments):
    """x   f32 [tokens][width], in place"""

    x: Address
    width: Int32
    cap: Float32


@dataclass(frozen=True, kw_only=True)
class LimitArguments(Arguments):
    """x     f32 [tokens][stride], of which `width` numbers from the address on are read
    out   f32 [tokens][out_stride], of which as many from the address on are written; it may be x
    """

    x: Address
    out: Address
    stride: Int32
    out_stride: Int32
    width: Int32
    least: Float32
    most: Float32


@dataclass(frozen=True, kw_only=True)
class RowMeanArguments(Arguments):
    """x   f32 [tokens][count][width];  out: f32 [tokens][width]"""

    x: Address
    out: Address
    count: Int32
    width: Int32


@dataclass(frozen=True, kw_only=True)
class ScaleShiftArguments(Arguments):
    """x   f32 [tokens][width], in place;  scale, shift: f32 [width]"""

    x: Address
    scale: Address
    shift: Address
    width: Int32


@dataclass(frozen=True, kw_only=True)
class GateArguments(Arguments):
    """x      f32 [tokens][stride], of which the first `width` numbers change
    gate   f32 [tokens][gate_stride], of which `width` numbers from the address on are read
    """

    x: Address
    gate: Address
    stride: Int32
    gate_stride: Int32
    width: Int32


@dataclass(frozen=True, kw_only=True)
class InjectArguments(Arguments):
    """table   f32 [any][stride], of which `width` numbers from `offset` on are taken
    which   i32 [tokens], rows of the table; negative: none
    out     f32 [tokens][width];  add: 1: they are added to what is there
    """

    table: Address
    which: Address
    out: Address
    width: Int32
    stride: Int32
    offset: Int32
    add: Int32


@dataclass(frozen=True, kw_only=True)
class SelectedArguments(Arguments, run=()):
    """x   f32 [any][width];  out: f32 [tokens][width]"""

    x: Address = 0
    out: Address = 0
    width: Int32 = 0


NOTHING_SELECTED = SelectedArguments()


@dataclass(frozen=True, kw_only=True)
class SelectArguments(Arguments):
    """wanted   i32 [tokens], the rows of both buffers that are taken
    second   names end in 2
    """

    wanted: Address
    first: SelectedArguments
    second: SelectedArguments = suffixed("2")


@dataclass(frozen=True, kw_only=True)
class LargestResultArguments(Arguments, run=()):
    """values, ids   f32 and i32 [tokens][slices of a row][count]
    finite        i32 [tokens][slices of a row], whether all numbers of the slice are
    """

    values: Address
    ids: Address
    finite: Address


@dataclass(frozen=True, kw_only=True)
class LargestArguments(Arguments):
    """x        f32 [tokens][width]
    given    i32 [tokens][width], the ids of x, and `sound`, i32 [tokens][sounds], whether what x came from is finite: not read
             by the first launch over a row
    """

    x: Address
    given: Address
    sound: Address
    result: LargestResultArguments
    width: Int32
    sounds: Int32
    count: Int32


@dataclass(frozen=True, kw_only=True)
class DrawArguments(Arguments):
    """values, ids   f32 and i32 [tokens][count], in falling order
    draws         f64 [tokens][5]: temperature, top_k, top_p, min_p, and a number from 0 to 1
    drawn         i32 [tokens]
    """

    values: Address
    ids: Address
    draws: Address
    drawn: Address
    count: Int32


@dataclass(frozen=True, kw_only=True)
class ReadMemoryArguments(Arguments, run=()):
    """x        u32, read by `ctas` blocks of threads in `rounds` rounds
    out      u32 [ctas][128]
    """

    x: Address
    out: Address
    ctas: Int32
    rounds: Int32
