"""The processor itself: kernels compiled by Numba for x86 and, portably, for anything Numba knows."""

from __future__ import annotations

import importlib.util
import sys

from edgeq.container import ModelFile
from edgeq.targets.graph import Graph
from edgeq.targets.host import host_room
from edgeq.targets.target import OnProgress, Options, Program, Room, no_progress


class CpuTarget:
    name = "cpu"
    shares_weights = True

    def refusal(self, file: ModelFile | None = None) -> str | None:
        if sys.byteorder != "little" or sys.maxsize < 1 << 32:
            return "it needs a 64-bit little-endian processor"
        if importlib.util.find_spec("numba") is None:
            return "numba is not installed; run: pip install numba"
        return None

    def room(self, graph: Graph, file: ModelFile, options: Options) -> Room:
        return host_room(graph, file, options)

    def compile(self, graph: Graph, file: ModelFile, options: Options, on_progress: OnProgress = no_progress) -> Program:
        from edgeq.targets.cpu.program import CpuProgram

        return CpuProgram(graph, file, options, on_progress)
