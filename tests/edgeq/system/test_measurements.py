"""Numbers that are measured once per machine."""

import json
from pathlib import Path

import pytest

from edgeq.system import machine, measurements


def test_measurements_within_measurements_are_kept_and_on_measure_is_called_for_those_alone_that_are_made(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    begun = []

    def outer() -> tuple[float, bool]:
        return measurements.measured("inner", 1, lambda: (2.0, True), on_measure=lambda: begun.append("inner")) + 1, True

    for _ in range(2):
        assert measurements.measured("outer", 1, outer, on_measure=lambda: begun.append("outer")) == 3
    assert begun == ["outer", "inner"]
    assert list(json.loads((tmp_path / "edgeq" / "machine.json").read_text()).values()) == [2, 3]


def test_a_number_taken_on_a_busy_machine_is_not_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answers = iter([(2.0, False), (3.0, True), (9.0, False), (4.0, True)])
    seen = [measurements.measured("x", 1, lambda: next(answers)) for _ in range(3)]
    assert seen == [2, 3, 3] and measurements.known("x", 1) == 3
    seen = [measurements.measured("x", 1, lambda: next(answers), refresh=True) for _ in range(2)]
    assert seen == [9, 4] and measurements.known("x", 1) == 4


def test_of_rates_the_largest_seen_is_kept_and_the_last_one_given(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for found, kept in ((5.0, 5), (3.0, 5), (7.0, 7)):
        assert measurements.measured("rate", 1, lambda: (found, True), refresh=True, largest=True) == found  # noqa: B023
        assert measurements.known("rate", 1) == kept
    assert measurements.measured("rate", 1, lambda: (1.0, True), largest=True) == 7


def test_a_user_without_a_home_keeps_nothing(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(machine.Path, "home", homeless)
    assert [measurements.measured("x", 1, lambda: (2.0, True)) for _ in range(2)] == [2, 2]
    assert measurements.known("x", 1) is None and not machine.cache_folder().exists()


def test_a_damaged_measurement_is_measured_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "edgeq").mkdir()
    for text in ("{", "[]", '{"read_bandwidth": [3]}', '{"read_bandwidth": {"x": "y"}}', "\xff"):
        (tmp_path / "edgeq" / "machine.json").write_text(text)
        assert measurements.known("read_bandwidth", 1) is None


def test_what_is_no_number_of_a_measurement_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "cache_folder", lambda: tmp_path)
    numbers = ["NaN", "Infinity", "1" + "0" * 400, "-1", "0", '"1"', "true"]
    kept = ", ".join(f'"{i}": {number}' for i, number in enumerate([*numbers, "2.5"]))
    (tmp_path / "machine.json").write_text(f"{{{kept}}}")
    assert measurements._kept() == {str(len(numbers)): 2.5}
