"""Kernels generated and compiled by two processes at once.

New processes and not forks or threads: TVM keeps threads and the state of a compiler, and holds Python's lock.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from edgeq.errors import ResourceError
from edgeq.system import machine
from edgeq.targets.cuda.supply import build
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.cuda.supply.pack_file import Packed

PROCESSES = 2
"""TVM takes 0.4 GB of memory in each."""
MIN_JOBS = 4
"""It starts as long as it takes to make some kernels."""
OnDone = Callable[[int, int, str], None]


def compiled(variants: Sequence[Variant], archs: Sequence[str], on_progress: OnDone) -> tuple[dict[Variant, Packed], int]:
    """Kernels for these architectures, and how many were not kept from earlier.  UnsupportedError: as build.compiled.

    on_progress   is told (kernels done, in all, the last one) where some have to be made
    """
    missing = [v for v in variants if any(build.kept_image(v, arch) is None for arch in archs)]
    made: dict[Variant, Packed] = {}
    count = min(PROCESSES, machine.cpu().cores) if len(missing) >= MIN_JOBS else 1
    if count > 1:
        made = _by_processes(missing, archs, count, on_progress)
    for done, variant in enumerate(variants):
        if variant not in made:
            if variant in missing:
                on_progress(done, len(variants), variant.symbol)
            made[variant] = build.compiled(variant, archs)
    return made, len(missing)


def _by_processes(missing: Sequence[Variant], archs: Sequence[str], count: int, on_progress: OnDone) -> dict[Variant, Packed]:
    made: dict[Variant, Packed] = {}
    on_progress(0, len(missing), f"compiling {len(missing)} kernels")
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        waiting: dict[Future[Packed], Variant] = {pool.submit(build.compiled, v, archs): v for v in missing}
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    variant = waiting.pop(future)
                    made[variant] = future.result()
                    on_progress(len(made), len(missing), variant.symbol)
        except BrokenProcessPool:
            raise ResourceError("a process that compiled kernels ended, perhaps for want of memory; run it again") from None
        finally:
            # An error or an interrupt: what has not begun is not begun.
            for future in waiting:
                future.cancel()
    return made
