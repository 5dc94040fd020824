"""A compiled graph: its memory, its tables and the threads that walk them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from edgeq import machine
from edgeq.container import ModelFile
from edgeq.records import Mode
from edgeq.targets.cpu.choose_isa import choose
from edgeq.targets.cpu.jit.buffers import CpuPage, Memory
from edgeq.targets.cpu.jit.optable import ROW_WORDS, Tables
from edgeq.targets.cpu.jit.threadpool import Pool
from edgeq.targets.cpu.kernels.kv_layout import layer_bytes
from edgeq.targets.cpu.lowering import requantize
from edgeq.targets.cpu.lowering.context import Lowering, RowArrays
from edgeq.targets.cpu.lowering.requantize import CpuWeights
from edgeq.targets.cpu.probes import decode_threads, read_bandwidth
from edgeq.targets.graph import Graph, linears
from edgeq.targets.host import check_rows, resolved
from edgeq.targets.requantization import InputSums, SharedInput, Weights, shared_inputs
from edgeq.targets.rows import Page, Rows
from edgeq.targets.target import OnProgress, Options, StepTimes, no_progress

LEAST_BYTES = 4 << 20
"""Of weights, for each thread.  With less its part of an operation takes no longer than meeting the others, and where another
process holds a core, meeting can take milliseconds."""
TILE = 12
"""Rows of the largest tile of products."""
MOST_PIECES, ROWS_A_PIECE = 16, 4
"""Of a run of many rows, between which an interrupt is taken: a chunk of a prompt takes a second, a piece of it does not."""


class CpuProgram:
    """Weights are read where the file is mapped; everything else a run needs is allocated here, once."""

    tile = TILE

    def __init__(self, graph: Graph, file: ModelFile, options: Options, on_progress: OnProgress) -> None:
        most = max(1, sum(linear.nbytes for o in graph.operations for linear in linears(o)) // LEAST_BYTES)
        begin = partial(on_progress, 0, 0, "measuring which kernels and how many threads are fastest")
        isa, self._reason = choose(options.isa, begin)
        self.threads = options.threads or min(most, decode_threads(isa, on_measure=begin) if most > 1 else 1)
        self.threads_prefill = options.threads_prefill or options.threads or min(most, machine.cpu().big_cores)
        options = replace(resolved(options), threads=self.threads, threads_prefill=self.threads_prefill)
        self.options = options
        self.graph = graph
        self.isa = isa.name
        # Holds the file: the tables hold addresses in its map.
        self._file = file
        self._memory = Memory(file)
        rows, logits = options.max_rows, options.max_logits
        self._counts, counts = self._memory.array(2, np.int64)
        self._tokens, tokens = self._memory.array(rows, np.int32)
        self._positions, positions = self._memory.array(rows, np.int32)
        self._slots, slots = self._memory.array(rows, np.int32)
        self._tables, tables = self._memory.array(rows, np.int64)
        self._selection, selection = self._memory.array(logits, np.int32)
        self._selected_slots, selected_slots = self._memory.array(logits, np.int32)
        self._selected_tables, selected_tables = self._memory.array(logits, np.int64)
        self._counted, counted = self._memory.array(rows, np.int32)
        self._sums, sums = self._memory.array(1, np.int64)
        chosen = (selection, selected_slots, selected_tables)
        arrays = RowArrays(counts, counts + 8, tokens, positions, slots, tables, *chosen, counted, sums)
        self._lower = partial(Lowering, graph, file, isa=isa, memory=self._memory, arrays=arrays)
        self._tables_of: dict[tuple[Mode, requantize.Source], Tables] = {}
        lowering = self._lower(options=self.options)
        self._tables_of[options.mode, "file"] = Tables(*lowering.tables(on_progress), lowering.steps())
        self._page_bytes = graph.layers * layer_bytes(graph, options.kv)
        width = graph.buffers[graph.result]
        stride = lowering.row_bytes[graph.result] // 4
        whole = self._memory.view(lowering.buffers[graph.result]).view(np.float32)
        self._logits = whole[: logits * stride].reshape(logits, stride)[:, :width]
        self._pool = Pool(max(self.threads, self.threads_prefill), len(lowering.rows), ROW_WORDS)
        if options.requantize:
            self._made(options.mode, "masters", on_progress)
            self._made(options.mode, "copy", on_progress)
            requantize.prepare(self._inputs, on_progress)

    @cached_property
    def _inputs(self) -> tuple[SharedInput, ...]:
        return shared_inputs(self.graph)

    @property
    def description(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        if self.threads_prefill != self.threads:
            threads += f" ({self.threads_prefill} for prefill)"
        return f"cpu, {self.isa} ({self._reason}), {threads}, {self.options.mode}"

    def _made(self, mode: Mode, source: requantize.Source, on_progress: OnProgress = no_progress) -> Tables:
        """The tables of a mode and of weights, made when they are first used: over the same buffers, one runs after another."""
        if (mode, source) not in self._tables_of:
            lowering = self._lower(options=replace(self.options, mode=mode), source=source)
            tables = Tables(*lowering.tables(on_progress), lowering.steps())
            # Room first: an interrupt must not leave tables behind that are too long for the pool.
            if len(lowering.rows) > self._pool.operations:
                self._pool = Pool(self._pool.threads, len(lowering.rows), ROW_WORDS)
            self._tables_of[mode, source] = tables
        return self._tables_of[mode, source]

    def _of_copy(self, mode: Mode, weights: Weights) -> Tables:
        assert isinstance(weights, CpuWeights)
        if mode not in weights.tables:
            general, addresses = self._made(mode, "copy"), weights.addresses(self._memory)
            one, many = (requantize.moved(table, addresses) for table in (general.one, general.many))
            weights.tables[mode] = Tables(one, many, general.steps)
        return weights.tables[mode]

    def prepare(self, mode: Mode, on_progress: OnProgress = no_progress) -> None:
        self._made(mode, "copy" if self.options.requantize else "file", on_progress)

    def new_page(self) -> Page:
        return CpuPage(self._page_bytes)

    def copy_page(self, page: Page) -> Page:
        assert isinstance(page, CpuPage)
        copied = CpuPage(self._page_bytes)
        copied.data[:] = page.data
        return copied

    def save_page(self, page: Page) -> bytes:
        assert isinstance(page, CpuPage)
        return page.data.tobytes()

    def load_page(self, data: bytes) -> Page:
        page = CpuPage(self._page_bytes)
        page.data[:] = np.frombuffer(data, np.uint8, count=self._page_bytes)
        return page

    def new_sums(self) -> InputSums:
        return InputSums(self._inputs)

    def new_weights(self) -> CpuWeights:
        return CpuWeights(self._inputs)

    def requantize(self, weights: Weights, scales: Sequence[NDArray[np.float32]]) -> None:
        assert isinstance(weights, CpuWeights)
        threads = self.threads_prefill
        requantize.fill(self._file, self._memory, self._pool, threads, self._inputs, weights, scales)
        self._of_copy(self.options.mode, weights)

    def read_bandwidth(self, refresh: bool = False) -> float | None:
        return read_bandwidth(self.threads, refresh)

    def run(self, rows: Rows, mode: Mode | None = None, *, times: list[StepTimes] | None = None) -> NDArray[np.float32]:
        return self._run(rows, self._made(mode or self.options.mode, "file"), times)

    def run_requantized(
        self, rows: Rows, weights: Weights, mode: Mode | None = None, *, times: list[StepTimes] | None = None
    ) -> NDArray[np.float32]:
        return self._run(rows, self._of_copy(mode or self.options.mode, weights), times)

    def run_summing(
        self, rows: Rows, sums: InputSums, mode: Mode | None = None, *, times: list[StepTimes] | None = None
    ) -> NDArray[np.float32]:
        made = self._made(mode or self.options.mode, "masters")
        check_rows(rows, self.options)
        self._sums[0] = sums.values.ctypes.data
        self._counted[: len(rows)] = 1 if rows.counted is None else rows.counted
        sums.tokens += int(self._counted[: len(rows)].sum())
        # Sums must not be left half taken: no interrupt between two pieces.
        return self._run(rows, made, times, pieces=1)

    def _run(self, rows: Rows, made: Tables, times: list[StepTimes] | None, pieces: int = 0) -> NDArray[np.float32]:
        """`pieces` into which a run is cut, between which an interrupt is taken; 0: as many as its rows are worth."""
        check_rows(rows, self.options)
        count, selected = len(rows), len(rows.wanted)
        pages = [np.array([page.address for page in session], np.int64) for session in rows.pages]  # type: ignore[attr-defined]
        tables = np.array([page.ctypes.data for page in pages], np.int64)
        self._counts[:] = count, selected
        self._tokens[:count] = rows.tokens
        self._positions[:count] = rows.positions[0]
        self._slots[:count] = rows.slots
        self._tables[:count] = tables[rows.sessions]
        self._selection[:selected] = rows.wanted
        self._selected_slots[:selected] = rows.slots[rows.wanted]
        self._selected_tables[:selected] = self._tables[rows.wanted]
        table, threads = (made.one, self.threads) if count == 1 else (made.many, self.threads_prefill)
        pieces = pieces or min(MOST_PIECES, max(1, count // ROWS_A_PIECE))
        if times is None:
            self._pool.run(table, threads, pieces)
        else:
            times.append(StepTimes(made.steps, self._pool.timed(table, threads, pieces)))
        return self._logits[:selected]
