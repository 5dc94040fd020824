"""Addresses: aligned arrays whose machine addresses a table can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.format.codec import from_bf16
from edgeq.format.container import ModelFile
from edgeq.format.records import ArrayRef
from edgeq.targets.rows import PagePart

ALIGNMENT = 64
SPACING, APART = 4096, 5 * 64
"""Bytes between addresses that a first-level cache keeps in the same place, and an odd number of lines."""


def padded(n: int, multiple: int = 16) -> int:
    return -(-n // multiple) * multiple


def row_stride(width: int) -> int:
    """Bytes from one row of so many floats to the next: no multiple of 4096, or rows would compete for the same few lines of a
    cache."""
    nbytes = 4 * padded(width)
    return nbytes if nbytes % SPACING else nbytes + APART


def zeros(nbytes: int) -> NDArray[np.uint8]:
    """`nbytes` zero bytes at an address that is a multiple of 64; the memory is real only where it is written.

    The 64 bytes after them may be read: a vector need not end where an array does.
    """
    whole = np.zeros(nbytes + 2 * ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


class CpuPart(PagePart):
    """A part of a cache page.  It starts as zeros and holds finite numbers: what a row does not see is weighted by 0, and
    0 x inf is not 0."""

    __slots__ = ("address", "data")

    def __init__(self, data: NDArray[np.uint8]) -> None:
        """`data`: of `zeros`, with finite numbers."""
        self.data = data
        self.address = data.ctypes.data


class Buffers:
    """All memory of a program but the pages: arrays stay alive as long as it does, so their addresses stay valid."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._kept: dict[int, NDArray[Any]] = {}
        self._floats: dict[ArrayRef, int] = {}
        self._shared: dict[Hashable, int] = {}
        self.allocated = 0

    def reserve(self, nbytes: int) -> int:
        """Address of `nbytes` zero bytes."""
        return self.array(nbytes, np.uint8)[1]

    def shared(self, name: Hashable, nbytes: int) -> int:
        """The address of `nbytes` bytes that all who ask by this name use in turn: tables of several modes, layers."""
        if (name, nbytes) not in self._shared:
            self._shared[name, nbytes] = self.reserve(nbytes)
        return self._shared[name, nbytes]

    def copied(self, values: NDArray[Any]) -> int:
        """The address of a copy, which may be read a vector beyond its end; the same for the same values."""
        name = (values.dtype.str, hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=16).digest())
        if name not in self._shared:
            data, self._shared[name] = self.array(values.size, values.dtype)
            data[:] = values.ravel()
        return self._shared[name]

    def array(self, shape: int | tuple[int, ...], dtype: Any) -> tuple[NDArray[Any], int]:
        """A zeroed array and its address."""
        data = zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
        address = int(data.ctypes.data)
        self._kept[address] = data
        self.allocated += data.nbytes
        return data, address

    def view(self, address: int) -> NDArray[Any]:
        """The array at an address that `reserve` or `array` gave."""
        return self._kept[address]

    def stored(self, ref: ArrayRef | None) -> int:
        """Address of an array in the mapped file; 0 for none."""
        return 0 if ref is None else int(self._file.array(ref).ctypes.data)

    def floats(self, ref: ArrayRef) -> int:
        """Address of a small stored vector (a gain, a bias) as f32, padded to 16 with zeros."""
        if ref not in self._floats:
            values = self._file.array(ref)
            data, self._floats[ref] = self.array(padded(values.size), np.float32)
            data[: values.size] = from_bf16(values) if ref.dtype == "bf16" else values
        return self._floats[ref]
