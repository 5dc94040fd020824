"""`edgeq convert` as a user follows it: lines without a terminal, interruption and what to do then."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from edgeq.system.devices import DEVICES, GIB, PROCESS, DeviceSpec

Run = Callable[..., Result]
COMMAND = [sys.executable, "-c", "from edgeq.tools.cli.main import main; main()", "convert"]
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


@pytest.mark.exhaustive
def test_an_interrupt_says_how_to_continue_and_the_next_run_where(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.edgeq"
    arguments = [str(tiny_llama), "-o", str(out), "--method", "gptq", "--calibration-rows", "4", "--calibration-length", "64"]
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


def test_a_dry_run_says_what_would_be_made_and_makes_nothing(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.edgeq"
    words = edgeq("convert", tiny_llama, "-o", out, "--dry-run", "--for", "raspberry-pi-5")
    assert words.exit_code == 0 and not words.stderr and not list(tmp_path.iterdir())
    size, device, quick = words.stdout.splitlines()
    assert re.search(
        r"at most [\d.]+ MB, 4.58 bits per weight, [\d.]+ MB read per token; converting needs up to [\d.]+ GB", size
    )
    assert "fits in" in device and "tokens per second" in device and quick.startswith("without --method ")
    facts = json.loads(edgeq("convert", tiny_llama, "--dry-run", "--json", "--for", "raspberry-pi-5").stdout)
    made = json.loads(edgeq("convert", tiny_llama, "-o", out, "--json", "--for", "raspberry-pi-5").stdout)
    assert facts["device"]["fits"] and facts["device"]["tokens_per_second"] > 0 and facts["memory_bytes"] > 0
    assert out.stat().st_size == made["file_bytes"] <= facts["file_bytes"] < 1.02 * out.stat().st_size
    stored = json.loads(edgeq("inspect", out, "--json").stdout)
    assert stored["bytes_per_token"] == facts["bytes_per_token"] and stored["identity"] == made["identity"]
    again = json.loads(edgeq("convert", tiny_llama, "-o", out, "--json").stdout)
    assert again["already_there"] and not made["already_there"] and again["identity"] == made["identity"]


def test_layers_with_a_window_take_memory_for_their_window(edgeq: Run, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = checkpoint("mistral", max_position_embeddings=8192), tmp_path / "a.edgeq"
    planned = json.loads(edgeq("convert", folder, "-o", out, "--dry-run", "--json", "--for", "raspberry-pi-5").stdout)
    assert edgeq("convert", folder, "-o", out).exit_code == 0
    fit = json.loads(edgeq("fit", out, "--for", "raspberry-pi-5", "--json").stdout)
    cache = planned["device"]["needs"] - planned["file_bytes"] - PROCESS
    assert planned["device"]["context"] == 4096 == fit["context"] and cache == fit["needs"] - out.stat().st_size - PROCESS
    # Rows of a run, and a few pages before and after them.
    assert 1024 * fit["position_bytes"] < cache < 1536 * fit["position_bytes"]


def test_a_device_without_a_runtime_is_promised_no_speed(edgeq: Run, tiny_llama: Path) -> None:
    for name, device in DEVICES.items():
        found = edgeq("convert", tiny_llama, "--dry-run", "--for", name).stdout
        assert ("tokens per second" in found) is not device.isa.startswith("sm_"), found
        assert ("runs on CPUs only" in found) is device.isa.startswith("sm_"), found


def test_what_does_not_fit_the_device_is_not_begun(
    edgeq: Run, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An eighth, or half a GiB, is the system's: 5 MB are left beside what a process takes.
    tight = DeviceSpec("raspberry-pi-4", "neon", 4, GIB // 2 + PROCESS + 5_000_000, 1e9)
    monkeypatch.setitem(DEVICES, "raspberry-pi-4", tight)
    found = edgeq("convert", tiny_llama, "-o", tmp_path / "a.edgeq", "--for", "raspberry-pi-4")
    assert found.exit_code == 1 and found.stderr.count("\n") == 1 and "does not fit in" in found.stderr
    assert "--for" in found.stderr and not list(tmp_path.iterdir())
    assert "does not fit" in edgeq("convert", tiny_llama, "--dry-run", "--for", "raspberry-pi-4").stdout
    monkeypatch.setitem(DEVICES, "raspberry-pi-4", DeviceSpec("raspberry-pi-4", "neon", 4, GIB // 2 + PROCESS + 7_000_000, 1e9))
    assert edgeq("convert", tiny_llama, "-o", tmp_path / "a.edgeq", "--for", "raspberry-pi-4").exit_code == 0


@pytest.mark.exhaustive
def test_the_built_in_text_can_be_asked_for_where_no_method_needs_it(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    small = ("--calibration-rows", 4, "--calibration-length", 128)
    found = edgeq("convert", tiny_llama, "-o", tmp_path / "a.edgeq", "--calibration", "built-in", *small)
    assert found.exit_code == 0, found.stderr
    provenance = json.loads(edgeq("inspect", tmp_path / "a.edgeq", "--json").stdout)["provenance"]
    assert provenance["calibration"]["tokens"] == 512 and set(provenance["measured"]["head_kl"]) == {"4", "6", "8"}
    # Without it rounding stays quick: nothing is read.
    plain = edgeq("convert", tiny_llama, "-o", tmp_path / "b.edgeq")
    facts = json.loads(edgeq("inspect", tmp_path / "b.edgeq", "--json").stdout)
    assert plain.exit_code == 0 and facts["provenance"]["calibration"] is None
