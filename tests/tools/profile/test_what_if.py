"""Predictions from the table of operations, against sums done by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgeq.container import ModelFile
from edgeq.errors import InputError
from edgeq.tools.cli import main
from edgeq.tools.profile.limits import Limits
from edgeq.tools.profile.options import Change
from edgeq.tools.profile.page import page
from edgeq.tools.profile.tables import markdown, what_if
from edgeq.tools.profile.what_if import Prediction, predictions
from tests.tools.profile.conftest import invented

Document = dict[str, Any]
LIMITS = {1: Limits(1, 1e7, 1e12), 2: Limits(2, 2e7, 2e12)}


@pytest.fixture(scope="module")
def file(tiny: Path) -> ModelFile:
    return ModelFile.open(tiny)


def predicted(document: Document, file: ModelFile, change: Change) -> list[Prediction]:
    return list(predictions(document, (change,), file, LIMITS.get))


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


def test_fewer_bits_are_fewer_bytes(calm: Document, file: ModelFile) -> None:
    linear = file.metadata.linears["layers.0.qkv"]
    share = 1 - linear.rows * linear.columns * 1 / 8 / linear.nbytes
    (found,) = predicted(calm, file, Change(bits=3))
    least = 0.1 * share
    assert found.low == pytest.approx(0.21 / 0.25 / (0.1 + least + 0.01)) and share < 0.8
    assert found.high == pytest.approx(0.21 / 0.25 / (0.2 * share + 0.01))
    assert predicted(calm, file, Change(bits=4))[0].expected == pytest.approx(found.now)


@pytest.mark.parametrize(
    ("change", "said"), [(Change(bits=3), True), (Change(bits=3, threads=2), True), (Change(threads=2), False)]
)
def test_of_other_bits_it_says_that_bytes_alone_are_counted(
    calm: Document, file: ModelFile, change: Change, said: bool
) -> None:
    calm["what_if"] = [asdict(each) for each in predicted(calm, file, change)]
    assert ("by the bytes alone" in page(calm)) == ("\n\nbits: by the bytes alone" in markdown(calm)) == said


def test_a_board_is_what_fit_says(calm: Document, file: ModelFile) -> None:
    (found,) = predicted(calm, file, Change(board="raspberry-pi-5"))
    (fewer,) = predicted(calm, file, Change(board="raspberry-pi-5", bits=3))
    assert found.low <= found.expected <= found.high and 1.1 < fewer.high / found.high < 4 / 3
    with pytest.raises(InputError, match="runs on CPUs only"):
        predicted(calm, file, Change(board="h200"))
    with pytest.raises(InputError, match="limits of the machine"):
        list(predictions(calm, (Change(bits=3),), file, lambda _: None))


def test_the_experts_of_a_layer_are_one_operation(calm: Document, file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four experts, all alike, of which a token uses one: a board reads a quarter of what they are."""
    linears = file.metadata.linears
    experts = {f"layers.0.experts.{e}.down": linears["layers.0.down"] for e in range(4)}
    sparse = replace(
        file.metadata,
        config=replace(file.metadata.config, num_experts=4, num_experts_per_tok=1),
        linears={"head": linears["head"], **experts},
    )
    held = linears["layers.0.down"].nbytes
    saved = linears["layers.0.down"].rows * linears["layers.0.down"].columns / 8
    calm["operations"][0]["lines"][0].update(name="experts")
    monkeypatch.setattr(file, "metadata", sparse)
    (same,) = predicted(calm, file, Change(bits=4))
    (found,) = predicted(calm, file, Change(bits=3))
    assert found.high == pytest.approx(0.21 / 0.25 / (0.2 * (1 - saved / held) + 0.01)) and found.high > same.high
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
