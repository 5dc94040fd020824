"""Masters rounded again on the emulated device: the bits of edgeq/format/quantization.py, and the sums of the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgeq.format.codec import Codec, pack_floats, unpack_groups, unpack_integers
from edgeq.format.quantization import rounded
from edgeq.format.records import KvCodec, LinearSpec, Weight
from edgeq.targets import load
from edgeq.targets.capabilities import Requantizable
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.cuda.run import plan
from edgeq.targets.cuda.run.program import CudaProgram
from edgeq.targets.cuda.run.requantized import CudaWeights
from edgeq.targets.graph import Graph
from edgeq.targets.requantization import requantized_arrays, shared_inputs
from edgeq.targets.target import Options
from tests.cuda.emulated import FORWARD, SHUFFLED, EmulatedDevice
from tests.targets.cases import matrix, recording, rows_of
from tests.targets.test_requantization import CODECS, MASTERS, Case, File, graph_of, hard, layer, stored

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

ALL_MASTERS = [*MASTERS, Codec("int", 4, 32), Codec("int", 5, 16, False)]


def program_of(graph: Graph, file: File, mode: Any = "a16", order: int | None = FORWARD) -> Any:
    target = load("reference") if order is None else CudaTarget(EmulatedDevice(order))
    return target.compile(graph, file, Options(mode, max_rows=40, max_logits=40, requantize=True))  # type: ignore[arg-type]


def arrays_of(program: CudaProgram, weights: CudaWeights, graph: Graph) -> dict[Any, np.ndarray]:
    """What is on the device, by the record of the array that it replaces."""
    found = {}
    for ref, (dtype, shape) in requantized_arrays(shared_inputs(graph)).items():
        found[ref] = np.empty(shape, dtype)
        program._device.read(weights.address(ref), found[ref])
    return found


@pytest.mark.parametrize(
    ("codec", "master"),
    [*((codec, ALL_MASTERS[0]) for codec in CODECS), *((CODECS[i], master) for i, master in enumerate(ALL_MASTERS) if i)],
    ids=lambda c: c.name.replace(" ", "-"),
)
def test_a_master_is_rounded_to_the_same_bits(codec: Codec, master: Codec) -> None:
    rng = np.random.default_rng(codec.bits)
    for rows, columns in ((33, 384), (16, 128), (150, 96), (18, 19)):
        file = File()
        spec = layer(file, "layer", hard(rng, rows, columns), codec, master)
        graph = graph_of(file, np.ones((2, columns), np.float32), [spec], columns)
        s = np.exp(rng.standard_normal(columns)).astype(np.float32)
        for order in (FORWARD, SHUFFLED):
            program = program_of(graph, file, order=order)
            weights = program.new_weights()
            program.requantize(weights, [s, s])
            made = arrays_of(program, weights, graph)
            assert spec.master
            expected = rounded(matrix(file, spec.master) * s, codec)
            for name, ref in spec.weights[0].arrays.items():
                assert np.array_equal(made[ref], expected[name]), (name, rows, columns)
            inverse = np.empty(columns, np.float32)
            program._device.read(weights.address(("factors", 0)), inverse)
            assert np.array_equal(inverse, 1 / s)
            assert weights.nbytes == sum(a.nbytes for a in made.values()) + 2 * inverse.nbytes


@pytest.mark.parametrize("codec", [Codec("int", 4, 32, False), Codec("int", 3, 32)], ids=lambda c: c.name.replace(" ", "-"))
def test_what_is_not_finite_makes_the_scale_of_its_group_nan_and_no_other(codec: Codec) -> None:
    file = File()
    w = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    w[4, 3], w[5, 40] = np.nan, -np.inf
    kept = Weight(Codec("f32"), 16, 64, {"q": file.add(pack_floats(w, "f32"), "f32")})
    clean = np.where(np.isfinite(w), w, 0).astype(np.float32)
    spec = LinearSpec("layer", (stored(file, clean, codec),), master=kept)
    graph = graph_of(file, np.ones((1, 64), np.float32), [spec], 64)
    program = program_of(graph, file)
    weights = program.new_weights()
    program.requantize(weights, [np.ones(64, np.float32)] * 2)
    made = arrays_of(program, weights, graph)
    q, scale = (made[ref] for ref in list(spec.weights[0].arrays.values())[:2])
    assert np.argwhere(np.isnan(unpack_groups(scale, 16))).tolist() == [[4, 0], [5, 1]]
    assert unpack_integers(q, 16, 64).max() < 1 << codec.bits
    others = np.delete(np.arange(16), [4, 5])
    assert np.array_equal(unpack_integers(q, 16, 64)[others], unpack_integers(rounded(clean, codec)["q"], 16, 64)[others])


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def sums_of(case: Case, cuts: tuple[int, ...], counted: np.ndarray | None, order: int | None) -> tuple[Any, np.ndarray]:
    program = program_of(case.graph, case.file, order=order)
    sums, parts, first = program.new_sums(), [], 0
    pages = [program.new_page()]
    for last in (*cuts, 30):
        rows = rows_of(program, last - first, first, pages)
        rows.counted = None if counted is None else counted[first:last]
        parts.append(program.run_summing(rows, sums).copy())
        first = last
    return sums, np.concatenate(parts)


def test_sums_have_the_bits_of_the_reference_in_any_chunks(case: Case) -> None:
    counted = np.arange(30) % 3 != 0
    for rows in (None, counted):
        theirs, wanted = sums_of(case, (), rows, None)
        for cuts in ((), (1,), (5, 9, 22)):
            ours, y = sums_of(case, cuts, rows, FORWARD)
            assert ours.tokens == theirs.tokens and np.array_equal(ours.values, theirs.values)
            assert np.abs(y - wanted).max() < 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("mode", ["a16", "a8"])
def test_requantized_weights_run_like_those_of_the_reference(case: Case, mode: Any) -> None:
    s = [np.exp(np.random.default_rng(i).standard_normal(128)).astype(np.float32) for i in range(2)]
    results = []
    for order in (None, FORWARD):
        program = program_of(case.graph, case.file, mode, order)
        assert isinstance(program, Requantizable)
        weights, others = program.new_weights(), program.new_weights()
        program.requantize(weights, s)
        program.requantize(others, s[::-1])
        rows = rows_of(program, 30)
        many = program.run_requantized(rows, weights).copy()
        own = program.run(rows).copy()
        assert not np.allclose(many, own), "the requantized weights were not used"
        assert not np.allclose(many, program.run_requantized(rows, others)), "two sessions have weights of their own"
        assert np.array_equal(program.run_requantized(rows_of(program, 1), weights)[0], many[0])
        assert np.array_equal(program.run(rows), own)
        if order is not None:
            # Other weights are other recordings, also where they were given the addresses of those that are gone.
            made = program._recordings.recorded  # type: ignore[attr-defined]
            del weights, others
            weights = program.new_weights()
            program.requantize(weights, s[::-1])
            assert not np.array_equal(program.run_requantized(rows_of(program, 1), weights)[0], many[0])
            assert program._recordings.recorded == made + 1  # type: ignore[attr-defined]
        results.append(many)
    assert np.abs(results[0] - results[1]).max() < 1e-3 * np.abs(results[0]).max()


def test_scales_of_one_give_the_bits_of_the_files_own_weights() -> None:
    rng, file, codec = np.random.default_rng(0), File(), Codec("int", 3, 32, False)
    spec = layer(file, "layer", hard(rng, 48, 256), codec, Codec("int", 8, 128))
    program = program_of(graph_of(file, np.ones((2, 256), np.float32), [spec], 256), file)
    weights = program.new_weights()
    program.requantize(weights, [np.ones(256, np.float32)] * 2)
    rows = rows_of(program, 2)
    assert np.array_equal(program.run(rows).copy(), program.run_requantized(rows, weights))


def test_masters_are_brought_layer_by_layer_where_they_do_not_fit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In less memory the same sums in any chunks, the same results, the same requantized weights."""
    counted = np.arange(30) % 3 != 0
    options = Options("a16", max_rows=40, max_logits=40, requantize=True, cache_bytes=case.graph.page_bytes(KvCodec()))
    needed = [
        CudaTarget(EmulatedDevice()).room(case.graph, case.file, replace(options, requantize=each)).needed  # type: ignore[arg-type]
        for each in (False, True)
    ]
    kept = program_of(case.graph, case.file)
    wanted, y = sums_of(case, (5, 9), counted, FORWARD)
    monkeypatch.setattr(EmulatedDevice, "memory", lambda self: (1 << 32, needed[1] + case.graph.page_bytes(options.kv)))
    brought = CudaTarget(EmulatedDevice()).compile(case.graph, case.file, options)  # type: ignore[arg-type]
    weights = [program.new_weights() for program in (brought, kept)]
    assert brought.device_bytes + weights[0].nbytes == needed[1] > needed[0]
    assert kept.device_bytes > brought.device_bytes
    found, result = sums_of(case, (5, 9), counted, FORWARD)
    assert np.array_equal(found.values, wanted.values) and np.array_equal(result, y)
    scales = [np.exp(np.random.default_rng(i).standard_normal(128)).astype(np.float32) for i in range(2)]
    made = []
    for program, own in zip((brought, kept), weights, strict=True):
        program.requantize(own, scales)
        made.append(arrays_of(program, own, case.graph))
        assert program.device_bytes + own.nbytes == (needed[1] if program is brought else kept.device_bytes + own.nbytes)
    assert all(np.array_equal(array, made[1][ref]) for ref, array in made[0].items())
    with recording(brought) as steps:
        brought.run_summing(rows_of(brought, 3), brought.new_sums())
    layers = [each for shared in shared_inputs(case.graph) for each in shared.layers]
    assert sum(step.kernel == "bring" for step in steps[0].steps) == len(layers)
    del brought, kept
    # A byte less, and one page of the context would not fit beside all of them.
    for spare, brings in ((0, False), (-1, True)):
        whole = plan.device_bytes(case.graph, case.file, options, EmulatedDevice())  # type: ignore[arg-type]
        free = whole + case.graph.page_bytes(options.kv) + spare
        monkeypatch.setattr(EmulatedDevice, "memory", lambda self, free=free: (1 << 32, free))
        program = CudaTarget(EmulatedDevice()).compile(case.graph, case.file, options)  # type: ignore[arg-type]
        with recording(program) as steps:
            program.run_summing(rows_of(program, 3), program.new_sums())
        assert any(step.kernel == "bring" for step in steps[0].steps) == brings
