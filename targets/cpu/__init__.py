"""The processor itself: kernels compiled by Numba for x86, Arm (NEON) and, portably, for anything Numba knows."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from edgeq.format.container import ModelFile
from edgeq.targets.graph import Graph
from edgeq.targets.hardware import Gpu, Hardware
from edgeq.targets.host import host_room
from edgeq.targets.target import Beside, KernelBuilder, KernelPack, MemoryNeed, OnProgress, Options, Program, no_progress


class CpuTarget:
    name = "cpu"
    shares_weights = True

    def refusal(self, file: ModelFile | None = None) -> str | None:
        if sys.byteorder != "little" or sys.maxsize < 1 << 32:
            return "it needs a 64-bit little-endian processor"
        if importlib.util.find_spec("numba") is None:
            return "numba is not installed; run: pip install numba"
        return None

    def room(self, graph: Graph, file: ModelFile, options: Options, beside: Sequence[Beside] = ()) -> MemoryNeed:
        return host_room(graph, file, options, beside)

    def compile(
        self,
        graph: Graph,
        file: ModelFile,
        options: Options,
        on_progress: OnProgress = no_progress,
        beside: Program | None = None,
    ) -> Program:
        from edgeq.targets.cpu.jit import packed
        from edgeq.targets.cpu.program import CpuProgram

        packed.install(file)
        return CpuProgram(graph, file, options, on_progress)

    def gpus(self) -> Sequence[Gpu]:
        return ()

    def hardware(self) -> Hardware:
        from edgeq.targets.cpu.hardware import CpuHardware

        return CpuHardware()

    def packs(self, file: ModelFile) -> Sequence[KernelPack]:
        from edgeq.targets.cpu.jit.packed import facts

        return facts(file)

    def builder(self) -> KernelBuilder:
        from edgeq.targets.cpu.ahead import CpuBuilder

        return CpuBuilder()
