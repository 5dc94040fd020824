"""Layers with a state on the emulated device: against their formulas, in any runs; states that are copied, saved and begun."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.targets.capabilities import HoldsStates
from edgeq.targets.rows import PAGE
from edgeq.targets.states import LOG
from tests.cuda.comparing import program_of
from tests.cuda.emulated import BACKWARD, CHECKED, SHUFFLED
from tests.targets.cases import Arrays, rows_of
from tests.targets.states.state_cases import LENGTH, read
from tests.targets.states.test_short_conv import graph as convolution

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]


@pytest.mark.parametrize(("width", "taps"), [(5, 2), (16, 3), (40, 3), (33, 7), (64, 20)])
@pytest.mark.parametrize("gated", [True, False])
def test_a_convolution_computes_what_the_reference_does(width: int, taps: int, gated: bool) -> None:
    arrays = Arrays()
    made, expected = convolution(arrays, width, taps, gated)
    whole = read(program_of(made, arrays, 2 * LENGTH), (LENGTH,))
    assert np.abs(whole - expected).max() < 1e-5 * np.abs(expected).max()
    for counts in ((1,), (7, 1, 20, 2), (LOG, LOG + 1)):
        assert np.array_equal(read(program_of(made, arrays, 2 * LENGTH), counts), whole)


@pytest.mark.parametrize("order", [BACKWARD, SHUFFLED, CHECKED])
def test_a_convolution_has_the_same_bits_in_any_order_of_threads(order: int) -> None:
    arrays = Arrays()
    made, _ = convolution(arrays, 40, 3)
    whole = read(program_of(made, arrays, 2 * LENGTH), (LENGTH,))
    for counts in ((LENGTH,), (7, 1, 20, 2)):
        assert np.array_equal(read(program_of(made, arrays, 2 * LENGTH, order=order), counts), whole)


def test_what_is_not_a_number_stays_in_its_session_and_channel() -> None:
    arrays = Arrays()
    made, _ = convolution(arrays, 24, 3)
    table = arrays.array(made.operations[0].table)  # type: ignore[attr-defined]
    clean = read(program_of(made, arrays, 2 * LENGTH), (LENGTH,))
    table[40, 3] = np.nan
    found = read(program_of(made, arrays, 2 * LENGTH), (LENGTH,))
    assert np.isnan(found[40:43, 3]).all() and np.isnan(found).sum() == 3
    found[40:43, 3] = clean[40:43, 3]
    assert np.array_equal(found, clean)


def test_states_are_saved_and_loaded_and_those_that_are_dropped_used_again() -> None:
    arrays = Arrays()
    made, _ = convolution(arrays, 24, 4)
    program = program_of(made, arrays, LENGTH)
    assert isinstance(program, HoldsStates)
    pages = [program.new_page().with_snapshot(program.new_snapshot()) for _ in range(2)]

    def run(state, first: int, count: int) -> np.ndarray:
        rows = rows_of(program, count, first, pages)
        rows.states = [state]
        return program.run(rows).copy()

    state = program.new_state()
    run(state, 0, 100)
    saved, snapshot = program.save_state(state), program.save_snapshot(pages[0].snapshot)
    assert (len(saved), len(snapshot)) == program.saved_bytes
    copied = program.fork_state(state)
    wanted = run(state, 100, 5)
    assert (copied.slot, copied.written) == (100, 100) and np.array_equal(run(copied, 100, 5), wanted)
    loaded = program.load_state(np.frombuffer(saved, np.uint8), 100, 101)
    assert np.array_equal(run(loaded, 100, 5), wanted) and loaded.slot == 105
    begun = program.start_from(program.load_snapshot(np.frombuffer(snapshot, np.uint8)), PAGE)
    assert not begun.trim(PAGE - 1)
    run(begun, PAGE, 36)
    assert np.array_equal(run(begun, 100, 5), wanted)
    held = program.facts().device_bytes
    del copied, loaded
    again = program.new_state()
    assert program.save_state(again) == bytes(len(saved)) and program.facts().device_bytes == held
    for each in (saved[:-4], saved + bytes(4)):
        with pytest.raises(ValueError, match=f"{len(each)} bytes for {len(saved)}"):
            program.load_state(np.frombuffer(each, np.uint8), 100, 100)
    with pytest.raises(ValueError, match="not the next ones of states"):
        run(begun, 104, 2)
