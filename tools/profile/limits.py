"""What bounds an operation on this machine: bytes per second from memory, integer operations per second from registers.

Williams et al. 2009, "Roofline": an operation that reads B bytes and computes N operations takes at least the larger of B over
the read bandwidth and N over the peak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgeq.format.records import Mode
from edgeq.runtime import Model
from edgeq.targets import load
from edgeq.tools.profile.work import Work


@dataclass(frozen=True)
class MachineLimits:
    """bytes_per_s: that threads read from memory;  operations_per_s: of the activations' width, a MAC being two."""

    threads: int
    bytes_per_s: float
    operations_per_s: float

    def least_seconds(self, work: Work) -> float:
        """The time that the work takes at least."""
        return max(work.bytes / self.bytes_per_s, 2 * work.macs / self.operations_per_s)

    def bound(self, work: Work) -> str:
        """What that time is spent on: "memory" or "integers"."""
        return "memory" if work.bytes / self.bytes_per_s >= 2 * work.macs / self.operations_per_s else "integers"


PEAK_SHARE: dict[Mode, float] = {"a16": 0.5, "a8": 1.0, "a4": 1.0}
"""Share of the peak of 8-bit operations: one of 16 bits takes two of them, and is done by dot products."""


def limits(model: Model, refresh: bool) -> dict[str, MachineLimits]:
    """Limits by phase, of which those of several rows may have other threads; empty where the target measures none.

    refresh   the bandwidth is measured again; the larger of the old and the new number counts
    """
    program = model.program
    mode = program.options.mode
    found = {n: limits_of(model, n, mode, refresh) for n in {program.threads, program.options.threads_prefill}}
    decode, prefill = found[program.threads], found[program.options.threads_prefill]
    if decode is None or prefill is None:
        return {}
    # Drafts are made in a mode of 8 bits or fewer.
    draft = replace(decode, operations_per_s=decode.operations_per_s / PEAK_SHARE[mode])
    return {"decode": decode, "draft": draft, "prefill": prefill, "verify": prefill, "tower": prefill}


def limits_of(model: Model, threads: int, mode: Mode, refresh: bool = False) -> MachineLimits | None:
    """Limits with so many threads in a mode, for the instruction set of the model; None: the target measures none."""
    here = load(model.target).hardware()
    peak = here.integer_peak(threads, model.program.options.isa)
    read = here.read_bandwidth(threads, refresh)
    return None if peak is None or read is None else MachineLimits(threads, read.bytes_per_s, PEAK_SHARE[mode] * peak)
