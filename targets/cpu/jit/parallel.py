"""Kernels compiled by several processes at once.

Processes and not threads: most of the time goes to Python.  New ones and not forks: a fork of a process with threads, of
another library or of another model, may wait for ever for what one of them held.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from edgeq.system import machine
from edgeq.system.devices import DeviceSpec
from edgeq.targets.cpu.jit import compile
from edgeq.targets.target import OnProgress

_log = logging.getLogger(__name__)
Job = tuple[Callable[..., Any], tuple[int, ...]]
"""A factory of kernels and its literals, or an `Entry` and none."""

MIN_JOBS = 3
"""A process takes as long to start as one or two kernels to compile."""
WORKER_BYTES = 320 << 20
"""Memory of a process that compiles, at most."""
_START = "import sys; sys.path[:] = sys.argv[1:]; from edgeq.targets.cpu.jit.worker import main; main()"


def compile_missing(jobs: Iterable[Job], on_progress: OnProgress) -> None:
    """Compile what is not kept yet; `on_progress` is told how many are, then of the end.

    With several cores by processes.  What they leave undone, because one died or the folder cannot be written, this process
    compiles after them, and an error shows here.
    """
    missing = [job for job in dict.fromkeys(jobs) if not compile.is_kept(job[0], *job[1])]
    if not missing:
        return
    compile.remove_remains()
    started, count = perf_counter(), workers_for(len(missing))
    _log.info("compiling %d kernels in %d process%s", len(missing), count, "es" if count > 1 else "")
    if count > 1:
        for failure in compile_by(count, missing, compile.cache_folder(), None, on_progress):
            _log.warning("a process that compiled kernels ended: %s", failure)
    for i, (factory, literals) in enumerate(missing):
        if not compile.is_kept(factory, *literals):
            on_progress(i, len(missing), f"compiling {factory.__name__}")
            compile.address(factory, *literals)
    on_progress(len(missing), len(missing), "compiled")
    names = ", ".join(compile.file_name(factory, *literals).removesuffix(".o") for factory, literals in missing)
    _log.info("compiled in %.1f s: %s", perf_counter() - started, names)


def workers_for(jobs: int) -> int:
    """Processes that are worth starting: one for each core and for every two jobs, as far as the memory goes."""
    python = os.path.basename(sys.executable or "")
    # An application that has Python inside would start itself.
    if getattr(sys, "frozen", False) or not python.startswith("python"):
        return 1
    return max(1, min(machine.cpu().cores, jobs // 2, machine.available_bytes() // WORKER_BYTES)) if jobs >= MIN_JOBS else 1


def compile_by(count: int, jobs: list[Job], folder: Path, device: DeviceSpec | None, on_progress: OnProgress) -> list[str]:
    """Compile into `folder` by `count` processes, for a device or for this machine.  Returns why processes ended early."""
    setup = {"folder": str(folder), "device": device and device.name, "digest": compile.source_digest()}
    done, waiting, failures = 0, iter(jobs), list[str]()
    with _workers(count) as workers, selectors.DefaultSelector() as ready:
        for worker in workers:
            if worker.tell(setup) and worker.take(waiting):
                ready.register(worker.answers, selectors.EVENT_READ, worker)
        while ready.get_map():
            on_progress(done, len(jobs), f"compiling kernels in {len(ready.get_map())} processes")
            for key, _ in ready.select():
                worker = key.data
                if worker.answers.readline():
                    done += 1
                else:
                    failures.append(worker.last_words())
                if failures or not worker.take(waiting):
                    ready.unregister(worker.answers)
    return failures


class _Worker:
    """A process of worker.py."""

    def __init__(self) -> None:
        """OSError: the system gives no more processes."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        # A session of its own: an interrupt from the terminal ends this process, and this process ends the others.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *sys.path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        self._tells, self.answers = self._process.stdin, self._process.stdout

    def tell(self, message: Any) -> bool:
        """Whether it could be told."""
        with suppress(BrokenPipeError):
            self._tells.write(json.dumps(message).encode() + b"\n")
            self._tells.flush()
            return True
        return False

    def take(self, waiting: Iterator[Job]) -> bool:
        """Give it the next job; False if there is none or the process died."""
        job = next(waiting, None)
        return job is not None and self.tell([job[0].__module__, job[0].__name__, job[1]])

    def last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"exit code {self._process.returncode}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._tells, self.answers, self._errors):
            with suppress(BrokenPipeError):
                file.close()


@contextmanager
def _workers(count: int) -> Iterator[list[_Worker]]:
    """Processes that end with the block, whatever ends it; fewer, or none, where the system gives no more."""
    workers: list[_Worker] = []
    try:
        with suppress(OSError):
            for _ in range(count):
                workers.append(_Worker())
        yield workers
    finally:
        for worker in workers:
            worker.end()
