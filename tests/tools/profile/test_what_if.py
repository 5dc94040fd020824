"""Predictions from the table of operations, against sums done by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgeq.errors import InputError
from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.format.records import Mode
from edgeq.runtime import Model
from edgeq.runtime.network.decoder import decoder
from edgeq.tools.cli.main import main
from edgeq.tools.measure.random_file import file_bytes, with_layers
from edgeq.tools.profile.limits import MachineLimits
from edgeq.tools.profile.options import Change
from edgeq.tools.profile.output.page import page
from edgeq.tools.profile.output.tables import markdown, what_if
from edgeq.tools.profile.prediction import fit, width_cost
from edgeq.tools.profile.prediction.what_if import SpeedPrediction, predictions
from tests.tools.profile.conftest import invented

Document = dict[str, Any]
MACHINE_LIMITS = {1: MachineLimits(1, 1e7, 1e12), 2: MachineLimits(2, 2e7, 2e12)}


def limits(threads: int, mode: Mode) -> MachineLimits | None:
    return MACHINE_LIMITS.get(threads)


def cost(codec: Codec, bits: int, threads: int, mode: Mode) -> float:
    """Invented: of 3 bits 0.9, in two threads 0.8; of those of the file 1."""
    return {3: 0.9, codec.bits: 1.0}[bits] - (threads == 2) * 0.1


@pytest.fixture(scope="module")
def file(tiny: Path) -> ModelFile:
    return ModelFile.open(tiny)


def predicted(document: Document, file: ModelFile, change: Change) -> list[SpeedPrediction]:
    return list(predictions(document, (change,), file, limits, cost))


def test_more_threads_read_faster(calm: Document, file: ModelFile) -> None:
    """A token of 0.25 s, as the operations' 0.21: 0.1 of the 0.2 s are what 1 MB takes at 10 MB/s; with two threads 0.05."""
    (found,) = predicted(calm, file, Change(threads=2))
    rest, scaled = 0.25 * (0.15 + 0.01) / 0.21, 0.25 * (0.1 + 0.01) / 0.21
    assert (found.now, found.low, found.high) == (pytest.approx(4), pytest.approx(1 / rest), pytest.approx(1 / scaled))
    assert found.low < found.expected < found.high and found.measured is None
    assert predicted(calm, file, Change(threads=1)) == []


def test_what_was_measured_is_beside_it(calm: Document, file: ModelFile) -> None:
    calm["measurements"].append(invented("tg", "tg4", 0.8) | {"threads": 2})
    (found,) = predicted(calm, file, Change(threads=2))
    assert found.measured == pytest.approx(5) and found.error == pytest.approx(found.expected / 5 - 1)
    cells = what_if([vars(found)])
    assert cells[1][0] == "threads=2" and cells[1][-2] == "5.0" and cells[1][-1].endswith(" %")


def test_a_model_in_a_cache_may_gain_nothing(calm: Document, file: ModelFile) -> None:
    calm["operations"][0]["lines"][0].update(bytes=1e7)
    (found,) = predicted(calm, file, Change(threads=2))
    assert found.low == pytest.approx(found.now) and found.high > found.low


def test_other_bits_cost_what_was_measured_of_them(calm: Document, file: ModelFile) -> None:
    (found,) = predicted(calm, file, Change(bits=3))
    expected = 0.21 / 0.25 / (0.2 * 0.9 + 0.01)
    assert found.expected == pytest.approx(expected)
    assert (found.low, found.high) == (pytest.approx(0.9 * expected), pytest.approx(1.1 * expected))
    assert predicted(calm, file, Change(bits=4))[0].expected == pytest.approx(found.now)


def test_other_bits_with_other_threads_cost_what_was_measured_with_those(calm: Document, file: ModelFile) -> None:
    (found,) = predicted(calm, file, Change(bits=3, threads=2))
    assert found.low == pytest.approx(0.9 * 0.21 / 0.25 / (0.15 * 0.8 + 0.01))
    assert found.high == pytest.approx(1.1 * 0.21 / 0.25 / (0.1 * 0.8 + 0.01))


def test_limits_are_those_of_the_mode_of_a_test(calm: Document, file: ModelFile) -> None:
    asked: list[tuple[int, Mode]] = []

    def noted(threads: int, mode: Mode) -> MachineLimits | None:
        asked.append((threads, mode))
        return MACHINE_LIMITS[threads]

    for list_of in ("measurements", "operations"):
        calm[list_of] = [{**each, "mode": "a4"} for each in calm[list_of]]
    assert list(predictions(calm, (Change(threads=2),), file, noted, cost)) and asked == [(1, "a4"), (2, "a4")]


