"""How fast threads of this machine read memory: the bound of decode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from edgeq.targets.cpu.compiled import COUNT, address, word
from edgeq.targets.cpu.pool import Pool
from edgeq.targets.cpu.vector import get_i64, put_f32, vadd, vload, vsplat, vsum

BYTES = 256 << 20
"""Several times the largest cache of a machine this is for."""
SECONDS = 1.0


def read_lines() -> Callable[[int, int, int], None]:
    """Row words: COUNT of 256-byte runs, 2 address, 3 results of the threads.  Sums, so that nothing can be left out."""

    def kernel(row, thread, threads):  # type: ignore[no-untyped-def]
        count = get_i64(word(row, COUNT))
        a, b, c, d = vsplat(0.0), vsplat(0.0), vsplat(0.0), vsplat(0.0)
        for i in range(count * thread // threads, count * (thread + 1) // threads):
            x = word(row, 2) + 256 * i
            a, b = vadd(a, vload(x)), vadd(b, vload(x + 64))
            c, d = vadd(c, vload(x + 128)), vadd(d, vload(x + 192))
        put_f32(word(row, 3) + 64 * thread, vsum(vadd(vadd(a, b), vadd(c, d))))

    return kernel


def measure(threads: int) -> float:
    """Bytes per second, the median of as many passes over 256 MiB as fit in a second."""
    data = np.ones(BYTES // 4, np.float32)
    results, count = np.zeros(16 * threads, np.float32), np.array([BYTES // 256], np.int64)
    table = np.array([[address(read_lines), count.ctypes.data, data.ctypes.data, results.ctypes.data]], np.int64)
    pool = Pool(threads, table.shape[1])
    passes, end = list[float](), time.perf_counter() + SECONDS
    while len(passes) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        pool.run(table)
        passes.append(BYTES / (time.perf_counter() - began))
    pool.close()
    return statistics.median(passes)
