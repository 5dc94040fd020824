"""How a run is cut into calls, between which Python can take an interrupt."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]
PARTS_OF_A_PIECE, FINER = 2, 4
"""Parts of a piece for each thread, so that none waits for the last one long, and how much finer they may become: an operation
has no more work items than some for each of its parts."""


class TablePiece(NamedTuple):
    """Operations that are run in one call: those of `table`, which lies at `address` and begins at `start` of the whole, or
    with `last`, not 0, the parts [first, last) of one."""

    start: int
    table: Table
    address: int
    first: int = 0
    last: int = 0


def split(table: Table, pieces: int, cuts: NDArray[np.int64] | None, threads: int = 1) -> list[TablePiece]:
    """The table in about as many pieces; an operation that `cuts` has more than one for is cut into so many, or fewer: each
    has parts for all `threads`, and parts become no finer than FINER times.  None is empty."""
    pieces = min(pieces, len(table))
    bounds = {len(table) * i // pieces for i in range(pieces + 1)}
    if cuts is not None:
        alone = np.flatnonzero(cuts > 1)
        bounds.update(alone.tolist(), (alone + 1).tolist())
    found = list[TablePiece]()
    for start, end in pairwise(sorted(bounds)):
        if cuts is None or cuts[start] <= 1:
            found.append(TablePiece(start, table[start:end], table.ctypes.data + start * table.strides[0]))
            continue
        # With the record after it, which a kernel may read (args.py, following).
        record, count, least = table[start : end + 1].copy(), int(cuts[start]), 1
        parts = int(record[0, -1])
        if threads > 1:
            least = PARTS_OF_A_PIECE * threads
            count = min(count, max(1, FINER * parts // least))
        each = max(-(-parts // count), least)
        record[0, -1] = each * count
        found += [TablePiece(start, record[:1], record.ctypes.data, each * i, each * (i + 1)) for i in range(count)]
    return found
