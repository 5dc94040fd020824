"""How long a context fits in memory; asked before anything is allocated."""

from __future__ import annotations

from edgeq.errors import InputError, ResourceError
from edgeq.targets.rows import PAGE
from edgeq.targets.target import Room

DEFAULT_CONTEXT = 4096


def choose_context(room: Room, page_bytes: int, limit: int, context: int | None) -> int:
    """`context` if it can be had; without one min(limit, 4096, what fits).

    room         what a program may take, and needs without its cache
    page_bytes   of the cache, for PAGE positions
    limit        positions that the model was made for

    InputError: out of the model's range.  ResourceError: it does not fit; the message names the largest that does.
    """
    if context is not None and not 1 <= context <= limit:
        raise InputError(
            f"context {context} is out of range; this model takes 1 to {limit} positions: pass `context={limit}` or less"
        )
    fits = max(0, room.available - room.needed) // page_bytes * PAGE
    wanted = min(limit, DEFAULT_CONTEXT, fits) if context is None else context
    if wanted == 0 or wanted > fits:
        need = room.needed + -(-max(wanted, 1) // PAGE) * page_bytes
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


def check_length(tokens: int, context: int, held: int = 0, visual: int = 0) -> None:
    """InputError: a prompt of so many tokens, `visual` of them of pictures, after `held` others, is longer than the context."""
    if held + tokens > context:
        after = f", {visual} of them of images" if visual else ""
        after += f" after the {held} already there" if held else ""
        raise InputError(
            f"the prompt has {tokens} tokens{after}, the context {context} positions; "
            "shorten the prompt or pass a larger `context`"
        )


def _size(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"
