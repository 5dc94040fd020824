"""What this machine has for a target, and how fast it is: for tools that show and predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver lists it.

    sm               compute capability, 87 for 8.7
    memory           bytes
    refused          why edgeq cannot use it, whatever the file; None if it can
    driver           CUDA version of the driver, 12060 for 12.6; 0: not known
    read_bandwidth   bytes per second that a run measured; None: none has
    """

    ordinal: int
    name: str
    sm: int
    multiprocessors: int
    memory: int
    integrated: bool
    refused: str | None
    driver: int = 0
    read_bandwidth: float | None = None


@dataclass(frozen=True)
class InstructionSet:
    """Instructions that a target has kernels for.

    name, label   as options take it, and as people call it
    missing       what the processor lacks for it
    refused       why it cannot be asked for here; None if it can
    reason        why it is the one that is used here; None: it is not
    """

    name: str
    label: str
    missing: tuple[str, ...]
    refused: str | None
    reason: str | None


class Bandwidth(NamedTuple):
    """Bytes per second that are read.  `in_cache`: memory has no room to read more than the largest cache holds."""

    bytes_per_s: float
    in_cache: bool


class Hardware:
    """What a target finds of it.  Here: nothing, for a target that asks for none of it."""

    def instruction_sets(self) -> Sequence[InstructionSet]:
        """All that the target has kernels for, the best first."""
        return ()

    def kernel_version(self) -> tuple[str, ...]:
        """What the speed of kernels depends on beside the machine: their instruction set, the digest of their sources."""
        return ()

    def read_bandwidth(self, threads: int, refresh: bool = False) -> Bandwidth | None:
        """How fast so many threads read memory, measured in about a second unless known; None: it is not measured."""
        return None

    def integer_peak(self, threads: int, isa: str | None = None) -> float | None:
        """8-bit operations per second of so many threads from registers, a multiplication and an addition being two, measured
        in half a second unless known; None: it is not measured.

        isa   None: the one that is used here
        """
        return None
