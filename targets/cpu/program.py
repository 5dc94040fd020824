"""A compiled graph: its memory, its tables and the threads that walk them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from edgeq.format.container import ModelFile
from edgeq.format.records import Mode
from edgeq.system import machine
from edgeq.targets.cpu.choose_isa import choose
from edgeq.targets.cpu.jit import processor
from edgeq.targets.cpu.jit.args import RECORD_SLOTS
from edgeq.targets.cpu.jit.buffers import Buffers, CpuPart, zeros
from edgeq.targets.cpu.kernels.attention.kv_layout import part_bytes
from edgeq.targets.cpu.lowering.context import Context, Masters, RowArrays
from edgeq.targets.cpu.lowering.dispatch import lower, tables
from edgeq.targets.cpu.lowering.requantize import masters_of
from edgeq.targets.cpu.probes import decode_threads, prefetch_bytes, read_bandwidth
from edgeq.targets.cpu.requantized import CpuRequantizer, CpuWeights, prepare
from edgeq.targets.cpu.threads.optable import Tables
from edgeq.targets.cpu.threads.threadpool import ThreadPool
from edgeq.targets.graph import Graph, InjectVectors, RopeRotate
from edgeq.targets.host import check_rows, resolved
from edgeq.targets.host_states import HostStates
from edgeq.targets.layers import integer_codecs, linears
from edgeq.targets.requantization import InputSums, SharedInput, Weights, WeightSource, shared_inputs
from edgeq.targets.rows import Page, PagePart, Rows, StateRows, parts_of
from edgeq.targets.states import snapshot_pages
from edgeq.targets.target import OnProgress, Options, ProgramFacts, no_progress
from edgeq.targets.times import RanRows, RecordedRun, StepTimes

MIN_THREAD_BYTES = 4 << 20
"""Bytes of weights for each thread.  With less its part of an operation takes no longer than meeting the others, and where
another process holds a core, meeting can take milliseconds."""
TILE = 12
"""Rows of the largest tile of products."""
FEW_PIECES, MIN_ROWS, MAX_ROWS = 16, 4, 32
"""Pieces of a run of many rows, between which an interrupt is taken: a chunk of a prompt takes a second, a piece of it does
not.  There are 16 where that leaves each 4 rows, and more of a run so long, a picture's, that each would have more than 32."""

MAX_PRODUCTS, MAX_SCORES = 4e9, 2e9
"""Multiplications and additions of a product, and of attention, that a board takes 0.1 s for: a run whose rows see ranges, a
picture, is as long as the picture is large, and its longer operations are cut as well."""


