"""What the runtime asks of a target, with one that computes nothing: memory, sizes of runs, a device that fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray

from edgeq import targets
from edgeq.errors import DeviceError, InputError, ResourceError
from edgeq.format.container import ModelFile
from edgeq.format.records import KvCodec, Mode
from edgeq.runtime import Batch, Model
from edgeq.runtime.session import session
from edgeq.runtime.session.prefill_rate import PrefillRate
from edgeq.targets import TargetChoice
from edgeq.targets.graph import Graph
from edgeq.targets.rows import Page, PagePart, Rows
from edgeq.targets.target import Beside, MemoryNeed, OnProgress, Options, Program, ProgramFacts, no_progress
from edgeq.targets.times import RecordedRun
from edgeq.tools.cli.main import main

LOST = "the GPU has fallen off the bus"
LETTER = 66
"""The token of "a"."""


class IdleProgram:
    """Every token is followed by LETTER.  After so many runs as `last` says the device is lost."""

    threads, tile, window, snapshot_pages, most_largest, description = 1, 64, 0, 0, 0, "idle"

    def __init__(self, graph: Graph, options: Options, last: int) -> None:
        self.options = replace(options, max_rows=options.max_rows or 1024)
        self.runs: list[int] = []
        self._last, self._width = last, graph.buffers[graph.result]

    def facts(self) -> ProgramFacts:
        return ProgramFacts()

    def prepare(self, mode: Mode, on_progress: OnProgress = no_progress) -> None:
        """Nothing is compiled."""

    def new_page(self) -> Page:
        self._check_device()
        return Page(PagePart(), PagePart())

    def copy_page(self, page: Page) -> Page:
        return Page(PagePart(), PagePart())

    def save_page(self, page: Page) -> bytes:
        return b""

    def page_memory(self, windowed: bool = True) -> NDArray[np.uint8]:
        return np.zeros(0, np.uint8)

    def load_page(self, data: NDArray[np.uint8]) -> Page:
        return Page(PagePart(), PagePart())

    def read_bandwidth(self, refresh: bool = False) -> float | None:
        return None

    def record(self, on: bool) -> None:
        """Nothing takes time."""

    def recorded(self) -> list[RecordedRun]:
        return []

    def run(self, rows: Rows, mode: Mode | None = None) -> Any:
        self._check_device()
        assert len(rows) <= self.options.max_rows
        self.runs.append(len(rows))
        logits = np.zeros((len(rows.wanted), self._width), np.float32)
        logits[:, LETTER] = 1
        return logits

    def _check_device(self) -> None:
        if len(self.runs) >= self._last:
            raise DeviceError(LOST)


class IdleTarget:
    name = "idle"

    def __init__(self, room: MemoryNeed | None = None, last: int = 1 << 30) -> None:
        self._room, self._last = room or MemoryNeed(1 << 40, 0), last

    def refusal(self, file: ModelFile | None = None) -> str | None:
        return None

    def room(self, graph: Graph, file: ModelFile, options: Options, beside: Sequence[Beside] = ()) -> MemoryNeed:
        return self._room

    def compile(
        self,
        graph: Graph,
        file: ModelFile,
        options: Options,
        on_progress: OnProgress = no_progress,
        beside: Program | None = None,
    ) -> Program:
        return IdleProgram(graph, options, self._last)


def loaded(path: Path, target: IdleTarget, context: int | None = None, **options: Any) -> Model:
    return Model(ModelFile.open(path), TargetChoice(target, ()), Options("a16", **options), context=context)


def runs(model: Model) -> list[int]:
    assert isinstance(model.program, IdleProgram)
    return model.program.runs


def test_the_context_is_what_the_target_has_room_for(tiny_path: Path) -> None:
    page = loaded(tiny_path, IdleTarget()).graph.page_bytes(KvCodec())
    target = IdleTarget(MemoryNeed(5000 + 4 * page - 1, 5000))
    assert loaded(tiny_path, target).context == 192
    with pytest.raises(ResourceError, match="largest context that fits is 192"):
        loaded(tiny_path, target, context=193)
    with pytest.raises(ResourceError, match="no context fits"):
        loaded(tiny_path, IdleTarget(MemoryNeed(4999, 5000)))
    with pytest.raises(ResourceError, match=r"pass `context=192`, or draw less of it$"):
        loaded(tiny_path, IdleTarget(MemoryNeed(5000 + 4 * page - 1, 5000, "draw less of it")), context=193)


def test_a_prompt_runs_in_whole_tiles_of_the_target(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By this clock every run takes a second.
    monkeypatch.setattr(session, "perf_counter", count().__next__)
    model, tokens = loaded(tiny_path, IdleTarget()), [3] * 1000
    model.session().prefill(tokens)
    assert runs(model)[:2] == [256, 320] and sum(runs(model)) == 1000
    assert not any(rows % 64 for rows in runs(model)[:-1])
    slow = PrefillRate(64)
    slow.record(64, 1000, True)
    assert slow.rows(1) == 64


def test_the_target_says_how_many_rows_a_run_has_unless_a_user_does(tiny_path: Path) -> None:
    model, small = loaded(tiny_path, IdleTarget()), loaded(tiny_path, IdleTarget(), max_rows=100, max_logits=200)
    for each, most in ((model, 1024), (small, 100)):
        assert each.program.options.max_rows == most
        each.session().prefill([3] * 1000)
        assert max(runs(each)) <= most
    assert small.session().most_logits == 100
    with pytest.raises(InputError, match="1 to 100"):
        Batch(small, 101)


def test_a_lost_device_ends_its_model_and_nothing_else(tiny_path: Path) -> None:
    model = loaded(tiny_path, IdleTarget(last=4))
    kept = model.session()
    generation = model.generate([5, 6, 7], max_tokens=9, session=kept)
    with pytest.raises(DeviceError, match=LOST):
        list(generation)
    # The prompt and three tokens ran; the token that was drawn last did not.
    assert runs(model) == [3, 1, 1, 1] and len(kept.tokens) == 6 and len(generation.tokens) == 4
    for again in (
        lambda: kept.decode(5),
        lambda: model.session().prefill([1, 2]),
        lambda: "".join(model.generate("x")),
        lambda: list(Batch(model, 1).run(["x"])),
    ):
        with pytest.raises(DeviceError, match=LOST):
            again()
    assert len(kept.tokens) == 6
    model.close()
    with pytest.raises(InputError, match="closed"):
        model.generate("x")
    with loaded(tiny_path, IdleTarget()) as other:
        assert other.generate([5, 6, 7], max_tokens=9).text()


@pytest.fixture
def edgeq(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line where the reference target's device is lost in the fourth run."""
    monkeypatch.setattr(targets, "load", lambda name: IdleTarget(last=3))

    def run(*words: object, input: str | None = None) -> Result:
        return CliRunner().invoke(main, [*map(str, words), "--target", "reference"], input=input)

    return run


