"""Runs of several sessions of one model: the rows that each contributes, and what each gets of the results.

A session gives the same bits in a run with others as in one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import InputError
from edgeq.format.records import Mode
from edgeq.pictures.prompt import PicturePlace, Prompt, positions
from edgeq.pictures.whole_pictures import next_run, seen_ends, seen_ranges
from edgeq.runtime.network.pictures import PictureFeatures
from edgeq.runtime.session.whole_text import WholeTexts
from edgeq.targets.capabilities import Draw, Largest
from edgeq.targets.rows import TEXT, VISION, Page, Rows
from edgeq.targets.states import SessionState

RowOrder = Literal["sequence", "modality"]
"""Order of the rows of a run: as the tokens come, or those of pictures first."""
Logits = NDArray[np.float32]
R = TypeVar("R")


class Runnable(Protocol):
    """What a run needs of a Session, which says more of each."""

    tokens: list[int]
    places: tuple[PicturePlace, ...]
    row_order: RowOrder
    vision_s: float
    lock: Lock
    has_states: bool
    whole: WholeTexts | None
    axes: int
    ranges: tuple[int, ...]

    @property
    def pages(self) -> Sequence[Page]: ...

    @property
    def runs_with(self) -> tuple[int, int]: ...

    def requantize(self) -> float: ...

    def check(self, tokens: Sequence[int], visual: int = 0) -> list[int]: ...

    def features(self, prompt: Prompt) -> PictureFeatures | None: ...

    def reserve(self, count: int) -> None: ...

    def state_of_run(self, count: int) -> SessionState: ...

    def run_rows(self, rows: Rows, mode: Mode | None, summing: bool) -> Logits: ...

    def draft_rows(self, rows: Rows) -> Logits: ...

    def most_largest(self, rows: int) -> int: ...

    def holds(self, count: int) -> bool: ...

    def largest_of(self, rows: Rows, count: int, ahead: Sequence[Draw]) -> Largest: ...

    def append(self, tokens: Sequence[int], places: tuple[PicturePlace, ...], whole: bool) -> None: ...


class BatchItem(NamedTuple):
    """The tokens that one session contributes to a run; `wanted`: indices of those whose logits are asked for.

    places    of all pictures that the session has from then on; empty: of those that it has already
    vectors   float32 [V, width] that tokens of pictures bring, and which each token brings, int32; -1: none
    second    index of the token with which the second text of a pair begins; 0: there is none
    whole     the tokens are a text, or a prompt, in which each sees all of them, where the model reads some so
    """

    session: Runnable
    tokens: Sequence[int]
    wanted: Sequence[int]
    places: tuple[PicturePlace, ...] = ()
    vectors: tuple[NDArray[np.float32], NDArray[np.int32]] | None = None
    second: int = 0
    whole: bool = False


class Chunks:
    """A prompt on its way into a session, in pieces whose lengths the caller chooses.

    left    tokens that have not been run;  sees: pictures are among them
    """

    def __init__(self, session: Runnable, tokens: Sequence[int] | Prompt) -> None:
        """InputError: no tokens, tokens that are not in the vocabulary, or more than the context has room for."""
        visual = tokens.visual_tokens if isinstance(tokens, Prompt) else 0
        self._tokens = session.check(tokens.tokens if isinstance(tokens, Prompt) else tokens, visual)
        self._session, self._begun = session, len(session.tokens)
        self._seen = session.features(tokens) if isinstance(tokens, Prompt) else None
        self._second = tokens.second if isinstance(tokens, Prompt) else 0
        self.left = len(self._tokens)
        self._drawn = tokens.drawn if isinstance(tokens, Prompt) else 0

    @property
    def sees(self) -> bool:
        return self._seen is not None

    @property
    def _whole(self) -> bool:
        """Whether a text, or a prompt, comes next in which each token sees all of them."""
        return self._session.whole is not None and self._begun + len(self._tokens) == self.left

    def count(self, most: int) -> int:
        """How many tokens `next` takes of `most`: more where they would be a part of a text or a picture that sees itself."""
        if self._whole:
            return self.left - self._drawn
        count = min(most, self.left)
        if self._seen is None or not self._session.ranges:
            return count
        return next_run(self._seen.places, self._begun + len(self._tokens) - self.left, count)

    def next(self, most: int) -> BatchItem:
        """The next `count(most)` tokens, which have to run before more are taken; the logits after the last are wanted."""
        done, seen, whole = len(self._tokens) - self.left, self._seen, self._whole
        chunk, vectors = self._tokens[done : done + self.count(most)], None
        if seen:
            before = seen.seconds
            vectors = seen.between(self._begun + done, self._begun + done + len(chunk))
            self._session.vision_s += seen.seconds - before
        self.left -= len(chunk)
        wanted, places = [] if self.left else [len(chunk) - 1], seen.places if seen else ()
        return BatchItem(self._session, chunk, wanted, places, vectors, self._second, whole)


def run_together(items: Sequence[BatchItem], mode: Mode | None = None, *, summing: bool = False) -> list[Logits]:
    """One run of the program for the rows of several sessions of one model; the wanted logits of each item, [n, vocab].

    An item gives the same bits as if it ran alone.  Its tokens are the session's once the run is done.

    Sessions with weights of their own, requantized or of an adapter, run one after another.  `summing`: run with the masters
    and add up what they read, for one item whose session has a requantizer.
    """
    if not summing:
        for item in items:
            item.session.requantize()
    found = dict[int, Logits]()

    def run(group: Sequence[BatchItem], rows: Rows) -> Logits:
        # The next run, perhaps another session's, overwrites the program's own array.
        return group[0].session.run_rows(rows, mode, summing).copy()

    for group in _by_weights(items):
        logits = _in_turn([items[i] for i in group], run)
        ends = accumulate(len(items[i].wanted) for i in group)
        found |= {i: logits[end - len(items[i].wanted) : end] for i, end in zip(group, ends, strict=True)}
    return [found[i] for i in range(len(items))]


def run_drafting(items: Sequence[BatchItem]) -> list[Logits]:
    """As `run_together`, by the layer that drafts alone: logits of the token after the next.  Each item has one token.

    The sessions have the tokens on return, and forget them again (`rewind`) before the model runs: it has not seen them.
    """
    found = dict[int, Logits]()

    def run(group: Sequence[BatchItem], rows: Rows) -> Logits:
        # Slot 0 of its cache is of the first token, which has no state before it.
        rows.spans = np.stack([np.minimum(rows.slots, 1), rows.slots + 1])[None]
        return group[0].session.draft_rows(rows)

    for group in _by_weights(items):
        logits = _in_turn([items[i] for i in group], run)
        found |= {i: logits[row : row + 1] for row, i in enumerate(group)}
    return [found[i] for i in range(len(items))]


def run_largest(items: Sequence[BatchItem], count: int, ahead: Sequence[Draw] = ()) -> list[Largest] | None:
    """The `count` largest logits after each item, which wants those of its last token, from one run as that of `run_together`.

    ahead   how the next token of each is drawn, where each is likely to go on with it

    None: nothing was run, as the target gives only all logits, or has no room for so many rows.
    """
    for item in items:
        if not 0 < count <= item.session.most_largest(len(items)):
            return None
    for item in items:
        item.session.requantize()
    found = dict[int, Largest]()
    for group in _by_weights(items):
        draws = [ahead[i] for i in group] if ahead else ()
        ids, values, finite = _in_turn([items[i] for i in group], partial(_largest, count, draws))
        for row, i in enumerate(group):
            found[i] = Largest(ids[row : row + 1], values[row : row + 1], finite[row : row + 1])
    return [found[i] for i in range(len(items))]


def _largest(count: int, ahead: Sequence[Draw], items: Sequence[BatchItem], rows: Rows) -> Largest:
    """Those of one run, which the next run does not overwrite."""
    if ahead:
        for item in items:
            if not item.session.holds(len(item.tokens) + 1):
                ahead = ()
                break
    ids, values, finite = items[0].session.largest_of(rows, count, ahead)
    return Largest(ids.copy(), values.copy(), finite.copy())


def _by_weights(items: Sequence[BatchItem]) -> list[list[int]]:
    """The indices of the items, those that share a run together."""
    if len(items) == 1:
        return [[0]]
    groups = dict[tuple[int, int], list[int]]()
    for index, item in enumerate(items):
        groups.setdefault(item.session.runs_with, []).append(index)
    return list(groups.values())


def _in_turn(items: Sequence[BatchItem], run: Callable[[Sequence[BatchItem], Rows], R]) -> R:
    """What `run` gives for the rows of sessions that share weights, between the runs of other threads; after it their tokens
    are the sessions'."""
    session = items[0].session
    with session.lock:
        # Within the lock: another thread may close a session.
        for item in items:
            item.session.reserve(len(item.tokens))
        rows = _rows_of(items)
        found = run(items, rows.by_modality() if session.row_order == "modality" else rows)
        for item in items:
            item.session.append(item.tokens, item.places, item.whole)
    return found


