"""A compiled graph on a device: its memory, its kernels, and the launches of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import DeviceError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.format.records import Mode
from edgeq.targets.capabilities import Draw, Largest
from edgeq.targets.cuda.device import bandwidth
from edgeq.targets.cuda.device.device import Device
from edgeq.targets.cuda.lowering import lower
from edgeq.targets.cuda.lowering.context import Launch, Lowering, Routed, Tuning
from edgeq.targets.cuda.lowering.largest import Chosen, largest, most
from edgeq.targets.cuda.lowering.linear import MANY_TOKENS
from edgeq.targets.cuda.lowering.spread import spread
from edgeq.targets.cuda.run.ahead import RunsAhead
from edgeq.targets.cuda.run.feed import Feed
from edgeq.targets.cuda.run.graphs import ROW_CLASSES, Recordings, is_short_prompt, repeats
from edgeq.targets.cuda.run.holds_states import HoldsCudaStates
from edgeq.targets.cuda.run.kernels import ProgramKernels
from edgeq.targets.cuda.run.one_by_one import OneByOne
from edgeq.targets.cuda.run.recorded import RecordedRuns
from edgeq.targets.cuda.run.requantized import CudaRequantizer, CudaWeights
from edgeq.targets.cuda.run.states import States
from edgeq.targets.cuda.run.storage import Pages, Storage
from edgeq.targets.cuda.supply import build
from edgeq.targets.cuda.supply.supply import KernelSource
from edgeq.targets.graph import Embed, Graph, Operation, Select
from edgeq.targets.host import check_rows, resolved
from edgeq.targets.requantization import InputSums, SharedInput, Weights, WeightSource, master_arrays, shared_inputs
from edgeq.targets.rows import Page, Rows, StateRows
from edgeq.targets.states import snapshot_pages
from edgeq.targets.target import OnProgress, Options, ProgramFacts, no_progress
from edgeq.targets.times import RecordsRuns

CHUNK_ROWS = 1024
"""Default maximum rows per run."""
DEFAULT = Tuning()
MAX_ROWS = 65535
"""Rows of a run: a launch has no more blocks in its second dimension."""


class CudaProgram(RecordsRuns, HoldsCudaStates):
    """The host's threads only launch; recorded runs go operation by operation, of which others fuse some."""

    threads = 1
    tile = MANY_TOKENS

    def __init__(
        self,
        device: Device,
        graph: Graph,
        file: ModelFile,
        options: Options,
        on_progress: OnProgress = no_progress,
        *,
        kernel_source: KernelSource = build.kernels,
        stream_masters: bool = False,
        tuning: Tuning = DEFAULT,
        beside: CudaProgram | None = None,
    ) -> None:
        """stream_masters   bring the master of a layer to the device whenever it is read, instead of keeping all of them there
        beside   a program of the same file, whose pages, states and arrays this one uses

        UnsupportedError: the graph has what this target does not, more rows than a launch takes, or kernels are missing.
        """
        super().__init__()
        self.options = resolved(options, CHUNK_ROWS)
        if max(self.options.max_rows, self.options.max_logits) > MAX_ROWS:
            raise UnsupportedError(f"the cuda target runs at most {MAX_ROWS} rows; pass a smaller `max_rows` or `max_logits`")
        self._device, self._graph, self._tuning = device, graph, tuning
        layers = (layer for each in self._inputs for layer in each.layers) if stream_masters else ()
        # Of programs beside each other the first has the pages, and starts runs ahead.
        self._beside: CudaProgram | None = (beside._beside or beside) if beside else None
        self.window = graph.window
        held = beside._storage if beside else None
        self._storage: Storage = Storage(device, file, [master_arrays(layer) for layer in layers], held)
        self._pages: Pages = beside._pages if beside else Pages(device, graph.part_bytes(self.options.kv))
        self.page_memory = self._pages.host_memory
        self.snapshot_pages = snapshot_pages(graph.states, graph.page_bytes(self.options.kv))
        if graph.states:
            self._states = beside._states if beside else States(device, graph.states)
        feed = Feed(graph, file, self._storage, self._pages, self.options)
        self._kernels = ProgramKernels(device, kernel_source, self._pages.base)
        self._one_by_one = OneByOne(device, self._storage, self._kernels, feed, graph.together)
        self._lowered: dict[tuple[Mode, WeightSource], Lowering] = {}
        self._largest: dict[tuple[int, bool], Chosen] = {}
        self.most_largest, self.largest_rows = 0, ROW_CLASSES[-1]
        self._logits = np.zeros((self.options.max_logits, graph.buffers[graph.result]), np.float32)
        self._guard = beside._guard if beside else DeviceGuard()
        self.prepare(self.options.mode, on_progress)
        if self.options.requantize:
            self._made(self.options.mode, "masters", on_progress)
            self._kernels.load(self._requantizer.variants, on_progress)
        if beside is None and any(isinstance(op, Embed) for op in graph.operations):
            # Of logits, not of what a tower gives.
            self.most_largest = most(self._logits.shape[1])
            chosen = self._chosen(self.most_largest, draws=True).launches
            self._kernels.load([bandwidth.KERNEL, *(variant for variant, _ in chosen)], on_progress)
        self._recordings = self._new_recordings()
        result = self._storage.address(self._result_name), 4 * self._logits.shape[1]
        self._replays = RecordedRuns(self._recordings, self._storage, self._pages, self._kernels, feed, result=result)
        self._ahead = RunsAhead(self._replays)

    def _chosen(self, count: int, draws: bool) -> Chosen:
        """The launches that find the largest numbers of the result; `draws`: and draw from them."""
        if (count, draws) not in self._largest:
            rows, width = min(self._logits.shape[0], ROW_CLASSES[-1]), self._logits.shape[1]
            result = self._storage.address(self._result_name)
            self._largest[count, draws] = largest(self._storage, result, width, rows, count, draws)
        return self._largest[count, draws]

    def _new_recordings(self) -> Recordings:
        """For runs in which the host has nothing to read before the end."""
        found = self._made(self.options.mode, self._own).by_operation
        whole = self.options.graphs and self._graph.together == 1 and not any(isinstance(each, Routed) for each in found)
        steps, width = max(len(found), self.kernels_per_token) if whole else 0, self._graph.buffers[self._graph.result]
        return Recordings(self._device, self.options.max_rows, self.options.max_logits, width, steps)

    @cached_property
    def _inputs(self) -> tuple[SharedInput, ...]:
        return shared_inputs(self._graph)

    @cached_property
    def _requantizer(self) -> CudaRequantizer:
        return CudaRequantizer(self._device, self._storage, self._inputs)

    @property
    def description(self) -> str:
        started = "started as one graph" if self._recordings.reserved else "started one by one"
        where = f"{self._device.name}, sm_{self._device.sm}, mode {self.options.mode}"
        return f"cuda target: {where}, {self.kernels_per_token} kernels per token, {started}"

    def facts(self) -> ProgramFacts:
        name, copied = self._device.name, bandwidth.copied(self._device.name)
        return ProgramFacts(None, name, self.device_bytes, copied, timed_apart=True, launches_per_token=self.kernels_per_token)

    @property
    def kernels_per_token(self) -> int:
        return len(self.launches_of_a_token())

    def launches_of_a_token(self) -> list[Launch]:
        """Those of a run of one row that asks for its logits."""
        return [each for each in self._made(self.options.mode, self._own).launches((1, 1)) if isinstance(each, Launch)]

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that this program holds, or has reserved for recordings, without what it uses of another."""
        own = self._storage.nbytes + self._recordings.reserved
        if self._beside is not None:
            return own
        return own + self._pages.nbytes + (self._states.nbytes if self.snapshot_pages else 0)

    @property
    def _own(self) -> WeightSource:
        """What most runs of this program use."""
        return "requantized" if self.options.requantize else "file"

    def prepare(self, mode: Mode, on_progress: OnProgress = no_progress) -> None:
        with self._guard:
            self._made(mode, self._own, on_progress)

    def _made(self, mode: Mode, source: WeightSource, on_progress: OnProgress = no_progress) -> Lowering:
        """The launches of a mode and of weights, lowered when they are first used: over the same buffers."""
        if (mode, source) not in self._lowered:
            inputs = () if source == "file" else self._inputs
            if source == "masters":
                self._storage.named("sums", max(4, InputSums(inputs).values.nbytes))
            options = replace(self.options, mode=mode)
            lowering = lower(self._graph, self._storage, options, source, inputs)
            launches = (*lowering.by_operation, *lowering.fused)
            self._kernels.load((variant for each in launches for variant in each.variants), on_progress)
            self._kernels.check(launches)
            lowering.fused = spread(lowering.fused, self._tuning, self._storage, self._kernels.blocks_held)
            self._lowered[mode, source] = lowering
        return self._lowered[mode, source]

    def new_page(self) -> Page:
        with self._guard:
            self._ahead.drop()
            return self._pages.page()

    def copy_page(self, page: Page) -> Page:
        with self._guard:
            self._ahead.drop()
            return self._pages.filled(self._pages.contents(page))

    def save_page(self, page: Page) -> bytes:
        with self._guard:
            return self._pages.contents(page).tobytes()

    def load_page(self, data: NDArray[np.uint8]) -> Page:
        with self._guard:
            self._ahead.drop()
            return self._pages.filled(data)

    def new_sums(self) -> InputSums:
        return InputSums(self._inputs)

    def new_weights(self) -> CudaWeights:
        with self._guard:
            return CudaWeights(self._device, self._inputs)

    def requantize(self, weights: Weights, scales: Sequence[NDArray[np.float32]]) -> None:
        assert isinstance(weights, CudaWeights)
        with self._guard:
            self._kernels.load(self._requantizer.variants, no_progress)
            self._requantizer.fill(self._kernels.loaded, weights, scales)

    def read_bandwidth(self, refresh: bool = False) -> float | None:
        """None: the device is full."""
        with self._guard:
            return bandwidth.measured(self._device, self._kernels.loaded[bandwidth.KERNEL], refresh)

    def run(self, rows: Rows, mode: Mode | None = None) -> NDArray[np.float32]:
        """The rows of the result, float32 [wanted, width].  ValueError: more rows than the options allow, or not the next ones
        of their session's states."""
        return self._checked(rows, mode, "file")

    def seconds_of(self, kind: type[Operation], rows: Rows, rounds: int, repetitions: int) -> list[float]:
        """By the device's clock, what the launches of one kind of operation in a run without times take `rounds` times."""
        with self._guard:
            self._ahead.drop()
            lowering = self._made(self.options.mode, "file")
            return self._one_by_one.seconds_of(kind, self._in_order(rows), lowering, rounds, repetitions)

    def run_requantized(self, rows: Rows, weights: Weights, mode: Mode | None = None) -> NDArray[np.float32]:
        assert isinstance(weights, CudaWeights)
        return self._checked(rows, mode, "requantized", weights)

    def run_summing(self, rows: Rows, sums: InputSums, mode: Mode | None = None) -> NDArray[np.float32]:
        return self._checked(rows, mode, "masters", sums=sums)

    def run_largest(
        self, rows: Rows, count: int, mode: Mode | None = None, weights: Weights | None = None, *, ahead: Sequence[Draw] = ()
    ) -> Largest:
        if not 0 < count <= self.most_largest or rows.wanted.shape[0] > self.largest_rows:
            raise ValueError(
                f"the {count} largest of {len(rows.wanted)} rows; at most {self.most_largest} of {self.largest_rows}"
            )
        assert weights is None or isinstance(weights, CudaWeights)
        check_rows(rows, self.options)
        if self.snapshot_pages:
            rows = self._begun(rows)
        # Recordings are kept for few counts.
        most = 1 if count == 1 else min(self.most_largest, 1 << max(3, (count - 1).bit_length()))
        chosen = self._chosen(most, draws=count > 1 and len(ahead) > 0 and weights is None)
        with self._guard:
            lowering = self._made(mode or self.options.mode, "requantized" if weights else "file")
            recorded = self._is_recorded(rows, lowering)
            found = self._ahead.run(rows, lowering, weights, chosen, ahead) if recorded else None
            if found is None:
                self._ahead.drop()
                self._one_by_one.run(rows, lowering, weights)
                chosen = self._chosen(most, draws=False)
                found = self._largest_of_result(chosen, rows.wanted.shape[0])
        if rows.in_order:
            rows.in_order.end(rows.states)
        values, ids, finite = found[0], found[1], found[2]
        results = len(rows.wanted)
        return Largest(ids[:results, :count], values[:results, :count], finite[:results, 0] != 0)

    def _largest_of_result(self, chosen: Chosen, count: int) -> list[NDArray[Any]]:
        """Values, ids and finite of so many rows of the result, which a run has left."""
        for call in self._kernels.choosing(chosen, count):
            self._device.launch(*call)
        found = [np.empty(result.shape, result.type) for result in chosen.results(count)]
        for result, array in zip(chosen.results(count), found, strict=True):
            self._device.read(result.address, array)
        return found

    def _checked(
        self,
        rows: Rows,
        mode: Mode | None,
        source: WeightSource,
        weights: CudaWeights | None = None,
        sums: InputSums | None = None,
    ) -> NDArray[np.float32]:
        check_rows(rows, self.options, self._graph.together)
        rows = self._begun(rows)
        with self._guard:
            self._ahead.drop()
            if self._beside is not None:
                # What it started ahead has written where this run does.
                self._beside._ahead.drop()
            lowering = self._made(mode or self.options.mode, source)
            if sums is not None:
                self._storage.send("sums", sums.values)
            result = self._result(rows, lowering, weights)
            if rows.in_order:
                rows.in_order.end(rows.states)
            if sums is not None:
                # Last: a run that failed leaves the sums as they were.
                self._device.read(self._storage.address("sums"), sums.values)
                sums.tokens += len(rows) if rows.counted is None else int(rows.counted.sum())
            return result

    def _result(self, rows: Rows, lowering: Lowering, weights: CudaWeights | None) -> NDArray[np.float32]:
        """Run; the rows of the result."""
        timed = self._recording
        started = (
            self._replays.start(rows, lowering, weights, None) if not timed and self._is_recorded(rows, lowering) else None
        )
        if started is not None:
            found = self._replays.wait(started)
            return found[0][: len(rows.wanted)]
        if timed:
            record = self._recordings.reserved > 0 and repeats(rows, self._recordings.rows)
            self._note(self._one_by_one.timed(rows, lowering, weights, record), lowering.options.mode, rows)
        else:
            self._one_by_one.run(rows, lowering, weights)
        count = len(rows.wanted) // self._graph.together if self._result_name[1] else len(rows)
        if count:
            self._device.read(self._storage.address(self._result_name), self._logits[:count])
        return self._logits[:count]

    def _begun(self, rows: Rows) -> Rows:
        """As `_in_order`, of a run whose rows are about to be written to the states."""
        found = self._in_order(rows)
        if found.in_order:
            found.in_order.begin(rows.states)
        return found

    def _in_order(self, rows: Rows) -> Rows:
        """With the order in which states take the rows, if the graph has some.  ValueError: as `run`."""
        return rows.changed(in_order=StateRows.of(rows)) if self.snapshot_pages else rows

    def _is_recorded(self, rows: Rows, lowering: Lowering) -> bool:
        """Whether such runs are started as recordings, where there is memory for it."""
        recordings = self._recordings
        if lowering.source == "masters" or not recordings.reserved:
            return False
        return repeats(rows, recordings.rows) or is_short_prompt(rows, recordings.prompt_rows)

    @cached_property
    def _result_name(self) -> tuple[str, int]:
        """Name of the memory that has the result."""
        return self._graph.result, int(any(isinstance(op, Select) for op in self._graph.operations))


class DeviceGuard:
    """Within it a program uses its device.  DeviceError: the device failed now, or did before; nothing is tried on it again."""

    def __init__(self) -> None:
        self._failed = ""

    def __enter__(self) -> None:
        if self._failed:
            raise DeviceError(self._failed)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, DeviceError):
            self._failed = f"this program cannot run any more: {error}"
