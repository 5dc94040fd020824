"""Records of the kernels of mixtures of experts.

routing is f32 [tokens][2 * chosen]: shares, falling, and after them which experts they are of.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.targets.cuda.arguments.record import Address, Arguments, Float32, Int32


@dataclass(frozen=True, kw_only=True)
class RouteArguments(Arguments):
    """x            f32 [tokens][width], of which the first `experts` numbers are logits
    out          the routing
    normalized   1: shares are divided by their sum
    """

    x: Address
    out: Address
    width: Int32
    experts: Int32
    chosen: Int32
    normalized: Int32


@dataclass(frozen=True, kw_only=True)
class RouteBySigmoidsArguments(Arguments):
    """bias   f32 [experts];  factor: of all shares;  the others: of RouteArguments"""

    x: Address
    bias: Address
    out: Address
    width: Int32
    experts: Int32
    chosen: Int32
    normalized: Int32
    factor: Float32


@dataclass(frozen=True, kw_only=True)
class ShareScaleArguments(Arguments):
    """routing   of which the shares change;  scales: f32 [experts]"""

    routing: Address
    scales: Address
    chosen: Int32


@dataclass(frozen=True, kw_only=True)
class ScatterArguments(Arguments):
    """x        f32 [tokens][width];  out: f32 [any][width]
    places   i32 [tokens], rows of `out`
    """

    x: Address
    places: Address
    out: Address
    width: Int32


@dataclass(frozen=True, kw_only=True)
class GatherAddArguments(Arguments):
    """x     f32 [tokens][chosen][width], results of the chosen experts;  out: f32 [tokens][width], to which they are added"""

    x: Address
    routing: Address
    out: Address
    width: Int32
    chosen: Int32


@dataclass(frozen=True, kw_only=True)
class GatedAddArguments(Arguments):
    """x, out   f32 [tokens][width];  gate: f32 [tokens][stride], of which the first number is read"""

    x: Address
    gate: Address
    out: Address
    width: Int32
    stride: Int32
