"""Kernels compiled ahead for GPUs, on a machine that needs none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from edgeq.errors import UnsupportedError
from edgeq.format.kernel_pack import KernelSet
from edgeq.targets.cuda.device import occupancy
from edgeq.targets.cuda.run import plan
from edgeq.targets.cuda.supply import build, nvrtc, pack_file, parallel, supply
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.cuda.supply.pack_file import Pack
from edgeq.targets.target import BuiltKernel, BuiltKernels, Goal, OnProgress, Workload, no_progress


class CudaBuilder:
    """Generates by TVM and compiles by NVRTC; PTX for newer GPUs is always with what is asked for."""

    architectures: Sequence[str] = (*(f"sm_{sm}" for sm in nvrtc.COMPILED_FOR), nvrtc.VIRTUAL)

    def refusal(self) -> str | None:
        return build.refusal() or nvrtc.refusal() or build.other_versions()

    def arch_for(self, isa: str) -> str | None:
        capability = re.fullmatch(r"sm_(\d{2,3})", isa, re.ASCII)
        # Of a GPU that this compiler does not know, the driver makes machine code from PTX.
        if capability and int(capability[1]) >= min(nvrtc.COMPILED_FOR):
            return nvrtc.arch_for(int(capability[1]))
        return isa if isa == nvrtc.VIRTUAL else None

    def outdated(self, made: KernelSet) -> str | None:
        return supply.outdated(made)

    def build(
        self, workloads: Sequence[Workload], goals: Sequence[Goal], on_progress: OnProgress = no_progress
    ) -> BuiltKernels:
        variants, left_out = needed(workloads)
        archs = sorted({goal.arch for goal in goals} | {nvrtc.VIRTUAL})
        made, compiled = parallel.compiled(variants, archs, on_progress)
        pack = Pack(build.versions(), build.source_digest(), made)
        lines = [line for variant in variants for line in _lines(pack, variant, goals)]
        return BuiltKernels(pack_file.sets(pack), lines, compiled, left_out)


def needed(workloads: Sequence[Workload]) -> tuple[list[Variant], list[str]]:
    """The kernels that these launch, and why optional ones cannot be run."""
    found, left_out = dict[Variant, None](), list[str]()
    for work in workloads:
        try:
            found.update(dict.fromkeys(plan.variants(work.graph, work.file, work.options, work.modes)))
        except UnsupportedError as error:
            if not work.optional:
                raise
            left_out.append(str(error))
    return sorted(found, key=lambda variant: variant.symbol), left_out


def _lines(pack: Pack, variant: Variant, goals: Sequence[Goal]) -> Iterator[BuiltKernel]:
    """A line for each GPU that a kernel was compiled for; bytes."""
    kernel = pack.kernels[variant]
    threads = occupancy.threads_of(kernel.generated)
    for goal in goals:
        image = kernel.images[goal.arch]
        blocks = occupancy.blocks_held(image, threads)
        in_flight = occupancy.bytes_in_flight(variant, blocks, threads) if blocks else None
        facts = {
            "registers": image.registers,
            "shared": image.shared,
            "spilled": image.spilled,
            "threads": threads,
            "blocks": blocks,
            "in_flight": in_flight,
            "needed": occupancy.bytes_needed(goal.device) if goal.device and in_flight else None,
        }
        name = goal.device.name if goal.device else goal.arch
        yield BuiltKernel(variant.symbol, name, goal.arch, len(image.image), facts)
