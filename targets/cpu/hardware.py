"""The processor as a target shows it: instruction sets, bandwidth and peak."""

from __future__ import annotations

from collections.abc import Sequence

from edgeq.errors import UnsupportedError
from edgeq.system import machine
from edgeq.targets.cpu import probes
from edgeq.targets.cpu.choose_isa import choose
from edgeq.targets.cpu.isa import all_isas
from edgeq.targets.cpu.jit.compile import cache_folder
from edgeq.targets.hardware import Bandwidth, Hardware, InstructionSet


class CpuHardware(Hardware):
    """Measured by kernels of the target itself."""

    def instruction_sets(self) -> Sequence[InstructionSet]:
        (chosen, reason), features = choose(), machine.cpu().features
        return [
            InstructionSet(
                isa.name,
                isa.label,
                tuple(isa.missing(features)),
                _refusal(isa.name),
                reason if isa.name == chosen.name else None,
            )
            for isa in all_isas()
        ]

    def kernel_version(self) -> tuple[str, ...]:
        return choose()[0].name, cache_folder().name

    def read_bandwidth(self, threads: int, refresh: bool = False) -> Bandwidth | None:
        return Bandwidth(probes.read_bandwidth(threads, refresh), probes.within_cache(probes.probe_bytes()))

    def integer_peak(self, threads: int, isa: str | None = None) -> float | None:
        return probes.integer_peak(choose(isa)[0], threads)


def _refusal(name: str) -> str | None:
    try:
        choose(name)
    except UnsupportedError as error:
        return str(error)
    return None
