"""Runs that come again and again, those that decode or verify and short prompts, started as recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.targets.cuda.device.device import Call, Copy
from edgeq.targets.cuda.lowering.attention import PART
from edgeq.targets.cuda.lowering.context import Bring, Gather, Lowering, Routed
from edgeq.targets.cuda.lowering.largest import DRAWS, Chosen, LeftArray
from edgeq.targets.cuda.run.block import Draws, SentBlock, Write, padded_draws
from edgeq.targets.cuda.run.feed import PAGES_OF_A_RUN, Feed, Sent
from edgeq.targets.cuda.run.graphs import Key, Places, Recorded, Recordings, gathered, padded, parts_of, row_class
from edgeq.targets.cuda.run.kernels import ProgramKernels, Reach
from edgeq.targets.cuda.run.requantized import CudaWeights
from edgeq.targets.cuda.run.storage import Pages, Storage
from edgeq.targets.rows import PAGE, Page, Rows

TOKENS = [("tokens", "sent", stage) for stage in range(2)]
"""Where a run reads its tokens, by name."""


class RecordedRuns:
    """Starts the recording of a run, and makes it when such a run first comes; of a prompt when one comes again, as to record a
    run takes longer than to start its launches."""

    def __init__(
        self, recordings: Recordings, storage: Storage, pages: Pages, kernels: ProgramKernels, feed: Feed, *,
        result: tuple[int, int],
    ) -> None:  # fmt: skip
        """result   of a run: its address, and the bytes of a row"""
        self._recordings, self._storage, self._pages = recordings, storage, pages
        self._kernels, self._feed = kernels, feed
        self._result, self._result_bytes = result
        self._classes, self._prompt_classes = (
            [row_class(count, most) for count in range(most + 1)] for most in (recordings.rows, recordings.prompt_rows)
        )
        self._prompts = set[Key]()
        self._padding: Page | None = None

    def start(
        self, rows: Rows, lowering: Lowering, weights: CudaWeights | None, chosen: Chosen | None, turn: int = 0,
        draws: Draws = (),
    ) -> Recorded | None:  # fmt: skip
        """Start a run; None: there is no memory for it, or it is the first prompt of its kind.

        turn   as of Key; not 0: its rows have no tokens yet, as they are what `chosen` found in the run that was started last
        draws  of each row, where `chosen` draws
        """
        prompt = rows.wanted.shape[0] < rows.tokens.shape[0]
        count = (self._prompt_classes if prompt else self._classes)[rows.tokens.shape[0]]
        results, parts = 1 if prompt else count, parts_of(rows)
        number = weights.number if weights else 0
        largest, draw = (chosen.count, chosen.draws) if chosen else (0, False)
        key = Key(lowering.options.mode, lowering.source, number, count, results, parts, largest, draw, turn)
        if prompt and key not in self._prompts:
            # With weights of one session there could be any number.
            if not number:
                self._prompts.add(key)
            return None
        if self._padding is None:
            self._padding = self._pages.page()
        found = self._recordings.kept(key)
        if found is not None and found.started:
            self._recordings.wait(found)
        if found is not None and found.block.takes(rows):
            found.block.fill(rows, self._padding, draws)
            return found if self._recordings.start(found) else None
        entries = min(PAGES_OF_A_RUN, count * parts * (PART // PAGE))
        sent = dict(self._feed.of(padded(rows, count, self._padding), lowering, pages=entries))
        if draws:
            sent[DRAWS] = np.array(padded_draws(draws, results), np.float64)
        if found is None:
            steps = partial(self._steps, lowering, weights, chosen, key, sent)
            width = self._result_bytes // 4
            read = chosen.results(results) if chosen else [LeftArray(self._result, (results, width), np.float32)]
            found = self._recordings.record(key, sent, steps, read, partial(self._block, key, sent))
        if found is None:
            return None
        found.block.copy(sent)
        return found if self._recordings.start(found) else None

    def wait(self, recorded: Recorded) -> Sequence[NDArray[Any]]:
        """The results for the rows of the class, which are valid until the next run."""
        return self._recordings.wait(recorded)

    def _block(self, key: Key, sent: Sent, array: NDArray[np.uint8], places: Places, write: Write) -> SentBlock:
        feed, base = self._feed, self._pages.base
        return SentBlock(
            array, places, sent,
            rows=key.rows, results=key.results, kinds=feed.kinds, base=base, angles=feed.angles,
            windows=feed.span_windows, write=write,
        )  # fmt: skip

    def _steps(
        self, lowering: Lowering, weights: CudaWeights | None, chosen: Chosen | None, key: Key, sent: Sent,
        places: Mapping[object, int],
    ) -> list[Call | Copy]:  # fmt: skip
        """The launches, reading what is sent where the recording copies it."""
        moved = {self._storage.address(name): at for name, at in places.items() if not isinstance(name, Gather)}
        found: list[Call | Copy] = []
        if key.turn:
            assert chosen is not None
            sent_to = [at for name, at in places.items() if name in TOKENS]
            found += [Copy("within", at, chosen.next, 4 * key.rows) for at in sent_to]
        counts = key.rows, key.results
        for each in lowering.launches(counts):
            assert not isinstance(each, Routed | Bring)
            if isinstance(each, Gather):
                found.append(gathered(each, places, sent))
            else:
                found.append(self._kernels.call(each, counts[each.stage], weights, Reach(key.parts, key.rows), moved))
        return found + (self._kernels.choosing(chosen, key.results, moved) if chosen else [])
