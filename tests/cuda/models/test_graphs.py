"""Runs that are recorded once and replayed, on the emulated device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.errors import ResourceError
from edgeq.format.container import ModelFile
from edgeq.format.records import Mode
from edgeq.runtime import Generation, Model, Sampling
from edgeq.runtime.network.decoder import decoder
from edgeq.runtime.sampling import Sampler
from edgeq.runtime.uniforms import Uniforms
from edgeq.targets import TargetChoice
from edgeq.targets.capabilities import Draw
from edgeq.targets.cuda import CudaTarget
from edgeq.targets.cuda.run import graphs
from edgeq.targets.cuda.run.graphs import MAX_BYTES, Recordings, parts_of, repeats, row_class
from edgeq.targets.cuda.run.program import CudaProgram
from edgeq.targets.rows import PAGE, Page, Rows
from edgeq.targets.target import Options
from tests.cuda.emulated import EmulatedDevice, EmulatedRecording
from tests.targets.cases import recording

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

LOGITS = 32
Compiled = Callable[..., CudaProgram]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    from edgeq.converters.convert import convert
    from edgeq.converters.planning.options import ConvertOptions

    made = tmp_path_factory.mktemp("graphs") / "rtn.edgeq"
    source = Path(__file__).parents[3] / "models" / "tiny-llama"
    convert(str(source), made, ConvertOptions(method="rtn"), lambda *_: None)
    return made


@pytest.fixture
def compiled(path: Path, device: EmulatedDevice) -> Compiled:
    def get(**options: object) -> CudaProgram:
        file = ModelFile.open(path)
        settings = Options("a16", max_rows=64, max_logits=LOGITS, **options)  # type: ignore[arg-type]
        return CudaTarget(device).compile(decoder(file.metadata, 4096), file, settings)

    return get


class Text:
    """A session by hand that has `length` positions of zeros."""

    def __init__(self, program: CudaProgram, length: int = 0) -> None:
        self.program, self.length = program, length
        self.pages: list[Page] = [program.new_page() for _ in range(-(-length // PAGE))]


def rows_of(texts: Sequence[Text], tokens: Sequence[Sequence[int]]) -> Rows:
    """The next tokens of several texts, all of whose logits are wanted."""
    slots = []
    for text, each in zip(texts, tokens, strict=True):
        slots.append(np.arange(text.length, text.length + len(each), dtype=np.int32))
        while len(text.pages) * PAGE < text.length + len(each):
            text.pages.append(text.program.new_page())
    sessions = np.repeat(np.arange(len(texts), dtype=np.int32), [len(each) for each in tokens])
    places, flat = np.concatenate(slots), np.concatenate([np.asarray(each, np.int32) for each in tokens])
    wanted = np.arange(len(flat), dtype=np.int32)[::-1].copy()
    return Rows(flat, places[None], places, sessions, [text.pages for text in texts], wanted)


def one_by_one(program: CudaProgram, rows: Rows, mode: Mode | None = None) -> np.ndarray:
    """The logits of launches that are timed, each by itself."""
    with recording(program):
        return program.run(rows, mode).copy()


def read(texts: Sequence[Text], tokens: Sequence[Sequence[int]], check: bool = True) -> np.ndarray:
    """Their logits; `check`: launches that are started one by one give the same bits."""
    program, rows = texts[0].program, rows_of(texts, tokens)
    alone = one_by_one(program, rows) if check else None
    logits = program.run(rows).copy()
    assert alone is None or np.array_equal(logits, alone)
    for text, each in zip(texts, tokens, strict=True):
        text.length += len(each)
    return logits


def recorded(program: CudaProgram) -> int:
    return program._recordings.recorded


def test_a_text_of_any_length_has_a_recording_for_each_class_and_the_next_text_none(
    compiled: Compiled, device: EmulatedDevice
) -> None:
    """300 tokens across the ends of pages, of a part, and of a class of the context."""
    program, token = compiled(), 1
    text = Text(program, graphs.PART - 150)
    for i in range(300):
        before = recorded(program)
        check = i % 50 == 0 or abs(text.length - graphs.PART) < 2
        token = int(read([text], [[token]], check).argmax())
        assert recorded(program) - before == (i in (0, 150)), text.length
    assert device.replays == 300 and recorded(program) == 2
    for length in (3, graphs.PART - 1, graphs.PART, 2 * graphs.PART - 1):
        second = Text(program, length)
        read([second], [[token]])
    assert recorded(program) == 2
    read([second], [[token]])
    assert recorded(program) == 3


def test_batches_and_verified_drafts_have_one_for_each_class_of_rows(compiled: Compiled) -> None:
    program = compiled()
    texts = [Text(program, 11 * i) for i in range(5)]
    for count, made in ((3, 1), (4, 1), (2, 2), (3, 2), (5, 3)):
        read(texts[:count], [[5 + i] for i in range(count)])
        assert recorded(program) == made, count
    # Drafts of several texts, 16 rows together; then more than the largest class, which is what a run gives logits of.
    read(texts[:2], [list(range(9)), list(range(7))])
    read(texts[:1], [list(range(31))])
    assert recorded(program) == 5


def test_what_does_not_come_again_is_not_recorded(compiled: Compiled, device: EmulatedDevice) -> None:
    program = compiled()
    rows = rows_of([Text(program)], [[1, 2, 3]])
    rows.wanted = rows.wanted[:0]
    program.run(rows)
    program.run(rows)
    assert not device.replays and recorded(program) == 0
    without = compiled(graphs=False)
    assert "one by one" in without.description and "one graph" in program.description
    read([Text(without)], [[1]])
    assert not device.replays
    assert without.device_bytes < program.device_bytes
    rows = rows_of([Text(program)], [[1]])
    assert repeats(rows, LOGITS)
    rows.modality = np.zeros(1, np.uint8)
    assert not repeats(rows, LOGITS)


def test_a_short_prompt_is_recorded_when_one_comes_again(compiled: Compiled, device: EmulatedDevice) -> None:
    """Prompts of 11 rows, and of fewer in the same class, which the recording pads."""
    program = compiled()
    for round, tokens in enumerate((list(range(11)), list(range(11)), list(range(20, 29)))):
        rows = rows_of([Text(program, 5 * round)], [tokens])
        rows.wanted = rows.wanted[:1]
        alone = one_by_one(program, rows)
        assert np.array_equal(program.run(rows), alone)
        assert (device.replays, recorded(program)) == (round, min(round, 1))
    # The largest of its logits, by a recording of its own.
    for _ in range(2):
        found = program.run_largest(rows, 1)
        assert found.ids[0, 0] == alone.argmax() and found.values[0, 0] == alone.max()
    assert recorded(program) == 2


def test_the_mode_of_drafts_has_recordings_of_its_own(compiled: Compiled) -> None:
    program = compiled()
    text = Text(program, 20)
    rows = rows_of([text], [[3]])
    exact, draft = program.run(rows).copy(), program.run(rows, "a8").copy()
    assert recorded(program) == 2 and not np.array_equal(exact, draft)
    assert np.array_equal(one_by_one(program, rows, "a8"), draft) and np.array_equal(program.run(rows), exact)
    assert recorded(program) == 2


def test_a_mode_that_reads_more_of_the_rows_leaves_earlier_recordings_valid(
    model_path: Callable[..., Path], device: EmulatedDevice
) -> None:
    """Integer activations with constant scales are told which rows are of a picture, floats are not."""
    options = {"activations": "static", "calibration_rows": 2, "calibration_length": 64}
    file = ModelFile.open(model_path("tiny-llama", method="smoothquant", **options))
    program = CudaTarget(device).compile(decoder(file.metadata, 128), file, Options("a16", max_rows=4, max_logits=4))
    rows = rows_of([Text(program, 20)], [[3]])
    for mode in ("a16", "a8", "a16", "a8"):
        assert np.array_equal(program.run(rows, mode), one_by_one(program, rows, mode))  # type: ignore[arg-type]
    assert recorded(program) == 2


def test_the_least_recently_used_makes_room(compiled: Compiled) -> None:
    program = compiled()
    texts = [Text(program) for _ in range(8)]
    for count in (1, 2, 1):
        read(texts[:count], [[count]] * count)
    held = program._recordings
    held._room = sum(each.nbytes for each in held._kept.values())
    read(texts, [[8]] * 8)
    assert recorded(program) == 3 and [key.rows for key in held._kept] in ([8], [1, 8])
    read(texts[:2], [[1], [2]])
    assert recorded(program) == 4 and sum(each.nbytes for each in held._kept.values()) <= held._room


def test_without_memory_launches_are_started_one_by_one(
    compiled: Compiled, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled()
    wanted = read([Text(program)], [[4]])

    def full(*_: object) -> None:
        raise ResourceError("no room")

    # To record them, or to start what was recorded.
    for owner, name in ((device, "record"), (EmulatedRecording, "start")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, full)
            other = compiled()
            held = other.device_bytes
            assert np.array_equal(read([Text(other)], [[4]]), wanted)
            assert other.device_bytes < held and "one by one" in other.description


def test_classes() -> None:
    assert [row_class(n, 64) for n in (1, 2, 3, 9, 33, 64)] == [1, 2, 4, 16, 64, 64]
    assert [row_class(n, 6) for n in (4, 5, 6)] == [4, 6, 6]
    for last, parts in ((0, 1), (511, 1), (512, 2), (1023, 2), (1024, 4), (2048, 8)):
        slots = np.array([0, last], np.int32)
        assert parts_of(Rows(slots, slots[None], slots, slots * 0, [[]])) == parts
    device = EmulatedDevice()
    device.integrated = True
    assert (
        Recordings(device, 16, 8, 100, 10).reserved
        == Recordings(EmulatedDevice(), 16, 8, 100, 10).reserved + 8 * 100 * 4 + MAX_BYTES
    )
    assert Recordings(device, 16, 8, 100, 0).reserved == 0


@pytest.mark.parametrize("recording", [True, False])
def test_the_largest_logits_without_the_others(compiled: Compiled, recording: bool) -> None:
    """By recordings for one, 8, 16 ... of them, and by single launches."""
    program = compiled(graphs=recording)
    rows = rows_of([Text(program), Text(program, 9)], [[5], [6]])
    logits = program.run(rows).copy()
    for count in (1, 5, 8, 40, program.most_largest):
        found = program.run_largest(rows, count)
        wanted = np.argsort(-logits, axis=1, kind="stable")[:, :count]
        assert np.array_equal(found.ids, wanted) and found.finite.all()
        assert np.array_equal(found.values, np.take_along_axis(logits, wanted, 1))
    assert recorded(program) == (4 if recording else 0)
    for count in (0, 65):
        with pytest.raises(ValueError, match="at most 64"):
            program.run_largest(rows, count)


NARROW = Sampling(temperature=1.1, top_k=9, top_p=0.8, min_p=0.02)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=40, seed=3), NARROW])
def test_tokens_drawn_from_the_largest_logits_are_those_drawn_from_all(
    path: Path, device: EmulatedDevice, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeq.runtime.model.pick", lambda name, file: TargetChoice(CudaTarget(device), []))
    texts = []
    with Model.load(path, target="cuda", mode="a16", context=128, max_rows=32) as model:
        for most in (64, 0):
            model.program.most_largest = most  # type: ignore[attr-defined]
            device.launches.clear()
            generation = model.generate("def read(", max_tokens=10, sampling=sampling, ignore_eos=True)
            assert generation.text()
            texts.append(generation.tokens)
            assert any(name.startswith("largest") for name in device.launches) == bool(most)
        assert texts[0] == texts[1]
        model.program.most_largest = 64  # type: ignore[attr-defined]
        device.launches.clear()
        changed = replace(sampling, repeat_penalty=1.2)
        assert model.generate("def read(", max_tokens=3, sampling=changed, ignore_eos=True).text()
        assert not any(name.startswith("largest") for name in device.launches)


class Greedy:
    """A text by hand whose runs may be started ahead, and what its tokens are by launches that are started one by one."""

    def __init__(self, program: CudaProgram, length: int) -> None:
        self.text, self.alone, self.token = Text(program, length), Text(program, length), 1

    def step(self, ahead: bool = True, token: int | None = None) -> int:
        """The token after `token`, or after the last one."""
        token = self.token if token is None else token
        whole = one_by_one(self.alone.program, rows_of([self.alone], [[token]]))
        found = self.text.program.run_largest(rows_of([self.text], [[token]]), 1, ahead=[Draw()] if ahead else [])
        assert found.ids.tolist() == [[int(whole[0].argmax())]] and found.values[0, 0] == whole.max() and found.finite.all()
        for text in (self.text, self.alone):
            text.length += 1
        self.token = int(found.ids[0, 0])
        return self.token


def test_a_run_that_is_started_ahead_is_the_next_one_or_none(path: Path, device: EmulatedDevice) -> None:
    """Texts that go on as expected, take another token or take turns, and pages that change; started runs are counted."""
    file = ModelFile.open(path)
    settings = Options("a16", max_rows=4, max_logits=4)
    program, beside = (
        CudaTarget(each).compile(decoder(file.metadata, 4096), file, settings) for each in (device, EmulatedDevice())
    )
    assert isinstance(program, CudaProgram) and isinstance(beside, CudaProgram)

    def greedy(length: int) -> Greedy:
        made = Greedy(program, length)
        made.alone = Text(beside, length)
        return made

    def wasted(runs: int, before: int) -> int:
        return device.replays - before - runs

    first, second = greedy(30), greedy(40)
    # The first run has none before it, the second is followed by one that waits.
    for _ in range(6):
        first.step()
    assert wasted(6, 0) == 1 and recorded(program) == 3
    first.step(ahead=False)
    assert wasted(7, 0) == 0 and program._ahead._next is None
    # Another token than the largest, then two texts by turns.
    for _ in range(3):
        first.step()
    first.step(token=(first.token + 1) % 100)
    assert wasted(11, 0) == 2
    for _ in range(3):
        first.step()
        second.step()
    assert wasted(17, 0) == 2
    # What the run has written that nobody waited for is overwritten.
    for _ in range(4):
        first.step()
    assert wasted(21, 0) == 3 and recorded(program) == 3
    # A page that is made or copied meanwhile, as of a session that another begins with.
    before = device.replays
    program.copy_page(first.text.pages[0])
    first.step()
    assert wasted(1, before) == 0
    # A run that is not recorded.
    first.step()
    whole = program.run(rows_of([first.text], [[first.token]])).copy()
    assert np.array_equal(whole, one_by_one(beside, rows_of([first.alone], [[first.token]])))
    first.step()


DRAWN = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, seed=3)


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_a_text_is_the_same_whether_its_runs_are_started_ahead(
    path: Path, device: EmulatedDevice, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the end of a page, where a run waits for the page of the next one."""
    monkeypatch.setattr("edgeq.runtime.model.pick", lambda name, file: TargetChoice(CudaTarget(device), []))
    texts, replays = [], []
    for graphs_too in (True, False):
        with Model.load(path, target="cuda", mode="a16", context=256, max_rows=32, graphs=graphs_too) as model:
            before = device.replays
            generation = model.generate("def read(", max_tokens=70, sampling=sampling, ignore_eos=True)
            texts.append((generation.text(), generation.tokens))
            replays.append(device.replays - before)
    assert texts[0] == texts[1]
    # One for each token but the first, which the prompt gives; nothing is started for a token that cannot come.
    assert replays == [69, 0]


