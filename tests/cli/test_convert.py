"""`edgeq convert` as a user follows it: lines without a terminal, interruption and what to do then."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

Run = Callable[..., Result]
COMMAND = [sys.executable, "-c", "from edgeq.tools.cli import main; main()", "convert"]
LAYER = re.compile(
    r"layer (\d) of 6: \d\.\d\d bits per weight, error of (output|weights) [\d.e+]+ %, (\d:\d\d:\d\d|-:--:--) left"
)


def lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("layer ")]


def test_without_a_terminal_every_layer_has_its_line(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    result = edgeq("convert", tiny_llama, "-o", tmp_path / "a.edgeq")
    assert result.exit_code == 0 and not result.stdout
    found = [LAYER.fullmatch(line) for line in lines(result.stderr)]
    assert [m and m[1] for m in found] == list("123456") and all(m and m[2] == "weights" for m in found)
    assert found[-1] and found[-1][3].startswith("0:00:0")


def test_the_same_command_again_finds_the_file(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.edgeq"
    assert edgeq("convert", tiny_llama, "-o", out).exit_code == 0
    again = edgeq("convert", tiny_llama, "-o", out)
    assert again.exit_code == 0 and not again.stdout
    assert again.stderr.startswith(f"{out}: already there, ") and again.stderr.count("\n") == 1
    other = edgeq("convert", tiny_llama, "-o", out, "--bits", 3)
    assert other.exit_code == 1 and "--force" in other.stderr and other.stderr.count("\n") == 1
    assert edgeq("convert", tiny_llama, "-o", out, "--bits", 3, "--force").exit_code == 0


def test_an_interrupt_says_how_to_continue_and_the_next_run_where(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.edgeq"
    arguments = [str(tiny_llama), "-o", str(out), "--method", "gptq", "--calibration-rows", "4"]
    child = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    before = ""
    while "layer 2 of 6" not in before:
        line = child.stderr.readline()
        assert line, before
        before += line
    child.send_signal(signal.SIGINT)
    rest = child.stderr.read()
    child.stderr.close()
    assert child.wait() == 130 and "interrupted; run the same command again to continue" in rest and not out.exists()
    done = len(lines(before + rest))
    again = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    assert again.returncode == 0 and f"continuing at layer {done + 1} of 6\n" in again.stderr
    assert [line[6] for line in lines(again.stderr)] == [str(n) for n in range(done + 1, 7)]
