"""Requantized weights of a session: their memory, their tables, and the rounding that fills them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeq.container import ModelFile
from edgeq.records import ArrayRef, Mode, Weight
from edgeq.targets.cpu.jit.buffers import Buffers, zeros
from edgeq.targets.cpu.jit.compile import address
from edgeq.targets.cpu.jit.optable import PARTS_A_THREAD, Table, Tables, Variant
from edgeq.targets.cpu.jit.parallel import compile_missing
from edgeq.targets.cpu.jit.threadpool import Pool
from edgeq.targets.cpu.kernels import requantize
from edgeq.targets.cpu.lowering.activations import factors_of
from edgeq.targets.requantization import HostWeights, SharedInput, requantized_arrays
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
    needed = dict.fromkeys(requantize.literals(spec.master, spec.weights[0].codec) for spec in specs if spec.master)
    return [(requantize.requantize, each) for each in needed]


def prepare(inputs: Sequence[SharedInput], on_progress: OnProgress) -> None:
    """Compile what `fill` needs; `on_progress` is told of kernels that were not compiled before."""
    compile_missing(kernels_of_rounding(inputs), on_progress)


class Requantizer:
    """Rounds masters with a program's threads and memory."""

    def __init__(self, file: ModelFile, memory: Buffers, pool: Pool, threads: int) -> None:
        self._file, self._memory, self._pool, self._threads = file, memory, pool, threads

    def fill(self, inputs: Sequence[SharedInput], weights: CpuWeights, scales: Sequence[NDArray[np.float32]]) -> None:
        """Round every master again, layer by layer.

        What was read of it leaves the memory; what a prompt left there does first.
        """
        for ref in (ref for each in inputs for spec in each.layers if spec.master for _, ref in spec.master.arrays()):
            self._file.release(ref)
        for each, scale, inverse in zip(inputs, scales, weights.input_scales, strict=True):
            inverse[:] = np.float32(1) / scale
            s = np.ascontiguousarray(scale, np.float32)
            for spec in each.layers:
                assert spec.master
                self._pool.run(self._table(spec.master, spec.weights[0], weights, s), self._threads)
                for _, ref in spec.master.arrays():
                    self._file.release(ref)

    def _table(self, master: Weight, weight: Weight, weights: CpuWeights, scale: NDArray[np.float32]) -> Table:
        """The table, of one record, that rounds `master` times `scale` to the arrays of `weights` that replace `weight`."""
        codec, stored = weight.codec, self._memory.stored
        size = requantize.scratch_bytes(weight.columns, codec.group_size)
        q, scales, zero_points = (weights.array(ref).ctypes.data if ref else 0 for ref in (weight.q, weight.scale, weight.zero))
        args = requantize.RequantizeArgs(
            master=stored(master.q), master_block=_block_bytes(master.q),
            master_scales=stored(master.scale), master_scales_block=_block_bytes(master.scale),
            master_zeros=stored(master.zero), master_zeros_block=_block_bytes(master.zero),
            master_group=master.codec.group_size or master.columns, factors=scale.ctypes.data,
            output_channels=weight.rows, columns=weight.columns, group=codec.group_size or weight.columns,
            scratch=self._memory.shared("requantize", self._threads * size), scratch_bytes=size,
            q=q, q_block=_block_bytes(weight.q), scales=scales, scales_block=_block_bytes(weight.scale),
            zeros=zero_points, zeros_block=_block_bytes(weight.zero),
        )  # fmt: skip
        function = address(requantize.requantize, *requantize.literals(master, codec))
        return np.array([args.record(function, PARTS_A_THREAD * self._threads)], np.int64)


def _block_bytes(ref: ArrayRef | None) -> int:
    """Bytes from one block of 16 output channels to the next."""
    return ref.nbytes // ref.shape[0] if ref else 0
