"""Kernels for Arm, compiled on the machine that runs the tests: the emulator would take much longer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from edgeq.format.container import ModelFile
from edgeq.format.kernel_pack import KernelSet
from edgeq.format.records import Mode
from edgeq.system.devices import DeviceSpec
from edgeq.targets.cpu import ahead
from edgeq.targets.cpu.jit.compile import file_name
from edgeq.targets.cpu.jit.parallel import Job
from edgeq.targets.graph import Graph
from edgeq.targets.target import Options
from edgeq.tools.commands.build import workloads
from tests.arm import panels, products
from tests.targets.cases import Arrays

Kernels = Mapping[str, bytes]
"""Object files by the names of their kernels."""


def kernels_of(sets: Iterable[KernelSet]) -> Kernels:
    return {name: kernel.pieces[0] for each in sets for name, kernel in each.kernels.items()}


def compiled(jobs: Iterable[Job], device: DeviceSpec, without: Iterable[str] = ()) -> Kernels:
    """Kernels of `jobs`, each once, but for those of these names."""
    wanted = [job for job in dict.fromkeys(jobs) if file_name(job[0], *job[1]).removesuffix(".o") not in set(without)]
    return kernels_of([ahead.compiled(wanted, device)])


def of_model(path: Path, device: DeviceSpec, settings: Iterable[tuple[Sequence[Mode], str]]) -> Iterator[Job]:
    """What the decoder of a file runs in these modes and caches; no adapter is given."""
    file = ModelFile.open(path)
    for modes, cache in settings:
        for work in workloads(file, modes, [cache]):
            if work.file is file:
                yield from ahead.jobs_for(device, work.graph, work.file, work.options, work.modes)


def of_graph(graph: Graph, arrays: Arrays, device: DeviceSpec, mode: Mode, rows: int) -> list[Job]:
    options = Options(mode, 1, max_rows=rows, max_logits=rows)
    return ahead.jobs_for(device, graph, arrays, options, (mode,))  # type: ignore[arg-type]


def of_products(device: DeviceSpec) -> Iterator[Job]:
    for case in products.CASES:
        yield from of_graph(*case.graph()[:2], device, case.mode, products.ROWS)


def of_panels(device: DeviceSpec) -> Iterator[Job]:
    for case in panels.CASES:
        yield from of_graph(*panels.graph_of(case), device, case.mode, panels.ROWS_OF_TOKENS)
