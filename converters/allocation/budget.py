"""What a user asks of an allocation: one number, in one of four units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgeq.devices import Device
from edgeq.errors import InputError

WITHIN = 0.15
"""Share of a prediction by which the measured divergence may differ from it, from 3 to 6 bits per weight."""
MOST_TOKENS = 4096
"""Tokens of the calibration text that divergences are measured on, at most, in whole rows."""
Unit = Literal["bits", "size", "read", "kl"]
_OPTIONS: dict[Unit, str] = {"bits": "--bits {:g}", "size": "--size {:.4g}MB", "read": "--read {:.4g}MB", "kl": "--kl {:.3g}"}


@dataclass(frozen=True)
class Budget:
    """The most that an allocation may take.

    unit     bits: per weight of all linear layers but those of a vision tower, with scales and zero points; size: bytes of the
             file; read: bytes read to decode one token, without the cache; kl: mean KL divergence from the source in nats
    amount   the number; at 0 or below nothing can be met
    """

    unit: Unit
    amount: float

    def __post_init__(self) -> None:
        if not 0 < self.amount < float("inf"):
            raise InputError(f"{self}: choose a number above 0")

    def __str__(self) -> str:
        """As on the command line."""
        return _OPTIONS[self.unit].format(self.amount / 1e6 if self.unit in ("size", "read") else self.amount)

    @classmethod
    def of_speed(cls, device: Device, tokens_per_second: float) -> Budget:
        """The bytes that `device` can read for each token at this speed.

        InputError: no speed is above 0, or this version does not run on the device.
        """
        if not device.supported:
            raise InputError(f"--speed for {device.name}: this version runs on CPUs only; choose --size or --read")
        if not 0 < tokens_per_second < float("inf"):
            raise InputError(f"--speed {tokens_per_second:g}: choose a number of tokens per second above 0")
        # At 0 or below nothing can be met: the parts say so, and what can.
        return cls("read", max(1.0, device.readable(1 / tokens_per_second)))
