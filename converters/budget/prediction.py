"""What an allocation was chosen by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AllocationPrediction:
    """What was predicted of an allocation: its divergence in nats, and the measurements that this follows from."""

    kl: float
    measured: Mapping[str, Mapping[str, float]]
