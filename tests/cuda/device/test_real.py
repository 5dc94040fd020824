"""What `make test-gpu` runs, on an imitated GPU: from a pack that has the kernels of the lists, without TVM and NVRTC."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeq.targets.cuda.supply import nvrtc
from edgeq.targets.cuda.supply.pack import Variant
from tests.cuda import asked, conftest, emulated, imitated, kernels, sanitized

pytestmark = [pytest.mark.cuda, pytest.mark.exhaustive, pytest.mark.usefixtures("needs_emulator", "needs_generator")]

ROOM = Path(__file__).parents[1] / "operations"
TESTS = "test_largest", "test_attention_parts"
"""Single kernels, and programs."""


@pytest.fixture(autouse=True)
def needed() -> None:
    if reason := nvrtc.refusal() or imitated.refusal():
        pytest.skip(reason)


def run(tests: Sequence[str], pack: Path, made: Path, cache: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    paths = [ROOM / f"{name}.py" for name in tests]
    command = "-m", "pytest", "-q", "--gpu", "--pack", pack, *paths
    return imitated.run(*command, cache=cache, kernels=made, bare=True, **settings)


def test_tests_run_from_the_pack_of_their_kernels_and_from_no_other(tmp_path: Path) -> None:
    variants = sorted(set().union(*map(asked.listed, TESTS)), key=lambda variant: variant.symbol)
    made = imitated.kernels(variants, tmp_path / "made")
    kernels.main(["sm_87"], variants, tmp_path / "whole")
    contexts = tmp_path / "contexts"
    ran = run(TESTS, tmp_path / "whole", made, tmp_path / "cache", contexts=contexts)
    assert ran.returncode == 0 and "passed" in ran.stdout and "skipped" not in ran.stdout, ran.stdout
    # A context takes tenths of a second on a GPU, and there are thousands of launches.
    assert len(contexts.read_text().splitlines()) == 1
    kernels.main(["sm_87"], variants[:-1], tmp_path / "less")
    (tests,) = (name for name in TESTS if variants[-1] in asked.listed(name))
    ran = run([tests], tmp_path / "less", made, tmp_path / "cache")
    assert ran.returncode == 1 and f"has no {variants[-1].symbol}; make it again with: make kernels" in ran.stdout, ran.stdout


class Kinds:
    """A plugin of pytest that notes the kinds of kernels that a run launches."""

    def __init__(self) -> None:
        self.found, self.tests = set[str](), set[str]()

    def pytest_sessionstart(self) -> None:
        launch, found = emulated.EmulatedDevice.launch, self.found

        def noted(device: emulated.EmulatedDevice, kernel: emulated.EmulatedKernel, *rest: Any) -> None:
            found.add(kernel.generated.variant.kernel)
            launch(device, kernel, *rest)

        emulated.EmulatedDevice.launch = noted  # type: ignore[method-assign,assignment]


def test_what_sanitizers_run_is_there_and_has_every_kind_of_kernel(tmp_path: Path) -> None:
    """On the emulated device, in a process of its own."""
    script = """
        import json, sys, pytest
        from tests.cuda.device.test_real import Kinds
        kinds = Kinds()
        kinds.pytest_itemcollected = lambda item: kinds.tests.add(item.nodeid.rpartition("/")[2])
        status = pytest.main(["-q", "-m", "sanitize", sys.argv[1]], plugins=[kinds])
        json.dump([int(status), sorted(kinds.found), sorted(kinds.tests)], open(sys.argv[2], "w"))
    """
    told = tmp_path / "kinds.json"
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), ROOM.parent, told], capture_output=True, text=True, check=False
    )
    status, kinds, tests = json.loads(told.read_text())
    assert status == 0, ran.stdout
    assert set(tests) >= sanitized.TESTS and len(sanitized.TESTS) <= 40
    assert {variant.kernel for variant in asked.every()} == set(kinds)


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
        ran = run(TESTS, tmp_path / pack, tmp_path, tmp_path / "cache", **settings)
        (told,) = ran.stderr.strip().splitlines()
        assert ran.returncode == pytest.ExitCode.USAGE_ERROR and words in told and not ran.stdout.strip(), ran.stdout


def test_tests_of_a_file_are_recorded_in_one_process() -> None:
    command = [sys.executable, "-m", "pytest", ROOM / "test_largest.py", "--record-kernels", "--collect-only", "-n", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR and "add --dist loadfile" in ran.stderr, ran.stderr


@pytest.mark.parametrize("skipped", [True, False])
def test_a_list_keeps_the_kernels_of_tests_that_were_skipped(skipped: bool) -> None:
    stash, recording = pytest.Stash(), asked.Asked(recording=True)
    stash[conftest.ASKED] = recording
    item: Any = SimpleNamespace(config=SimpleNamespace(stash=stash), path=Path("test_x.py"))
    hook = conftest.pytest_runtest_makereport(item)
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(SimpleNamespace(skipped=skipped))
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
