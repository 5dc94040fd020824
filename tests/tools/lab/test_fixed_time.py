"""The line through tokens of several shapes, and what is measured of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgeq.errors import InputError
from edgeq.tools.lab import fixed_time
from edgeq.tools.lab.fixed_time import CODEC, Point, line, main, measured, text
from edgeq.tools.lab.gpu_roofline import config_of
from edgeq.tools.random_file import bytes_per_token, with_layers, write_random


def point(size: float, seconds: float, **others: Any) -> Point:
    about = {"target": "cuda", "device": "Imagined GPU", "mode": "a16"}
    return Point(
        **{"shape": f"{size:g}", "bytes": size, "seconds": seconds, "launches": 83, "host_s": 1e-4, "facts": about, **others}
    )


def test_the_intercept_is_the_time_of_a_token_that_reads_nothing() -> None:
    found = line([point(1e9, 0.0105), point(2e9, 0.0205), point(4e9, 0.0405)])
    assert found.fixed_ms == pytest.approx(0.5) and found.bytes_per_s == pytest.approx(1e11)
    assert found.largest_error < 1e-9
    assert line([point(1e9, 0.0105), point(2e9, 0.0205), point(4e9, 0.05)]).largest_error > 0.05
    assert line([point(1e9, 0.02), point(2e9, 0.01)]).bytes_per_s is None
    with pytest.raises(InputError, match="two shapes"):
        line([point(1e9, 0.01), point(1e9, 0.02)])
    shown = text([point(1e9, 0.0105), point(2e9, 0.0205, launches=None, host_s=None)], found)
    assert "Imagined GPU" in shown and "fixed_ms 0.500, 100.0 GB/s" in shown and "| 83 " in shown and "0.100" in shown


def test_a_processor_counts_no_launches_and_waits_for_nobody(tmp_path: Path) -> None:
    config, seen = with_layers(config_of("tiny"), 1), list[float]()
    write_random(tmp_path / "one.edgeq", config, CODEC)
    found = measured(tmp_path / "one.edgeq", "one", 3, 2, seen.append, target="reference", mode="a16")
    assert (found.launches, found.host_s, seen) == (None, None, [0, 0.5]) and found.seconds > 0
    assert found.bytes > bytes_per_token(config, CODEC)


def test_the_command_wants_two_shapes_and_measures_each(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(main, ["tiny", "tiny"])
    assert result.exit_code and "two shapes" in result.output
    asked = list[tuple[str, dict[str, Any]]]()

    def stand_in(path: Path, shape: str, tokens: int, repetitions: int, report: Any, **options: Any) -> Point:
        assert path.exists()
        asked.append((shape, options))
        return point(1e8 * len(asked), 0.001 + 0.001 * len(asked))

    monkeypatch.setattr(fixed_time, "measured", stand_in)
    monkeypatch.setattr(fixed_time, "write_random", lambda path, *_: path.touch())
    result = CliRunner().invoke(main, ["tiny", "smollm-135m", "--target", "cuda", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["fixed_ms"] == pytest.approx(1.0)
    options = {"target": "cuda", "mode": "a16"}
    assert asked == [("tiny", options), ("smollm-135m", options)]
