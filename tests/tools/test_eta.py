"""The remaining time, predicted against a clock that the test moves."""

from __future__ import annotations

import pytest

from edgeq.tools.cli.eta import Eta

HEAD = "norm and head"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def predictions(times: list[float], bursts: list[tuple[float, float]], work: float = 1.0, tail: float = 0.0) -> list[tuple]:  # type: ignore[type-arg]
    """(layers finished, predicted, true) every second of layers that take `times`; bursts: (share of the time, share done)."""
    clock, found = Clock(), []
    eta, total, end = Eta(clock), work * len(times) + tail, sum(times) + tail
    for layer, seconds in enumerate(times):
        start = clock.now
        eta.report(layer * work, total, f"layer {layer + 1}")
        for second in range(int(seconds)):
            clock.now = start + second
            done = max((done for at, done in bursts if at * seconds <= second), default=0.0)
            eta.report((layer + done) * work, total, f"layer {layer + 1}")
            found.append((layer, eta.left(), end - clock.now))
        clock.now = start + seconds
    eta.report(len(times) * work, total, HEAD)
    found.append((len(times), eta.left(), end - clock.now))
    return found


AT_THE_END = [(0.97, 0.9), (0.99, 1.0)]
BURSTS = {
    "nothing until it is written": AT_THE_END,
    "all at once, then a long wait": [(0.02, 0.9)],
    "four matrices": [(0.2, 0.1), (0.5, 0.4), (0.9, 0.8)],
}


@pytest.mark.parametrize("bursts", BURSTS.values(), ids=BURSTS)
@pytest.mark.parametrize("seconds", [2.0, 40.0, 300.0])
def test_from_the_first_finished_layer_on_it_is_right_and_falls_steadily(
    bursts: list[tuple[float, float]], seconds: float
) -> None:
    found = predictions([seconds] * 6, bursts)
    for layers, left, true in found:
        assert layers == 0 or left == pytest.approx(true, abs=1e-6 * seconds)


@pytest.mark.parametrize("bursts", BURSTS.values(), ids=BURSTS)
def test_layers_that_vary_by_a_fifth_leave_it_right_within_a_quarter(bursts: list[tuple[float, float]]) -> None:
    times = [40.0, 48.0, 36.0, 44.0, 33.0, 40.0, 47.0, 35.0]
    for layers, left, true in predictions(times, bursts):
        # Less than a layer is left of the last one: its own length is not known.
        assert not 0 < layers < len(times) - 1 or left == pytest.approx(true, rel=0.25)


def test_the_first_layer_has_an_estimate_once_something_of_it_is_done() -> None:
    found = predictions([40.0] * 6, BURSTS["four matrices"])
    assert found[0][1] is None and found[7][1] is None
    assert all(left is not None for _, left, _ in found[8:])


def test_a_machine_that_slows_down_is_noticed_after_a_layer() -> None:
    found = [(layers, left, true) for layers, left, true in predictions([20.0] * 3 + [60.0] * 6, AT_THE_END)]
    assert all(left == pytest.approx(true, rel=0.25) for layers, left, true in found if 6 <= layers < 9)
    assert all(left >= 0 for _, left, _ in found if left is not None)


def test_short_stages_of_another_kind_do_not_count() -> None:
    clock = Clock()
    eta = Eta(clock)
    eta.report(0, 1000, "text and embedding")
    clock.now = 3
    # Layers that an earlier run finished go by quickly; what they tell of the others is forgotten with the first of those.
    for again in range(4):
        eta.report(1 + 20 * again, 1000, f"reading layer {again + 1} again")
        clock.now += 1
    for layer in range(9):
        eta.report(81 + 100 * layer, 1000, f"layer {layer + 5}")
        if layer:
            assert eta.left() == pytest.approx(40 * (1000 - 81 - 100 * layer) / 100)
        clock.now += 40


def test_work_of_one_stage_is_judged_by_all_of_it() -> None:
    clock = Clock()
    eta = Eta(clock)
    assert eta.left() is None
    eta.report(0, 0, "measuring")
    assert eta.left() is None
    eta.report(200, 1000, "reading")
    clock.now = 10
    eta.report(200.5, 1000, "reading")
    assert eta.left() is None
    clock.now = 20
    eta.report(600, 1000, "reading")
    assert eta.left() == pytest.approx(20)


def test_a_longer_stage_that_overruns_falls_with_what_it_reports() -> None:
    clock = Clock()
    eta = Eta(clock)
    for layer in range(4):
        eta.report(100 * layer, 900, f"layer {layer + 1}")
        clock.now += 10
    eta.report(400, 900, "measure")
    clock.now += 100
    eta.report(850, 900, "measure")
    assert eta.left() == pytest.approx(5)
