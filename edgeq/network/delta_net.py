"""Layers of a gated delta net in place of attention: their sizes, as a file holds them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from edgeq.errors import FormatError
from edgeq.network.json_records import check_flag, check_integer, check_positive, known, list_of

UNIT_EPS = 1e-6
"""Added to the sum of the squares of a query and of a key before they are divided by its root."""
MAX_HEADS = 2_048
MAX_DIM = 1_024
MAX_TAPS = 64
"""The longest convolution over tokens."""
MAX_CHANNELS = 1 << 20
"""The most channels of queries, keys and values together."""
NEWER_FIELDS = {"allow_neg_eigval": False, "norm_eps": None}
"""Fields that came after the first files, written only where they are not these."""


@dataclass(frozen=True)
class DeltaNet:
    """A state of a matrix for each value head, which a token changes where its key points (Yang et al. 2024, arXiv 2412.06464).

    layers                   indices of the layers that have it in place of attention, ascending, not all of them
    key_heads, value_heads   value head h reads queries and keys of head h // (value_heads / key_heads)
    key_dim, value_dim       channels of a head of queries and of keys, and of values
    taps                     tokens that the convolution over queries, keys and values sees, their own included
    allow_neg_eigval         beta is twice the sigmoid, so that a token may turn around what its key points at (Grazzi et al.
                             2024, arXiv 2411.12537; OLMo-Hybrid)
    norm_eps                 of the norm over what a head gives; None: that of all norms
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    allow_neg_eigval: bool = False
    norm_eps: float | None = None

    LIMITS: ClassVar[dict[str, tuple[int, int]]] = {
        "key_heads": (1, MAX_HEADS),
        "value_heads": (1, MAX_HEADS),
        "key_dim": (1, MAX_DIM),
        "value_dim": (1, MAX_DIM),
        "taps": (2, MAX_TAPS),
    }

    def __post_init__(self) -> None:
        for name, (least, most) in self.LIMITS.items():
            check_integer(f"delta_net.{name}", getattr(self, name), least, most)
        check_flag("delta_net.allow_neg_eigval", self.allow_neg_eigval)
        if self.norm_eps is not None:
            check_positive("delta_net.norm_eps", self.norm_eps)
        if self.value_heads % self.key_heads:
            raise FormatError(
                f"config delta_net has {self.value_heads} value heads and {self.key_heads} key heads; the first must be a "
                "multiple of the second"
            )
        if self.channels > MAX_CHANNELS:
            raise FormatError(f"config delta_net has {self.channels} channels; expected at most {MAX_CHANNELS}")
        if not self.layers:
            raise FormatError("config delta_net has no layers")

    @property
    def beta_scale(self) -> float:
        """The factor of the sigmoid in beta."""
        return 2.0 if self.allow_neg_eigval else 1.0

    def record(self) -> dict[str, Any]:
        """What JSON holds of it."""
        return {key: value for key, value in asdict(self).items() if key not in NEWER_FIELDS or value != NEWER_FIELDS[key]}

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values side by side, which the convolution takes."""
        return 2 * self.key_size + self.value_size

    @classmethod
    def read(cls, data: Any, where: str, layers: int) -> DeltaNet:
        """FormatError, UnsupportedError: a key or a value that cannot be one, or more than `layers` layers."""
        values = dict(data) if isinstance(data, dict) else data
        found = list_of(values, "layers", layers, where) if isinstance(values, dict) else ()
        return cls(layers=found, **known(cls, values, where, frozenset({"layers"})))
