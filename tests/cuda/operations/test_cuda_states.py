"""Layers with a state on the emulated device: against their formulas, in any runs; states that are copied, saved and begun."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.errors import UnsupportedError
from edgeq.targets.capabilities import HoldsStates
from edgeq.targets.family_operations import GatedNorm
from edgeq.targets.rows import PAGE
from edgeq.targets.states import LOG
from tests.cuda.comparing import program_of
from tests.cuda.comparing import read as read_rows
from tests.cuda.emulated import BACKWARD, CHECKED, SHUFFLED
from tests.targets.cases import Arrays, rows_of
from tests.targets.states.state_cases import CUTS, LENGTH, read
from tests.targets.states.test_delta_rule import SIZES, Sizes, of_gates, silu
from tests.targets.states.test_delta_rule import expected as delta_expected
from tests.targets.states.test_delta_rule import graph as delta_graph
from tests.targets.states.test_delta_rule import inputs as delta_inputs
from tests.targets.states.test_row_before import graph as rows_before
from tests.targets.states.test_short_conv import graph as convolution
from tests.targets.states.test_ssd_scan import SIZES as SSD_SIZES
from tests.targets.states.test_ssd_scan import Sizes as SsdSizes
from tests.targets.states.test_ssd_scan import graph as ssd_graph
from tests.targets.states.test_ssd_scan import inputs as ssd_inputs
from tests.targets.states.test_ssd_scan import step_form

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


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("width", [5, 40])
def test_a_row_gets_the_one_before(width: int, drafts: bool) -> None:
    """Over pages and their snapshots, in runs of more rows than the state has places; what drafts reads before it keeps."""
    arrays = Arrays()
    made, expected = rows_before(arrays, width, drafts)
    for counts in ((1,),) if drafts else ((LENGTH,), (1,), (7, 1, 20, 2), (LOG, LOG + 1)):
        assert np.array_equal(read(program_of(made, arrays, 2 * LENGTH), counts), expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_delta_rule_computes_the_step_form(sizes: Sizes) -> None:
    """The same bits however the text is cut, at places that are no ends of logs too."""
    arrays, numbers = Arrays(), delta_inputs(sizes)
    made, wanted = delta_graph(arrays, sizes, numbers), delta_expected(sizes, numbers)
    whole = read(program_of(made, arrays, 2 * LENGTH), (LENGTH,))
    assert np.abs(whole - wanted).max() < 3e-6 * np.abs(wanted).max()
    for counts in CUTS:
        assert np.array_equal(read(program_of(made, arrays, 2 * LENGTH), counts), whole)


@pytest.mark.parametrize("sizes", SSD_SIZES, ids=str)
def test_the_scan_of_a_state_space_computes_the_step_form(sizes: SsdSizes) -> None:
    arrays, numbers = Arrays(), ssd_inputs(sizes)
    made, wanted = ssd_graph(arrays, sizes, numbers), step_form(numbers, sizes)
    whole = read(program_of(made, arrays, 2 * LENGTH), (LENGTH,))
    assert np.abs(whole - wanted).max() < 3e-6 * np.abs(wanted).max()
    for counts in CUTS:
        assert np.array_equal(read(program_of(made, arrays, 2 * LENGTH), counts), whole)


@pytest.mark.parametrize("order", [BACKWARD, SHUFFLED, CHECKED])
def test_scans_have_the_same_bits_in_any_order_of_threads(order: int) -> None:
    """Heads that share keys, columns of two blocks of threads, and runs over several logs."""
    for sizes in (Sizes(1, 2, 20, 40), SsdSizes(4, 40, 1, 20)):
        arrays = Arrays()
        if isinstance(sizes, Sizes):
            made = delta_graph(arrays, sizes, delta_inputs(sizes))
        else:
            made = ssd_graph(arrays, sizes, ssd_inputs(sizes))
        whole = read(program_of(made, arrays, 2 * LENGTH), (LENGTH,))
        for counts in ((LENGTH,), (7, 30, 2)):
            assert np.array_equal(read(program_of(made, arrays, 2 * LENGTH, order=order), counts), whole)


@pytest.mark.parametrize(("heads", "dim", "offset"), [(1, 16, 0), (3, 20, 7), (2, 128, 64), (5, 3, 1)])
@pytest.mark.parametrize("gate_first", [False, True])
def test_a_norm_with_a_gate_computes_its_formula(heads: int, dim: int, offset: int, gate_first: bool) -> None:
    arrays, rng = Arrays(), np.random.default_rng(dim)
    gain = rng.standard_normal(dim * (heads if gate_first else 1)).astype(np.float32)
    norm = GatedNorm(0, "x", "gate", offset, heads, dim, arrays.add(gain, "f32"), 0.125, "y", gate_first)
    made, tables = of_gates(arrays, norm, {"x": heads * dim, "gate": heads * dim + offset, "y": heads * dim})
    x, gates = tables["x"].astype(np.float64).reshape(LENGTH, heads, dim), tables["gate"].astype(np.float64)[:, offset:]
    by = silu(gates).reshape(x.shape)
    normed = x * by if gate_first else x
    wanted = normed / np.sqrt((normed * normed).mean(-1, keepdims=True) + 0.125) * gain.reshape(-1, dim)
    wanted = (wanted if gate_first else wanted * by).reshape(LENGTH, -1)
    found = read_rows(program_of(made, arrays, LENGTH), LENGTH)
    assert np.abs(found - wanted).max() < 2e-6 * np.abs(wanted).max()


def test_keys_of_more_channels_than_shared_memory_holds_are_refused_by_name() -> None:
    arrays, sizes = Arrays(), Sizes(1, 1, 257, 16)
    with pytest.raises(UnsupportedError, match="states with keys of 257 channels, only of up to 256"):
        program_of(delta_graph(arrays, sizes, delta_inputs(sizes)), arrays, LENGTH)


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
