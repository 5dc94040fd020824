"""What the targets that run in host memory share: the size of a run, and the memory that a program needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgeq.format.container import ModelFile
from edgeq.system.machine import available_bytes
from edgeq.targets.graph import Experts, Graph, Select
from edgeq.targets.rows import Rows
from edgeq.targets.target import Beside, MemoryNeed, Options

CHUNK_ROWS = 516
"""Default maximum rows per run (prefill chunk size): a prompt of 512 tokens in one, and a multiple of a tile of 12 tokens."""


def resolved(options: Options, chunk_rows: int = CHUNK_ROWS) -> Options:
    """The options with the number of rows of a run, where that is left to the target: `chunk_rows`."""
    return replace(options, max_rows=options.max_rows or max(chunk_rows, options.max_logits))


def check_rows(rows: Rows, options: Options, together: int = 1) -> None:
    """ValueError: more rows, or more wanted rows, than the program was compiled for; `together` wanted rows give one result."""
    if not 0 < len(rows.tokens) <= options.max_rows or len(rows.wanted) > together * options.max_logits:
        raise ValueError(
            f"{len(rows)} rows, {len(rows.wanted)} of them wanted; this program was compiled for {options.max_rows} "
            f"and {options.max_logits}"
        )


def host_room(graph: Graph, file: ModelFile, options: Options, beside: Sequence[Beside] = ()) -> MemoryNeed:
    """Weights are mapped from the file: their pages count as available, but must stay in memory."""
    metadata = file.metadata
    sizes = metadata.bytes_per_token()
    needed = sizes["weights"] + metadata.idle_bytes() + sizes["head"] + buffer_bytes(graph, options)
    needed += sum(each.own_bytes + buffer_bytes(each.graph, each.options) for each in beside)
    return MemoryNeed(available_bytes(), needed)


def buffer_bytes(graph: Graph, options: Options) -> int:
    """Bytes of a program's float32 buffers: `max_rows` rows of each, those of experts once for every choice, and `max_logits`
    rows of those after the selection."""
    rows, total, seen, routed = resolved(options).max_rows, 0, set[str](), 0
    for operation in graph.operations:
        if isinstance(operation, Select):
            rows = options.max_logits
            total += sum(graph.buffers[name] for name in operation.writes()) * rows * 4
            seen.update(operation.writes())
        if isinstance(operation, Experts):
            widths = graph.buffers[operation.x] + 3 * operation.width + graph.buffers[operation.out]
            routed = max(routed, widths * operation.chosen * rows * 4)
        for name in operation.writes():
            if name not in seen:
                seen.add(name)
                total += graph.buffers[name] * rows * 4
    return total + routed
