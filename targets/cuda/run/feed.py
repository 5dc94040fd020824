"""What the kernels of a run read of its rows: tokens, slots, page tables, places of angles, rows of a table that stays in the
file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import as_float32
from edgeq.format.codec_rows import dequantize_rows
from edgeq.format.container import ModelFile
from edgeq.format.records import ArrayRef, Weight
from edgeq.targets.cuda.lowering.cache import cache_kinds
from edgeq.targets.cuda.lowering.context import Gather, Lowering
from edgeq.targets.cuda.run.angles import AngleTables
from edgeq.targets.cuda.run.states import sent_of_states
from edgeq.targets.cuda.run.storage import POOL_UNIT, Pages, Storage
from edgeq.targets.graph import Graph
from edgeq.targets.rows import Rows
from edgeq.targets.target import Options

PAGES_OF_A_RUN = 1 << 16
"""Pages that the rows of a run see at most: 4 million positions."""
PLACES = [("places", "sent", stage) for stage in range(2)]
"""Where a run reads which rows of tables its angles are, by name."""
Sent = Mapping[object, NDArray[Any]]


class Feed:
    """Arrays for the rows of a run, by the name of the memory that they go to.

    kinds    of layers of the cache, each with page tables of its own
    angles   of rotary positions;  span_windows: as of Graph
    """

    def __init__(self, graph: Graph, file: ModelFile, storage: Storage, pages: Pages, options: Options) -> None:
        self.span_windows = graph.span_windows
        self._graph, self._file, self._storage, self._pages = graph, file, storage, pages
        self.kinds, self.angles = cache_kinds(graph, options.kv), AngleTables(graph, storage, options.max_rows)
        for kind in self.kinds:
            storage.named(kind, PAGES_OF_A_RUN * 8)

    def of(self, rows: Rows, lowering: Lowering, pages: int = 0) -> Sent:
        """What the launches of a run ask for of its rows, by the name of its memory; of a table in the file by its Gather.

        pages   entries of the page tables of all sessions together; 0: as many as they have
        """
        stages = rows, rows.selected(self._graph.together) if len(rows.wanted) else None
        sent = dict[object, NDArray[Any]]()
        sent |= self._page_tables(rows, pages)
        tables = np.cumsum([0, *(len(session) for session in rows.pages)])[:-1].astype(np.int32)
        brought = np.zeros(0, np.int32) if rows.vector_of is None else np.unique(rows.vector_of[rows.vector_of >= 0])
        if self._storage.has("vectors"):
            vectors = np.zeros((0, 0), np.float32) if rows.vectors is None else rows.vectors
            sent["vectors"] = np.asarray(vectors[brought, : lowering.vector_width], np.float32)
        for stage, here in enumerate(stages):
            if here is not None:
                sent |= self._of_stage(here, stage, tables[here.sessions], brought)
        if any(self._storage.has(name) for name in PLACES):
            places = self.angles.places(rows.positions)
            of_stages = places, places[rows.wanted[:: self._graph.together]]
            sent |= {name: of for name, of in zip(PLACES, of_stages, strict=True) if self._storage.has(name) and len(of)}
        if rows.states:
            of_states = sent_of_states(rows, len(rows), self._pages.base)
            sent |= {(name, "sent", 0): values for name, values in of_states.items()}
        if self._storage.has("wanted"):
            sent["wanted"] = np.asarray(rows.wanted, np.int32)
        for each in lowering.by_operation:
            if isinstance(each, Gather):
                sent[each] = self._table_rows(each.table, rows.tokens.astype(np.int64))
        return sent

    def _table_rows(self, table: ArrayRef | Weight, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of a table in the file, float32 [tokens, width]."""
        if isinstance(table, ArrayRef):
            return np.ascontiguousarray(as_float32(self._file.array(table)[tokens], table.dtype))
        arrays = {name: self._file.array(ref) for name, ref in table.arrays.items()}
        return dequantize_rows(table.codec, table.columns, tokens, arrays)

    def _page_tables(self, rows: Rows, count: int) -> Sent:
        """Where the layers of each kind begin in the pages of all sessions, one session after another."""
        every = [page for session in rows.pages for page in session]
        if len(every) > PAGES_OF_A_RUN:
            raise ValueError(f"{len(every)} pages in a run, of at most {PAGES_OF_A_RUN}")
        sent = dict[object, NDArray[Any]]()
        for kind in self.kinds:
            offsets = np.zeros(max(count, len(every)), np.int64)
            offsets[: len(every)] = [self._pages.offset(page, kind.windowed) for page in every]
            offsets[: len(every)] += kind.start // POOL_UNIT
            sent[kind] = offsets
        return sent

    def _of_stage(self, rows: Rows, stage: int, tables: NDArray[np.int32], brought: NDArray[np.int32]) -> Sent:
        """What the kernels of a stage ask for of its rows; `brought`: the vectors that were sent, in their order."""
        ends = rows.slots + 1
        each: dict[str, NDArray[Any]] = {
            "tokens": rows.tokens, "slots": rows.slots, "positions": rows.positions[0], "tables": tables,
            "first of causal": np.zeros_like(ends), "last of causal": ends,
            "modality": np.zeros(len(rows)) if rows.modality is None else rows.modality,
            "counted": np.ones(len(rows)) if rows.counted is None else rows.counted,
            "vectors": np.full(len(rows), -1) if rows.vector_of is None else np.where(
                rows.vector_of < 0, -1, np.searchsorted(brought, rows.vector_of)),
        }  # fmt: skip
        for kind, (first, last) in enumerate(rows.ranges(self.span_windows)):
            each |= {f"first of span {kind}": first, f"last of span {kind}": last}
        return {
            (name, "sent", stage): np.asarray(values, np.int32)
            for name, values in each.items()
            if self._storage.has((name, "sent", stage))
        }
