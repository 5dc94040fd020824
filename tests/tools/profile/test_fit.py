"""Whether a file fits a device, against numbers written out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgeq.errors import InputError
from edgeq.format.container import ModelFile
from edgeq.format.writer import Writer
from edgeq.system.devices import DEVICES, GIB, PROCESS, DeviceSpec, needed
from edgeq.tools.cli.main import main
from edgeq.tools.measure import decode_speed
from edgeq.tools.profile.prediction.fit import Fit, fitted, text
from tests.edgeq.format.sample_file import write_body

POSITION = 2 * 2 * 1 * 2 * 16
"""Bytes of the sample's cache: keys and values of 2 layers, one head of 16 numbers of 2 bytes."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fit") / "sample.edgeq"
    writer = Writer(path)
    writer.finish(write_body(writer))
    return path


@pytest.fixture(scope="module")
def file(path: Path) -> ModelFile:
    return ModelFile.open(path)


def with_room(file: ModelFile, positions: int, bandwidth: float = 8e6, measured: float = 0.0) -> DeviceSpec:
    """A device with memory for exactly so many positions of cache."""
    own = needed(file.size, POSITION * positions)
    found = DeviceSpec("board", "avx2", 4, GIB // 2 + own, bandwidth, measured)
    assert found.usable_memory == own
    return found


@pytest.mark.parametrize(("positions", "longest"), [(0, 0), (1, 1), (63, 63), (64, 64), (127, 64), (128, 128), (4000, 128)])
def test_the_longest_context_is_in_whole_pages_if_one_fits_and_within_the_model(
    file: ModelFile, positions: int, longest: int
) -> None:
    found = fitted(file, with_room(file, positions), None, None)
    assert found.longest_context == longest and found.position_bytes == POSITION
    assert found.context == max(1, longest) and found.fits == (positions > 0)


def test_memory_counts_file_cache_and_process(file: ModelFile) -> None:
    board = with_room(file, 100)
    assert fitted(file, board, 100, None).needs == file.size + 100 * POSITION + PROCESS == board.usable_memory
    assert fitted(file, board, 100, None).fits and not fitted(file, board, 101, None).fits
    with pytest.raises(InputError, match="takes 1 to 128 positions"):
        fitted(file, board, 129, None)


@pytest.mark.parametrize(
    ("measured", "shares", "usual"), [(0.0, (0.7 * 8e6, 0.9 * 8e6), 0.75 * 8e6), (6e6, (0.75 * 6e6, 0.96 * 6e6), 0.95 * 6e6)]
)
def test_the_range_of_speed_follows_from_the_bandwidth(
    file: ModelFile, measured: float, shares: tuple[float, float], usual: float
) -> None:
    found = fitted(file, with_room(file, 128, measured=measured), 128, None)
    sizes = file.metadata.bytes_per_token()
    weights = sizes["weights"] + sizes["head"]
    assert found.bytes_per_token == weights and found.measured == bool(measured)
    assert found.slowest == pytest.approx(shares[0] / (weights + 128 * POSITION))
    assert found.fastest == pytest.approx(shares[1] / (weights + 32 * POSITION))
    assert found.expected == pytest.approx(usual / (weights + 64 * POSITION))


def test_less_than_a_page_of_positions_is_a_context(file: ModelFile) -> None:
    found, board = fitted(file, with_room(file, 40), None, None), with_room(file, 40)
    assert found.longest_context == 40 == found.context and found.fits
    assert "the file alone does not fit" not in text(found, file, board)
    assert fitted(file, with_room(file, 100), None, None).longest_context == 64


def test_a_speed_holds_up_to_a_context(file: ModelFile) -> None:
    board = with_room(file, 128)
    sizes = file.metadata.bytes_per_token()
    weights = sizes["weights"] + sizes["head"]
    for positions in (1, 50, 128):
        wanted = 0.75 * 8e6 / (weights + positions * POSITION) * (1 - 1e-9)
        found = fitted(file, board, 128, wanted)
        assert found.speed_context == positions and found.fast_enough == (positions >= 64)
    assert fitted(file, board, 128, 1e9).speed_context == 0


def test_the_cache_may_be_smaller(file: ModelFile) -> None:
    assert fitted(file, with_room(file, 128), 128, None, "int8").position_bytes == 2 * 2 * (16 + 4)


def test_the_words_are_those_of_the_numbers(file: ModelFile) -> None:
    found, board = fitted(file, with_room(file, 64), None, 1.0), with_room(file, 64)
    said = text(found, file, board)
    assert (
        "0.30 GB with a context of 64 fits in 0.3 GB" in said
        and "longest context that fits: 64, 128 bytes per position" in said
    )
    assert "by its data sheet" in said and "1 tokens per second: expected up to a context of 128" in said
    assert "the file alone does not fit" in text(fitted(file, with_room(file, 0), None, None), file, board)
    gpu = DEVICES["h200"]
    assert "runs on CPUs only" in text(fitted(file, gpu, None, 1.0), file, gpu)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_the_command(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run("fit", path, "--for", "raspberry-pi-5", "--json")
    assert shown.exit_code == 0 and Fit(**json.loads(shown.stdout)).fits
    assert run("fit", path, "--for", "raspberry-pi-5", "--speed", "1e9").exit_code == 2
    assert run("fit", path, "--for", "raspberry-pi-5", "--speed", "999999999").exit_code == 1
    monkeypatch.setitem(DEVICES, "raspberry-pi-5", DeviceSpec("raspberry-pi-5", "neon-dotprod", 4, GIB // 2, 1e9))
    small = run("fit", path, "--for", "raspberry-pi-5")
    assert small.exit_code == 1 and "does not fit in 0.0 GB" in small.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--for", "rasberrypi5"), "did you mean raspberry-pi-5"),
        (("--for", "zzz"), "supported: this-machine, raspberry-pi-4"),
        ((), "--for"),
        (("--for", "raspberry-pi-5", "-c", "129"), "pass --context 128 or less"),
    ],
)
def test_what_cannot_be_answered_is_one_line(path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("fit", path, *arguments)
    assert result.exit_code in (1, 2) and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_this_machine_is_measured(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = DeviceSpec("this-machine", "x86_64", 2, 8 * GIB, 1e10, 1e10)
    monkeypatch.setattr(decode_speed, "this_machine", lambda: here)
    monkeypatch.setattr(decode_speed, "seconds_per_token", lambda path, **_: (0.01, True))
    shown = run("fit", path, "--for", "this-machine", "-c", "1", "--json")
    found = Fit(**json.loads(shown.stdout))
    assert found.expected == pytest.approx(100, rel=1e-3)
    assert (found.slowest, found.fastest) == (pytest.approx(90, rel=1e-3), pytest.approx(110, rel=1e-3))
    assert "measured, decode of this file too" in run("fit", path, "--for", "this-machine").stdout
    # A file that does not fit in memory is not loaded: the bandwidth alone is known.
    monkeypatch.setattr("edgeq.system.machine.available_bytes", lambda: 0)
    assert "at 10.0 GB/s (measured)" in run("fit", path, "--for", "this-machine").stdout
