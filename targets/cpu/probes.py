"""What threads of this machine can do: read memory, multiply integers; how many of them decode fastest, and looking how far
ahead."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import CHUNK, QUADS, ROWS, Codec
from edgeq.format.quantization import activation_block
from edgeq.system.machine import available_bytes, cpu, last_level_cache
from edgeq.system.measurements import ALONE, IN_CACHE, READ_BANDWIDTH, OnMeasure, measured
from edgeq.targets.cpu.isa import all_isas, isa_index
from edgeq.targets.cpu.isa.isa import Isa, by_chunks
from edgeq.targets.cpu.jit.args import PARTS
from edgeq.targets.cpu.jit.buffers import zeros
from edgeq.targets.cpu.jit.compile import address
from edgeq.targets.cpu.kernels.args import CHUNKS, HALF_CHUNK, ONE_CHUNK, ProductArgs
from edgeq.targets.cpu.kernels.products.groups import group_args, group_kind
from edgeq.targets.cpu.kernels.products.matmul import SCRATCH_BYTES, integer_matvec
from edgeq.targets.cpu.kernels.products.matrix_unit import ROW_BYTES, SIDE, TILE_BYTES
from edgeq.targets.cpu.probe_kernels import (
    ROUNDS,
    STEPS,
    TILES_ROOM_BYTES,
    MultiplyArgs,
    MultiplyTilesArgs,
    ReadArgs,
    chains,
    multiply,
    multiply_tiles,
    read_lines,
)
from edgeq.targets.cpu.threads.optable import PARTS_A_THREAD
from edgeq.targets.cpu.threads.threadpool import ThreadPool

BYTES = 256 << 20
"""The least that is read: several times the largest cache of most machines this is for."""
CACHES = 2
"""What is read is at least so many times the largest cache."""
MEMORY_SHARE = 4
"""At most one part in so many of the available memory is read."""
Table = NDArray[np.int64]


def _rates_and_share(table: Table, threads: int, work: float, seconds: float) -> tuple[list[float], float]:
    """`work` per second of each pass, for at least three passes and `seconds`, and which share of the time the threads had a
    core each; they do not sleep between the passes."""
    pool = ThreadPool(threads, 1, table.shape[1])
    pool.run(table, threads)
    passes, start, used = list[float](), time.perf_counter(), time.process_time()
    end = start + seconds
    while len(passes) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        pool.run(table, threads)
        passes.append(work / (time.perf_counter() - began))
    share = (time.process_time() - used) / (time.perf_counter() - start) / threads
    pool.close()
    return passes, share


def read_bandwidth(threads: int, refresh: bool = False) -> float:
    """Bytes per second that `threads` threads read from memory, measured in about a second; the largest is kept per machine.

    Threads beyond the number of cores read no more than the cores do, and count as those.
    """
    threads, size = min(threads, cpu().cores), probe_bytes()
    what = f"{READ_BANDWIDTH}{IN_CACHE if within_cache(size) else ''}"
    return measured(what, threads, lambda: _read_bandwidth(threads, size), refresh, largest=True)


def probe_bytes() -> int:
    """Bytes that a measurement of the bandwidth reads: more than the largest cache holds, where memory has room for it."""
    wanted = max(BYTES, CACHES * (last_level_cache() or 0))
    return max(1 << 20, min(wanted, available_bytes() // MEMORY_SHARE)) // 256 * 256


def within_cache(size: int) -> bool:
    """Whether so many bytes fit in the largest cache: what is measured with them is said, and kept, apart."""
    return size <= (last_level_cache() or 0)


def _read_bandwidth(threads: int, size: int) -> tuple[float, bool]:
    """The median of as many passes over `size` bytes as fit in a second; whether the threads were alone."""
    data = np.ones(size // 4, np.float32)
    parts = 4 * threads
    results, count = np.zeros(16 * parts, np.float32), np.array([size // 256], np.int64)
    args = ReadArgs(rows=count.ctypes.data, x=data.ctypes.data, results=results.ctypes.data)
    table = np.array([args.record(address(read_lines), parts)], np.int64)
    passes, share = _rates_and_share(table, threads, size, 1.0)
    return statistics.median(passes), share >= ALONE


def integer_peak(isa: Isa, threads: int, refresh: bool = False) -> float:
    """8-bit operations per second of `threads` threads from registers, on a matrix unit where the instruction set has one from
    the first-level cache, measured in half a second; the largest is kept per machine.

    A multiplication and an addition are two operations.  Where dot products are several instructions, those of PROBED_BITS-bit
    weights: wider ones need more (isa/avx2.py).
    """

    def measure() -> tuple[float, bool]:
        found = _tile_rates(threads, 10_000, 0.5) if isa.matrix_unit else _product_rates(isa, False, threads, 20_000, 0.5)
        passes, share = found
        return statistics.median(passes), share >= ALONE

    other = "octets_peak" if isa.octets else "chunk_peak" if by_chunks(isa) else "integer_peak"
    kind = "matrix_peak" if isa.matrix_unit else other
    return measured(f"{kind} {isa.name}", threads, measure, refresh, largest=True)


def _tile_rates(threads: int, repeat: int, seconds: float) -> tuple[list[float], float]:
    x, weights, room = zeros(TILE_BYTES + ROW_BYTES * STEPS), zeros(TILE_BYTES * STEPS), zeros(TILES_ROOM_BYTES * threads)
    count = np.array([repeat], np.int64)
    args = MultiplyTilesArgs(rows=count.ctypes.data, x=x.ctypes.data, weights=weights.ctypes.data, room=room.ctypes.data)
    table = np.array([args.record(address(multiply_tiles), threads)], np.int64)
    return _rates_and_share(table, threads, 2.0 * (2 * SIDE) ** 2 * ROW_BYTES * STEPS * repeat * threads, seconds)


PROBES = 5
"""Measurements of each of the things compared, in turn; the best counts, because what else runs on the machine for a moment
must not decide for all time."""


def winograd_gain(on_measure: OnMeasure = lambda: None) -> float:
    """How much faster one thread does what plain dot products do by Winograd's method (winograd.py), both from registers.

    Measured in a moment and kept per machine.
    """
    return measured("winograd_gain", 1, _winograd_gain, on_measure=on_measure)


def _winograd_gain() -> tuple[float, bool]:
    isa = next(i for i in all_isas() if i.winograd)
    rates, shares = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    for _ in range(PROBES):
        for pairs in (True, False):
            passes, share = _product_rates(isa, pairs, 1, 500, 0.01)
            rates[pairs], shares[pairs] = max(rates[pairs], *passes), max(shares[pairs], share)
    # A product by pairs does twice the work.
    return 2 * rates[True] / rates[False], min(shares.values()) >= ALONE


def _product_rates(isa: Isa, pairs: bool, threads: int, repeat: int, seconds: float) -> tuple[list[float], float]:
    index = isa_index(isa)
    results, count = zeros(64 * threads), np.array([repeat], np.int64)
    args = MultiplyArgs(rows=count.ctypes.data, results=results.ctypes.data)
    table = np.array([args.record(address(multiply, index, int(pairs)), threads)], np.int64)
    work = 2.0 * 4 * isa.lanes * chains(isa) * ROUNDS * repeat * threads * (2 if isa.octets else QUADS if by_chunks(isa) else 1)
    return _rates_and_share(table, threads, work, seconds)


DECODE_CODEC = Codec("int", 4, 128)
"""Codec of the product by which threads are counted."""


def decode_literals(isa: Isa, codec: Codec) -> tuple[int, ...]:
    """Literals of the product that is probed, with 8-bit activations."""
    extent = {CHUNK // 2: HALF_CHUNK, CHUNK: ONE_CHUNK}.get(activation_block(codec), CHUNKS)
    return codec.bits, int(isa.widens(codec.multiplied_bits)), group_kind(codec), extent


def decode_threads(isa: Isa, refresh: bool = False, on_measure: OnMeasure = lambda: None) -> int:
    """How many threads decode fastest, probed once in about half a second and kept per machine."""
    most = cpu().big_cores
    if most == 1:
        return 1
    return int(measured(f"decode_threads {isa.name}", most, lambda: best_decode_threads(isa, most), refresh, on_measure))


def best_decode_threads(isa: Isa, most: int) -> tuple[int, bool]:
    """The number of threads, up to `most`, that multiplies a large 4-bit matrix with a token fastest; whether they were alone.

    More threads than it takes to fill the memory's bandwidth only disturb each other (two are best on a Raspberry Pi 5), so of
    counts within 3 % of the best the smallest is taken.  Takes about half a second.
    """
    table, kept = _decode_table(isa, most, DECODE_CODEC)
    candidates = sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n < most} | {most})

    def choose(n: int) -> int:
        table[0, PARTS] = PARTS_A_THREAD * n
        return n

    rates, alone = _in_turn(table, candidates, choose, 0.5)
    del kept
    return min(n for n in candidates if rates[n] >= 0.97 * max(rates.values())), alone


WORTH_ANOTHER = 1.03
"""How much faster than the nearest distance another one has to be: less may be chance."""


def prefetch_bytes(isa: Isa, threads: int, codec: Codec, refresh: bool = False, on_measure: OnMeasure = lambda: None) -> int:
    """How many bytes ahead `threads` threads that decode ask for weights in a codec, probed once in about a third of a second
    and kept per machine; 0: the instruction set leaves that to the processor."""
    if len(isa.prefetch_distances) < 2:
        return next(iter(isa.prefetch_distances), 0)
    most, what = cpu().cores, f"prefetch_bytes {isa.name} {codec.name}"
    threads = min(threads, most)
    return int(measured(what, threads, lambda: best_prefetch_bytes(isa, threads, codec), refresh, on_measure))


def best_prefetch_bytes(isa: Isa, threads: int, codec: Codec) -> tuple[int, bool]:
    """The distance at which a large matrix is multiplied with a token fastest, the nearest of those within 3 % of it.

    While others use the memory all are alike, and what is chosen then is kept: of 4 and 8 bits on a Zen 4 far costs a fifth.

    Also whether the threads were alone.
    """
    table, kept = _decode_table(isa, threads, codec)
    table[0, PARTS] = PARTS_A_THREAD * threads

    def choose(distance: int) -> int:
        table[0, ProductArgs.prefetch_bytes.slot] = distance
        return threads

    rates, alone = _in_turn(table, isa.prefetch_distances, choose, 0.3)
    del kept
    return min(each for each in rates if WORTH_ANOTHER * rates[each] >= max(rates.values())), alone


def _in_turn(
    table: Table, candidates: Collection[int], choose: Callable[[int], int], seconds: float
) -> tuple[dict[int, float], bool]:
    """Passes per second with each of `candidates`, the best of PROBES measurements in turn; whether the threads were alone.

    choose   sets a candidate in `table` and gives the number of threads to measure it with
    seconds  for all measurements
    """
    rates, shares = dict.fromkeys(candidates, 0.0), dict.fromkeys(candidates, 0.0)
    for _ in range(PROBES):
        for each in candidates:
            passes, share = _rates_and_share(table, choose(each), 1.0, seconds / PROBES / len(candidates))
            rates[each], shares[each] = max(rates[each], statistics.median(passes)), max(shares[each], share)
    return rates, min(shares.values()) >= ALONE


def _decode_table(isa: Isa, threads: int, codec: Codec) -> tuple[Table, list[NDArray[Any]]]:
    """One product of a matrix larger than caches, 16 MiB for each bit, with a token of mode a8; and the arrays it needs."""
    rows, columns, block = 64 << 10, 2 << 10, activation_block(codec)
    parts, blocks = codec.parts(rows, columns), rows // ROWS
    of_groups = {name: zeros(part.nbytes) for name, part in parts.items() if name != "q"}
    weights = zeros(parts["q"].nbytes)
    weights[:] = 0x5A
    token, numbers, y = zeros(2 * columns), zeros(4 * columns // block), zeros(4 * rows)
    scratch, count = zeros(threads * SCRATCH_BYTES), np.array([1], np.int64)
    args = ProductArgs(
        rows=count.ctypes.data, x=token.ctypes.data, x_stride=columns, x_scales=numbers.ctypes.data, x_sums=numbers.ctypes.data,
        x_blocks=columns // block, weights=weights.ctypes.data, weights_block=weights.nbytes // blocks,
        **group_args(codec, rows, columns, lambda name: of_groups[name].ctypes.data),
        chunks=columns // CHUNK, chunks_per_block=max(1, block // CHUNK), output_channels=rows, group_blocks=1,
        y=y.ctypes.data, y_stride=0, scratch=scratch.ctypes.data, prefetch_bytes=next(iter(isa.prefetch_distances), 0),
    )  # fmt: skip
    function = address(integer_matvec, isa_index(isa), *decode_literals(isa, codec))
    return np.array([args.record(function)], np.int64), [
        weights, *of_groups.values(), token, numbers, y, scratch, count
    ]  # fmt: skip
