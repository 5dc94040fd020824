"""A short share of the fuzzers of this folder, and what they must find; `make fuzz` runs them longer."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
COUNTS = {"bytes": 1000, "metadata": 250, "template": 20, "tokenizer": 60, "config": 4000, "index": 3000, "header": 4000}
COUNTS |= {"cache": 500, "packed": 2000, "policy": 1500, "acting": 60, "family": 60}
COMMON = ("bytes", "packed")
"""Files of two formats that strangers give first.  What compiles kernels takes longer than all together, and is tried below."""


@pytest.mark.parametrize(
    "kind", [kind if kind in COMMON else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in COUNTS]
)
def test_nothing_but_a_result_or_one_clear_error(kind: str) -> None:
    """At most 5 seconds of each kind, always of the same trials."""
    command = [sys.executable, str(HERE / "run.py"), kind, "--seed", "1", "--seconds", "5", "--count", str(COUNTS[kind])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and " tried: " in done.stdout, done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "count"), [("mutant", 20), ("sound", 6), ("kill", 16)])
def test_nothing_but_a_result_of_what_takes_long(kind: str, count: int) -> None:
    """A few of what `make fuzz` does: each sound file has codecs of its own, whose kernels are compiled for every instruction
    set, and a conversion is killed up to three times."""
    command = [sys.executable, str(HERE / "run.py"), kind, "--seed", "2", "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and f"{kind}: {count} tried: " in done.stdout, done.stdout + done.stderr


BROKEN = """
import os, time
from dataclasses import dataclass

@dataclass(frozen=True)
class Kind:
    prepare: object
    count: int = 8
    seconds: float = 0.05
    memory: int = 0
    own_cache: bool = True
    hang: float = 2

def trial(rng):
    seen = numbers[rng.random()]
    if seen == 2:
        os.abort()
    if seen == 4:
        time.sleep(100)
    if seen == 5:
        raise TypeError("not for users")
    return "well"

import random
numbers = {random.Random(f"broken 0 {i}").random(): i for i in range(8)}
KINDS = {"broken": Kind(lambda folder: trial)}
"""


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.exhaustive), "2"])
def test_a_crash_a_hang_and_an_exception_are_named_and_the_other_trials_run(jobs: str, tmp_path: Path) -> None:
    shutil.copy(HERE / "run.py", tmp_path)
    (tmp_path / "trials.py").write_text(BROKEN)
    command = [sys.executable, str(tmp_path / "run.py"), "broken", "--jobs", jobs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "broken: 8 tried: 3 FINDING, 5 well" in done.stdout, done.stdout
    assert "broken --seed 0 --only 2: ends the process (status -6)" in done.stdout
    assert "broken --seed 0 --only 4: does not end" in done.stdout and "in trial" in done.stderr
    assert "broken --seed 0 --only 5: TypeError at trials.py:" in done.stdout
    one = subprocess.run([*command, "--only", "2"], capture_output=True, text=True, timeout=600)
    assert one.returncode == 1 and "broken: 1 tried: 1 FINDING" in one.stdout


@pytest.fixture
def fuzzers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module number_trials, imported as `run.py` does."""
    monkeypatch.syspath_prepend(str(HERE))
    import number_trials

    return number_trials


@pytest.mark.parametrize(
    ("size", "slack", "sound"), [(128, 0, 128), (100, 0, 128), (128, 64, 192), (4096, 64, 4160), (1, 64, 128)]
)
def test_a_byte_after_what_may_be_read_ends_the_process(size: int, slack: int, sound: int, fuzzers: ModuleType) -> None:
    array = importlib.import_module("fence").Fence().array(size, slack)
    before = array.ctypes.data // 4096 * 4096 - 1 - array.ctypes.data
    for offset in (sound - 1, sound, before):
        pid = os.fork()
        if not pid:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(array.ctypes.data + offset, 1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == (0 if offset == sound - 1 else -signal.SIGSEGV), offset


def test_a_byte_written_beside_an_array_is_found(fuzzers: ModuleType) -> None:
    for offset in (-1, 100, 127):
        with fuzzers.fenced() as fence:
            array = fence.zeros(100)
            array[:] = 1
            fence.check()
            whole, start, _ = fence._made[0]
            whole[start + offset] = 0
            with pytest.raises(AssertionError, match="beside an array of 100 bytes"):
                fence.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mode", "error"), [("a16", 2e-3), ("a8", 2e-4)])
def test_a_small_error_of_a_kernel_is_found(
    mode: Any, error: float, fuzzers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that relative tolerances of 2 % in a16 and 30 % in a8 would not show."""
    from file_trials import samples

    from edgeq.targets.cpu.program import CpuProgram

    plain, factor = CpuProgram._run, np.float32(1)
    monkeypatch.setattr(CpuProgram, "_run", lambda *arguments, **settings: plain(*arguments, **settings) * factor)
    path = tmp_path / "sample.edgeq"
    path.write_bytes(samples(tmp_path)[5].whole)
    assert fuzzers.same_numbers(path, Random(1), fuzzers.HERE[:1], [1], mode) == "same within 0.1 %"
    factor = np.float32(1 + error)
    with pytest.raises(AssertionError, match="logits differ by"):
        fuzzers.same_numbers(path, Random(1), fuzzers.HERE[:1], [1], mode)