def test_the_cost_of_a_width_is_measured_in_turn_and_kept(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(width_cost, "_loaded", lambda path, config, codec, *_: codec)
    monkeypatch.setattr(width_cost, "_product_seconds", lambda codec: float(codec.bits))
    waits = iter((0.0, 100.0, 0.0, 0.0))
    monkeypatch.setattr(width_cost, "core_wait_s", lambda: next(waits))
    with Model.load(tiny, target="cpu") as model:
        codec = Codec("int", 4, 64)
        assert width_cost.width_cost(model, codec, 4, 1, "a8") == 1.0
        # The first is not kept: others had the cores.
        assert [width_cost.width_cost(model, codec, 6, 1, "a8") for _ in range(3)] == [1.5] * 3
        assert next(waits, None) is None


def test_what_is_timed_is_larger_than_caches_and_no_larger_than_the_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, codec = ModelFile.open(tiny).metadata.config, Codec("int", 4, 64)
    assert width_cost._shape(config, codec) == config
    monkeypatch.setattr(width_cost, "MIN_BYTES", 1)
    monkeypatch.setattr(
        width_cost, "last_level_cache", lambda: file_bytes(with_layers(replace(config, vocab_size=16), 2), codec) // 4
    )
    cut = width_cost._shape(config, codec)
    assert cut.num_hidden_layers == 2 and cut.vocab_size == 16


@pytest.mark.parametrize(
    ("change", "here", "board"),
    [
        (Change(bits=3), True, False),
        (Change(bits=3, threads=2), True, False),
        (Change(threads=2), False, False),
        (Change(bits=3, board="raspberry-pi-5"), False, True),
    ],
)
def test_of_other_bits_it_says_what_they_are_predicted_from(
    calm: Document, file: ModelFile, change: Change, here: bool, board: bool
) -> None:
    calm["what_if"] = [asdict(each) for each in predicted(calm, file, change)]
    for shown in (page(calm), markdown(calm)):
        assert ("bits: products of that width were timed here" in shown) == here
        assert ("bits on a board: by the bytes alone" in shown) == board


def test_a_board_is_what_fit_says(calm: Document, file: ModelFile) -> None:
    (found,) = predicted(calm, file, Change(board="raspberry-pi-5"))
    (fewer,) = predicted(calm, file, Change(board="raspberry-pi-5", bits=3))
    assert found.low <= found.expected <= found.high and 1.1 < fewer.high / found.high < 4 / 3
    with pytest.raises(InputError, match="runs on CPUs only"):
        predicted(calm, file, Change(board="h200"))
    with pytest.raises(InputError, match="limits of the machine"):
        list(predictions(calm, (Change(bits=3),), file, lambda *_: None, cost))


def test_the_experts_of_a_layer_are_one_operation(calm: Document, file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token uses one of four experts, all alike: a board reads a quarter of what they are."""
    linears = file.metadata.linears
    experts = {f"layers.0.experts.{e}.down": linears["layers.0.down"] for e in range(4)}
    sparse = replace(
        file.metadata,
        config=replace(file.metadata.config, num_experts=4, num_experts_per_tok=1),
        linears={"head": linears["head"], **experts},
    )
    saved = linears["layers.0.down"].rows * linears["layers.0.down"].columns / 8
    calm["operations"][0]["lines"][0].update(name="experts")
    # Other linear layers are left out; the cache is that of attention, which has all of its own.
    whole = decoder(file.metadata)
    monkeypatch.setattr(fit, "decoder", lambda metadata: whole)
    monkeypatch.setattr(file, "metadata", sparse)
    (same,) = predicted(calm, file, Change(bits=4))
    (found,) = predicted(calm, file, Change(bits=3))
    assert found.high == pytest.approx(1.1 * 0.21 / 0.25 / (0.2 * 0.9 + 0.01)) and found.high > same.high
    now, fewer = (predicted(calm, file, Change(board="raspberry-pi-5", bits=bits))[0] for bits in (4, 3))
    read = sparse.bytes_per_token()["weights"] + sparse.bytes_per_token()["head"]
    assert 1 < fewer.high / now.high < read / (read - 1.01 * saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("bits=9", "from 2 to 8"),
        ("threads=0", "from 1 to 1024"),
        ("speed=3", "expected bits=N"),
        ("bits", "expected bits=N"),
        ("bits=3,bits=4", "each once"),
        ("board=raspberry", "did you mean raspberry-pi-"),
        ("board=raspberry-pi-5,threads=2", "exclude each other"),
    ],
)
def test_a_change_that_is_none_is_one_line(tiny: Path, change: str, message: str) -> None:
    result = CliRunner().invoke(main, ["profile", str(tiny), "--what-if", change])
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
