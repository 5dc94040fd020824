"""Numbers that were measured on this machine, kept in its cache folder so that each is measured once.

The caller decides what is measured, and how: the probes of a target run kernels, this file only keeps their results.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from edgeq.system.machine import cache_folder, cpu
from edgeq.system.whole_file import write_whole

READ_BANDWIDTH = "read_bandwidth 2"
"""The name of the read bandwidth; its number is raised when it is measured in another way, so that older ones are not used."""
IN_CACHE = " within the cache"
"""Follows it where memory has no room for an array that is larger than the cache."""
MAX_MEASUREMENT = 1e30
"""No measurement gives more."""
ALONE = 0.9
"""Share of the time that the threads of a measurement have their cores where nothing else runs.  What was measured with a
smaller one is not kept."""
OnMeasure = Callable[[], None]
"""Called before a measurement, which takes a while; not called where the number is kept already."""


def known(what: str, threads: int) -> float | None:
    """The number kept for `what`, or None."""
    return _kept().get(_key(what, threads))


def measured(
    what: str,
    threads: int,
    measure: Callable[[], tuple[float, bool]],
    refresh: bool = False,
    on_measure: OnMeasure = lambda: None,
    largest: bool = False,
) -> float:
    """The number kept for `what`; with `refresh`, or where there is none, the one that `measure` gives.

    measure   gives a number, and whether its threads were alone on their cores; a number that was disturbed is good for now
              and is not kept
    largest   of the number kept and the new one the larger is kept: for rates, which a busy machine only lowers
    """
    value = known(what, threads)
    if value is not None and not refresh:
        return value
    on_measure()
    found, alone = measure()
    if alone:
        keep(what, threads, max(found, value or 0.0) if largest else found)
    return found


def keep(what: str, threads: int, value: float) -> None:
    """Keep a number.  Where the cache folder cannot be written, nothing is kept and the next run measures again."""
    path, numbers = cache_folder() / "machine.json", {**_kept(), _key(what, threads): value}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(numbers, indent=1))
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
    return {key: float(value) for key, value in entries if type(value) in (int, float) and 0 < value < MAX_MEASUREMENT}
