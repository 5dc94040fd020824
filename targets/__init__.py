"""Where a model runs: the targets by name, and the choice among them.  `target.py` says what a target is."""

from collections.abc import Sequence
from dataclasses import dataclass

from edgeq.errors import UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.targets.target import Absence, Target

TARGETS = ("cuda", "cpu", "reference")
"""In order of preference."""


@dataclass(frozen=True)
class TargetChoice:
    """The chosen target, and why those before it were refused that this machine has something for."""

    target: Target
    refused: Sequence[tuple[str, str]]


def load(name: str) -> Target:
    """The target of that name; a target is imported when it is first asked for."""
    if name == "cuda":
        from edgeq.targets.cuda import CudaTarget

        return CudaTarget()
    if name == "cpu":
        from edgeq.targets.cpu import CpuTarget

        return CpuTarget()
    if name == "reference":
        from edgeq.targets.reference import ReferenceTarget

        return ReferenceTarget()
    raise UnsupportedError(f"target {name!r} is not known; supported: {', '.join(TARGETS)}")


def pick(name: str | None = None, file: ModelFile | None = None) -> TargetChoice:
    """The named target, or the first of TARGETS that this machine can use, for `file` if one is given.

    UnsupportedError: the named target is unknown or refused, with its reason.
    """
    refused: list[tuple[str, str]] = []
    for candidate in (name,) if name else TARGETS:
        target = load(candidate)
        reason = target.refusal(file)
        if reason is None:
            return TargetChoice(target, [each for each in refused if not isinstance(each[1], Absence)])
        refused.append((candidate, reason))
    reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in refused)
    raise UnsupportedError(f"no target can run here: {reasons}")
