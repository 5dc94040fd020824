"""The allocation that decodes as fast as was asked for.

Seconds that follow from models of one codec predict a mixture within a quarter.  So what is chosen by them is decoded, they are
scaled by what that found, and the choice is made again, until it is as fast as was asked for and not much faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from edgeq.converters.budget.budget import Budget
from edgeq.converters.budget.parts import AllocationPart
from edgeq.converters.probing.decode_times import DecodeTimes
from edgeq.converters.probing.frontier import SECONDS, Frontier, FrontierPoint, cost_of
from edgeq.converters.probing.record import ChosenAllocation
from edgeq.errors import InputError
from edgeq.format.codec import Codec

CLOSE = 0.03
"""Share of the seconds asked for that may be left over."""
MAX_DECODED = 8
"""Allocations that are decoded, at most."""
SURE = 1.5
"""An allocation that is predicted to be so many times as fast as asked for is not decoded to see whether it is fast enough."""
NEIGHBOURS = 1.005
"""Scales of the predicted seconds that are nearer to each other are not told apart."""
Codecs = Mapping[str, Codec]


class DecodeHere(Protocol):
    """Decode of allocations on this machine.

    setting   names all that it depends on besides the model: the machine, the kernels, the mode
    times     what an allocation is predicted to take
    alone     nothing else ran so far during its measurements
    resumes   a conversion of the output was begun: it goes on with what was chosen for it, also where `alone` was not true
    """

    setting: str
    times: DecodeTimes
    alone: bool
    resumes: bool

    def ratio(self, codecs: Codecs) -> float:
        """Measured seconds of a token in an allocation over those that `times` predict."""


def cheapest(parts: Sequence[AllocationPart], times: DecodeTimes) -> tuple[dict[str, Codec], float]:
    """The allocation that is predicted to be the fastest, and its seconds."""
    codecs = {part.name: min(part.candidates(), key=lambda codec: cost_of(part, codec, SECONDS, times)) for part in parts}
    return codecs, sum(cost_of(part, codecs[part.name], SECONDS, times) for part in parts)


def refuse_too_fast(budget: Budget, parts: Sequence[AllocationPart], here: DecodeHere) -> None:
    """InputError: the fastest allocation is slower than `budget`; it is decoded where the prediction leaves that open."""
    codecs, seconds = cheapest(parts, here.times)
    if SURE * seconds > budget.amount:
        _refuse(budget, here.ratio(codecs) * seconds)


def _refuse(budget: Budget, fastest: float) -> None:
    if fastest > budget.amount:
        # Rounded up, so that what the message says can be met.
        raise InputError(f"{budget}: cannot be met; the fastest that can is {Budget(SECONDS, 1.005 * fastest)}")


@dataclass(frozen=True)
class _Decoded:
    """An allocation, the seconds that a token took in it, and those over what was predicted."""

    point: FrontierPoint
    seconds: float
    ratio: float


def closest(
    frontier: Frontier, budget: Budget, here: DecodeHere, on_round: Callable[[int], None], note: Callable[[str], None]
) -> ChosenAllocation:
    """The allocation with the least divergence of those decoded that are fast enough.

    on_round   called with how many allocations were decoded, before another one is;  note: with a line about each
    InputError: the fastest one is not fast enough.
    """
    asked, (_, least) = budget.amount, cheapest(frontier.parts, here.times)
    found: dict[tuple[Codec, ...], _Decoded] = {}

    def decoded(scale: float) -> _Decoded:
        """What is chosen where the predicted seconds are multiplied by `scale`."""
        point = replace(frontier, times=here.times.scaled(scale)).best(budget)
        key = (*point.codecs.values(),)
        if key not in found:
            on_round(len(found))
            assert point.seconds is not None
            ratio = here.ratio(point.codecs)
            found[key] = _Decoded(point, point.seconds / scale * ratio, ratio)
            note(f"{point.bits:.3f} bits per weight decode {1 / found[key].seconds:,.1f} tokens per second here")
        return found[key]

    # The largest scale that was too slow, and the smallest that was fast enough.  With the largest of all nothing is left but
    # the fastest allocation; sums in another order must not leave nothing at all.
    last = (1 - 1e-9) * asked / least
    slow, fast, scale = 0.0, last, min(1.0, last)
    while len(found) < MAX_DECODED:
        known = len(found)
        each = decoded(scale)
        if each.seconds > asked:
            slow = scale
        else:
            fast = scale
        if (1 - CLOSE) * asked <= each.seconds <= asked or fast <= NEIGHBOURS * slow or (len(found) == known and not slow):
            break
        scale = each.ratio if slow < each.ratio < fast else (slow * fast) ** 0.5 or fast / SURE
    met = [each for each in found.values() if each.seconds <= asked] or [decoded(last)]
    _refuse(budget, min(each.seconds for each in found.values()))
    best = min(met, key=lambda each: each.point.kl)
    return ChosenAllocation(best.point.names, best.ratio, here.alone)
