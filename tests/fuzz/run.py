"""Gives edgeq hostile inputs by the thousand; anything but a result or one clear error is a finding.

    python tests/fuzz/run.py [KIND ...] [--seed N] [--count N] [--seconds S] [--jobs N] [--only INDEX]

Trials run in processes that are started again where one ends or hangs.  Trial INDEX of a kind and a seed is always the same
input: a finding names both.  The exit code is 1 where there is a finding.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import mmap
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from trials import KINDS

LABELS = 62
STATE = struct.Struct(f"<{2 + LABELS}q")
"""What a worker tells of itself, in a file that both map, so that nothing is lost when it ends: the trial that runs, how many
are done, and how often each outcome came; the names of outcomes are in another file."""
MEMORY = "/dev/shm"
BUSY = 20
"""A machine with so many times as much other work leaves a process at the lowest priority the rest."""


def work(kind: str, seed: int, first: int, step: int, end: int, folder: Path) -> None:
    """Trials first, first + step ... before `end`; prints findings, and leaves outcomes and their numbers in a file."""
    faulthandler.enable()
    if KINDS[kind].own_cache:
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    trial = KINDS[kind].prepare(folder)
    if KINDS[kind].memory:
        resource.setrlimit(resource.RLIMIT_AS, (KINDS[kind].memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with open(folder / "state", "r+b") as file:
        state = memoryview(mmap.mmap(file.fileno(), STATE.size)).cast("q")
    names: list[str] = []

    def count(outcome: str) -> None:
        if outcome not in names:
            names.append(outcome)
            (folder / "names").write_text(json.dumps(names))
        state[2 + names.index(outcome)] += 1

    for done, index in enumerate(range(first, end, step)):
        state[0], state[1] = index, done
        before = sum(os.times()[:4])
        try:
            count(trial(random.Random(f"{kind} {seed} {index}")))
        except Exception as error:
            count("FINDING")
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            print(f"{kind} --seed {seed} --only {index}: {type(error).__name__} at {place}: {str(error)[:300]!r}", flush=True)
        if (took := sum(os.times()[:4]) - before) > KINDS[kind].seconds:
            count("FINDING")
            print(f"{kind} --seed {seed} --only {index}: takes {took:.1f} s", flush=True)
    state[0], state[1] = end, len(range(first, end, step))


def processor_time(pid: int) -> float:
    """Seconds that a process and its ended children have used; 0 where there is no /proc."""
    try:
        # After the name of the program, which may hold anything: utime, stime, cutime and cstime are the 12th to 15th field.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Worker:
    """A process that runs every `step`-th trial, started again after one that ended or stopped it."""

    def __init__(self, kind: str, seed: int, first: int, step: int, end: int, folder: Path) -> None:
        self.kind, self.seed, self.step, self.end, self.folder = kind, seed, step, end, folder
        self.outcomes: dict[str, int] = collections.Counter()
        self.tried, self.failed = 0, False
        self._start(first)

    def _start(self, first: int) -> None:
        (self.folder / "state").write_bytes(STATE.pack(first, *([0] * (STATE.size // 8 - 1))))
        (self.folder / "names").write_text("[]")
        words = [self.kind, "--seed", str(self.seed), "--work", f"{first},{self.step},{self.end},{self.folder}"]
        # Matrices of this size gain nothing from threads.
        self.process = subprocess.Popen([sys.executable, __file__, *words], env=os.environ | {"OMP_NUM_THREADS": "1"})
        self._seen, self._since, self._used = first, time.monotonic(), 0.0

    def _state(self) -> tuple[int, ...]:
        return STATE.unpack((self.folder / "state").read_bytes())

    def _collect(self) -> int:
        """Add up what the process has done; the index of the trial at which it is."""
        index, done, *counts = self._state()
        names = json.loads((self.folder / "names").read_text())
        self.outcomes.update(dict(zip(names, counts, strict=False)))
        self.failed |= bool(self.outcomes.get("FINDING"))
        self.tried += done
        return index

    def poll(self) -> bool:
        """Whether there is more to do; an end before the last trial, or a hang, is printed and the next trial follows."""
        index = self._state()[0]
        if index != self._seen:
            self._seen, self._since, self._used = index, time.monotonic(), processor_time(self.process.pid)
        status = self.process.poll()
        if status is None:
            most, used = KINDS[self.kind].hang, processor_time(self.process.pid) - self._used
            if used > most or time.monotonic() - self._since > BUSY * most:
                # The handler of this signal prints where Python is.
                self.process.send_signal(signal.SIGABRT)
                self.process.wait()
                return self._ended("does not end")
            return True
        return self._ended("" if status == 0 else f"ends the process (status {status})")

    def _ended(self, how: str) -> bool:
        index = self._collect()
        if not how:
            return False
        self.failed = True
        self.tried += 1
        self.outcomes["FINDING"] += 1
        print(f"{self.kind} --seed {self.seed} --only {index}: {how}", flush=True)
        if index + self.step >= self.end:
            return False
        self._start(index + self.step)
        return True

    def stop(self) -> None:
        """End it in the middle of a trial, which does not count."""
        self.process.kill()
        self.process.wait()
        self._collect()


def run(kind: str, seed: int, first: int, end: int, seconds: float, jobs: int) -> bool:
    """Trials first ... end - 1 of a kind in `jobs` processes; prints the outcomes.  True: there was a finding."""
    began = time.monotonic()
    before = os.times()
    where = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="edgeq-fuzz-", dir=where) as root:
        workers = []
        for job in range(min(jobs, end - first)):
            folder = Path(root) / str(job)
            folder.mkdir()
            workers.append(Worker(kind, seed, first + job, jobs, end, folder))
        active = workers
        while active := [worker for worker in active if worker.poll()]:
            if time.monotonic() - began > seconds:
                for worker in active:
                    worker.stop()
                break
            time.sleep(0.1)
    outcomes: dict[str, int] = collections.Counter()
    for worker in workers:
        outcomes.update(worker.outcomes)
    cpu = sum(os.times()[2:4]) - sum(before[2:4])
    tried = sum(worker.tried for worker in workers)
    print(f"{kind}: {tried} tried:", ", ".join(f"{n} {what}" for what, n in sorted(outcomes.items())))
    print(f"    {time.monotonic() - began:.0f} s, {cpu:.0f} s of processor time", flush=True)
    return any(worker.failed for worker in workers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all if none is given")
    parser.add_argument("--seconds", type=float, default=1e9, help="for each kind, at most")
    parser.add_argument("--count", type=int, help="trials of each kind; without it those that docs/security.md states")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", type=int, metavar="INDEX", help="one trial")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        first, step, end, folder = options.work.split(",", 3)
        work(options.kinds[0], options.seed, int(first), int(step), int(end), Path(folder))
        return 0
    failed = False
    for kind in options.kinds or KINDS:
        count = KINDS[kind].count if options.count is None else options.count
        first, end = (0, count) if options.only is None else (options.only, options.only + 1)
        failed |= run(kind, options.seed, first, end, options.seconds, options.jobs)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
