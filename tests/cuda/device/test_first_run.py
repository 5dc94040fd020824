"""The protocol of a first run: on an imitated GPU, whole and with failures, and how steps are ended and begun again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from edgeq.errors import FormatError, InputError
from edgeq.format import kernel_pack
from edgeq.targets.cuda.supply import build
from edgeq.targets.cuda.supply.nvrtc import VIRTUAL, Compiled
from edgeq.targets.cuda.supply.pack import Generated, Variant
from edgeq.targets.cuda.supply.pack_file import Pack, Packed
from tests.cuda import asked, imitated, kernels
from tests.cuda.first_run import bundle, carried
from tests.cuda.first_run.steps import SANITIZERS, Step, run, steps

pytestmark = [pytest.mark.cuda]

ROOT = Path(__file__).parents[3]
BARE = "import sys\nsys.modules['tvm'] = sys.modules['nvidia'] = None\n"
"""As on a machine with neither TVM nor NVRTC: Python imports it before anything else."""
TOOLS = {"compute-sanitizer": "--error-exitcode", "ncu": "--metrics"}
"""Programs that run another one, and the last of their options."""
# A shell's text that runs that program, and one for a tool that is refused what it needs.
RUNS = 'while [ "$1" != {} ]; do shift || exit 0; done; shift 2; exec "$@"'
FAILS = "echo 'no counters for this user'; exit 9"


def step(name: str, code: str, minutes: float = 1, program: str = "") -> Step:
    return Step(name, f"what {name} does", minutes, [sys.executable, "-c", code], program)


def test_every_step_ends_and_a_failure_is_no_other_steps(tmp_path: Path) -> None:
    every = [
        step("good", "print('as it should')"),
        step("bad", "print('half a result', flush=True); raise SystemExit(3)"),
        step("absent", "", program="a-program-that-nobody-has"),
        Step("nothing", "a command that is not there", 1, [str(tmp_path / "nowhere")]),
        step("last", "import os; open(os.environ['FIRST_RUN_OUT'] + '/found', 'w').write('x')"),
    ]
    lines = list[str]()
    endings = run(every, tmp_path / "out", told=lines.append)
    assert [each.status for each in endings] == ["passed", "failed", "left out", "failed", "passed"]
    assert endings[1].exit_code == 3 and endings[1].last == "half a result" and (tmp_path / "out" / "found").exists()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())[1]["status"] == "failed"
    assert (tmp_path / "out" / "bad.log").read_text() == "half a result\n" and len(lines) == 10


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; print('began', subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    endings = run([step("hangs", code, minutes=0.05), step("after", "")], tmp_path)
    assert [each.status for each in endings] == ["out of time", "passed"]
    started = int(endings[0].last.split()[1])
    assert endings[0].last.startswith("began")
    # Killed; what it was may still be waited for by nobody.
    status = Path(f"/proc/{started}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_a_run_begins_at_any_step_and_keeps_what_was_found_before(tmp_path: Path) -> None:
    every = [step("one", "raise SystemExit(1)"), step("two", ""), step("three", "")]
    run(every, tmp_path)
    run([step("one", ""), *every[1:]], tmp_path, lambda each: each.name != "one")
    noted = json.loads((tmp_path / "summary.json").read_text())
    assert [(each["name"], each["status"]) for each in noted] == [("one", "failed"), ("two", "passed"), ("three", "passed")]
    run([step("one", ""), *every[1:]], tmp_path, lambda each: each.name == "one")
    assert {each["status"] for each in json.loads((tmp_path / "summary.json").read_text())} == {"passed"}


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.cuda.first_run", "--out", tmp_path / "out", "--from", "lunch"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 2 and "no step 'lunch'; there are facts, tests, memcheck" in ran.stderr
    assert not (tmp_path / "out").exists()


def test_the_protocol_keeps_to_its_limits(tmp_path: Path) -> None:
    """Ten minutes are what a machine that is lent gives a command."""
    protocol = steps(tmp_path, ("a", "b", "c"), ("tests/cuda",), tmp_path / "pack")
    assert [each.name for each in protocol] == ["facts", "tests", *SANITIZERS, "products", "decode", "tuning", "ncu"]
    assert all(each.minutes < 10 for each in protocol)


def small_pack() -> Pack:
    variant = Variant("select")
    generated = Generated(variant, "select_kernel", "text", (), (1, 1, 1), (32, 1, 1))
    return Pack(
        build.versions(), build.source_digest(), {variant: Packed(generated, {VIRTUAL: Compiled(VIRTUAL, b".version")})}
    )


def test_kernels_are_carried_small_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pack = tmp_path / "pack.xz", small_pack()
    path.write_bytes(carried.write(pack))
    assert carried.read(path) == pack
    with pytest.raises(InputError, match="is not there; make it with: make kernels"):
        carried.read(tmp_path / "nowhere")
    for damaged in (path.read_bytes()[:-9], b"a letter"):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(InputError, match="cannot be unpacked"):
            carried.read(tmp_path / "damaged")
    # A small file that unpacks to anything is not unpacked to the end.
    monkeypatch.setattr(kernel_pack, "MAX_BYTES", 64)
    with pytest.raises((InputError, FormatError), match="at most 64"):
        carried.read(path)


@pytest.mark.exhaustive
def test_the_archive_is_a_folder_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """edgeq is imported from it, with what was carried beside it, and nothing is installed."""
    monkeypatch.setattr(bundle, "CARRIED", tuple(name for name in bundle.CARRIED if not name.startswith("models/")))
    (tmp_path / "pack").write_bytes(carried.write(small_pack()))
    assert bundle.write(tmp_path / "bundle.tar.xz", tmp_path / "pack") < bundle.MAX_BYTES - 16 * 10**6
    with tarfile.open(tmp_path / "bundle.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / bundle.FOLDER
    code = "import edgeq.runtime, tests.cuda.first_run.steps as s; print(edgeq.__file__, s.ROOT)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(folder / "edgeq" / "__init__.py"), str(folder)]
    code = "from tests.cuda.first_run import carried; print(len(carried.read(carried.PACK).kernels))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "1"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("needs_emulator", "needs_generator")
def test_the_whole_protocol_on_an_imitated_gpu_and_a_failure_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compilers, from the kernels that were carried; then on one whose first launch fails in every process, with
    tools that fail before they run anything, as one does that may not count."""
    if reason := imitated.refusal():
        pytest.skip(reason)
    variants = {*asked.listed("test_largest"), *asked.listed("test_lab_products"), *kernels.of_shapes(["tiny"])}
    made, pack = imitated.kernels(variants, tmp_path / "made"), tmp_path / "pack.xz"
    pack.write_bytes(imitated.pack(variants))
    programs, path = imitated.nvidia_smi(tmp_path / "bin"), tmp_path / "site"

    def install_tools(text: str) -> None:
        for name, last in TOOLS.items():
            (programs / name).write_text(f"#!/bin/sh\n{text.format(last)}\n")
            (programs / name).chmod(0o755)

    install_tools(RUNS)
    path.mkdir()
    (path / "sitecustomize.py").write_text(BARE)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(path))
    monkeypatch.chdir(ROOT)
    # One that sanitizers run, and one that they do not.
    names = "test_drawn_tokens_are_those_of_the_sampler[0]", "test_rows_of_several_slices[0]"
    tests = ",".join(f"tests/cuda/operations/test_largest.py::{name}" for name in names)
    command = ("-m", "tests.cuda.first_run", "--shapes", "tiny", "--tests", tests, "--pack", pack)
    protocol = [each.name for each in steps(tmp_path, ("tiny",), (), pack)]

    def statuses(out: Path) -> dict[str, str]:
        return {each["name"]: each["status"] for each in json.loads((out / "summary.json").read_text())}

    whole = tmp_path / "whole"
    # A GPU of which the pack has PTX alone.
    ran = imitated.run(*command, "--out", whole, cache=tmp_path / "cache", kernels=made, sm=120)
    assert statuses(whole) == dict.fromkeys(protocol, "passed"), (
        ran.stderr,
        [each.read_text() for each in whole.glob("*.log")],
    )
    assert ran.returncode == 0 and "to send them without the cache: tar" in ran.stdout

    def found(name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (whole / f"{name}.jsonl").read_text().splitlines()]

    facts = {key for each in found("facts") for key in each}
    assert {"replay_us", "launch_us", "read_bytes_per_s", "nvidia-smi -q", "gpus", "device_driver"} <= facts
    assert {(each["shape"], each["mode"]) for each in found("decode")} == {("tiny", "a16"), ("tiny", "a8")}
    assert "best" in found("tuning")[-1] and len(found("tuning")) >= 4
    assert json.loads((whole / "products.log").read_text()[(whole / "products.log").read_text().index("{") :])["lines"]
    assert " 2 passed" in (whole / "tests.log").read_text()
    assert all(" 1 passed, 1 deselected" in (whole / f"{each}.log").read_text() for each in SANITIZERS)
    install_tools(FAILS)
    lost = tmp_path / "lost"
    ran = imitated.run(*command, "--out", lost, cache=tmp_path / "cache", kernels=made, sm=120, fail="cuLaunchKernel:719:1")
    assert ran.returncode == 1 and statuses(lost) == dict.fromkeys(protocol, "failed"), statuses(lost)
    assert "unspecified launch failure" in ran.stderr
    # The rest, once the GPU works again.
    ran = imitated.run(*command, "--out", lost, "--only", "facts,tuning", cache=tmp_path / "cache", kernels=made, sm=120)
    assert ran.returncode == 0
    assert {name for name, status in statuses(lost).items() if status == "passed"} == {"facts", "tuning"}
