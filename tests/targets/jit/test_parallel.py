"""Kernels compiled by several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgeq.system import machine
from edgeq.targets.cpu.jit import compile, parallel
from edgeq.targets.cpu.jit.parallel import compile_by, compile_missing, workers_for
from edgeq.targets.cpu.kernels.rows.elementwise import select
from edgeq.targets.cpu.kernels.rows.norms import scale
from edgeq.targets.cpu.threads.threadpool import dismiss
from edgeq.targets.target import no_progress

JOBS = [(select, ()), (scale, ()), (dismiss, ())]
FILES = {"elementwise-select.o", "norms-scale.o", "threadpool-dismiss.o"}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder for machine code, and a process that has loaded none of it."""
    monkeypatch.setattr(compile, "cache_folder", lambda: tmp_path)
    compile.address.cache_clear()
    return tmp_path


def code(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_processes_make_what_this_process_makes_and_tell_how_far_they_are(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    told = list[tuple[int, int, str]]()
    compile_by(2, JOBS, folder, None, lambda *step: told.append(step))
    assert set(code(folder)) == FILES and told[0][:2] == (0, 3) and {step[1] for step in told} == {3}
    alone = tmp_path_factory.mktemp("alone")
    for factory, literals in JOBS:
        compile.keep(alone, factory, *literals)
        assert compile._read(folder / compile.file_name(factory, *literals)), "what was made can be loaded"
    # Names within an object file count what Numba has compiled before, so the bytes are not the same.
    assert set(code(alone)) == FILES


@pytest.mark.parametrize(
    "broken", ["import sys; sys.exit(3)", "raise MemoryError", "print(flush=True); import os; os.kill(os.getpid(), 9)"]
)
def test_what_processes_that_die_leave_undone_is_compiled_here(
    broken: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "_START", broken)
    monkeypatch.setattr(parallel, "workers_for", lambda jobs: 2)
    told = list[tuple[int, int, str]]()
    compile_missing(JOBS, lambda *step: told.append(step))
    assert set(code(folder)) == FILES and told[-1] == (3, 3, "compiled")


def test_processes_of_other_sources_compile_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "source_digest", lambda: "0" * 16)
    compile_by(1, JOBS[:1], folder, None, no_progress)
    assert not code(folder)


def test_the_logger_is_told_what_was_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parallel, "workers_for", lambda jobs: 1)
    with caplog.at_level("INFO", logger="edgeq"):
        compile_missing(JOBS[1:], no_progress)
        compile_missing(JOBS[1:], no_progress)
    first, last = (record.getMessage() for record in caplog.records)
    assert first == "compiling 2 kernels in 1 process"
    assert last.startswith("compiled in ") and last.endswith("s: norms-scale, threadpool-dismiss")


def test_an_interrupt_ends_the_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[subprocess.Popen[bytes]]()
    start = subprocess.Popen

    def noted(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel.subprocess, "Popen", noted)
    with pytest.raises(KeyboardInterrupt):
        compile_by(2, JOBS, folder, None, interrupted)
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_as_many_processes_as_cores_jobs_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(cores: int, memory: int) -> None:
        monkeypatch.setattr(machine, "cpu", lambda: machine.Cpu("any", "x86_64", frozenset(), cores))
        monkeypatch.setattr(machine, "available_bytes", lambda: memory)

    of(4, 8 << 30)
    assert [workers_for(jobs) for jobs in (1, 2, 3, 6, 20)] == [1, 1, 1, 3, 4]
    of(4, 700 << 20)
    assert workers_for(20) == 2
    of(1, 8 << 30)
    assert workers_for(20) == 1
    of(4, 8 << 30)
    monkeypatch.setattr(sys, "executable", "/usr/bin/application")
    assert workers_for(20) == 1, "an application with Python inside would start itself"
