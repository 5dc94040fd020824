"""Runs whose launches the host starts one by one: prompts, pictures, experts, and what is timed operation by operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from edgeq.errors import ResourceError
from edgeq.targets.cuda.device.device import Device
from edgeq.targets.cuda.device.timed import Timer
from edgeq.targets.cuda.lowering.context import Bring, Gather, Launch, Lowered, Lowering, Routed
from edgeq.targets.cuda.run import experts
from edgeq.targets.cuda.run.feed import Feed
from edgeq.targets.cuda.run.graphs import parts_of
from edgeq.targets.cuda.run.kernels import NOTHING_ELSE, ProgramKernels, Reach
from edgeq.targets.cuda.run.requantized import CudaWeights
from edgeq.targets.cuda.run.storage import Storage
from edgeq.targets.graph import Operation
from edgeq.targets.rows import Rows
from edgeq.targets.times import Step, StepTimes


class OneByOne:
    """together   wanted rows that make one row of the result"""

    def __init__(self, device: Device, storage: Storage, kernels: ProgramKernels, feed: Feed, together: int) -> None:
        self._device, self._storage, self._kernels, self._feed, self._together = device, storage, kernels, feed, together
        self._timer = Timer(device)

    def run(self, rows: Rows, lowering: Lowering, weights: CudaWeights | None) -> None:
        """By the launches that do several operations each, to the end."""
        self._send(rows, lowering)
        for each, tokens, reach in self._of_run(rows, lowering, fused=True):
            for _ in self._start(each, tokens, weights, reach):
                pass
        self._device.synchronize()

    def timed(self, rows: Rows, lowering: Lowering, weights: CudaWeights | None, record: bool) -> StepTimes:
        """Operation by operation.  `record`: as one recording, where the host brings nothing between launches."""
        self._send(rows, lowering)
        launched = self._of_run(rows, lowering, fused=False)
        if record and not any(isinstance(each, Bring) for each, *_ in launched):
            calls = [
                (each, self._kernels.call(each, n, weights, reach)) for each, n, reach in launched if isinstance(each, Launch)
            ]
            with suppress(ResourceError):
                return self._timer.replayed(calls)
        return self._timer.one_by_one(step for each, n, reach in launched for step in self._start(each, n, weights, reach))

    def seconds_of(self, kind: type[Operation], rows: Rows, lowering: Lowering, rounds: int, repetitions: int) -> list[float]:
        """By the device's clock, what the launches of one kind of operation of a run take `rounds` times."""
        self._send(rows, lowering)
        of_kind = (x for x in self._of_run(rows, lowering, fused=True) if isinstance(x[0].operation, kind))
        calls = [self._kernels.call(each, n, None, reach) for each, n, reach in of_kind if isinstance(each, Launch)]
        return self._timer.together(calls * rounds, repetitions)

    def _send(self, rows: Rows, lowering: Lowering) -> None:
        for name, values in self._feed.of(rows, lowering).items():
            if isinstance(name, Gather):
                self._device.write(name.address, values)
            else:
                self._storage.send(name, values)

    def _of_run(self, rows: Rows, lowering: Lowering, fused: bool) -> list[tuple[Lowered, int, Reach]]:
        """The launches of a run, with the rows of each and what it takes beside them."""
        counts = len(rows), len(rows.wanted) // self._together
        # What a row sees by spans is not what its slot says.
        reach = Reach(parts_of(rows) if rows.spans is None else 0, len(rows.pages))
        return [(each, counts[each.stage], reach) for each in lowering.launches(counts, fused)]

    def _start(self, lowered: Lowered, count: int, weights: CudaWeights | None, reach: Reach) -> Iterator[Step]:
        if isinstance(lowered, Gather):
            yield Step(lowered.operation, "gather")
        elif isinstance(lowered, Bring):
            self._storage.bring(lowered.arrays)
            yield Step(lowered.operation, "bring")
        elif isinstance(lowered, Routed):
            for launch, chosen in experts.launches(self._device, lowered, count):
                yield self._launch(launch, chosen)
        else:
            yield self._launch(lowered, count, weights, reach)

    def _launch(self, launch: Launch, tokens: int, weights: CudaWeights | None = None, reach: Reach = NOTHING_ELSE) -> Step:
        call = self._kernels.call(launch, tokens, weights, reach)
        self._device.launch(*call)
        return Step(launch.operation, call.kernel.generated.variant.symbol, launch.reads_weights)
