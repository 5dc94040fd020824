"""What the host does for a token: how much, and that it writes what the general way does.  No kernel runs, so without TVM."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeq.converters.families.table import recognise
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.format.records import LinearSpec
from edgeq.runtime import Model, Sampling
from edgeq.runtime.decode import PlainStepper, Stream
from edgeq.runtime.network.decoder import decoder
from edgeq.runtime.sampling import Sampler
from edgeq.targets import TargetChoice
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.cuda.run import angles, plan
from edgeq.targets.cuda.run.angles import NEIGHBOURS, Angles, AngleTables
from edgeq.targets.cuda.run.block import Draws, SentBlock
from edgeq.targets.cuda.run.graphs import padded
from edgeq.targets.cuda.run.program import CudaProgram
from edgeq.targets.cuda.run.storage import Storage
from edgeq.targets.cuda.supply.pack import Generated, Variant
from edgeq.targets.graph import Embed, RopeRotate
from edgeq.targets.rows import PAGE, Page, Rows
from edgeq.targets.target import Options
from edgeq.tools.lab.make_checkpoint import SHAPES, llama_config
from edgeq.tools.measure.random_file import write_random
from tests.cuda.nothing import Nothing
from tests.targets.cases import Arrays, weight
from tests.targets.states.test_short_conv import graph as convolution

pytestmark = pytest.mark.cuda

SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, seed=1)
GREEDY = Sampling(temperature=0)
MOST_CALLS = {GREEDY: 160, SAMPLED: 220}
"""Calls of functions, of Python and of its libraries, for a token: when a greedy one took 625, the GPU waited for the host."""
TOKENS = 10


def written(folder: Path, **fields: object) -> Path:
    """Random weights; one layer of two sees 128 positions."""
    config = replace(recognise(llama_config(SHAPES["tiny"]))[1], sliding_windows=(128, 0), **fields)  # type: ignore[arg-type]
    write_random(folder / "random.edgeq", config, Codec("int", 4, 128))
    return folder / "random.edgeq"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def both_ways(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokens of its prompts have ranges, those of its answers none."""
    return written(tmp_path_factory.mktemp("host"), bidirectional_prompt=True)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("file", "room", "context"),
    [("path", 1, 40), ("path", 100, 40), ("path", 1, 1900), ("path", 100, 1900), ("both_ways", 100, 900)],
)
def test_a_token_takes_few_calls_whatever_its_context(
    file: str, context: int, room: int, sampling: Sampling, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """room   1: no run is started ahead; else the GPU has the next run before the one before it has ended"""
    device = Nothing()
    monkeypatch.setattr("edgeq.runtime.model.pick", lambda *_: TargetChoice(CudaTarget(device, plan.names_only), []))
    calls, idle = 0, 0

    def count(frame: FrameType, event: str, of: object) -> None:
        nonlocal calls, idle
        calls += event in ("call", "c_call")
        idle += event in ("call", "c_call") and not device.started

    with Model.load(request.getfixturevalue(file), target="cuda", mode="a16", context=2048) as model:
        session = model.session()
        session.prefill([1] * context)
        stream, stepper = Stream(session, Sampler(sampling), [1] * (context + 1)), PlainStepper()
        for _ in range(4):
            stepper.step([stream], [room])
        sys.setprofile(count)
        try:
            for _ in range(TOKENS):
                stepper.step([stream], [room])
        finally:
            sys.setprofile(None)
        assert stream.error is None and len(session.tokens) == context + TOKENS + 4
    assert TOKENS < calls <= TOKENS * MOST_CALLS[sampling], calls / TOKENS
    assert idle == 0 if room > 1 else idle > TOKENS, idle / TOKENS


def compare(monkeypatch: pytest.MonkeyPatch, program: CudaProgram) -> list[Rows]:
    """Compare each block that is written in place with what the general way sends of the run; those runs."""
    fill, feed, found = SentBlock.fill, program._replays._feed, list[Rows]()

    def compared(block: SentBlock, rows: Rows, padding: Page, draws: Draws) -> None:
        fill(block, rows, padding, draws)
        found.append(rows)
        written = block.array.copy()
        entries = max(len(view) for _, view, *_ in block._tables)
        block.copy(feed.of(padded(rows, block._count, padding), program._made("a8", "file"), pages=entries))
        assert np.array_equal(block.array, written)

    monkeypatch.setattr(SentBlock, "fill", compared)
    return found


def sessions(program: CudaProgram, lengths: list[int], dropped: int) -> list[list[Page]]:
    """Pages of sessions of these lengths, with some to spare; the first has no windows in its first pages."""
    found = [[program.new_page() for _ in range(length // PAGE + 2)] for length in lengths]
    found[0][:dropped] = [page.without_windows() for page in found[0][:dropped]]
    return found


def runs(program: CudaProgram) -> Iterator[Rows]:
    """Runs of one and of several sessions, of drafts, in another order, of fewer rows than the class has, and of prompts."""
    rng = np.random.default_rng(0)
    for rows, prompt in (
        ([(700, 1)], False),
        ([(701, 1)], False),
        ([(5, 1), (900, 1), (63, 1)], False),
        ([(64, 4), (800, 1)], False),
        ([(200, 6)], False),
        ([(6, 1), (901, 1), (64, 1)], False),
        ([(190, 6)], True),
        ([(60, 7)], True),
    ):
        pages = sessions(program, [length + count for length, count in rows], dropped=rows[0][0] // PAGE // 2)
        slots = np.array([length + i for length, count in rows for i in range(count)], np.int32)
        of = np.array([i for i, (_, count) in enumerate(rows) for _ in range(count)], np.int32)
        order = np.argsort(rng.random(len(of)), kind="stable") if len(of) == 3 else np.arange(len(of))
        tokens = rng.integers(0, 2000, len(of)).astype(np.int32)
        wanted = np.arange(len(of), dtype=np.int32)[-1 if prompt else 0 :]
        yield Rows(tokens, slots[order][None], slots[order], of[order], pages, wanted)


@pytest.mark.parametrize("name", ["path", "both_ways"])
def test_what_is_written_in_place_is_what_the_general_way_sends(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, options = ModelFile.open(request.getfixturevalue(name)), Options("a8", max_rows=16, max_logits=16)
    program = CudaProgram(Nothing(), decoder(file.metadata), file, options, kernel_source=plan.names_only)
    filled, every = compare(monkeypatch, program), list(runs(program))
    for rows in (*every, *every):
        program.run(rows)
    # The first run of a key is written by the general way, which says how large everything is; of a prompt it is the second.
    recorded = program._recordings.recorded
    assert 3 < recorded < len(every) and len(filled) == 2 * len(every) - recorded - 1
    assert sum(len(rows.wanted) < len(rows) for rows in filled) == 2


def test_states_are_written_in_place_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one and of several sessions, of rows that are not in the order of their sessions, over the end of a page."""
    arrays = Arrays()
    graph, _ = convolution(arrays, 24, 3)
    head = LinearSpec("head", (weight(arrays, np.random.default_rng(0), Codec("int", 4, 32), 150, 72),))
    # Not a table that stays in the file, of which the host brings rows.
    graph = replace(graph, operations=(Embed(-1, head, "x"), *graph.operations[1:]))
    options = Options("a8", max_rows=16, max_logits=16)
    program = CudaProgram(Nothing(), graph, arrays, options, kernel_source=plan.names_only)  # type: ignore[arg-type]
    filled, found = compare(monkeypatch, program), list[Rows]()
    for counts in ((1,), (1,), (3, 1, 2), (5, 1, 2), (2, 4), (1, 1, 1), (1, 1, 1, 1)):
        slots = np.concatenate([np.arange(62, 62 + count, dtype=np.int32) for count in counts])
        of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        order = np.random.default_rng(len(of)).permutation(len(of))
        pages = [[program.new_page().with_snapshot(program.new_snapshot()), program.new_page()] for _ in counts]
        states = [program.load_state(np.zeros(program.saved_bytes[0], np.uint8), 62, 62) for _ in counts]
        wanted = np.arange(len(of), dtype=np.int32)
        found.append(Rows(slots, slots[order][None], slots[order], of[order], pages, wanted, states=states))
        program.run(found[-1])
        assert [state.slot for state in states] == [62 + count for count in counts]
    assert len(filled) == len(found) - program._recordings.recorded >= 3


def test_what_is_not_plain_text_is_written_the_general_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, filled = ModelFile.open(path), list[Rows]()
    program = CudaProgram(
        Nothing(), decoder(file.metadata), file, Options("a16", max_rows=8, max_logits=8), kernel_source=plan.names_only
    )
    monkeypatch.setattr(SentBlock, "fill", lambda block, rows, *_: filled.append(rows))
    none, pages = np.zeros(2, np.int32), [[program.new_page()]]
    plain = Rows(none, np.array([[3, 4]], np.int32), np.array([3, 4], np.int32), none, pages, np.arange(2, dtype=np.int32))
    turned = replace(plain, wanted=np.array([1, 0], np.int32))
    axes = replace(plain, positions=np.repeat(plain.positions, 3, axis=0))
    counted = replace(plain, counted=np.array([True, False]))
    for rows in (plain, turned, axes, counted, plain):
        program.run(rows)
    assert filled == [plain] and program._recordings.recorded == 1


class Holding(Nothing):
    """writes   how many;  memory: what they wrote, by address"""

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.memory = 0, np.zeros(1 << 20, np.uint8)

    def write(self, address: int, data: NDArray[Any]) -> None:
        assert data.flags.c_contiguous
        self.writes += 1
        self.memory[address : address + data.nbytes] = data.reshape(-1).view(np.uint8)


def test_angles_on_the_device_have_the_bits_of_those_that_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ropes, one with a factor, one of other pairs whose positions have three parts; two blocks of positions are kept."""
    monkeypatch.setattr(angles, "BLOCKS", 2)
    monkeypatch.setattr(angles, "KEPT", 2 * NEIGHBOURS)
    device, ropes = Holding(), [
        RopeRotate(0, "x", 0, 1, 64, tuple(1e4 ** (-i / 20) for i in range(20)), 1.25),
        RopeRotate(0, "x", 0, 1, 64, tuple(1e6 ** (-i / 6) for i in range(6)), axes=(0, 0, 1, 1, 2, 2)),
    ]  # fmt: skip
    storage = Storage(device, Arrays())  # type: ignore[arg-type]
    tables = AngleTables(SimpleNamespace(operations=ropes), storage, 8)  # type: ignore[arg-type]

    def check(positions: list[list[int]], places: Sequence[int], writes: int) -> None:
        for each in map(Angles.of_operation, ropes):
            kept = device.memory[storage.address(each) :][: (2 * NEIGHBOURS + 8) * each.row_bytes].view(np.float32)
            assert np.array_equal(kept.reshape(-1, 2, each.row_bytes // 8)[places], each.of(np.array(positions, np.int32)))
        assert device.writes == writes * len(ropes)

    for first, writes in ((0, 2), (1, 2), (131071 - 64, 4), (1, 6)):
        few = [first, first + 63, first + 64, first + 3]
        check([few], tables.places_of_text(few), writes)
    text = [[5, 4, 70], [5, 4, 70], [5, 4, 70]]
    check(text[:1], tables.places(np.array(text[:1], np.int32)), 6)
    check(text, tables.places(np.array(text, np.int32)), 6)
    for positions in ([[5, 4, 70], [5, 5, 5], [6, 7, 8]], [[0, 400, 70000]]):
        check(positions, tables.places(np.array(positions, np.int32)), writes := writes + 1)


def test_a_number_that_a_launch_leaves_out_is_told_when_the_graph_is_lowered(path: Path) -> None:
    def source(wanted: list[Variant], on_kernel: object) -> list[Generated]:
        made = plan.names_only(wanted, lambda *_: None)
        return [
            replace(each, grid=(["+", "tokens", "widht"], 1, 1)) if each.variant.kernel == "attend" else each for each in made
        ]

    file = ModelFile.open(path)
    with pytest.raises(ValueError, match=r"the launch of attend\w* has no widht"):
        CudaProgram(Nothing(), decoder(file.metadata), file, Options("a16", max_rows=8), kernel_source=source)  # type: ignore[arg-type]
