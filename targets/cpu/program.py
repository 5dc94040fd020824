"""A compiled graph: its memory, its tables and the threads that walk them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeq.container import ModelFile
from edgeq.targets import Options, Report, machine
from edgeq.targets.cpu.isa import choose
from edgeq.targets.cpu.lower import ROW_WORDS, Lowering, RowArrays
from edgeq.targets.cpu.memory import CpuPage, Memory
from edgeq.targets.cpu.pages import layer_bytes
from edgeq.targets.cpu.pool import Pool
from edgeq.targets.operations import Graph, Linear, Page, Rows

LEAST_BYTES = 4 << 20
"""Of weights, for each thread.  With less its part of an operation takes no longer than meeting the others, and where another
process holds a core, meeting can take milliseconds."""


class CpuProgram:
    """Weights are read where the file is mapped; everything else a run needs is allocated here, once."""

    def __init__(self, graph: Graph, file: ModelFile, options: Options, report: Report) -> None:
        most = max(1, sum(o.linear.nbytes for o in graph.operations if isinstance(o, Linear)) // LEAST_BYTES)
        self.threads = options.threads or min(most, machine.decode_threads() if most > 1 else 1)
        self.threads_prefill = options.threads_prefill or options.threads or min(most, machine.cpu().big_cores)
        self.options = replace(options, threads=self.threads, threads_prefill=self.threads_prefill)
        self.graph = graph
        isa, self._reason = choose(options.isa)
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
        arrays = RowArrays(counts, counts + 8, tokens, positions, slots, tables, selection)
        lowering = Lowering(graph, file, self.options, isa, self._memory, arrays)
        self._one, self._many = lowering.tables(report)
        self._page_bytes = graph.layers * layer_bytes(graph, options.kv)
        width = graph.buffers[graph.logits]
        stride = lowering.row_bytes[graph.logits] // 4
        whole = self._memory.view(lowering.buffers[graph.logits]).view(np.float32)
        self._logits = whole[: logits * stride].reshape(logits, stride)[:, :width]
        self._pool = Pool(max(self.threads, self.threads_prefill), len(self._many), ROW_WORDS)

    @property
    def description(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        if self.threads_prefill != self.threads:
            threads += f" ({self.threads_prefill} for prefill)"
        return f"cpu, {self.isa} ({self._reason}), {threads}, {self.options.mode}"

    def new_page(self) -> Page:
        return CpuPage(self._page_bytes)

    def run(self, rows: Rows) -> NDArray[np.float32]:
        count, selected = len(rows), len(rows.logits)
        if not 0 < count <= self.options.max_rows or selected > self.options.max_logits:
            raise ValueError(
                f"{count} rows and {selected} logits; this program was compiled for {self.options.max_rows} "
                f"and {self.options.max_logits}"
            )
        pages = [np.array([page.address for page in session], np.int64) for session in rows.pages]  # type: ignore[attr-defined]
        tables = np.array([page.ctypes.data for page in pages], np.int64)
        self._counts[:] = count, selected
        self._tokens[:count] = rows.tokens
        self._positions[:count] = rows.positions
        self._slots[:count] = rows.slots
        self._tables[:count] = tables[rows.sessions]
        self._selection[:selected] = rows.logits
        if count == 1:
            self._pool.run(self._one, self.threads)
        else:
            self._pool.run(self._many, self.threads_prefill)
        return self._logits[:selected]
