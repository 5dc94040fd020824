"""Where the float32 buffers of a graph lie: those that are never needed at the same time share memory.

A buffer is needed from a write to the last read of what was written.  Its name comes again in every layer, so it has many
lives, and between them its place belongs to others.  When a life begins, what lies there are remains of others: nothing may
read what no operation of that life has written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from edgeq.targets import graph as op
from edgeq.targets.column_ranges import Columns, without
from edgeq.targets.cpu.jit.buffers import ALIGNMENT, padded


class Buffer(NamedTuple):
    """A buffer of the graph; `selected`: of the rows of the result, which have places of their own from the selection on."""

    name: str
    selected: bool = False


class Access(NamedTuple):
    """What an operation reads, all columns, and what it writes: columns [begin, end)."""

    reads: tuple[Buffer, ...]
    writes: tuple[tuple[Buffer, int, int], ...]


@dataclass(frozen=True)
class Places:
    """Bytes from the beginning of the shared memory to each buffer, and of all of it."""

    offsets: dict[Buffer, int]
    nbytes: int


def lives(graph: op.Graph) -> dict[Buffer, set[int]]:
    """The operations, by their place in the list, during which each buffer is needed.

    One more on either side of a life: an operation may do a part of the one before or after it (fuse.py).
    """
    accesses, widths = list(_accesses(graph)), graph.buffers
    found: dict[Buffer, set[int]] = {}
    needed: dict[Buffer, Columns] = {}
    for i in reversed(range(len(accesses))):
        reads, writes = accesses[i]
        for buffer, begin, end in writes:
            needed[buffer] = without(needed.get(buffer, []), begin, end)
        for buffer in reads:
            needed[buffer] = [(0, widths[buffer.name])]
        for buffer in (*reads, *(buffer for buffer, *_ in writes), *(buffer for buffer, rest in needed.items() if rest)):
            found.setdefault(buffer, set()).update((i - 1, i, i + 1))
    return found


def _accesses(graph: op.Graph) -> Iterator[Access]:
    selected = set[str]()
    for o in graph.operations:
        reads = tuple(Buffer(name, name in selected) for name in o.reads())
        if isinstance(o, op.Select):
            selected.update(o.writes())
        columns = {name: o.columns(graph.buffers[name]) for name in o.writes()}
        yield Access(reads, tuple((Buffer(name, name in selected), *columns[name]) for name in o.writes()))


def places(sizes: Mapping[Buffer, int], needed: Mapping[Buffer, set[int]]) -> Places:
    """A place for each buffer of so many bytes, apart from all that are needed at the same time: the largest first, each as low
    as it fits (Pisarchyk and Lee 2020, arXiv 2001.03288, greedy by size)."""
    found: dict[Buffer, int] = {}
    for buffer in sorted(sizes, key=lambda each: (-sizes[each], each)):
        at = 0
        others = (other for other in found if needed.get(other, set()) & needed.get(buffer, set()))
        for start, other in sorted((found[other], other) for other in others):
            if at + sizes[buffer] <= start:
                break
            at = max(at, padded(start + sizes[other], ALIGNMENT))
        found[buffer] = at
    return Places(found, max((start + sizes[buffer] for buffer, start in found.items()), default=0))
