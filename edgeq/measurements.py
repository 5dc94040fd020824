"""Numbers that were measured on this machine, kept in its cache folder so that each is measured once.

The caller decides what is measured, and how: the probes of a target run kernels, this file only keeps their results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from edgeq.machine import cache_folder, cpu

OnMeasure = Callable[[], None]
"""Called before a measurement, which takes a while; not called where the number is kept already."""


def known(what: str, threads: int) -> float | None:
    """The number kept for `what`, or None."""
    return _kept().get(_key(what, threads))


def measured(
    what: str, threads: int, measure: Callable[[], float], refresh: bool = False, on_measure: OnMeasure = lambda: None
) -> float:
    """The number kept for `what`; with `refresh`, or where there is none, `measure` is called and its result kept."""
    value = known(what, threads)
    if value is None or refresh:
        on_measure()
        value = measure()
        keep(what, threads, value)
    return value


def keep(what: str, threads: int, value: float) -> None:
    """Keep a number.  Where the cache folder cannot be written, nothing is kept and the next run measures again."""
    path, numbers = cache_folder() / "machine.json", {**_kept(), _key(what, threads): value}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        pass


def _key(what: str, threads: int) -> str:
    """The key of a measurement: its kind, the number of threads, and the hardware with its number of usable cores."""
    return f"{what}, {threads} of {cpu().cores} cores, {cpu().name}, {cpu().arch}"


def _kept() -> dict[str, float]:
    try:
        data = json.loads((cache_folder() / "machine.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    entries = data.items() if isinstance(data, dict) else ()
    return {key: float(value) for key, value in entries if type(value) in (int, float) and value > 0}
