"""Tables that read other weights than the file's: the masters, while sums are taken over what layers read; or requantized ones.

The table of requantized weights is lowered once, with the file's addresses and a placeholder where the factors of an input will
be; requantized.py puts those of each session's arrays in their places.
"""

from __future__ import annotations

import mmap

from edgeq.system.machine import available_bytes
from edgeq.targets import graph as op
from edgeq.targets.cpu.kernels.rows import requantize
from edgeq.targets.cpu.lowering.context import Context, Masters
from edgeq.targets.cpu.threads.optable import channel_parts, kernel
from edgeq.targets.requantization import SharedInput

MIN_RELEASED_BYTES = 1 << 20
"""Bytes for which it pays to tell the system."""


def masters_of(inputs: tuple[SharedInput, ...], run: bool) -> Masters:
    """The masters of a table.  `run`: products read them, not requantized weights.

    They leave the memory layer by layer only where it is short: mapping them again for every chunk of a prompt costs 6 % of the
    time on two fast cores, more on slow ones, and the system can take back such pages by itself.
    """
    nbytes = sum(layer.master.nbytes for each in inputs for layer in each.layers if layer.master)
    return Masters(inputs, run and hasattr(mmap, "MADV_DONTNEED") and available_bytes() < 2 * nbytes)


def count_input(context: Context, o: op.Linear) -> None:
    """Add the squares of an input to its sums, once for all layers that read it."""
    index = context.masters.indices.get(o.linear.name) if context.source == "masters" else None
    if index is None:
        return
    shared, (x, stride) = context.masters.inputs[index], context.place(o.x)
    if shared.layers[0].name == o.linear.name:
        args = requantize.SquaresArgs(
            x=x, x_stride=stride, counted=context.arrays.counted,
            sums_pointer=context.arrays.sums, sums_offset=4 * shared.offset, columns=shared.columns,
        )  # fmt: skip
        context.emit(kernel(requantize.add_squares), args, parts=channel_parts(shared.columns))


def release_master(context: Context, o: op.Linear) -> None:
    """After a product with a master its pages leave the memory, if that is worth it."""
    if context.masters.released and context.masters.indices.get(o.linear.name) is not None:
        assert o.linear.master
        for ref in o.linear.master.arrays.values():
            address, length = context.file.pages(ref)
            if length >= MIN_RELEASED_BYTES:
                args = requantize.ReleaseArgs(pages=address, length=length, advice=mmap.MADV_DONTNEED)
                context.emit(kernel(requantize.release), args)