class CpuProgram(HostStates):
    """Weights are read where the file is mapped; everything else a run needs is allocated here, once."""

    tile = TILE
    most_largest = 0

    def __init__(self, graph: Graph, file: ModelFile, options: Options, on_progress: OnProgress) -> None:
        super().__init__(graph.states, zeros)
        most = max(1, sum(linear.nbytes for o in graph.operations for linear in linears(o)) // MIN_THREAD_BYTES)
        begin = partial(on_progress, 0, 0, "measuring which kernels and how many threads are fastest")
        isa, self._reason = choose(options.isa, begin)
        self.threads = options.threads or min(most, decode_threads(isa, on_measure=begin) if most > 1 else 1)
        self.threads_prefill = options.threads_prefill or options.threads or min(most, machine.cpu().big_cores)
        # What caches hold needs no look ahead.
        first = next(iter(isa.prefetch_distances), 0)
        ahead = {
            codec: prefetch_bytes(isa, self.threads, codec, on_measure=begin) if most > 1 else first
            for codec in integer_codecs(graph)
        }
        options = replace(resolved(options), threads=self.threads, threads_prefill=self.threads_prefill)
        self._part_bytes, self.window = part_bytes(graph, options.kv), graph.window
        self.snapshot_pages = snapshot_pages(graph.states, graph.page_bytes(options.kv))
        # Which parts a page has: without a window 0, with one 1.
        self._part_kinds = [windowed for windowed, nbytes in enumerate(self._part_bytes) if nbytes]
        self.options = options
        self.graph = graph
        self.isa = isa.name
        # Holds the file: the tables hold addresses in its map.
        self._file = file
        self._memory = Buffers(file)
        rows, logits = options.max_rows, options.max_logits
        axes = 1 + max((axis for o in graph.operations if isinstance(o, RopeRotate) for axis in o.axes), default=0)
        self._injects = any(isinstance(o, InjectVectors) for o in graph.operations)
        self._counts, counts = self._memory.array(2, np.int64)
        self._tokens, tokens = self._memory.array(rows, np.int32)
        self._positions, positions = self._memory.array((axes, rows), np.int32)
        self._slots, slots = self._memory.array(rows, np.int32)
        self._page_tables, page_tables = self._memory.array((2, rows), np.int64)
        self._spans, spans = self._memory.array((len(graph.span_windows), 2, rows), np.int32)
        self._vectors, vectors = self._memory.array(rows, np.int64)
        self._selection, selection = self._memory.array(logits * graph.together, np.int32)
        self._selected_slots, selected_slots = self._memory.array(logits, np.int32)
        self._selected_page_tables, selected_page_tables = self._memory.array((2, logits), np.int64)
        self._selected_spans, selected_spans = self._memory.array((len(graph.span_windows), 2, logits), np.int32)
        self._selected_vectors, selected_vectors = self._memory.array(logits, np.int64)
        self._modality, modality = self._memory.array(rows, np.uint8)
        self._selected_modality, selected_modality = self._memory.array(logits, np.uint8)
        self._selected_positions, selected_positions = self._memory.array((axes, logits), np.int32)
        self._counted, counted = self._memory.array(rows, np.int32)
        self._sums, sums = self._memory.array(1, np.int64)
        arrays = RowArrays(
            rows=counts, selected=counts + 8, tokens=tokens, positions=positions, slots=slots, page_tables=page_tables,
            spans=spans, vectors=vectors, selection=selection, selected_slots=selected_slots,
            selected_page_tables=selected_page_tables, selected_spans=selected_spans, selected_vectors=selected_vectors,
            counted=counted, sums=sums, modality=modality, selected_modality=selected_modality,
            selected_positions=selected_positions,
            **(self._state_arrays(rows) if graph.states else {}),
        )  # fmt: skip
        self._context = partial(
            Context, graph, file, isa=isa, memory=self._memory, arrays=arrays, state_places=self.places,
            prefetch_bytes=ahead, features=processor.current().features,
        )  # fmt: skip
        self._tables: dict[tuple[Mode, WeightSource], Tables] = {}
        context = self._lowered(options.mode, "file")
        self._tables[options.mode, "file"] = tables(context, on_progress)
        width = graph.buffers[graph.result]
        address, stride = context.place(graph.result)
        stride //= 4
        whole = self._memory.view(address).view(np.float32)
        self._logits = whole[: logits * stride].reshape(logits, stride)[:, :width]
        # The slot of a run of one row: nothing else of its rows need be kept.
        self._new_pool = partial(
            ThreadPool, max(self.threads, self.threads_prefill), row_words=RECORD_SLOTS, row_slot_address=slots
        )
        self._pool = self._new_pool(len(context.records))
        self._recording, self._recorded = False, list[RecordedRun]()
        if options.requantize:
            self._made(options.mode, "masters", on_progress)
            self._made(options.mode, "requantized", on_progress)
            prepare(self._inputs, on_progress)

    @cached_property
    def _inputs(self) -> tuple[SharedInput, ...]:
        return shared_inputs(self.graph)

    @property
    def description(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        if self.threads_prefill != self.threads:
            threads += f" ({self.threads_prefill} for prefill)"
        return f"cpu, {self.isa} ({self._reason}), {threads}, {self.options.mode}"

    def facts(self) -> ProgramFacts:
        return ProgramFacts(isa=self.isa)

    def _state_arrays(self, rows: int) -> dict[str, int]:
        """The arrays of runs with states, and their addresses by the names of RowArrays."""
        shapes = {"state_sessions": 1, "state_order": rows, "state_begins": rows + 1, "states": rows, "snapshots": rows}
        kinds = dict.fromkeys(("state_order", "state_begins"), np.int32)
        made = {name: self._memory.array(count, kinds.get(name, np.int64)) for name, count in shapes.items()}
        self._states = {name: array for name, (array, _) in made.items()}
        return {name: address for name, (_, address) in made.items()}

    def _lowered(self, mode: Mode, source: WeightSource) -> Context:
        masters = Masters() if source == "file" else masters_of(self._inputs, source == "masters")
        context = self._context(replace(self.options, mode=mode), source=source, masters=masters)
        lower(context)
        return context

    def _made(self, mode: Mode, source: WeightSource, on_progress: OnProgress = no_progress) -> Tables:
        """The tables of a mode and of weights, made when they are first used: over the same buffers, one runs after another."""
        if (mode, source) not in self._tables:
            context = self._lowered(mode, source)
            made = tables(context, on_progress)
            # Room first: an interrupt must not leave tables that are too long for the pool.
            if len(context.records) > self._pool.operations:
                self._recorded = self.recorded()
                self._pool = self._new_pool(len(context.records))
                self._pool.record(self._recording)
            self._tables[mode, source] = made
        return self._tables[mode, source]

    def _requantized(self, mode: Mode, weights: Weights) -> Tables:
        assert isinstance(weights, CpuWeights)
        return weights.tables_of(mode, self._made(mode, "requantized"), self._memory)

    def prepare(self, mode: Mode, on_progress: OnProgress = no_progress) -> None:
        self._made(mode, "requantized" if self.options.requantize else "file", on_progress)

    def new_page(self) -> Page:
        full, windowed = (CpuPart(zeros(nbytes)) for nbytes in self._part_bytes)
        return Page(full, windowed)

    def copy_page(self, page: Page) -> Page:
        return Page(_copied(page.full), page.windowed and _copied(page.windowed))

    def save_page(self, page: Page) -> bytes:
        return b"".join(part.data.tobytes() for part in page.parts if isinstance(part, CpuPart))

    def page_memory(self, windowed: bool = True) -> NDArray[np.uint8]:
        return zeros(sum(self._part_bytes[: 1 + windowed]))

    def load_page(self, data: NDArray[np.uint8]) -> Page:
        full, windowed = parts_of(data, self._part_bytes)
        if windowed is None or not all(self._part_bytes):
            return Page(CpuPart(full), None if windowed is None else CpuPart(windowed))
        # Each part has memory of its own: one is dropped before the other.
        return Page(_copied(CpuPart(full)), _copied(CpuPart(windowed)))

    def new_sums(self) -> InputSums:
        return InputSums(self._inputs)

    def new_weights(self) -> CpuWeights:
        return CpuWeights(self._inputs)

    def requantize(self, weights: Weights, scales: Sequence[NDArray[np.float32]]) -> None:
        assert isinstance(weights, CpuWeights)
        CpuRequantizer(self._file, self._memory, self._pool, self.threads_prefill).fill(self._inputs, weights, scales)
        self._requantized(self.options.mode, weights)

    def read_bandwidth(self, refresh: bool = False) -> float | None:
        return read_bandwidth(self.threads, refresh)

    def record(self, on: bool) -> None:
        self._recording = on
        self._pool.record(on)

    def recorded(self) -> list[RecordedRun]:
        found, self._recorded = self._recorded, []
        first = np.zeros(1, np.int32)
        for made, slot, rows, calls in self._pool.recorded():
            alone = RanRows(np.array([slot], np.int32), first, None, first)
            found.append(RecordedRun(StepTimes(made.steps, self._pool.times, calls), made.mode, rows or alone))
        return found

    def run(self, rows: Rows, mode: Mode | None = None) -> NDArray[np.float32]:
        return self._run(rows, self._made(mode or self.options.mode, "file"))

    def run_requantized(self, rows: Rows, weights: Weights, mode: Mode | None = None) -> NDArray[np.float32]:
        return self._run(rows, self._requantized(mode or self.options.mode, weights))

    def run_summing(self, rows: Rows, sums: InputSums, mode: Mode | None = None) -> NDArray[np.float32]:
        made = self._made(mode or self.options.mode, "masters")
        check_rows(rows, self.options, self.graph.together)
        self._sums[0] = sums.values.ctypes.data
        self._counted[: len(rows)] = 1 if rows.counted is None else rows.counted
        sums.tokens += int(self._counted[: len(rows)].sum())
        # Sums must not be left half taken: no interrupt between two pieces.
        return self._run(rows, made, pieces=1)

    def _run(self, rows: Rows, made: Tables, pieces: int = 0) -> NDArray[np.float32]:
        """`pieces` into which a run is cut, between which an interrupt is taken; 0: as many as its rows are worth."""
        check_rows(rows, self.options, self.graph.together)
        count, selected = len(rows), -(-len(rows.wanted) // self.graph.together)
        # Of one row a slice: numpy takes longer to pick rows by their numbers than all else here.
        first = slice(1) if count == selected == 1 else rows.wanted[:: self.graph.together]
        # The kernels read these arrays until the run ends.
        pages = [[_addresses(session, windowed) for session in rows.pages] for windowed in self._part_kinds]
        self._counts[:] = count, selected
        self._tokens[:count] = rows.tokens
        self._positions[:, :count] = rows.positions[: len(self._positions)]
        self._slots[:count] = rows.slots
        for windowed, sessions in zip(self._part_kinds, pages, strict=True):
            tables = [each.__array_interface__["data"][0] for each in sessions]
            self._page_tables[windowed, :count] = tables[0] if len(tables) == 1 else np.array(tables)[rows.sessions]
        if len(self._spans):
            self._spans[:, :, :count] = rows.ranges(self.graph.span_windows)
            self._selected_spans[:, :, :selected] = self._spans[:, :, first]
        self._modality[:count] = 0 if rows.modality is None else rows.modality
        self._selected_modality[:selected] = self._modality[first]
        vectors = self._place_vectors(rows, first) if self._injects else None
        taken = self._place_states(rows) if self.snapshot_pages else None
        self._selection[: len(rows.wanted)] = rows.wanted
        self._selected_slots[:selected] = rows.slots[first]
        self._selected_positions[:, :selected] = self._positions[:, first]
        self._selected_page_tables[:, :selected] = self._page_tables[:, first]
        table, threads = (made.decode, self.threads) if count == 1 else (made.prefill, self.threads_prefill)
        pieces = pieces or max(1, min(FEW_PIECES, count // MIN_ROWS), count // MAX_ROWS)
        cuts = None
        if rows.spans is not None:
            widest = int((rows.spans[:, 1] - rows.spans[:, 0]).max())
            cuts = np.ceil(made.work @ (count / MAX_PRODUCTS, count * widest / MAX_SCORES)).astype(np.int64)
        alone = count == selected == 1 and rows.spans is None
        kept = RanRows.of(rows) if self._recording and not alone else None
        self._pool.run(table, threads, pieces, cuts, made, kept)
        if taken:
            taken[0].end(rows.states)
        del vectors, pages, taken
        return self._logits[:selected]

    def _place_states(self, rows: Rows) -> tuple[StateRows, list[NDArray[np.int64]]]:
        """Note the order of the rows, where states lie and snapshots go; the arrays that kernels read until the run ends."""
        found, arrays, count = StateRows.of(rows), self._states, len(rows.states)
        snapshots = [
            np.array([page.snapshot.address if page.snapshot else 0 for page in pages], np.int64)  # type: ignore[attr-defined]
            for pages in rows.pages
        ]
        arrays["state_sessions"][0] = count
        arrays["state_order"][: len(rows)] = found.order
        arrays["state_begins"][: count + 1] = found.begins
        arrays["states"][:count] = [state.address for state in rows.states]  # type: ignore[attr-defined]
        arrays["snapshots"][:count] = [each.ctypes.data for each in snapshots]
        found.begin(rows.states)
        return found, snapshots

    def _place_vectors(self, rows: Rows, first: NDArray[np.int32] | slice) -> NDArray[np.float32] | None:
        """Note where the vector of each row lies, 0 for none; returns the array that they lie in."""
        count, vectors = len(rows), None
        self._vectors[:count] = 0
        if rows.vectors is not None and rows.vector_of is not None:
            vectors = np.ascontiguousarray(rows.vectors, np.float32)
            addresses = vectors.ctypes.data + vectors.strides[0] * rows.vector_of.astype(np.int64)
            self._vectors[:count] = np.where(rows.vector_of >= 0, addresses, 0)
        selected = self._vectors[first]
        self._selected_vectors[: len(selected)] = selected
        return vectors


def _copied(part: PagePart) -> CpuPart:
    assert isinstance(part, CpuPart)
    copied = CpuPart(zeros(len(part.data)))
    copied.data[:] = part.data
    return copied


def _addresses(pages: Sequence[Page], windowed: int) -> NDArray[np.int64]:
    """Where the parts of pages lie; 0 for those that were dropped, which no row sees."""
    parts = [page.windowed for page in pages] if windowed else [page.full for page in pages]
    return np.array([part.address if part else 0 for part in parts], np.int64)  # type: ignore[attr-defined]
