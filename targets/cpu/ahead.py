"""The kernels that a model needs on another machine, found out without running any, and compiled for it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from edgeq.errors import ResourceError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.format.kernel_pack import KernelSet, joined
from edgeq.format.records import Mode
from edgeq.system.devices import DEVICES, DeviceSpec
from edgeq.targets.cpu import probe_kernels, probes
from edgeq.targets.cpu.isa import all_isas, isa_index
from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit import packed, processor
from edgeq.targets.cpu.jit.buffers import Buffers
from edgeq.targets.cpu.jit.parallel import Job, compile_by, workers_for
from edgeq.targets.cpu.kernels.products.matmul import integer_matvec
from edgeq.targets.cpu.kernels.rows import requantize
from edgeq.targets.cpu.lowering.context import Context, Masters, RowArrays
from edgeq.targets.cpu.lowering.dispatch import kernels_of, lower
from edgeq.targets.cpu.lowering.requantize import masters_of
from edgeq.targets.cpu.requantized import kernels_of_rounding
from edgeq.targets.cpu.threads.threadpool import entries
from edgeq.targets.graph import Graph
from edgeq.targets.host import resolved
from edgeq.targets.layers import integer_codecs
from edgeq.targets.requantization import WeightSource, shared_inputs
from edgeq.targets.target import BuiltKernel, BuiltKernels, Goal, OnProgress, Options, Workload, no_progress


class CpuBuilder:
    """Compiles by Numba for the processors of devices."""

    architectures: Sequence[str] = processor.ISAS

    def refusal(self) -> str | None:
        return None

    def arch_for(self, isa: str) -> str | None:
        return isa if isa in self.architectures else None

    def outdated(self, made: KernelSet) -> str | None:
        return packed.outdated(made)

    def build(
        self, workloads: Sequence[Workload], goals: Sequence[Goal], on_progress: OnProgress = no_progress
    ) -> BuiltKernels:
        sets, lines = list[KernelSet](), list[BuiltKernel]()
        for goal in goals:
            device = goal.device or next(each for each in DEVICES.values() if each.isa == goal.arch)
            jobs = [job for work in workloads for job in jobs_for(device, work.graph, work.file, work.options, work.modes)]
            made = compiled(list(dict.fromkeys(jobs)), device, on_progress)
            sets = joined(sets, [made])
            for name, kernel in made.kernels.items():
                lines.append(BuiltKernel(name, device.name, goal.arch, len(kernel.pieces[0]), {}))
        return BuiltKernels(sets, lines, len(lines))


def compiled(jobs: list[Job], device: DeviceSpec, on_progress: OnProgress = no_progress) -> KernelSet:
    """Kernels for the processor of a device.  UnsupportedError: one does not compile.  ResourceError: no process starts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        failures = compile_by(max(1, workers_for(len(jobs))), jobs, folder, device, on_progress)
        if failures:
            raise UnsupportedError(f"the compiler for {device.name} ended: {failures[0]}")
        if len(list(folder.iterdir())) < len(jobs):
            raise ResourceError("no process could be started to compile")
        return packed.kernel_set(device.isa, folder)


def jobs_for(device: DeviceSpec, graph: Graph, file: ModelFile, options: Options, modes: Sequence[Mode]) -> list[Job]:
    """What `file` needs on a device in these modes, for every instruction set that the device may choose.

    UnsupportedError: `options.isa` is none of those.
    """
    chosen = processor.of_device(device)
    options = replace(resolved(options), threads=device.cores, threads_prefill=device.cores)
    jobs: list[Job] = [(each, ()) for each in entries(device.cores)] + [(probe_kernels.read_lines, ())]
    for isa in _isas(chosen, options.isa):
        if isa.winograd:
            jobs += [(probe_kernels.multiply, (isa_index(isa), pairs)) for pairs in (0, 1)]
        probed = [probes.DECODE_CODEC, *(integer_codecs(graph) if len(isa.prefetch_distances) > 1 else ())]
        jobs += [(integer_matvec, (isa_index(isa), *probes.decode_literals(isa, codec))) for codec in probed]
        for mode in modes:
            for source in ("file", "masters", "requantized") if options.requantize else ("file",):
                jobs += _lowered(graph, file, replace(options, mode=mode), isa, source, chosen.features)
    if options.requantize:
        jobs += [(requantize.release, ()), *kernels_of_rounding(shared_inputs(graph))]
    return list(dict.fromkeys(jobs))


def _isas(chosen: processor.Processor, name: str | None) -> Iterator[Isa]:
    """Those that the device may choose: the best that its processor has, and what is better if a measurement says so."""
    found = [isa for isa in all_isas() if isa.runs_on(chosen.arch, chosen.features)]
    if name is not None:
        named = [isa for isa in found if isa.name == name]
        if not named:
            raise UnsupportedError(f"isa {name} is not one of the device's: {', '.join(isa.name for isa in found)}")
        yield from named
        return
    for isa in found:
        yield isa
        if not isa.winograd:
            return


def _lowered(
    graph: Graph, file: ModelFile, options: Options, isa: Isa, source: WeightSource, features: frozenset[str]
) -> list[Job]:
    # Nothing is run, so rows have no address.
    arrays = RowArrays(**{field.name: 0 for field in fields(RowArrays)})
    masters = Masters() if source == "file" else masters_of(shared_inputs(graph), source == "masters")
    context = Context(graph, file, options, isa, Buffers(file), arrays, source=source, masters=masters, features=features)
    lower(context)
    return kernels_of(context)
