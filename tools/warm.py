"""`edgeq warm`: compile the kernels of a model ahead of its first run, which then starts at once."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

from edgeq import machine
from edgeq.records import MODES, Mode
from edgeq.runtime import Model
from edgeq.tools.terminal import compilation, note


def warm(*, model: Path, mode: Mode | None, **options: Any) -> None:
    """Compile for `mode`, or for every mode, and print how long that took.  Kernels compiled earlier come from the cache."""
    for each in (mode,) if mode else MODES:
        started = perf_counter()
        with compilation() as report:
            loaded = Model.load(model, mode=each, on_progress=report, **options)
            if loaded.pictures:
                loaded.prepare_images(report)
        note(f"{loaded.description}: ready after {perf_counter() - started:.1f} s")
    note(f"kernels are kept in {machine.cache_folder()}")