def _positions(item: BatchItem, axes: int) -> NDArray[np.int32]:
    held = len(item.session.tokens)
    return positions(item.places or item.session.places, held, held + len(item.tokens), axes)


def _of_text(positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Positions [axes, rows], of text by one axis, which stands for all: targets start such a run sooner."""
    return positions[:1] if (positions == positions[0]).all() else positions


def _rows_of(items: Sequence[BatchItem]) -> Rows:
    """The rows of a run: the items one after another, each continuing its session."""
    # Lists of Python and one array of all: for the few rows of a decode step numpy's own ways take longer than a small model.
    session, starts, brings = items[0].session, list[int](), False
    tokens, at, of, wanted, pages = list[int](), list[int](), list[int](), list[int](), list[Sequence[Page]]()
    for index, item in enumerate(items):
        start, count, held = len(tokens), len(item.tokens), len(item.session.tokens)
        starts.append(start)
        tokens += item.tokens
        at += range(held, held + count)
        of += [index] * count
        for row in item.wanted:
            wanted.append(start + row)
        pages.append(item.session.pages)
        brings = brings or item.vectors is not None
    row_tokens, slots, sessions = np.array([tokens, at, of], np.int32)
    axes = session.axes
    rows = Rows(
        tokens=row_tokens,
        positions=slots[None] if axes == 1 else _of_text(np.concatenate([_positions(item, axes) for item in items], axis=1)),
        slots=slots,
        sessions=sessions,
        pages=pages,
        wanted=np.array(wanted, np.int32),
    )
    whole = session.whole
    # Rows that go on from a prompt have no ranges, so that a target may start them as those of any text.
    if whole is not None and (not whole.goes_on or any(item.whole for item in items)):
        lengths = [len(item.tokens) for item in items]
        if whole.goes_on:
            parts = np.split(slots, np.cumsum(lengths)[:-1])
            seen = [
                whole.spans([len(at)]) if item.whole else seen_ranges(whole.ranges, at, at + 1)
                for item, at in zip(items, parts, strict=True)
            ]
            rows.spans = np.concatenate(seen, axis=2)
        elif any(len(item.session.tokens) for item in items):
            raise InputError("this model sees a text in both directions: a session holds one, as one run; rewind it to 0")
        else:
            rows.spans, rows.positions = whole.spans(lengths), whole.positions(slots, [item.second for item in items], lengths)
    if brings and (ranges := session.ranges):
        ends = slots + 1
        for item, start in zip(items, starts, strict=True):
            if item.vectors is not None:
                of_item = slice(start, start + len(item.tokens))
                ends[of_item] = seen_ends(item.places, slots[of_item])
        rows.spans = seen_ranges(ranges, slots, ends)
    if session.has_states:
        rows.states = [item.session.state_of_run(len(item.tokens)) for item in items]
    if brings:
        brought = [(item.vectors, start) for item, start in zip(items, starts, strict=True) if item.vectors is not None]
        rows.vectors = np.concatenate([vectors for (vectors, _), _ in brought])
        rows.vector_of = np.full(len(rows), -1, np.int32)
        first = 0
        for (vectors, which), start in brought:
            rows.vector_of[start : start + len(which)] = np.where(which < 0, -1, which + first)
            first += len(vectors)
        rows.modality = np.where(rows.vector_of < 0, TEXT, VISION).astype(np.uint8)
    return rows
