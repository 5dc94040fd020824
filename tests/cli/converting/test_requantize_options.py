"""Options of test-time quantization, as a user meets them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def with_master(tmp_path_factory: pytest.TempPathFactory, edgeq: Run, tiny_llama: Path) -> Path:
    path = tmp_path_factory.mktemp("master") / "tiny.edgeq"
    options = ("--method", "ttq", "--bits", "3", "--rank", "0", "--head", "8")
    assert edgeq("convert", tiny_llama, "-o", path, *options).exit_code == 0
    return path


def ran(edgeq: Run, path: Path, *options: object) -> dict[str, float]:
    result = edgeq("run", path, "-p", "def main(argv): return [f(x) for x in argv]", "-n", "3", "-c", "64", "--json", *options)
    assert result.exit_code == 0, result.output
    measurement: dict[str, float] = json.loads(result.stdout)["generation"]
    return measurement


def test_a_file_with_masters_is_requantized_by_default(edgeq: Run, with_master: Path) -> None:
    m = ran(edgeq, with_master)
    assert m["requantized_tokens"] == m["prompt_tokens"] and m["copy_bytes"] > 0 and m["requantize_s"] > 0


@pytest.mark.parametrize("options", [("--requantize", "never"), ("--requantize-min-tokens", "60")])
def test_it_can_be_left_out(edgeq: Run, with_master: Path, options: tuple[str, str]) -> None:
    assert ran(edgeq, with_master, *options)["requantized_tokens"] == 0


def test_the_knobs_reach_the_model(edgeq: Run, with_master: Path) -> None:
    knobs = ("--requantize", "drift", "--requantize-alpha", "1", "--requantize-damping", "0", "--requantize-per-token")
    assert ran(edgeq, with_master, *knobs)["requantized_tokens"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--requantize-alpha", "-1"), "--requantize-alpha is -1"),
        (("--requantize-damping", "nan"), "--requantize-damping is nan"),
        (("--requantize-min-tokens", "0"), "--requantize-min-tokens is 0"),
    ],
)
def test_wrong_values_are_one_line(edgeq: Run, with_master: Path, options: tuple[str, str], message: str) -> None:
    result = edgeq("run", with_master, "-p", "a", *options)
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1 and re.search(message, result.stderr)


def test_an_unknown_time_is_one_line(edgeq: Run, with_master: Path) -> None:
    result = edgeq("run", with_master, "-p", "a", "--requantize", "sometimes")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert re.search("--requantize.*'sometimes'.*prompt, drift, never", result.stderr)


def test_a_file_without_masters_says_so(edgeq: Run, demo: Path) -> None:
    result = edgeq("run", demo, "-p", "a", "--requantize", "prompt")
    assert (
        result.exit_code == 1
        and "no layer has a master" in result.stderr
        and "--method ttq --master i8" in result.stderr
        and result.stdout == ""
    )
