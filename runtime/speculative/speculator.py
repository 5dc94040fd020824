"""Draft, verify, accept: several tokens for one reading of the weights, and exactly the text that there is without.

A cycle drafts gamma tokens after the last one, runs that one and the drafts in one exact run, which overwrites the keys and
values that the drafts left, and keeps the longest beginning that the exact logits agree with, plus the token that they give
next (Leviathan et al. 2023, arXiv 2211.17192; QSpec, arXiv 2410.11305).  A cycle for which no draft would pay is a plain
decoding step.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import EdgeqError, InputError
from edgeq.format.records import MODES, Mode
from edgeq.runtime.arguments import integer
from edgeq.runtime.decode import Stream
from edgeq.runtime.sampling import Candidates
from edgeq.runtime.session.runs import BatchItem, run_together
from edgeq.runtime.speculative.drafts import Draft, drafted, forced, looked_up
from edgeq.runtime.speculative.planner import DraftPlan, DraftPlanner, Source
from edgeq.runtime.stats import MAX_DRAFT, Speculation

DraftSource = Literal["off", "qspec", "lookup", "mtp", "both", "auto"]
DRAFT_SOURCES: tuple[DraftSource, ...] = ("off", "qspec", "lookup", "mtp", "both", "auto")


def layer_for(*sources: DraftSource) -> bool | Literal["auto"]:
    """Whether a model is loaded with its layer that drafts for these sources, as of Model.load."""
    return "mtp" in sources or ("auto" in sources and "auto")


class Speculator:
    """A Stepper with drafts.

    source   where drafts come from; "both" is "qspec" and "lookup", "auto" all that there are; "off": from grammars alone
    gamma    draft length; None: the one with the best predicted speed-up, 0 included
    mode     of the drafts that the model itself makes; None: it makes none
    layer    the model runs with its layer that drafts
    """

    def __init__(self, source: DraftSource, gamma: int | None, mode: Mode | None, layer: bool = False) -> None:
        self.statistics = Speculation()
        self.planner = DraftPlanner(gamma, MAX_DRAFT)
        self._looks_up, self._mode = source in ("lookup", "both", "auto"), mode
        by_layer: tuple[Source, ...] = ("mtp",) if layer and source in ("mtp", "auto") else ()
        by_mode: tuple[Source, ...] = ("mode",) if mode and source in ("qspec", "both", "auto") else ()
        self._made = by_layer + by_mode

    @property
    def prepares(self) -> Mode | None:
        """The mode that the program has to run in too; None: none but its own."""
        return self._mode if "mode" in self._made else None

    def may_draft(self, streams: Sequence[Stream]) -> bool:
        """Whether a cycle of these can have drafts: of its source, or of the grammar that a text is held to."""
        return self._looks_up or bool(self._made) or any(stream.sampler.rules.matcher for stream in streams)

    def step(self, streams: Sequence[Stream], room: Sequence[int]) -> list[list[int]]:
        share = streams[0].session.most_logits // len(streams) - 1
        limits = [max(0, min(MAX_DRAFT, share, n - 1, s.session.left - 1)) for s, n in zip(streams, room, strict=True)]
        offers: list[Draft] = []

        def offered() -> float:
            offers.extend(looked_up(stream, limit) for stream, limit in zip(streams, limits, strict=True))
            return sum(bool(draft.tokens) for draft in offers) / len(offers)

        plan = self.planner.plan(len(streams), max(limits), offered if self._looks_up else None, self._made)
        sure = [forced(stream, limit) for stream, limit in zip(streams, limits, strict=True)]
        counts = [0 if d.tokens else min(plan.gamma, limit) for d, limit in zip(sure, limits, strict=True)]
        drafts = [d if d.tokens else made for d, made in zip(sure, self._draft(streams, counts, plan, offers), strict=True)]
        verified = self._verify(streams, drafts)
        emitted = []
        for i, (stream, draft, logits) in enumerate(zip(streams, drafts, verified, strict=True)):
            before = len(stream.session.tokens) - len(draft.tokens)
            tokens = self._accepted(stream, draft, logits)
            accepted = max(0, len(tokens) - 1)
            stream.session.rewind(before + accepted)
            stream.session.logits = logits[accepted]
            self._count(plan, draft, accepted, offers[i].tokens if offers else [], tokens)
            emitted.append(tokens)
        self._conclude(plan, len(streams), emitted)
        return emitted

    def _accepted(self, stream: Stream, draft: Draft, logits: NDArray[np.float32]) -> list[int]:
        """As `accept`; fewer tokens where no other can come."""
        start = len(stream.tokens)
        try:
            return accept(stream, draft, logits)
        except EdgeqError as error:
            stream.error = error
            return stream.tokens[start:]

    def _draft(self, streams: Sequence[Stream], counts: list[int], plan: DraftPlan, offers: list[Draft]) -> list[Draft]:
        if not any(counts):
            return [Draft() for _ in streams]
        if plan.source == "lookup":
            return [Draft(d.tokens[:n], d.candidates[:n]) for d, n in zip(offers, counts, strict=True)]
        started = perf_counter()
        drafts = drafted(streams, counts, self._mode if plan.source == "mode" else None)
        self.statistics.draft_steps += max(counts)
        self.planner.record(plan.source, len(streams), (perf_counter() - started) / max(counts))
        return drafts

    def _verify(self, streams: Sequence[Stream], drafts: list[Draft]) -> list[NDArray[np.float32]]:
        items = [
            BatchItem(stream.session, [stream.tokens[-1], *draft.tokens], range(len(draft.tokens) + 1))
            for stream, draft in zip(streams, drafts, strict=True)
        ]
        for stream in streams:
            stream.prepare()
        started = perf_counter()
        logits = run_together(items)
        self.planner.record("exact", sum(len(item.tokens) for item in items), perf_counter() - started)
        return logits

    def _count(self, plan: DraftPlan, draft: Draft, accepted: int, offer: list[int], emitted: list[int]) -> None:
        """Acceptance of a stream's cycle.  An offer of the text that was not tried is judged by the token that came."""
        for j in range(len(draft.tokens)):
            self.statistics.drafted[j] += 1
            self.statistics.accepted[j] += j < accepted
        if draft.forced:
            return
        if draft.tokens:
            self.planner.acceptance[plan.source].count(accepted, len(draft.tokens))
        if offer and emitted and (plan.gamma == 0 or plan.source != "lookup"):
            self.planner.acceptance["lookup"].count(int(offer[0] == emitted[0]), 1)

    def _conclude(self, plan: DraftPlan, streams: int, emitted: list[list[int]]) -> None:
        s = self.statistics
        s.cycles += 1
        s.tokens += sum(map(len, emitted))
        s.predicted += (plan.speedup - s.predicted) / s.cycles
        if plan.gamma and self.planner.has_plain_steps(streams):
            s.c = self.planner.draft_cost(plan.source, streams)
            s.v = self.planner.verify_cost(streams, plan.gamma)
        if plan.gamma:
            s.beta = self.planner.acceptance[plan.source].beta


