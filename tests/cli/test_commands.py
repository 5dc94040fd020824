"""Conversion, kernels, devices and interrupts, end to end on the demo model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from edgeq.targets.cpu.isa import all_isas
from tests.cli.running import REFERENCE, TARGETS, Run, objects


def test_convert_says_size_bits_and_whether_a_device_can_hold_it(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.edgeq"
    result = edgeq("convert", tiny_llama, "-o", out, "--bits", 3, "--group-size", 32, "--sym", "--for", "raspberry-pi-5")
    assert result.exit_code == 0 and result.stdout == ""
    planned, device, quick, *layers, size = result.stderr.strip().splitlines()
    assert planned.startswith("rtn: a file of at most ") and quick.startswith("without --method ") and len(layers) == 6
    assert "bits per weight" in size and size.startswith(str(out))
    assert device.startswith("raspberry-pi-5: 0.31 GB with a context of 1024 fits in")
    facts = objects(edgeq("inspect", out, "--json"))
    assert "raspberry" not in json.dumps(facts["provenance"])
    assert {g["codec"] for g in facts["layers"] if g["part"] != "head"} == {"i3 g32"}


@pytest.mark.parametrize(
    ("grid", "codec"),
    [
        pytest.param(("--half",), "i4 g32 half", id="half"),
        pytest.param(("--half", "--scale-bits", 4), "i4 g32 half s4", id="s4", marks=pytest.mark.exhaustive),
        pytest.param(("--table",), "n4 g32", id="table", marks=pytest.mark.exhaustive),
        pytest.param(("--trellis", "--bits", 2), "t2 g32 s4", id="trellis", marks=pytest.mark.exhaustive),
    ],
)
def test_grids_without_zero_points_are_converted_inspected_and_run(
    edgeq: Run, tiny_llama: Path, tmp_path: Path, grid: tuple[str, ...], codec: str
) -> None:
    out = tmp_path / "a.edgeq"
    assert edgeq("convert", tiny_llama, "-o", out, "--bits", 4, "--group-size", 32, *grid).exit_code == 0
    facts = objects(edgeq("inspect", out, "--json"))
    assert {g["codec"] for g in facts["layers"] if g["part"] != "head"} == {codec}
    name = grid[0].strip("-")
    assert facts["provenance"]["quantizer"] == name and facts["provenance"]["options"][name] is True
    assert "symmetric" not in facts["provenance"]["options"]
    texts = [edgeq("run", out, "-p", "def ", "-n", 8, "--target", target) for target in ("cpu", "reference")]
    assert texts[0].exit_code == texts[1].exit_code == 0 and texts[0].stdout == texts[1].stdout
    both = edgeq("convert", tiny_llama, "-o", tmp_path / "b.edgeq", grid[0], "--sym")
    assert both.exit_code == 1 and "--sym/--asym" in both.stderr


def test_convert_takes_a_group_per_row_and_a_head(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.edgeq"
    assert edgeq("convert", tiny_llama, "-o", out, "--bits", 8, "--group-size", "row", "--head", 4).exit_code == 0
    layers = {g["part"]: g["codec"] for g in objects(edgeq("inspect", out, "--json"))["layers"]}
    assert layers["o"] == "i8 row zero" and layers["head"].startswith("i4")


def test_convert_without_quantizing(edgeq: Run, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.edgeq"
    assert edgeq("convert", tiny_llama, "-o", out, "--method", "none", "--dtype", "f16").exit_code == 0
    assert {g["codec"] for g in objects(edgeq("inspect", out, "--json"))["layers"]} == {"f16"}


def test_build_compiles_here_for_every_mode(edgeq: Run, demo: Path) -> None:
    result = edgeq("build", demo, *REFERENCE)
    assert result.exit_code == 0 and result.stdout == ""
    assert "mode a16: ready after" in result.stderr and "mode a8: ready after" in result.stderr
    assert "mode a16" not in edgeq("build", demo, "--mode", "a8", *REFERENCE).stderr


def test_devices_say_what_will_be_used(edgeq: Run) -> None:
    facts = objects(edgeq("devices", "--json"))
    assert facts["used"]["target"] == TARGETS[0] and facts["memory"]["total"] > 0
    assert {facts["used"]["isa"] is None, facts["used"]["reason"] is None} == {TARGETS[0] != "cpu"}
    assert "raspberry-pi-5" in {profile["name"] for profile in facts["profiles"]}
    text = edgeq("devices").stdout
    assert f"will be used: {TARGETS[0]}" in text and "jetson-orin-nano-8gb" in text
    assert re.search(r"^raspberry-pi-5 +neon-dotprod +4 +8 ", text, re.M) and " GiB available" in text
    assert sum("does not have" in line for line in text.splitlines()) == 0
    (sets,) = [line for line in text.splitlines() if line.startswith("instruction sets")]
    here, others = sets.split("; not here: ")
    for isa in facts["isas"]:
        # As people call it, once, and the name that an option takes.
        assert f"{isa['label']} (" in (others if isa["missing"] else here)
        if isa["name"] == facts["used"]["isa"]:
            assert f"with {isa['label']} ({isa['name']}): " in text
        assert sets.count(f"{isa['label']} (") == 1 and re.search(rf"[( ]{isa['name']}[ ;)]", sets)
    assert [isa["name"] for isa in facts["isas"] if isa["missing"]] == [isa["name"] for isa in facts["isas"] if isa["refused"]]


def test_instruction_sets_of_a_label_need_the_same() -> None:
    needs: dict[str, set[frozenset[str]]] = {}
    for isa in all_isas():
        needs.setdefault(isa.label, set()).add(isa.needs)
    assert {label for label, found in needs.items() if len(found) > 1} == set()


def test_an_interrupt_is_no_error_worth_a_traceback(edgeq: Run, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgeq.tools.commands.inspect.collect", interrupted)
    result = edgeq("inspect", demo)
    assert result.exit_code == 130 and result.stderr.strip() == ""


LOST = """
import sys, time
from edgeq.tools.cli.entry import repeated_interrupts

class Destroyed:
    def __del__(self):
        raise KeyboardInterrupt

class Broken:
    def __del__(self):
        raise ValueError

try:
    with repeated_interrupts():
        Destroyed()
        Broken()
        time.sleep(60)
except KeyboardInterrupt:
    print("heard")
"""


def test_an_interrupt_that_a_destructor_swallows_is_heard() -> None:
    result = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=600)
    assert (result.stdout, result.stderr) == ("heard\n", "")


def test_a_reader_that_goes_away_is_no_error_worth_a_traceback(demo: Path) -> None:
    command = [sys.executable, "-c", "import edgeq.tools.cli.main; edgeq.tools.cli.main.main()", "inspect", str(demo), "--json"]
    result = subprocess.run(["bash", "-c", f"{shlex.join(command)} | head -c 10"], capture_output=True, text=True)
    assert len(result.stdout) == 10 and "Traceback" not in result.stderr and "error" not in result.stderr
