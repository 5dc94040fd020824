"""Which instruction set this machine runs: the best that its processor has, unless a user asks for another."""

from __future__ import annotations

from edgeq.errors import UnsupportedError
from edgeq.system import machine
from edgeq.system.measurements import OnMeasure
from edgeq.targets.cpu import probes
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.isa.isa import Isa

MIN_GAIN = 1.05
"""The gain of Winograd's method over plain products, in registers: where bytes are added in the units that multiply they
lose."""


def choose(name: str | None = None, on_measure: OnMeasure = lambda: None) -> tuple[Isa, str]:
    """The instruction set to use and the reason, for people; `on_measure` is called if that takes a measurement.

    UnsupportedError: `name` is unknown, or this processor lacks what it needs.
    """
    isas, features = all_isas(), machine.cpu().features
    if name is not None:
        for isa in isas:
            if isa.name == name:
                if missing := isa.missing(features):
                    here = ", ".join(i.name for i in isas if not i.missing(features))
                    raise UnsupportedError(
                        f"isa {name} needs {', '.join(missing)}, which this processor does not have; it can run {here}"
                    )
                return isa, "asked for"
        raise UnsupportedError(f"isa {name!r} is not known; supported: {', '.join(isa.name for isa in isas)}")
    passed: list[str] = []
    for isa in isas:
        if isa.machines and machine.cpu().arch not in isa.machines:
            continue
        missing = isa.missing(features)
        if not missing and (not isa.winograd or probes.winograd_gain(on_measure) >= MIN_GAIN):
            return isa, "the best this processor has" if not passed else "; ".join(passed)
        if not (isa.winograd or isa.matrix_unit):
            passed.append(f"no {isa.name}: the processor lacks {', '.join(missing)}")
    raise AssertionError("the portable set needs nothing")
