"""Gives edgeq hostile inputs by the thousand; anything but a result or one clear error is a finding.

    python tests/fuzz/run.py [KIND ...] [--seconds S] [--count N] [--seed N] [--only INDEX]

Each kind runs in a process of its own, until S seconds have passed or N trials are done.  Trial INDEX of a kind and a seed is
always the same input: a finding names both.  The exit code is 1 where there is a finding.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

KINDS = ("bytes", "metadata", "template", "tokenizer", "config", "header")
SLOW = {"bytes": 2.0, "metadata": 2.0, "template": 5.0, "tokenizer": 12.0, "config": 2.0, "header": 2.0}
"""Seconds of processor time, of a trial and its children, beyond which it is a finding: the stated limits and a second."""
MEMORY = 2 << 30
"""Address space of a run; what asks for more is a finding."""


def run(kind: str, seed: int, first: int, count: int, seconds: float, progress: Path) -> dict[str, int]:
    """Trials `first` to `first + count` of a kind; prints findings, returns outcomes and their numbers."""
    os.environ["XDG_CACHE_HOME"] = str(progress.parent / "cache")
    sys.path.insert(0, str(Path(__file__).parent))
    from trials import trials

    trial = trials(progress.parent)[kind]
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    outcomes: dict[str, int] = collections.Counter()
    end = time.monotonic() + seconds
    for index in range(first, first + count):
        if time.monotonic() > end:
            break
        progress.write_text(str(index))
        before = sum(os.times()[:4])
        try:
            outcomes[trial(random.Random(f"{kind} {seed} {index}"))] += 1
        except Exception as error:
            outcomes["FINDING"] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            print(f"{kind} --seed {seed} --only {index}: {type(error).__name__} at {place}: {str(error)[:300]!r}", flush=True)
        if (took := sum(os.times()[:4]) - before) > SLOW[kind]:
            outcomes["FINDING"] += 1
            print(f"{kind} --seed {seed} --only {index}: takes {took:.1f} s", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all if none is given")
    parser.add_argument("--seconds", type=float, default=1e9, help="for each kind")
    parser.add_argument("--count", type=int, default=1 << 60, help="trials of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one trial")
    parser.add_argument("--in-process", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    first, count = (0, options.count) if options.only is None else (options.only, 1)
    if options.in_process:
        outcomes = run(options.kinds[0], options.seed, first, count, options.seconds, Path(options.in_process))
        print(f"{options.kinds[0]}: {sum(outcomes.values())} tried:", ", ".join(f"{n} {what}" for what, n in outcomes.items()))
        return int(bool(outcomes.get("FINDING")))
    failed = 0
    for kind in options.kinds or KINDS:
        with tempfile.TemporaryDirectory(prefix="edgeq-fuzz-") as folder:
            progress = Path(folder) / "index"
            arguments = [kind, "--seed", str(options.seed), "--seconds", str(options.seconds), "--count", str(count)]
            arguments += [] if options.only is None else ["--only", str(options.only)]
            command = [sys.executable, __file__, *arguments, "--in-process", str(progress)]
            began = time.monotonic()
            status = subprocess.run(command).returncode
            failed |= status
            if status < 0:
                print(f"{kind} --seed {options.seed} --only {progress.read_text()}: ends the process (signal {-status})")
            print(f"    {time.monotonic() - began:.0f} s", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
