"""What `make test-gpu` runs, on an imitated GPU: from a pack that has the kernels of the lists, without TVM and NVRTC."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeq.targets.cuda.supply import nvrtc
from edgeq.targets.cuda.supply.pack import Variant
from tests.cuda import asked, conftest, imitated, kernels, sanitized

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

ROOM = Path(__file__).parents[1] / "operations"
SINGLE, PROGRAM = "test_largest.py::test_rows_of_several_slices", "test_cuda_layers.py::test_a_cap"
OF_PROGRAM = [Variant("float_product", ("f32",)), Variant("read_memory"), Variant("select"), Variant("soft_cap")]
"""Its kernels, beside those of the largest numbers."""


@pytest.fixture(autouse=True)
def needed() -> None:
    if reason := nvrtc.refusal() or imitated.refusal():
        pytest.skip(reason)


def run(tests: Sequence[str], pack: Path, made: Path, cache: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    paths = [ROOM / name for name in tests]
    command = "-m", "pytest", "-q", "--gpu", "--pack", pack, *paths
    return imitated.run(*command, cache=cache, kernels=made, bare=True, **settings)


def test_tests_run_from_the_pack_of_their_kernels_and_from_no_other(tmp_path: Path) -> None:
    variants = [*asked.listed("test_largest") - {*OF_PROGRAM}, *OF_PROGRAM]
    made = imitated.kernels(variants, tmp_path / "made")
    kernels.main(["sm_87"], variants, tmp_path / "whole")
    contexts = tmp_path / "contexts"
    ran = run([SINGLE, PROGRAM], tmp_path / "whole", made, tmp_path / "cache", contexts=contexts)
    assert ran.returncode == 0 and "passed" in ran.stdout and "skipped" not in ran.stdout, ran.stdout
    # A context takes tenths of a second on a GPU, and there are thousands of launches.
    assert len(contexts.read_text().splitlines()) == 1
    kernels.main(["sm_87"], variants[:-1], tmp_path / "less")
    ran = run([PROGRAM], tmp_path / "less", made, tmp_path / "cache")
    assert ran.returncode == 1 and f"has no {variants[-1].symbol}; make it again with: make kernels" in ran.stdout, ran.stdout


def test_a_name_of_no_test_and_a_kind_of_kernel_are_missed() -> None:
    """By a run of all files that have chosen tests; what it launches is noted while one of those runs."""
    files = {name.partition(".py")[0] for name in sanitized.TESTS}
    first, *others = sorted(sanitized.TESTS)
    seen, process = sanitized.Seen(tests=set(others), files=files), sanitized.Seen(running=True)
    process.launched(Variant("select"))
    process.running = False
    process.launched(Variant("scale"))
    seen.add(process.told())
    missing = seen.missing([Variant("select"), Variant("rope"), Variant("scale")], ())
    assert missing == f"sanitized.py names no test with: {first}; no test of sanitized.py launches: rope, scale"
    assert not seen.missing([Variant("rope")], ["test_linear"])
    seen.add([[first], ["rope"], []])
    assert not seen.missing([Variant("select"), Variant("rope")], ()) and len(sanitized.TESTS) <= 44


def test_files_that_come_first_are_there() -> None:
    assert {path.stem for path in conftest.HERE.glob("*/test_*.py")} >= set(conftest.LONGEST)


def test_what_depends_on_the_architecture_runs_on_every_imitated_one() -> None:
    found = [path.name for path in imitated.of_capability()]
    assert "test_program.py" in found and "test_products.py" not in found
    assert {path.parent.name for path in imitated.of_capability()} <= imitated.ROOMS
    rooms = {path.parent for path in imitated.HERE.parent.glob("*/test_*.py") if not conftest.without_gpu(path)}
    assert {path.name for path in rooms} == imitated.ROOMS


def test_workers_have_no_compilers_either(tmp_path: Path) -> None:
    test = tmp_path / "test_worker.py"
    test.write_text("import pytest\ndef test(): pytest.raises(ImportError, __import__, 'tvm')\n")
    ran = imitated.run("-m", "pytest", "-q", "-n", "1", test, cache=tmp_path / "cache", bare=True)
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout


def test_without_a_gpu_or_a_pack_for_it_one_line_says_so(tmp_path: Path) -> None:
    kernels.main(["sm_87"], [Variant("select")], tmp_path / "pack")
    for pack, settings, words in (
        ("pack", {"count": 0}, "no GPU to test on: "),
        ("nowhere", {}, "nowhere is not there; make it with: make kernels"),
        # Its driver does not read the PTX.
        (
            "pack",
            {"sm": 90, "driver": 12000},
            "kernels for compute_80, sm_87 only; make it again with: make kernels GPU=sm_90",
        ),
    ):
        ran = run([SINGLE], tmp_path / pack, tmp_path, tmp_path / "cache", **settings)
        (told,) = ran.stderr.strip().splitlines()
        assert ran.returncode == pytest.ExitCode.USAGE_ERROR and words in told and not ran.stdout.strip(), ran.stdout


def test_tests_of_a_file_are_recorded_in_one_process() -> None:
    command = [sys.executable, "-m", "pytest", ROOM / "test_largest.py", "--record-kernels", "--collect-only", "-n", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR and "add --dist loadfile" in ran.stderr, ran.stderr


@pytest.mark.parametrize("skipped", [True, False])
def test_a_list_keeps_the_kernels_of_tests_that_were_skipped(skipped: bool) -> None:
    stash, recording = pytest.Stash(), asked.Asked(recording=True)
    stash[conftest.ASKED], stash[conftest.SEEN] = recording, sanitized.Seen()
    item: Any = SimpleNamespace(config=SimpleNamespace(stash=stash), path=Path("test_x.py"))
    hook = conftest.pytest_runtest_makereport(item)
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(SimpleNamespace(when="setup", skipped=skipped))
    assert recording.partly == ({"test_x"} if skipped else set())


def test_a_kernel_that_is_not_in_the_list_is_refused_and_recording_adds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, new = Variant("select"), Variant("matvec", (4, True, False, 128))
    monkeypatch.setattr(asked, "FOLDER", tmp_path)
    for tests, variants, partly in (("all", [known, new], False), ("some", [known], True), ("some", [new], True)):
        asked.listed.cache_clear()
        recording = asked.Asked(recording=True)
        recording.tests, recording.partly = Path("room", f"{tests}.py"), {tests} if partly else set()
        recording.ask(variants)
        recording.write()
    asked.listed.cache_clear()
    try:
        assert asked.listed("all") == asked.listed("some") == {known, new} and asked.every() == [new, known]
        checking = asked.Asked(recording=False)
        checking.ask([Variant("anything")])
        checking.tests = Path("room", "some.py")
        checking.ask([known, new])
        with pytest.raises(AssertionError, match=r"has no embed_4_1: .*pytest tests/cuda/room/some.py --record-kernels"):
            checking.ask([known, Variant("embed", (4, True))])
    finally:
        asked.listed.cache_clear()
