"""How long a context fits in this machine's memory; asked before anything is allocated."""

from __future__ import annotations

from edgeq.errors import InputError, ResourceError
from edgeq.machine import available_bytes
from edgeq.metadata import Metadata
from edgeq.targets import Options
from edgeq.targets.graph import PAGE, Experts, Graph, Select

DEFAULT_CONTEXT = 4096


def buffer_bytes(graph: Graph, options: Options) -> int:
    """Bytes of a program's float32 buffers: `max_rows` rows of each, of those of experts once for every choice, `max_logits` of
    those behind the selection."""
    rows, total, seen, routed = options.max_rows, 0, set[str](), 0
    for operation in graph.operations:
        if isinstance(operation, Select):
            rows = options.max_logits
            total += sum(graph.buffers[name] for name in operation.buffers) * rows * 4
        if isinstance(operation, Experts):
            widths = graph.buffers[operation.x] + 3 * operation.width + graph.buffers[operation.out]
            routed = max(routed, widths * operation.chosen * rows * 4)
        name = getattr(operation, "out", None)
        if name is not None and name not in seen:
            seen.add(name)
            total += graph.buffers[name] * rows * 4
    return total + routed


def choose_context(graph: Graph, metadata: Metadata, options: Options, context: int | None) -> int:
    """`context` if it can be had; without one min(max_position_embeddings, 4096, what fits).

    The weights are mapped from the file; their pages count as available but must stay in memory.
    InputError: out of the model's range.  ResourceError: it does not fit; the message names the largest that does.
    """
    limit = metadata.config.max_position_embeddings
    if context is not None and not 1 <= context <= limit:
        raise InputError(f"context {context} is out of range; this model takes 1 to {limit} positions: pass -c {limit} or less")
    sizes = metadata.bytes_per_token()
    available = available_bytes()
    fixed = sizes["weights"] + metadata.idle_bytes() + sizes["head"] + buffer_bytes(graph, options)
    fits = max(0, available - fixed) // graph.page_bytes(options.kv) * PAGE
    wanted = min(limit, DEFAULT_CONTEXT, fits) if context is None else context
    if wanted == 0 or wanted > fits:
        need = fixed + -(-max(wanted, 1) // PAGE) * graph.page_bytes(options.kv)
        cure = f"the largest context that fits is {min(fits, limit)}: pass -c {min(fits, limit)}"
        if not fits:
            cure = "no context fits: free some memory or take a file with fewer bits"
        raise ResourceError(
            f"a context of {max(wanted, 1)} positions needs {_size(need)}, weights included; "
            f"{_size(available)} are available; {cure}"
        )
    return wanted


def _size(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"
