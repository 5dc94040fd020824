"""An electric fence for machine code: what a program allocates, and what it reads of a file, lies between pages that cannot be
touched, and ends as near to the second of them as the rules allow.

An array of the program ends a line of 64 bytes before the page, since one vector beyond its end may be read (`buffers.zeros`);
a segment of the file ends at it, after the padding to a whole line that every file has.  What may be read but is nobody's holds
0xff, which as a float is a NaN; a byte of it that is written is a finding of `check`.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from edgeq.format.container import ModelFile
from edgeq.targets.cpu import requantized
from edgeq.targets.cpu.jit import buffers

LINE, SLACK = 64, 64
CANARY = 0xFF
PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Fence:
    """Arrays between guard pages.  Each lives as long as something refers to it."""

    def __init__(self) -> None:
        self._made: list[tuple[NDArray[np.uint8], int, int]] = []

    def array(self, nbytes: int, slack: int) -> NDArray[np.uint8]:
        """`nbytes` zero bytes at a multiple of 64, with `slack` readable ones after them, up to a whole line."""
        page = mmap.PAGESIZE
        room = -(-(nbytes + slack) // LINE) * LINE
        inner = -(-max(room, 1) // page) * page
        memory = mmap.mmap(-1, inner + 2 * page)
        whole = np.frombuffer(memory, np.uint8)
        for guard in (whole.ctypes.data, whole.ctypes.data + page + inner):
            if _libc.mprotect(guard, page, PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        start = page + inner - room
        # Pages that nothing writes stay without memory: canaries end a page from the array.
        whole[max(page, start - page) : start] = CANARY
        whole[start + nbytes : page + inner] = CANARY
        self._made.append((whole, start, nbytes))
        return whole[start : start + nbytes]

    def zeros(self, nbytes: int) -> NDArray[np.uint8]:
        """In place of `buffers.zeros`."""
        return self.array(nbytes, SLACK)

    def check(self) -> None:
        """AssertionError: a byte beside an array was written."""
        page = mmap.PAGESIZE
        for whole, start, nbytes in self._made:
            for beside in (whole[max(page, start - page) : start], whole[start + nbytes : len(whole) - page]):
                assert (beside == CANARY).all(), f"a byte beside an array of {nbytes} bytes was written"

    def clear(self) -> None:
        self._made.clear()


@contextmanager
def fenced() -> Iterator[Fence]:
    """Programs compiled in the block have their arrays, and the segments of files opened in it, in a fence."""
    fence = Fence()
    plain_zeros, plain_segment = buffers.zeros, ModelFile.segment
    copies: dict[tuple[int, int], tuple[ModelFile, NDArray[np.uint8]]] = {}

    def segment(self: ModelFile, index: int) -> NDArray[np.uint8]:
        key = id(self), index
        if key not in copies:
            data = plain_segment(self, index)
            copy = fence.array(len(data), 0)
            copy[:] = data
            copy.flags.writeable = False
            # The file is kept too: another one could get its id.
            copies[key] = self, copy
        return copies[key][1]

    buffers.zeros = requantized.zeros = fence.zeros
    ModelFile.segment = segment  # type: ignore[method-assign]
    try:
        yield fence
    finally:
        buffers.zeros = requantized.zeros = plain_zeros
        ModelFile.segment = plain_segment  # type: ignore[method-assign]