def test_what_was_started_for_another_token_than_the_one_drawn_is_not_used(
    path: Path, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is told other numbers than those that tokens are drawn by, and texts that end while a run waits."""
    monkeypatch.setattr("edgeq.runtime.model.pick", lambda name, file: TargetChoice(CudaTarget(device), []))
    with Model.load(path, target="cuda", mode="a16", context=256, max_rows=32) as model:

        def text(**options: Any) -> Generation:
            return model.generate("def read(", max_tokens=16, sampling=DRAWN, ignore_eos=True, **options)

        wanted = text()
        said, session = wanted.text(), model.session()
        assert len(set(wanted.tokens)) > 5
        with text(session=session) as cut:
            for _ in range(5):
                next(cut.pieces())
        assert cut.tokens == wanted.tokens[:5]
        # It goes back to the prompt; a stop string takes a part of the text back.
        stopped = text(session=session, stop=[said[8:11]])
        assert stopped.text() == said[: said.index(said[8:11])] and stopped.finish_reason == "stop"
        # The session has the prompt but for its last token, whose run is a recording as those of the 15 after it.
        before, again = device.replays, text(session=session)
        assert again.text() == said and again.tokens == wanted.tokens and device.replays - before == 16
        with monkeypatch.context() as patched:
            patched.setattr(Uniforms, "coming", lambda uniforms: (0.0, 0.0))
            before, again = device.replays, text(session=session)
            assert again.text() == said and again.tokens == wanted.tokens and device.replays - before > 16


def test_rows_that_are_drawn_and_greedy_rows_run_ahead_together(path: Path, device: EmulatedDevice) -> None:
    """Three sessions, in a recording for four."""
    file, steps = ModelFile.open(path), 6
    program = CudaTarget(device).compile(decoder(file.metadata, 4096), file, Options("a16", max_rows=4, max_logits=4))
    assert isinstance(program, CudaProgram)
    samplers = [Sampler(each) for each in (DRAWN, Sampling(), Sampling(temperature=5.0, top_k=17, seed=8))]
    texts, tokens, every = [Text(program, 10 * i) for i in range(3)], [5, 6, 7], list[list[int]]()
    for _ in range(steps):
        rows = rows_of(texts, [[token] for token in tokens])
        rows.wanted = np.arange(3, dtype=np.int32)
        found = program.run_largest(rows, 40, ahead=[sampler.coming() for sampler in samplers])
        tokens = [sampler.draw_among(found, row) for row, sampler in enumerate(samplers)]
        every.append(tokens)
        for text in texts:
            text.length += 1
    # The first has none before it, the last one is followed by one that nobody asks for.
    assert device.replays == steps + 1 and len({token for each in every for token in each}) > 6