def test_the_command_line_says_in_one_line_that_the_device_is_lost(edgeq: Callable[..., Result], tiny_path: Path) -> None:
    result = edgeq("run", tiny_path, "-p", "abc", "-n", 9)
    assert result.exit_code == 1 and result.stderr.splitlines()[-1] == f"error: {LOST}"
    # What was generated before stays, on a line of its own.
    assert result.stdout.strip() and result.stdout.endswith("\n")
    result = edgeq("run", tiny_path, "-p", "abc", "-n", 9, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout) == {"error": LOST, "exit_code": 1}


def test_a_conversation_ends_when_the_device_is_lost(edgeq: Callable[..., Result], tiny_path: Path, tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    result = edgeq("chat", tiny_path, "--chat-template", template, "-n", 2, "--temp", 0, input="a\nb\n/stats\n")
    assert result.exit_code == 1 and result.stderr.splitlines()[-1] == f"error: {LOST}"
    assert len(result.stdout.splitlines()) == 2 and result.stdout.endswith("\n") and "prefill" not in result.stderr


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_the_targets_in_host_memory_run_512_tokens_at_once_in_whole_tiles(tiny_path: Path, name: str) -> None:
    with Model.load(tiny_path, target=name) as model:
        most, tile = model.program.options.max_rows, model.program.tile
        assert 512 <= most < 512 + tile and most % tile == 0
    with Model.load(tiny_path, target=name, max_logits=600) as model:
        assert model.program.options.max_rows == 600
