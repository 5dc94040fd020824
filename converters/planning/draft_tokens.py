"""Which tokens a layer that drafts proposes: a head of 248,320 rows costs more to read than the layer before it.

A tokenizer numbers the pieces of words in the order in which it learned them, the most frequent first (byte-pair merges), or by
their probability (unigrams), so a run from the first id on has most of those that texts consist of.  Added to it are, wherever
they are, the tokens that end a turn, that a chat template writes, that are a single character (SentencePiece numbers these
last), and that have a meaning of their own.  Only how often a draft is accepted depends on it, never the text.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator

from edgeq.converters.checkpoint.tokenizer import TextAssets
from edgeq.network.draft_stack import BLOCK, MAX_DRAFT_RUNS
from edgeq.text import foreign_tokenizer

DRAFTED = 1 << 15
"""Tokens, where nobody says how many: of 262,144 those that texts have 93 times of 100 (docs/qspec.md)."""
MAX_ADDED = 1 / 16
"""Tokens that are added to the run, as a share of it."""


def drafted_tokens(text: TextAssets, vocab_size: int, asked: int | None) -> tuple[int, ...]:
    """`draft_tokens` of the configuration: about `asked` tokens; none stand for all.

    asked   None: DRAFTED, where the vocabulary has at least twice as many; 0: all
    """
    if asked is None and vocab_size < 2 * DRAFTED:
        return ()
    count = -(-(DRAFTED if asked is None else asked) // BLOCK) * BLOCK
    if not count or count >= vocab_size:
        return ()
    blocks = set(range(count // BLOCK))
    for block in dict.fromkeys(token // BLOCK for token in _named(text) if token < vocab_size):
        bounds = _bounds({*blocks, block}, vocab_size)
        if len(bounds) <= 2 * MAX_DRAFT_RUNS and (len(blocks) + 1) * BLOCK <= count + count * MAX_ADDED:
            blocks.add(block)
    return _bounds(blocks, vocab_size)


def _named(text: TextAssets) -> Iterator[int]:
    """Ids of tokens that should be among them, those that matter most first, some more than once."""
    tokenizer = foreign_tokenizer.load(text.blobs["tokenizer.json"])
    ends = text.generation.get("eos_token_ids")
    yield from ends if isinstance(ends, list) else ()
    yield from tokenizer.encode(text.blobs.get("chat_template", b"").decode(), add_special_tokens=False)
    single = map(tokenizer.tokenizer.token_to_id, string.printable)
    yield from (token for token in single if token is not None)
    yield from sorted(tokenizer.tokenizer.get_added_tokens_decoder())


def _bounds(blocks: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Begin and end of the runs of tokens of the blocks."""
    bounds: list[int] = []
    for block in sorted(blocks):
        end = min((block + 1) * BLOCK, vocab_size)
        if bounds and bounds[-1] == block * BLOCK:
            bounds[-1] = end
        else:
            bounds += [block * BLOCK, end]
    return tuple(bounds)
