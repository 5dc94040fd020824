"""How long a context fits in memory; asked before anything is allocated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from edgeq.errors import InputError, ResourceError
from edgeq.format.records import KvCodec
from edgeq.network.config import ModelConfig
from edgeq.runtime.session.cache import windowed_pages
from edgeq.targets.graph import Graph
from edgeq.targets.host import CHUNK_ROWS
from edgeq.targets.rows import PAGE
from edgeq.targets.states import snapshot_bytes, snapshot_pages, state_bytes
from edgeq.targets.target import MemoryNeed, Options

DEFAULT_CONTEXT = 4096


MAX_ROWS = 1024
"""Rows of a run, at most, where that is left to a target."""


WHOLE_PROMPT = 1024
"""Positions beside those of a picture, of a context that nobody chose, where a prompt is one run."""


def cache_bytes(graph: Graph, options: Options, positions: int) -> int:
    """Bytes of the cache of a session with so many positions, in whole pages, and of its states.

    Layers with a window hold fewer of the pages.
    """
    (full, windowed), pages = graph.part_bytes(options.kv), -(-positions // PAGE)
    held = pages * full + min(pages, windowed_pages(graph.window, options.max_rows or MAX_ROWS)) * windowed
    return held + states_bytes(graph, options.kv, pages) if graph.states else held


def expected_cache_bytes(graph: Graph, kv: KvCodec, positions: int) -> int:
    """The same with nothing but the codec known, of positions and not of whole pages: where a file is to run elsewhere."""
    full, windowed = graph.part_bytes(kv)
    kept = min(positions, PAGE * windowed_pages(graph.window, MAX_ROWS))
    held = (positions * full + kept * windowed) // PAGE
    return held + states_bytes(graph, kv, -(-positions // PAGE)) if graph.states else held


def states_bytes(graph: Graph, kv: KvCodec, pages: int) -> int:
    """Bytes of the states of a session and of their snapshots: with so many pages, and while a prompt is read."""
    apart = snapshot_pages(graph.states, graph.page_bytes(kv))
    snapshots = pages // apart + (2 if apart > 1 else 0)
    return 2 * state_bytes(graph.states) + snapshots * snapshot_bytes(graph.states)


def context_pages(graph: Graph, options: Options, positions: int) -> int:
    """Whole pages that take as much memory."""
    return -(-cache_bytes(graph, options, positions) // graph.page_bytes(options.kv))


def longest_context(fits: Callable[[int], bool], limit: int) -> int:
    """The most positions, of whole pages, that `fits` says can be had; a page more than `limit` is not looked for."""
    return PAGE * bisect_left(range(1, -(-limit // PAGE) + 1), True, key=lambda pages: not fits(PAGE * pages))


def choose_context(room: MemoryNeed, size: Callable[[int], int], limit: int, context: int | None) -> int:
    """`context` if it can be had; without one min(limit, 4096, what fits).

    room    what a program may take, and needs without its cache
    size    bytes of a cache of so many positions
    limit   positions that the model was made for

    InputError: out of the model's range.  ResourceError: it does not fit; the message names the largest that does.
    """
    if context is not None and not 1 <= context <= limit:
        raise InputError(
            f"context {context} is out of range; this model takes 1 to {limit} positions: pass `context={limit}` or less"
        )
    fits = longest_context(lambda positions: room.needed + size(positions) <= room.available, limit)
    wanted = min(limit, DEFAULT_CONTEXT, fits) if context is None else context
    if wanted == 0 or wanted > fits:
        need = room.needed + size(max(wanted, 1))
        cure = f"the largest context that fits is {min(fits, limit)}: pass `context={min(fits, limit)}`"
        if not fits:
            cure = "no context fits: free some memory or take a file with fewer bits"
        if room.saving:
            cure += f", or {room.saving}"
        raise ResourceError(
            f"a context of {max(wanted, 1)} positions needs {_size(need)}, weights included; "
            f"{_size(room.available)} are available; {cure}"
        )
    return wanted


def whole_texts(config: ModelConfig, options: Options, context: int | None) -> tuple[Options, int | None]:
    """Options and context of a model: where it sees a text, a prompt or a picture both ways, a run has room for all of one."""
    if config.whole_pictures and config.vision and (options.max_rows or CHUNK_ROWS) < config.vision.most_tokens:
        options = replace(options, max_rows=config.vision.most_tokens)
    if not config.ranges:
        return options, context
    usual = DEFAULT_CONTEXT
    if config.bidirectional_prompt:
        # Buffers for as many rows as have no picture would be most of what it takes.
        usual = WHOLE_PROMPT + (config.vision.most_tokens if config.vision else 0)
    longest = min(config.max_position_embeddings, usual) if context is None else context
    rows = max(options.max_rows or CHUNK_ROWS, longest)
    means = config.pooling is not None and config.pooling.kind == "mean"
    return replace(options, max_rows=rows, max_logits=rows if means else min(options.max_logits, rows)), longest


def check_length(tokens: int, context: int, cached: int = 0, visual: int = 0) -> None:
    """InputError: a prompt of so many tokens, `visual` of them of pictures, after `cached` others, exceeds the context."""
    if cached + tokens > context:
        after = f", {visual} of them of images" if visual else ""
        after += f" after the {cached} already there" if cached else ""
        raise InputError(
            f"the prompt has {tokens} tokens{after}, the context {context} positions; "
            "shorten the prompt or pass a larger `context`"
        )


def _size(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"
