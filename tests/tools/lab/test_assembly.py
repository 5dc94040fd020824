"""The tool that prints the machine code of a kernel."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from edgeq.system import machine
from edgeq.tools.lab import assembly


def printed(*words: str) -> str:
    result = CliRunner().invoke(assembly.main, words)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_kernel_is_listed_with_its_literals() -> None:
    lines = printed().splitlines()
    assert "integer_matvec ISA BITS MODE16 GROUP_KIND EXTENT" in lines and "select" in lines and "norm MAX_TILE" in lines
    assert len(lines) == len(assembly.factories()) > 25


def test_it_prints_instructions() -> None:
    text = printed("select")
    assert "select" in text and text.count("\n") > 50
    if machine.cpu().features >= {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}:
        assert "vpdpbusd" in printed("integer_matvec", "avx512-vnni", "4", "0", "0", "0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing",), "kernel 'nothing' is not known; there are activate, add_squares,"),
        (("norm",), "norm takes MAX_TILE, not none"),
        (("norm", "twelve"), "literals are numbers or instruction sets"),
    ],
)
def test_what_it_does_not_know_is_one_line(words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(assembly.main, words)
    assert result.exit_code == 1 and result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1
