"""Layers of a state-space model in place of attention, Mamba-2's: their sizes, as a file holds them."""

from __future__ import annotations

import math
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar

from edgeq.errors import FormatError, UnsupportedError
from edgeq.network.delta_net import MAX_CHANNELS, MAX_DIM, MAX_HEADS, MAX_TAPS
from edgeq.network.json_records import check_flag, check_integer, check_positive, known, list_of

NORMS = ("after_gate", "before_gate", "none")
LISTS = ("layers", "mlp_layers")


@dataclass(frozen=True)
class StateSpace:
    """A state of a matrix for each head, which decays and to which a token adds (Dao and Gu 2024, arXiv 2405.21060).

    layers           indices of the layers that have it, ascending; in place of attention not all of them
    heads, head_dim  heads of what the states take and give, and channels of one
    groups           head h reads the B and C of group h // (heads / groups)
    state_dim        channels of B and of C
    taps             tokens that the convolution over x, B and C sees, their own included
    norm_eps         of the norm over what the heads of a group give
    norm             where that norm is: "after_gate", of what was multiplied by the gate (Granite 4); "before_gate"; "none"
    beside_attention   the layers have attention too, which reads the same norm; both are added to the stream (Falcon-H1)
    mlp_layers       indices of layers that are an MLP and nothing else, ascending; the others then have no MLP (Nemotron-H).
                     Empty: every layer has one
    time_step_min, time_step_max   limits of the step; None: it has no upper one
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    norm_eps: float
    time_step_min: float = 0.0
    time_step_max: float | None = None
    norm: str = "after_gate"
    beside_attention: bool = False
    mlp_layers: tuple[int, ...] = ()

    LIMITS: ClassVar[dict[str, tuple[int, int]]] = {
        "heads": (1, MAX_HEADS),
        "head_dim": (1, MAX_DIM),
        "groups": (1, MAX_HEADS),
        "state_dim": (1, MAX_DIM),
        "taps": (2, MAX_TAPS),
    }

    def __post_init__(self) -> None:
        for name, (least, most) in self.LIMITS.items():
            check_integer(f"ssd.{name}", getattr(self, name), least, most)
        check_positive("ssd.norm_eps", self.norm_eps)
        check_flag("ssd.beside_attention", self.beside_attention)
        if self.norm not in NORMS:
            raise UnsupportedError(f"ssd.norm {self.norm!r:.80} is not known; supported: {', '.join(NORMS)}")
        if self.heads % self.groups:
            raise FormatError(
                f"config ssd has {self.heads} heads and {self.groups} groups; the first must be a multiple of the second"
            )
        if self.channels > MAX_CHANNELS:
            raise FormatError(f"config ssd has {self.channels} channels; expected at most {MAX_CHANNELS}")
        if type(self.time_step_min) not in (int, float) or self.time_step_min != 0:
            check_positive("ssd.time_step_min", self.time_step_min)
        if self.time_step_max is not None:
            check_positive("ssd.time_step_max", self.time_step_max)
        shortest, longest = self.time_step_limits
        if shortest >= longest:
            raise FormatError(f"config ssd has time steps from {shortest} to {longest}; the first must be less than the second")
        if not self.layers:
            raise FormatError("config ssd has no layers")
        if set(self.layers) & set(self.mlp_layers):
            raise FormatError("config ssd has mlp_layers among its layers")
        if self.beside_attention and self.mlp_layers:
            raise UnsupportedError("ssd.mlp_layers with beside_attention are not supported")

    @property
    def time_step_limits(self) -> tuple[float, float]:
        return self.time_step_min, math.inf if self.time_step_max is None else self.time_step_max

    def blocks(self, layer: int) -> tuple[bool, bool]:
        """As `Stack.blocks`."""
        alone = layer in self.mlp_layers
        return not alone, alone or not self.mlp_layers

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of x, B and C side by side, which the convolution takes."""
        return self.inner_size + 2 * self.groups * self.state_dim

    def record(self) -> dict[str, Any]:
        """What JSON holds of it."""
        unset = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        return {key: value for key, value in asdict(self).items() if key not in unset or value != unset[key]}

    @classmethod
    def read(cls, data: Any, where: str, layers: int) -> StateSpace:
        """FormatError, UnsupportedError: a key or a value that cannot be one, or more than `layers` layers."""
        values = dict(data) if isinstance(data, dict) else data
        lists: dict[str, Any] = {each: list_of(values, each, layers, where) for each in LISTS if isinstance(values, dict)}
        return cls(**lists, **known(cls, values, where, frozenset(LISTS)))
