"""Numbers that are measured once per machine."""

import json

from edgeq import machine, measurements


def test_measurements_within_measurements_are_kept_and_on_measure_is_called_for_those_alone_that_are_made(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    begun = []

    def outer() -> float:
        return measurements.measured("inner", 1, lambda: 2.0, on_measure=lambda: begun.append("inner")) + 1

    for _ in range(2):
        assert measurements.measured("outer", 1, outer, on_measure=lambda: begun.append("outer")) == 3
    assert begun == ["outer", "inner"]
    assert list(json.loads((tmp_path / "edgeq" / "machine.json").read_text()).values()) == [2, 3]


def test_a_user_without_a_home_keeps_nothing(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(machine.Path, "home", homeless)
    assert [measurements.measured("x", 1, lambda: 2.0) for _ in range(2)] == [2, 2]
    assert measurements.known("x", 1) is None and not machine.cache_folder().exists()


def test_a_damaged_measurement_is_measured_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "edgeq").mkdir()
    for text in ("{", "[]", '{"read_bandwidth": [3]}', '{"read_bandwidth": {"x": "y"}}', "\xff"):
        (tmp_path / "edgeq" / "machine.json").write_text(text)
        assert measurements.known("read_bandwidth", 1) is None
