"""Loops of a text: which tokens would go on with what it has said before, and how much less likely they become.

The rule is DRY ("don't repeat yourself", p-e-w 2024, in text-generation-webui and llama.cpp): a token that would make the end
of the text one longer that stands in it before loses multiplier * 1.75^(length - 2) of its logit, length being that of the
repetition so far.  Here each place counts where that stands, and not only the longest: "They walked away." came 60 times.

Only the text counts, not its prompt: to quote a question is no loop.  What is data and has to be copied exactly breaks a
repetition: the ends of lines, numbers, and all signs that prose does not have, so code, paths, quoted strings and keys.
Where these break nothing, SmolLM2 copied the list [1, 2, 3, 4, 5] as [1, 2, 4, 3, 5].  They lose nothing either, nor does a
token within a word: a name of several tokens that is said often would be misspelled.

Nothing breaks what stands there for the third time in a row: short lines, or zeros, without an end.  From 16 tokens of it on,
the token that goes on loses the same, counted from there.

A text that is kept from the same sentence may still go round the same words: "perfect meal, they are perfectly food, which
meets their food needs".  It has to end where the last 128 tokens are prose and less than a quarter of them differ (in licences
46 % do).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeq.text.tokenizer import Tokenizer

BASE = 1.75
MIN_REPEATED = 2
"""Tokens of a repetition that nothing is taken for."""
MAX_REPEATED = 40
"""Tokens of a repetition that are counted at most: the penalty is far above any logit there."""
LOOP = 16
"""Tokens that repeat those before them in a row, of which nothing is taken for a loop: tables and lists have as many."""
WINDOW = 1024
"""Tokens at the end of a text in which repetitions are looked for."""
SPAN = 128
"""Tokens at the end of a text that are looked at for whether it goes round the same words."""
MIN_PROSE = 96
"""Tokens among them that have to be prose."""
MIN_DISTINCT = 0.25
"""Share of different tokens among these, from which on a text may go on."""
BREAKERS = frozenset(range(128)) - frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,.;!?'-")
"""Bytes; those of other alphabets are prose."""


class Breakers:
    """Where repetitions end in the texts of one tokenizer; what a token spells is looked at when it comes."""

    def __init__(self, text: Tokenizer) -> None:
        self._text, self._known = text, dict[int, bool]()

    def run(self, tokens: Sequence[int]) -> int:
        """How many tokens at the end have no breaker, at most 40."""
        return next(
            (count for count in range(min(len(tokens), MAX_REPEATED)) if self._breaks(tokens[-1 - count])), MAX_REPEATED
        )

    def prose(self, tokens: Sequence[int]) -> list[int]:
        """Those that do not break a repetition."""
        return [token for token in tokens if not self._breaks(token)]

    def start(self, tokens: Sequence[int]) -> int:
        """After the last control token: an answer may repeat what was thought before it."""
        controls = self._text.added_ids
        return next((at for at in range(len(tokens), 0, -1) if tokens[at - 1] in controls), 0)

    def spared(self, token: int) -> bool:
        """Whether the token breaks a repetition, or goes on a word of the Latin alphabet that began before it."""
        return self._breaks(token) or self._text.token_bytes(token)[:1].isalpha()

    def _breaks(self, token: int) -> bool:
        if token not in self._known:
            self._known[token] = not BREAKERS.isdisjoint(self._text.token_bytes(token))
        return self._known[token]


def penalties(text: Sequence[int], multiplier: float, breakers: Breakers | None = None) -> dict[int, float]:
    """What the logits of tokens lose after the tokens of a text, its prompt left out; breakers None: nothing breaks."""
    window = np.asarray(text[-WINDOW:], np.int64)
    if len(window) <= MIN_REPEATED:
        return {}
    # Tokens that followed where the text was as its end is now; each further token of the end leaves fewer of them.
    places = np.flatnonzero(window[:-1] == window[-1:]) + 1
    for length in range(2, MIN_REPEATED + 1):
        places = _longer(window, places, length)
        if not len(places):
            return {}
    found = _in_a_row(window, len(window) - int(places[-1]), multiplier)
    recent = window.tolist()
    most, start = (breakers.run(recent), breakers.start(recent)) if breakers else (MAX_REPEATED, 0)
    most = min(most, len(recent) - start)
    length = MIN_REPEATED
    added = multiplier
    while length <= most and len(places := places[places - length >= start]):
        for token, count in Counter(window[places].tolist()).items():
            if breakers is None or not breakers.spared(token):
                found[token] = found.get(token, 0.0) + count * added
        added = multiplier * (BASE ** (length + 1 - MIN_REPEATED) - BASE ** (length - MIN_REPEATED))
        length += 1
        places = _longer(window, places, length)
    return found


def goes_round(text: Sequence[int], breakers: Breakers) -> bool:
    """Whether prose has come to say the same few words again and again, so that it has to end; its prompt left out."""
    if len(text) < MIN_PROSE:
        return False
    recent = text[-SPAN:]
    prose = breakers.prose(recent[breakers.start(recent) :])
    return len(prose) >= MIN_PROSE and len(set(prose)) < MIN_DISTINCT * len(prose)


def _in_a_row(window: NDArray[np.int64], period: int, multiplier: float) -> dict[int, float]:
    """The penalty of the token that goes on, where the last `period` tokens stand at the end three times in a row."""
    others = np.flatnonzero(window[period:] != window[:-period])
    same = len(window) - period - (int(others[-1]) + 1 if len(others) else 0)
    beyond = min(same - max(2 * period, LOOP), MAX_REPEATED)
    return {int(window[-period]): multiplier * BASE**beyond} if beyond >= 0 else {}


def _longer(window: NDArray[np.int64], places: NDArray[np.intp], length: int) -> NDArray[np.intp]:
    """Those of the places before which the last `length` tokens stand, where the last but one less do."""
    places = places[places >= length]
    found: NDArray[np.intp] = places[window[places - length] == window[-length]]
    return found
