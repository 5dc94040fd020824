"""The reference target: every operation in plain numpy, complete and slow; the oracle that other targets are tested against."""

from __future__ import annotations

from collections.abc import Sequence

from edgeq.errors import UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.targets.graph import Graph
from edgeq.targets.hardware import Gpu, Hardware
from edgeq.targets.host import host_room
from edgeq.targets.reference.program import ReferenceProgram
from edgeq.targets.target import Beside, KernelPack, MemoryNeed, OnProgress, Options, Program, no_progress


class ReferenceTarget:
    name = "reference"
    shares_weights = True

    def refusal(self, file: ModelFile | None = None) -> str | None:
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
    ) -> ReferenceProgram:
        """UnsupportedError: an instruction set was asked for; numpy has its own."""
        if options.isa is not None:
            raise UnsupportedError(f"the reference target has no isa {options.isa!r}; leave it out or use the cpu target")
        return ReferenceProgram(graph, file, options)

    def gpus(self) -> Sequence[Gpu]:
        return ()

    def hardware(self) -> Hardware:
        return Hardware()

    def packs(self, file: ModelFile) -> Sequence[KernelPack]:
        return ()

    def builder(self) -> None:
        return None