def checked_draft(
    draft: DraftSource, gamma: int | None, exact: Mode, made_for: Mode, no_layer: str | None
) -> Speculator | None:
    """A speculator that drafts from `draft`; None for "off".

    exact      mode of what is verified;  made_for: that of the file
    no_layer   why the model runs without a layer that drafts; None: it runs with it

    InputError: an unknown source, one that the model does not have, or a gamma out of range.
    """
    if draft not in DRAFT_SOURCES:
        raise InputError(f"draft {draft!r} is not known; supported: {', '.join(DRAFT_SOURCES)}")
    if gamma is not None:
        integer("gamma", gamma, 1, MAX_DRAFT, f"1 to {MAX_DRAFT}, or None")
    if draft == "off":
        return None
    cheaper = MODES[MODES.index(exact) + 1 :]
    if draft == "qspec" and not cheaper:
        raise InputError(f"mode {exact} has no cheaper one to draft in; load it with `mode=a16` or a8, or pass `draft=lookup`")
    if draft == "mtp" and no_layer is not None:
        raise InputError(no_layer)
    # Where activations of 4 bits are what the file was made for, they are the better draft.
    mode = made_for if made_for in cheaper else cheaper[0] if cheaper else None
    return Speculator(draft, gamma, mode, no_layer is None)


def accept(stream: Stream, draft: Draft, logits: NDArray[np.float32]) -> list[int]:
    """Append to `stream.tokens` the drafts that hold, and one token more; returns what was appended.

    logits   exact, float32 [drafts + 1, vocab], after the last token and after each draft

    A draft d from distribution q holds with probability min(1, p(d) / q(d)); at the first that does not, the token comes from
    max(0, p - q): together exactly the distribution p (Leviathan et al. 2023, section 2.3).  Greedy is the case of certain p.
    For a certain q that is the same as to draw from p and to look whether the draft came, and so the text is the one that there
    is without drafts, with temperature too.
    """
    start, sampler = len(stream.tokens), stream.sampler
    for token, q, row in zip(draft.tokens, draft.candidates, logits[:-1], strict=True):
        if len(q[0]) == 1:
            stream.draw(row)
            if stream.tokens[-1] != token:
                return stream.tokens[start:]
            continue
        p = sampler.candidates(row, stream.tokens)
        # q(d) is above 0: d was drawn from q.
        if sampler.uniform() * _probability(q, token) >= _probability(p, token):
            stream.take(sampler.pick(residual(p, q)), row)
            return stream.tokens[start:]
        stream.take(token, row)
    stream.draw(logits[len(draft.tokens)])
    return stream.tokens[start:]


def residual(p: Candidates, q: Candidates) -> Candidates:
    """max(0, p - q), normalized; p itself where rounding leaves nothing of it."""
    tokens, left = p[0], p[1].copy()
    order = np.argsort(q[0])
    at = np.minimum(np.searchsorted(q[0], tokens, sorter=order), len(order) - 1)
    found = q[0][order[at]] == tokens
    left[found] -= q[1][order[at]][found]
    left = np.maximum(left, 0)
    total = left.sum()
    return (tokens, left / total) if total > 0 else p


def _probability(candidates: Candidates, token: int) -> float:
    tokens, probabilities = candidates
    found = np.flatnonzero(tokens == token)
    return float(probabilities[found[0]]) if len(found) else 0.0
