"""Where drafts come from: the text so far, the same weights in a cheaper mode, or a layer that was trained to draft."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from edgeq.errors import EdgeqError, InputError
from edgeq.format.records import Mode
from edgeq.runtime.decode import Stream
from edgeq.runtime.sampling import Candidates, certain
from edgeq.runtime.session.runs import BatchItem, run_drafting, run_together


@dataclass
class Draft:
    """Tokens that may come next, each with the distribution it was drawn from.

    forced   they follow from the grammar of the text: their acceptance says nothing about another source
    """

    tokens: list[int] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    forced: bool = False


def looked_up(stream: Stream, count: int) -> Draft:
    """A draft from the text itself."""
    tokens = stream.lookup.propose(stream.tokens, count)
    return Draft(tokens, [certain(token) for token in tokens])


def forced(stream: Stream, count: int) -> Draft:
    """A draft from the grammar that the text is held to: a key of a schema, and what stands around it."""
    matcher = stream.sampler.rules.matcher
    try:
        tokens = matcher.forced(stream.tokens)[:count] if matcher and count else []
    except InputError:
        # The grammar gives up on this text: the draw that follows says so.
        tokens = []
    return Draft(tokens, [certain(token) for token in tokens], forced=True)


def drafted(streams: Sequence[Stream], counts: Sequence[int], mode: Mode | None) -> list[Draft]:
    """Drafts of `counts` tokens, drawn one after another in `mode`; all streams advance together.

    mode   None: by the layer that drafts

    Their keys and values go where the exact ones will (QSpec, arXiv 2410.11305, section 3); the caches are as before on return.
    """
    drafts = [Draft() for _ in streams]
    lengths = [len(stream.session.tokens) for stream in streams]
    try:
        for step in range(max(counts)):
            active = [i for i, count in enumerate(counts) if step < count and len(drafts[i].tokens) == step]
            if not active:
                break
            items = [BatchItem(streams[i].session, [(drafts[i].tokens or streams[i].tokens)[-1]], [0]) for i in active]
            found = run_drafting(items) if mode is None else run_together(items, mode)
            for i, logits in zip(active, found, strict=True):
                stream, draft = streams[i], drafts[i]
                # Where no token can come, the exact run tells whether the text ends there.
                with suppress(EdgeqError):
                    draft.candidates.append(stream.sampler.candidates(logits[0], stream.tokens + draft.tokens))
                    draft.tokens.append(stream.sampler.pick(draft.candidates[-1]))
    finally:
        # An interrupt must not leave keys and values of the cheap mode in the cache, which a later prompt would keep.
        for stream, length in zip(streams, lengths, strict=True):
            stream.session.rewind(length)
    return drafts
