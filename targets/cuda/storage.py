"""What a program holds on its device: weights, buffers, what a run sends, and the pages of the cache."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.codec import AnyArray
from edgeq.container import ModelFile
from edgeq.records import ArrayRef
from edgeq.targets.cuda.device import Device, Memory, upload
from edgeq.targets.reference.context import as_float32
from edgeq.targets.rows import Page

POOL_PAGES = 16
"""Pages that the pool of a cache grows by."""
POOL_UNIT = 16
"""Bytes in which kernels count the offsets of pages."""


class Storage:
    """Arrays of the file, each uploaded once, and memory by name; addresses do not change."""

    def __init__(self, device: Device, file: ModelFile) -> None:
        self.device, self._file = device, file
        self._uploaded: dict[tuple[ArrayRef, bool], Memory] = {}
        self._named: dict[object, Memory] = {}

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in (*self._uploaded.values(), *self._named.values()))

    def array(self, ref: ArrayRef) -> int:
        """The address of an array as it is in the file."""
        return self._upload(ref, as_stored=True)

    def floats(self, ref: ArrayRef) -> int:
        """The address of an array as f32."""
        return self._upload(ref, as_stored=False)

    def _upload(self, ref: ArrayRef, as_stored: bool) -> int:
        key = ref, as_stored
        if key not in self._uploaded:
            stored: AnyArray = self._file.array(ref)
            self._uploaded[key] = upload(self.device, stored if as_stored else as_float32(stored, ref.dtype))
        return self._uploaded[key].address

    def named(self, name: object, nbytes: int) -> int:
        """The address of memory that is made, as zeros, when it is first asked for."""
        memory = self._named.get(name)
        if memory is None:
            memory = self._named[name] = self.device.allocate(nbytes)
            self.device.zero(memory.address, nbytes)
        if memory.nbytes < nbytes:
            raise ValueError(f"{name}: {nbytes} bytes, of {memory.nbytes} that were allocated")
        return memory.address

    def has(self, name: object) -> bool:
        return name in self._named

    def address(self, name: object) -> int:
        return self._named[name].address

    def send(self, name: object, data: NDArray[Any]) -> None:
        """Fill the beginning of the memory of that name."""
        memory = self._named[name]
        if data.nbytes > memory.nbytes:
            raise ValueError(f"{name}: {data.nbytes} bytes for {memory.nbytes}")
        self.device.write(memory.address, np.ascontiguousarray(data))


class CudaPage(Page):
    """A page of a pool, to which its place returns when the page is dropped."""

    def __init__(self, pool: Pool, address: int) -> None:
        self.address, self._free = address, pool.free

    def __del__(self) -> None:
        # No call of the device: this can run in any thread, at any time.
        self._free.append(self.address)


class Pool:
    """Cache pages of one program, in memory that grows by POOL_PAGES; what it has it keeps.

    base   the address from which kernels count, in units of POOL_UNIT bytes
    """

    def __init__(self, device: Device, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.free: deque[int] = deque()
        self._device = device
        self._stride = -(-page_bytes // 256) * 256
        self._memories: list[Memory] = []
        self._grow()
        self.base = self._memories[0].address

    def _grow(self) -> None:
        memory = self._device.allocate(self._stride * POOL_PAGES)
        self._memories.append(memory)
        self.free.extend(memory.address + i * self._stride for i in range(POOL_PAGES))

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memories)

    def page(self) -> CudaPage:
        """A page of zeros: what was never written is multiplied by zero, and a NaN would stay."""
        if not self.free:
            self._grow()
        page = CudaPage(self, self.free.popleft())
        self._device.zero(page.address, self.page_bytes)
        return page

    def offset(self, page: Page) -> int:
        assert isinstance(page, CudaPage)
        return (page.address - self.base) // POOL_UNIT

    def contents(self, page: Page) -> NDArray[np.uint8]:
        assert isinstance(page, CudaPage)
        data = np.empty(self.page_bytes, np.uint8)
        self._device.read(page.address, data)
        return data

    def filled(self, data: NDArray[np.uint8]) -> CudaPage:
        """A page with these contents.  ValueError: another number of bytes."""
        if len(data) != self.page_bytes:
            raise ValueError(f"{len(data)} bytes for a page of {self.page_bytes}")
        page = self.page()
        self._device.write(page.address, data)
        return page
