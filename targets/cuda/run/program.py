"""A compiled graph on a device: its memory, its kernels, and the launches of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import DeviceError, ResourceError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.format.records import Mode
from edgeq.targets.capabilities import Largest
from edgeq.targets.cuda.device import bandwidth
from edgeq.targets.cuda.device.device import Call, Copy, Device, Kernel
from edgeq.targets.cuda.device.timed import Timer
from edgeq.targets.cuda.lowering import DEFAULT, lower
from edgeq.targets.cuda.lowering.attention import PART, SIDE_BY_SIDE
from edgeq.targets.cuda.lowering.context import Bring, Gather, Launch, Lowered, Lowering, Routed, Tuning
from edgeq.targets.cuda.lowering.largest import Chosen, largest, most
from edgeq.targets.cuda.lowering.linear import MANY_TOKENS
from edgeq.targets.cuda.run import experts
from edgeq.targets.cuda.run.feed import PAGES_OF_A_RUN, Feed
from edgeq.targets.cuda.run.graphs import ROW_CLASSES, Key, Recordings, gathered, padded, parts_of, repeats, row_class
from edgeq.targets.cuda.run.requantized import CudaRequantizer, CudaWeights
from edgeq.targets.cuda.run.storage import Pages, Storage
from edgeq.targets.cuda.supply import build
from edgeq.targets.cuda.supply.pack import POINTER, Variant
from edgeq.targets.cuda.supply.supply import KernelSource
from edgeq.targets.graph import Embed, Graph, Operation, Select
from edgeq.targets.host import check_rows, resolved
from edgeq.targets.requantization import InputSums, SharedInput, Weights, WeightSource, master_arrays, shared_inputs
from edgeq.targets.rows import PAGE, Page, Rows
from edgeq.targets.target import OnProgress, Options, ProgramFacts, no_progress
from edgeq.targets.times import RecordsRuns, Step, StepTimes

CHUNK_ROWS = 1024
"""Default maximum rows per run."""
MAX_ROWS = 65535
"""Rows of a run: a launch has no more blocks in its second dimension."""


class CudaProgram(RecordsRuns):
    """The host's threads only launch; recorded runs go operation by operation, of which others fuse some."""

    threads = 1
    tile = MANY_TOKENS
    snapshot_pages = 0

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
    ) -> None:
        """stream_masters   bring the master of a layer to the device whenever it is read, instead of keeping all of them there

        UnsupportedError: the graph has what this target does not, more rows than a launch takes, or kernels are missing.
        """
        super().__init__()
        self.options = resolved(options, CHUNK_ROWS)
        if max(self.options.max_rows, self.options.max_logits) > MAX_ROWS:
            raise UnsupportedError(f"the cuda target runs at most {MAX_ROWS} rows; pass a smaller `max_rows` or `max_logits`")
        self._device, self._graph, self._file, self._kernel_source = device, graph, file, kernel_source
        self._tuning = tuning
        layers = (layer for each in self._inputs for layer in each.layers) if stream_masters else ()
        self._storage = Storage(device, file, [master_arrays(layer) for layer in layers])
        self._pages, self.window = Pages(device, graph.part_bytes(self.options.kv)), graph.window
        self.page_memory = self._pages.host_memory
        self._feed = Feed(graph, file, self._storage, self._pages, self.options.kv)
        self._lowered: dict[tuple[Mode, WeightSource], Lowering] = {}
        self._kernels: dict[Variant, Kernel] = {}
        self.most_largest, self.largest_rows = 0, ROW_CLASSES[-1]
        self._logits = np.zeros((self.options.max_logits, graph.buffers[graph.result]), np.float32)
        self._padding: Page | None = None
        self._timer, self._failed = Timer(device), ""
        self.prepare(self.options.mode, on_progress)
        if self.options.requantize:
            self._made(self.options.mode, "masters", on_progress)
            self._load(self._requantizer.variants, on_progress)
        if any(isinstance(op, Embed) for op in graph.operations):
            # Of logits, not of what a tower gives.
            self.most_largest = most(self._logits.shape[1])
            chosen = self._chosen(self.most_largest).launches
            self._load([bandwidth.KERNEL, *(variant for variant, _ in chosen)], on_progress)
        self._recordings = self._new_recordings()

    def _chosen(self, count: int) -> Chosen:
        """The launches that find the largest numbers of the result."""
        rows, width = min(self._logits.shape[0], ROW_CLASSES[-1]), self._logits.shape[1]
        return largest(self._storage, self._storage.address(self._result_name), width, rows, count)

    def _new_recordings(self) -> Recordings:
        """For runs in which the host has nothing to read before the end."""
        found = self._made(self.options.mode, self._own).found
        whole = self.options.graphs and self._graph.together == 1 and not any(isinstance(each, Routed) for each in found)
        most = min(self.options.max_rows, self.options.max_logits)
        steps = max(len(found), self.kernels_per_token) if whole else 0
        return Recordings(self._device, most, self._graph.buffers[self._graph.result], steps)

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
    def waited_s(self) -> float | None:
        """Seconds so far in which the host waited for runs that were started as one graph; None: none are."""
        return self._recordings.waited_s if self._recordings.reserved else None

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that this program holds, or has reserved for recordings."""
        return self._storage.nbytes + self._pages.nbytes + self._recordings.reserved

    @property
    def _own(self) -> WeightSource:
        """What most runs of this program use."""
        return "requantized" if self.options.requantize else "file"

    def prepare(self, mode: Mode, on_progress: OnProgress = no_progress) -> None:
        with self._guarded():
            self._made(mode, self._own, on_progress)

    def _made(self, mode: Mode, source: WeightSource, on_progress: OnProgress = no_progress) -> Lowering:
        """The launches of a mode and of weights, lowered when they are first used: over the same buffers."""
        if (mode, source) not in self._lowered:
            inputs = () if source == "file" else self._inputs
            if source == "masters":
                self._storage.named("sums", max(4, InputSums(inputs).values.nbytes))
            options = replace(self.options, mode=mode)
            lowering = lower(self._graph, self._storage, options, source, inputs, tuning=self._tuning)
            self._load([variant for each in (*lowering.found, *lowering.fused) for variant in each.variants], on_progress)
            self._lowered[mode, source] = lowering
        return self._lowered[mode, source]

    def _load(self, variants: Sequence[Variant], on_progress: OnProgress) -> None:
        missing = [variant for variant in dict.fromkeys(variants) if variant not in self._kernels]
        generated = self._kernel_source(missing, lambda done, label: on_progress(done, len(missing), f"kernel {label}"))
        self._kernels.update(self._device.load(generated))

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """DeviceError: the device failed now, or did before; nothing is tried on it again."""
        if self._failed:
            raise DeviceError(self._failed)
        try:
            yield
        except DeviceError as error:
            self._failed = f"this program cannot run any more: {error}"
            raise

    def new_page(self) -> Page:
        with self._guarded():
            return self._pages.page()

    def copy_page(self, page: Page) -> Page:
        with self._guarded():
            return self._pages.filled(self._pages.contents(page))

    def save_page(self, page: Page) -> bytes:
        with self._guarded():
            return self._pages.contents(page).tobytes()

    def load_page(self, data: NDArray[np.uint8]) -> Page:
        with self._guarded():
            return self._pages.filled(data)

    def new_sums(self) -> InputSums:
        return InputSums(self._inputs)

    def new_weights(self) -> CudaWeights:
        with self._guarded():
            return CudaWeights(self._device, self._inputs)

    def requantize(self, weights: Weights, scales: Sequence[NDArray[np.float32]]) -> None:
        assert isinstance(weights, CudaWeights)
        with self._guarded():
            self._load(self._requantizer.variants, no_progress)
            self._requantizer.fill(self._kernels, weights, scales)

    def read_bandwidth(self, refresh: bool = False) -> float | None:
        """None: the device is full."""
        with self._guarded():
            return bandwidth.measured(self._device, self._kernels[bandwidth.KERNEL], refresh)

    def run(self, rows: Rows, mode: Mode | None = None) -> NDArray[np.float32]:
        """The rows of the result, float32 [wanted, width].  ValueError: more rows than the options allow."""
        return self._checked(rows, mode, "file")

    def seconds_of(self, kind: type[Operation], rows: Rows, rounds: int, repetitions: int) -> list[float]:
        """By the device's clock, what the launches of one kind of operation in a run without times take `rounds` times."""
        with self._guarded():
            lowering = self._made(self.options.mode, "file")
            self._send(rows, lowering)
            of_kind = (x for x in self._of_run(rows, lowering, fused=True) if isinstance(x[0].operation, kind))
            calls = [self._call(each, n, None, parts) for each, n, parts in of_kind if isinstance(each, Launch)]
            return self._timer.together(calls * rounds, repetitions)

    def run_requantized(self, rows: Rows, weights: Weights, mode: Mode | None = None) -> NDArray[np.float32]:
        assert isinstance(weights, CudaWeights)
        return self._checked(rows, mode, "requantized", weights)

    def run_summing(self, rows: Rows, sums: InputSums, mode: Mode | None = None) -> NDArray[np.float32]:
        return self._checked(rows, mode, "masters", sums=sums)

    def run_largest(self, rows: Rows, count: int, mode: Mode | None = None, weights: Weights | None = None) -> Largest:
        if not 0 < count <= self.most_largest or len(rows.wanted) > self.largest_rows:
            raise ValueError(
                f"the {count} largest of {len(rows.wanted)} rows; at most {self.most_largest} of {self.largest_rows}"
            )
        assert weights is None or isinstance(weights, CudaWeights)
        check_rows(rows, self.options)
        # Recordings are kept for few counts.
        chosen = self._chosen(1 if count == 1 else min(self.most_largest, 1 << max(3, (count - 1).bit_length())))
        with self._guarded():
            lowering = self._made(mode or self.options.mode, "requantized" if weights else "file")
            found = self._run(rows, lowering, False, weights, chosen)
        values = found[0].view(np.float32).reshape(-1, chosen.count)[:, :count]
        ids = found[1].view(np.int32).reshape(-1, chosen.count)[:, :count]
        return Largest(ids, values, found[2].view(np.int32) != 0)

    def _checked(
        self,
        rows: Rows,
        mode: Mode | None,
        source: WeightSource,
        weights: CudaWeights | None = None,
        sums: InputSums | None = None,
    ) -> NDArray[np.float32]:
        check_rows(rows, self.options, self._graph.together)
        with self._guarded():
            lowering = self._made(mode or self.options.mode, source)
            if sums is not None:
                self._storage.send("sums", sums.values)
            result = self._run(rows, lowering, self._recording, weights)[0].view(np.float32).reshape(-1, self._logits.shape[1])
            if sums is not None:
                # Last: a run that failed leaves the sums as they were.
                self._device.read(self._storage.address("sums"), sums.values)
                sums.tokens += len(rows) if rows.counted is None else int(rows.counted.sum())
            return result

    def _run(
        self,
        rows: Rows,
        lowering: Lowering,
        timed: bool,
        weights: CudaWeights | None,
        chosen: Chosen | None = None,
    ) -> list[NDArray[np.uint8]]:
        """The rows of the result as bytes, or of its largest numbers what `Chosen` has."""
        if not timed and lowering.source != "masters" and repeats(rows, self._recordings.rows):
            results = self._replayed(rows, lowering, weights, chosen)
            if results is not None:
                return results
        self._send(rows, lowering)
        if not timed:
            for each, tokens, parts in self._of_run(rows, lowering, fused=True):
                list(self._start(each, tokens, weights, parts))
            self._device.synchronize()
        else:
            self._note(self._timed(rows, lowering, weights), lowering.options.mode, rows)
        count = len(rows.wanted) // self._graph.together if self._result_name[1] else len(rows)
        if chosen is None:
            if count:
                self._device.read(self._storage.address(self._result_name), self._logits[:count])
            return [self._logits[:count].reshape(-1).view(np.uint8)]
        for call in self._choosing(chosen, count):
            self._device.launch(*call)
        found = [np.empty(nbytes, np.uint8) for _, nbytes in chosen.results(count)]
        for (address, _), array in zip(chosen.results(count), found, strict=True):
            self._device.read(address, array)
        return found

    def _send(self, rows: Rows, lowering: Lowering) -> None:
        for name, values in self._feed.of(rows, lowering).items():
            if isinstance(name, Gather):
                self._device.write(name.address, values)
            else:
                self._storage.send(name, values)

    def _choosing(self, chosen: Chosen, rows: int) -> list[Call]:
        kernels = [(self._kernels[variant], values) for variant, values in chosen.launches]
        return [Call(kernel, *kernel.generated.bind({**values, "tokens": rows})) for kernel, values in kernels]

    def _replayed(
        self, rows: Rows, lowering: Lowering, weights: CudaWeights | None, chosen: Chosen | None
    ) -> list[NDArray[np.uint8]] | None:
        """The results of a recording of such runs; None: there is no memory for it."""
        count, parts = row_class(len(rows), self._recordings.rows), parts_of(rows)
        number = weights.number if weights else 0
        key = Key(lowering.options.mode, lowering.source, number, count, parts, chosen.count if chosen else 0)
        if self._padding is None:
            self._padding = self._pages.page()
        run = padded(rows, count, self._padding)
        sent = self._feed.of(run, lowering, pages=min(PAGES_OF_A_RUN, count * parts * (PART // PAGE)))

        def calls(places: Mapping[object, int]) -> list[Call | Copy]:
            moved = {self._storage.address(name): at for name, at in places.items() if not isinstance(name, Gather)}
            found: list[Call | Copy] = []
            for each in lowering.launches((count, count)):
                assert not isinstance(each, Routed | Bring)
                found.append(
                    gathered(each, places, sent) if isinstance(each, Gather) else self._call(each, count, weights, parts, moved)
                )
            return found + (self._choosing(chosen, count) if chosen else [])

        whole = [(self._storage.address(self._result_name), 4 * count * self._logits.shape[1])]
        results = self._recordings.run(key, sent, calls, chosen.results(count) if chosen else whole)
        return None if results is None else [each[: len(each) // count * len(rows)] for each in results]

    def _of_run(self, rows: Rows, lowering: Lowering, fused: bool) -> list[tuple[Lowered, int, int]]:
        """The launches of a run, with the rows and the parts of the context of each."""
        counts = len(rows), len(rows.wanted) // self._graph.together
        # What a row sees by spans is not what its slot says.
        parts = parts_of(rows) if rows.spans is None else 0
        return [(each, counts[each.stage], parts) for each in lowering.launches(counts, fused)]

    def _timed(self, rows: Rows, lowering: Lowering, weights: CudaWeights | None) -> StepTimes:
        """Run operation by operation."""
        launched = self._of_run(rows, lowering, fused=False)
        # What the host brings between launches no recording has.
        whole = not any(isinstance(each, Bring) for each, *_ in launched)
        if whole and self._recordings.reserved and repeats(rows, self._recordings.rows):
            calls = [(each, self._call(each, n, weights, parts)) for each, n, parts in launched if isinstance(each, Launch)]
            with suppress(ResourceError):
                return self._timer.replayed(calls)
        return self._timer.one_by_one(step for each, n, parts in launched for step in self._start(each, n, weights, parts))

    def _start(self, each: Lowered, count: int, weights: CudaWeights | None, parts: int) -> Iterator[Step]:
        if isinstance(each, Gather):
            yield Step(each.operation, "gather")
        elif isinstance(each, Bring):
            self._storage.bring(each.arrays)
            yield Step(each.operation, "bring")
        elif isinstance(each, Routed):
            for launch, chosen in experts.launches(self._device, each, count):
                yield self._launch(launch, chosen)
        else:
            yield self._launch(each, count, weights, parts)

    def _launch(self, launch: Launch, tokens: int, weights: CudaWeights | None = None, parts: int = 0) -> Step:
        call = self._call(launch, tokens, weights, parts)
        self._device.launch(*call)
        return Step(launch.operation, call.kernel.generated.variant.symbol, launch.reads_weights)

    def _call(
        self, launch: Launch, tokens: int, weights: CudaWeights | None, parts: int = 0, moved: Mapping[int, int] | None = None
    ) -> Call:
        """A launch over `tokens` rows.

        parts   of the longest context among them, where they may be taken side by side
        moved   addresses to be used in place of others
        """
        kernel = self._kernels[launch.matmul if launch.matmul and tokens > launch.few_rows else launch.variant]
        base = self._pages.base
        scalars: dict[str, int | float] = {**launch.values, "tokens": tokens * launch.rows_per_token, "pool": base}
        scalars["numbers"] = base
        scalars["parts"] = parts if tokens * parts <= SIDE_BY_SIDE else 0
        scalars |= {name: weights.address(ref) for name, ref in launch.moved.items()} if weights else {}
        if moved:
            pointers = {str(p.value) for p in kernel.generated.parameters if p.type == POINTER}
            scalars |= {name: moved[int(at)] for name, at in scalars.items() if name in pointers and at in moved}
        return Call(kernel, *kernel.generated.bind(scalars))

    @cached_property
    def _result_name(self) -> tuple[str, int]:
        """Name of the memory that has the result."""
        return self._graph.result, int(any(isinstance(op, Select) for op in self._graph.operations))
