"""Tables that read other weights than the file's: the masters, while sums are taken over what layers read; or a copy.

The table of a copy is lowered once, with a placeholder where the factors of an input will be; for each copy the addresses of
its own arrays take the place of the file's and of the placeholders.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.container import ModelFile
from edgeq.machine import available_bytes
from edgeq.records import ArrayRef, LinearSpec, Mode, Weight
from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.buffers import Memory, zeros
from edgeq.targets.cpu.jit.compile import FUNCTION, address, is_kept
from edgeq.targets.cpu.jit.optable import PARTS, PARTS_A_THREAD, ROW_WORDS, Table, Tables, channel_parts, kernel
from edgeq.targets.cpu.jit.threadpool import Pool
from edgeq.targets.cpu.kernels import requantize
from edgeq.targets.requantization import HostWeights, SharedInput, requantized_arrays
from edgeq.targets.target import OnProgress

if TYPE_CHECKING:
    from edgeq.targets.cpu.lowering.context import Lowering

LEAST_RELEASED = 1 << 20
"""Bytes for which it pays to tell the system."""
Source = Literal["file", "masters", "copy"]
"""Where a table's weights come from."""


class CpuWeights(HostWeights):
    """A copy at addresses of its own."""

    def __init__(self, inputs: Sequence[SharedInput]) -> None:
        arrays = {
            ref: zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
            for ref, (dtype, shape) in requantized_arrays(inputs).items()
        }
        super().__init__(arrays, [zeros(4 * each.columns).view(np.float32) for each in inputs])
        self.tables: dict[Mode, Tables] = {}

    def addresses(self, memory: Memory) -> dict[int, int]:
        """What stands in the table of copies, and what this copy has instead."""
        moved = {memory.stored(ref): int(a.ctypes.data) for ref, a in self.arrays.items()}
        return moved | {placeholder(memory, i): int(a.ctypes.data) for i, a in enumerate(self.input_scales)}


def placeholder(memory: Memory, index: int) -> int:
    """An address that stands for the factors of shared input `index`."""
    return memory.shared(("factors", index), ROW_WORDS)


def moved(table: Table, addresses: Mapping[int, int]) -> Table:
    """`table` with other addresses."""
    result = table.copy()
    for old, new in addresses.items():
        result[table == old] = new
    return result


def layer(lowering: Lowering, o: op.Linear) -> LinearSpec:
    """The layer as the table reads it; for masters its input is counted first, by the first layer that reads it."""
    if lowering.source != "masters" or o.linear.name not in lowering.input_of:
        return o.linear
    each = lowering.inputs[lowering.input_of[o.linear.name]]
    if each.layers[0].name == o.linear.name:
        x = (lowering.buffers[o.x], lowering.row_bytes[o.x])
        words = (*x, lowering.arrays.counted, lowering.arrays.sums, 4 * each.offset, each.columns)
        lowering.emit(kernel(requantize.add_squares), *words, parts=channel_parts(each.columns))
    assert o.linear.master
    return replace(o.linear, weights=(o.linear.master,))


def streams(inputs: Sequence[SharedInput]) -> bool:
    """Whether masters leave the memory layer by layer also while a prompt is run.

    Mapping them again for every chunk of it costs 6 % of the time on two fast cores, more on slow ones, and the system can take
    back such pages by itself: only where memory is short.
    """
    masters = sum(layer.master.nbytes for each in inputs for layer in each.layers if layer.master)
    return hasattr(mmap, "MADV_DONTNEED") and available_bytes() < 2 * masters


def release(lowering: Lowering, o: op.Linear) -> None:
    """Behind a product with a master its pages go, if that is worth it."""
    if lowering.streams and o.linear.name in lowering.input_of:
        assert o.linear.master
        for _, ref in o.linear.master.arrays():
            address, length = lowering.file.pages(ref)
            if length >= LEAST_RELEASED:
                lowering.emit(kernel(requantize.release), address, length, mmap.MADV_DONTNEED)


def factors(lowering: Lowering, layer: LinearSpec) -> int:
    """The address of what a copy multiplies the input of `layer` by, 0 if there is nothing."""
    if lowering.source == "copy" and layer.name in lowering.input_of:
        return placeholder(lowering.memory, lowering.input_of[layer.name])
    return 0


def prepare(inputs: Sequence[SharedInput], on_progress: OnProgress) -> None:
    """Compile what `fill` needs; `on_progress` is told of each kernel that was not compiled before."""
    specs = [spec for each in inputs for spec in each.layers]
    needed = dict.fromkeys(requantize.literals(spec.master, spec.weights[0].codec) for spec in specs if spec.master)
    missing = [each for each in needed if not is_kept(requantize.requantize, *each)]
    for i, each in enumerate(missing):
        on_progress(i, len(missing), "compiling requantize")
        address(requantize.requantize, *each)
    if missing:
        on_progress(len(missing), len(missing), "compiled")


def fill(
    file: ModelFile,
    memory: Memory,
    pool: Pool,
    threads: int,
    inputs: Sequence[SharedInput],
    weights: CpuWeights,
    scales: Sequence[NDArray[np.float32]],
) -> None:
    """Round every master anew, layer by layer.  What was read of it leaves the memory; what a prompt left there does first."""
    for ref in (ref for each in inputs for spec in each.layers if spec.master for _, ref in spec.master.arrays()):
        file.release(ref)
    for each, scale, inverse in zip(inputs, scales, weights.input_scales, strict=True):
        inverse[:] = np.float32(1) / scale
        s = np.ascontiguousarray(scale, np.float32)
        for spec in each.layers:
            assert spec.master
            pool.run(row(memory, threads, spec.master, spec.weights[0], weights, s), threads)
            for _, ref in spec.master.arrays():
                file.release(ref)


def row(memory: Memory, threads: int, master: Weight, weight: Weight, weights: CpuWeights, scale: NDArray[np.float32]) -> Table:
    """The table, of one row, that rounds `master` times `scale` to the copy of `weight`."""
    codec, table = weight.codec, np.zeros((1, ROW_WORDS), np.int64)
    words = table[0]
    words[FUNCTION] = address(requantize.requantize, *requantize.literals(master, codec))
    for word, ref in zip((requantize.MASTER, requantize.MASTER_SCALE, requantize.MASTER_ZERO), refs(master), strict=True):
        words[word : word + 2] = (memory.stored(ref), ref.nbytes // ref.shape[0]) if ref else (0, 0)
    for word, ref in zip((requantize.Q, requantize.SCALE, requantize.ZERO), refs(weight), strict=True):
        words[word : word + 2] = (weights.array(ref).ctypes.data, ref.nbytes // ref.shape[0]) if ref else (0, 0)
    words[requantize.MASTER_GROUP] = master.codec.group_size or master.columns
    words[requantize.FACTORS] = scale.ctypes.data
    words[requantize.SIZE : requantize.SIZE + 2] = weight.rows, weight.columns
    words[requantize.GROUP] = codec.group_size or weight.columns
    size = requantize.scratch_bytes(weight.columns, codec.group_size)
    words[requantize.SCRATCH] = memory.shared("requantize", threads * size)
    words[requantize.SCRATCH_BYTES] = size
    words[PARTS] = PARTS_A_THREAD * threads
    return table


def refs(weight: Weight) -> tuple[ArrayRef | None, ...]:
    return weight.q, weight.scale, weight.zero
