"""Requantized weights of a session: their memory, their tables, and the rounding that fills them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import Codec
from edgeq.format.container import ModelFile
from edgeq.format.records import ArrayRef, Mode, Weight
from edgeq.targets.cpu.jit.buffers import Buffers, zeros
from edgeq.targets.cpu.jit.compile import address
from edgeq.targets.cpu.jit.parallel import compile_missing
from edgeq.targets.cpu.kernels.rows import requantize
from edgeq.targets.cpu.lowering.activations import factors_of
from edgeq.targets.cpu.lowering.codecs import CODECS
from edgeq.targets.cpu.threads.optable import PARTS_A_THREAD, Table, Tables, Variant
from edgeq.targets.cpu.threads.threadpool import ThreadPool
from edgeq.targets.requantization import HostWeights, SharedInput, master_arrays, requantized_arrays
from edgeq.targets.target import OnProgress


class CpuWeights(HostWeights):
    """Requantized weights at addresses of their own."""

    def __init__(self, inputs: Sequence[SharedInput]) -> None:
        arrays = {
            ref: zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
            for ref, (dtype, shape) in requantized_arrays(inputs).items()
        }
        super().__init__(arrays, [zeros(4 * each.columns).view(np.float32) for each in inputs])
        self.tables: dict[Mode, Tables] = {}

    def tables_of(self, mode: Mode, general: Tables, memory: Buffers) -> Tables:
        """The tables of a mode with these weights, from those that were lowered for any."""
        if mode not in self.tables:
            addresses = {memory.stored(ref): int(a.ctypes.data) for ref, a in self.arrays.items()}
            addresses |= {factors_of(memory, i): int(a.ctypes.data) for i, a in enumerate(self.input_scales)}
            decode, prefill = (moved(table, addresses) for table in (general.decode, general.prefill))
            self.tables[mode] = general._replace(decode=decode, prefill=prefill)
        return self.tables[mode]


def moved(table: Table, addresses: Mapping[int, int]) -> Table:
    """`table` with other addresses."""
    result = table.copy()
    for old, new in addresses.items():
        result[table == old] = new
    return result


def kernels_of_rounding(inputs: Sequence[SharedInput]) -> list[Variant]:
    """The kernels that `fill` needs."""
    specs = [spec for each in inputs for spec in each.layers]
    return list(dict.fromkeys(_kernel(spec.master, spec.weights[0].codec) for spec in specs if spec.master))


def prepare(inputs: Sequence[SharedInput], on_progress: OnProgress) -> None:
    """Compile what `fill` needs; `on_progress` is told of kernels that were not compiled before."""
    compile_missing(kernels_of_rounding(inputs), on_progress)


class CpuRequantizer:
    """Rounds masters with a program's threads and memory."""

    def __init__(self, file: ModelFile, memory: Buffers, pool: ThreadPool, threads: int) -> None:
        self._file, self._memory, self._pool, self._threads = file, memory, pool, threads

    def fill(self, inputs: Sequence[SharedInput], weights: CpuWeights, scales: Sequence[NDArray[np.float32]]) -> None:
        """Round every master again, layer by layer.

        What was read of it leaves the memory; what a prompt left there does first.
        """
        for ref in (ref for each in inputs for spec in each.layers for ref in master_arrays(spec)):
            self._file.release(ref)
        for each, scale, inverse in zip(inputs, scales, weights.input_scales, strict=True):
            inverse[:] = np.float32(1) / scale
            s = np.ascontiguousarray(scale, np.float32)
            for spec in each.layers:
                assert spec.master
                self._pool.run(self._table(spec.master, spec.weights[0], weights, s), self._threads)
                for ref in spec.master.arrays.values():
                    self._file.release(ref)

    def _table(self, master: Weight, weight: Weight, weights: CpuWeights, scale: NDArray[np.float32]) -> Table:
        """The table, of one record, that rounds `master` times `scale` to the arrays of `weights` that replace `weight`."""
        codec, stored = weight.codec, self._memory.stored
        size = requantize.scratch_bytes(weight.columns, codec.group_size)
        own, kept = weight.arrays, master.arrays
        q, scales, zero_points = (weights.array(own[name]).ctypes.data if name in own else 0 for name in ("q", "scale", "zero"))
        args = requantize.RequantizeArgs(
            master=stored(kept["q"]), master_block=_block_bytes(kept["q"]),
            master_scales=stored(kept.get("scale")), master_scales_block=_block_bytes(kept.get("scale")),
            master_zeros=stored(kept.get("zero")), master_zeros_block=_block_bytes(kept.get("zero")),
            master_group=master.codec.group_size or master.columns, factors=scale.ctypes.data,
            output_channels=weight.rows, columns=weight.columns, group=codec.group_size or weight.columns,
            scratch=self._memory.shared("requantize", self._threads * size), scratch_bytes=size,
            q=q, q_block=_block_bytes(own["q"]), scales=scales, scales_block=_block_bytes(own["scale"]),
            zeros=zero_points, zeros_block=_block_bytes(own.get("zero")),
        )  # fmt: skip
        rounding, literals = _kernel(master, codec)
        function = address(rounding, *literals)
        return np.array([args.record(function, PARTS_A_THREAD * self._threads)], np.int64)


def _kernel(master: Weight, codec: Codec) -> Variant:
    rounding = CODECS[codec.kind].requantize
    assert rounding
    return rounding(master, codec)


def _block_bytes(ref: ArrayRef | None) -> int:
    """Bytes from one block of 16 output channels to the next."""
    return ref.nbytes // ref.shape[0] if ref else 0
