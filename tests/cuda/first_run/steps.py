"""The steps, and how they are run: one after the other, each within its time, all to the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

from edgeq.system.whole_file import write_whole

ROOT = Path(__file__).parents[3]
SHAPES = ("smollm-135m", "llama-3.2-1b", "llama-3.1-8b")
PRODUCTS = "2048x2048,4096x4096,4096x14336"
"""Output x input channels of those that are timed by themselves."""
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
COUNTERS = (
    "dram__bytes_read.sum",
    "lts__t_sector_hit_rate.pct",
    "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "gpu__time_duration.sum",
)
"""What ncu counts: does a prefetch bring whole lines, and what a multiprocessor waits for."""


@dataclass(frozen=True)
class Step:
    """One step.

    minutes   after which it is ended
    program   that it needs and that a machine may lack; "": none
    """

    name: str
    about: str
    minutes: float
    command: Sequence[str]
    program: str = ""


@dataclass(frozen=True)
class Ending:
    """How a step ended.

    status   "passed", "failed", "out of time", or "left out", where its program is not installed
    last     of its log
    """

    name: str
    about: str
    status: str
    seconds: float
    exit_code: int | None
    last: str


def steps(out: Path, shapes: Sequence[str], tests: Sequence[str], pack: Path, workers: int = 1) -> list[Step]:
    """The protocol, 45 minutes on a server's GPU; with the shape "tiny" a try of it."""
    python, here, small = sys.executable, __package__, "tiny" in shapes
    pytest = [python, "-u", "-m", "pytest", "-v", "-ra", "--durations=30", "--gpu", "--pack", str(pack), *tests]

    def tested(name: str) -> list[str]:
        return [f"--junitxml={out / f'{name}.xml'}"]

    side_by_side = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else []
    found = [
        Step(
            "facts",
            "the GPU, its driver, clocks, versions, bandwidth, cost of a start",
            2,
            [python, "-m", f"{here}.facts"],
        ),
        Step("tests", "all tests of kernels and programs", 8, [*pytest, *tested("tests"), *side_by_side]),
    ]
    for check in SANITIZERS:
        sanitizer = ["compute-sanitizer", "--tool", check, "--error-exitcode", "9"]
        command = [*sanitizer, *pytest, *tested(check), "-m", "sanitize"]
        found.append(Step(check, f"the tests of sanitized.py under {check}", 9, command, "compute-sanitizer"))
    sizes = (
        ["--shapes", "128x128", "--rows", "1", "-r", "1", "--beyond", "1"]
        if small
        else ["--shapes", PRODUCTS, "--rows", "1,2,4,8,16,64"]
    )
    found += [
        Step("products", "single products", 6, [python, "-m", "edgeq.tools.lab.products", *sizes, "--json"]),
        Step("decode", "whole models of random weights", 8, [python, "-m", f"{here}.decode", *shapes]),
        Step("tuning", "how fused products are spread best", 6, [python, "-m", f"{here}.tuning", shapes[len(shapes) // 2]]),
    ]
    counted = [
        "ncu",
        "--clock-control",
        "none",
        "--csv",
        "-k",
        "regex:fused|attend",
        "-c",
        "24",
        "--metrics",
        ",".join(COUNTERS),
    ]
    ncu = [*counted, python, "-m", f"{here}.decode", shapes[len(shapes) // 2], "--tokens", "4", "--plain"]
    return [*found, Step("ncu", "counters of the kernels of a token", 8, ncu, "ncu")]


def run(
    every: Sequence[Step],
    out: Path,
    chosen: Callable[[Step], bool] = lambda step: True,
    told: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str] | None = None,
) -> list[Ending]:
    """Run the chosen steps.  What an earlier run noted of others stays in the summary."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "summary.json"
    noted = {each["name"]: each for each in _noted(path)}
    endings = list[Ending]()
    for step in filter(chosen, every):
        told(f"{step.name}: {step.about}, at most {step.minutes:g} minutes")
        endings.append(ending := run_one(step, out, environment))
        told(f"{step.name}: {ending.status} after {ending.seconds:.0f} s" + (f": {ending.last}" if ending.last else ""))
        noted[step.name] = asdict(ending)
        order = [each.name for each in every]
        kept = sorted(noted.values(), key=lambda each: order.index(each["name"]) if each["name"] in order else len(order))
        write_whole(path, json.dumps(kept, indent=1) + "\n")
    return endings


def run_one(step: Step, out: Path, environment: Mapping[str, str] | None) -> Ending:
    """A step as a process group of its own, whose output goes to a log as it comes."""
    here = {**(environment or os.environ), "FIRST_RUN_OUT": str(out)}
    if step.program and shutil.which(step.program, path=here.get("PATH")) is None:
        return Ending(step.name, step.about, "left out", 0.0, None, f"{step.program} is not installed")
    began, log = monotonic(), out / f"{step.name}.log"
    with open(log, "wb") as file:
        try:
            process = subprocess.Popen(
                step.command, cwd=ROOT, env=here, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        except OSError as error:
            return Ending(step.name, step.about, "failed", 0.0, None, str(error))
        try:
            code: int | None = process.wait(step.minutes * 60)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # What it started too, such as workers of the tests.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    status = "out of time" if code is None else "passed" if code == 0 else "failed"
    return Ending(step.name, step.about, status, monotonic() - began, code, _last_line(log))


def _last_line(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def _noted(path: Path) -> list[dict[str, object]]:
    try:
        return list(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
