"""The allocation that is as fast as was asked for, found by decoding: on machines that decode as no prediction has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np
import pytest

from edgeq.converters.budget.budget import Budget
from edgeq.converters.budget.parts import AllocationPart
from edgeq.converters.probing.decode_choice import CLOSE, MAX_DECODED, cheapest, closest, refuse_too_fast
from edgeq.converters.probing.decode_times import MEASURED, DecodeTimes
from edgeq.converters.probing.estimate import grid
from edgeq.converters.probing.frontier import READ, Costs, Frontier
from edgeq.converters.rounding.linears import LinearItem, Recipe
from edgeq.errors import InputError
from edgeq.format.codec import Codec

CODEC = Codec("int", 4, 64, symmetric=False)
Real = Callable[[float, Mapping[str, Codec]], float]


def part(name: str, rows: int, columns: int, count: int = 1, used: int = 1) -> AllocationPart:
    items = tuple(LinearItem(name, ((name, rows),), columns, Recipe(CODEC)) for _ in range(count))
    return AllocationPart(name, items, None, Fraction(used, count))


PARTS = [part(f"layers.{i}.{name}", rows, 512) for i in range(12) for name, rows in (("qkv", 768), ("down", 512))]


def frontier_of(parts: list[AllocationPart]) -> Frontier:
    """One with made-up divergences."""
    random = np.random.default_rng(0)
    measured = {
        part.name: {codec.name: float(10 ** random.uniform(-3, -2)) / (2**codec.bits - 1) ** 2 for codec in grid(part)}
        for part in parts
    }
    return Frontier(parts, measured, Costs({"bits": 0, "size": 0, "read": 0}, sum(part.weights for part in parts)))


class Here:
    """A machine that takes a nanosecond for every byte with the whole model in one codec, and `real` seconds in a mixture."""

    setting, resumes, alone = "here", False, True

    def __init__(self, parts: list[AllocationPart], real: Real) -> None:
        whole = {codec: sum(part.cost(codec, READ) for part in parts) for codec in MEASURED}
        self.times = DecodeTimes({codec: (read, 1e-9 * read) for codec, read in whole.items()})
        self.parts, self.real, self.decoded = parts, real, list[Mapping[str, Codec]]()

    def predicted(self, codecs: Mapping[str, Codec]) -> float:
        return sum(self.times.seconds(codecs[p.name], lambda codec, p=p: p.cost(codec, READ)) for p in self.parts)  # type: ignore[misc]

    def seconds(self, codecs: Mapping[str, Codec]) -> float:
        return self.real(self.predicted(codecs), codecs)

    def ratio(self, codecs: Mapping[str, Codec]) -> float:
        self.decoded.append(codecs)
        return self.seconds(codecs) / self.predicted(codecs)


def mixed(predicted: float, codecs: Mapping[str, Codec]) -> float:
    """Few bits take longer than predicted, and many widths together less."""
    few = sum(codec.bits < 4 for codec in codecs.values()) / len(codecs)
    return predicted * (1 + 0.4 * few) * (0.8 if len({codec.bits for codec in codecs.values()}) > 2 else 1.0)


def choose(parts: list[AllocationPart], here: Here, seconds: float) -> dict[str, Codec]:
    found = closest(frontier_of(parts), Budget("seconds", seconds), here, lambda done: None, lambda line: None)
    codecs = {part: Codec.named(name) for part, name in found.names.items()}
    assert found.ratio == pytest.approx(here.seconds(codecs) / here.predicted(codecs)) and found.alone
    assert len(here.decoded) <= MAX_DECODED + 1
    return codecs


REAL: dict[str, Real] = {
    "as predicted": lambda x, _: x,
    "faster": lambda x, _: 0.75 * x,
    "slower": lambda x, _: 1.3 * x + 1e-4,
    "mixed": mixed,
}
# In `make test` every second of them.
MET = [
    pytest.param(bits, real, marks=() if (i + j) % 2 == 0 else pytest.mark.exhaustive, id=f"{name}-{bits}")
    for i, (name, real) in enumerate(REAL.items())
    for j, bits in enumerate((2.7, 3.6, 4.5, 5.4))
]


@pytest.mark.parametrize(("bits", "real"), MET)
def test_a_speed_is_met_and_not_by_much(bits: float, real: Real) -> None:
    here = Here(PARTS, real)
    asked = bits / 8 * 1e-9 * sum(part.weights for part in PARTS) * 1.2
    taken = here.seconds(choose(PARTS, here, asked))
    # A step in the real seconds may leave more over than what is called close.
    assert taken <= asked and (taken >= (1 - CLOSE) * asked or real is mixed)
    assert taken > 0.78 * asked


def test_between_two_allocations_the_faster_one_is_taken() -> None:
    parts = [part("head", 512, 64)]
    here = Here(parts, lambda x, _: 1.2 * x)
    every = sorted(here.seconds({"head": codec}) for codec in parts[0].candidates())
    assert here.seconds(choose(parts, here, 0.999 * every[7])) <= every[6]
    assert here.seconds(choose(parts, here, 100 * every[-1])) <= every[-1]


def test_a_speed_above_all_is_refused_with_the_fastest() -> None:
    here = Here(PARTS, lambda x, _: 1.25 * x)
    codecs, least = cheapest(PARTS, here.times)
    for refuse in (
        lambda budget: refuse_too_fast(budget, PARTS, here),
        lambda budget: closest(frontier_of(PARTS), budget, here, lambda done: None, lambda line: None),
    ):
        here.decoded.clear()
        with pytest.raises(InputError, match="cannot be met; the fastest that can is --speed ") as refused:
            refuse(Budget("seconds", 1.1 * least))
        named = float(str(refused.value).split()[-1])
        assert 1 / named == pytest.approx(1.25 * least, rel=0.01) and codecs in here.decoded
        # What is named can be had.
        assert here.seconds(choose(PARTS, here, 1 / named)) <= 1 / named
    # Faster than predicted: nothing is refused that can be met, and what is far from the limit is not decoded for it.
    fast = Here(PARTS, lambda x, _: 0.7 * x)
    refuse_too_fast(Budget("seconds", 0.8 * least), PARTS, fast)
    assert len(fast.decoded) == 1 and fast.seconds(choose(PARTS, fast, 0.8 * least)) <= 0.8 * least
    refuse_too_fast(Budget("seconds", 2 * least), PARTS, Here(PARTS, lambda *_: pytest.fail("decoded")))


def test_a_part_of_experts_takes_the_bytes_of_all_of_them() -> None:
    one, many = part("layers.0.experts.down", 48, 40), part("layers.0.experts.down", 48, 40, count=6, used=2)
    for codec in one.candidates():
        assert (many.cost(codec, "size"), many.cost(codec, "bits")) == (
            6 * one.cost(codec, "size"),
            6 * one.cost(codec, "bits"),
        )
        assert many.cost(codec, "read") == 2 * one.cost(codec, "read")
