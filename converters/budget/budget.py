"""What a user asks of an allocation: one number, in one of five units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgeq.errors import InputError
from edgeq.system.devices import DeviceSpec

WITHIN = 0.15
"""Share of a prediction by which the measured divergence may differ from it, from 3 to 6 bits per weight."""
MAX_TOKENS = 4096
"""Tokens of the calibration text that divergences are measured on, at most, in whole rows."""
Unit = Literal["bits", "size", "read", "kl", "seconds"]
_OPTIONS: dict[Unit, tuple[str, int]] = {
    "bits": ("--bits {}", 6),
    "size": ("--size {}MB", 4),
    "read": ("--read {}MB", 4),
    "kl": ("--kl {}", 3),
    "seconds": ("--speed {}", 4),
}
"""As on the command line, and how many digits of the number are shown."""


@dataclass(frozen=True)
class Budget:
    """The most that an allocation may take.

    unit        bits: per weight of all linear layers but those of a vision tower, with scales and zero points; size: bytes of
                the file; read: bytes read to decode one token, without the cache; kl: mean KL divergence from the source in
                nats; seconds: of a token on this machine, as its decode times have it
    amount      the number; at 0 or below nothing can be met
    half_grids  whether these are among the codecs to choose from
    trellises   the same of those
    """

    unit: Unit
    amount: float
    half_grids: bool = True
    trellises: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.amount < float("inf"):
            raise InputError(f"{self}: choose a number above 0")

    def __str__(self) -> str:
        """As on the command line."""
        shown = {"size": self.amount / 1e6, "read": self.amount / 1e6, "seconds": 1 / self.amount if self.amount else 0.0}
        option, digits = _OPTIONS[self.unit]
        # 12350 and not 1.235e+04, which no option takes.
        number = np.format_float_positional(shown.get(self.unit, self.amount), digits, fractional=False, trim="-")
        return option.format(number)

    @classmethod
    def of_speed(cls, device: DeviceSpec | None, tokens_per_second: float) -> Budget:
        """The bytes that `device` can read for each token at this speed; None: seconds of a token on this machine.

        Bytes do not bound the speed of trellises on every device (docs/budgets.md), so that they are left out for one.

        InputError: no speed is above 0, or this version does not run on the device.
        """
        if device is not None and not device.supported:
            raise InputError(f"--speed for {device.name}: this version runs on CPUs only; choose --size or --read")
        if not 0 < tokens_per_second < float("inf"):
            raise InputError(f"--speed {tokens_per_second:g}: choose a number of tokens per second above 0")
        if device is None:
            return cls("seconds", 1 / tokens_per_second)
        return cls("read", device.decode_bandwidth / tokens_per_second, trellises=False)
