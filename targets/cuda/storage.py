"""What a program holds on its device: weights, buffers, what a run sends, and the pages of the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.codec import AnyArray
from edgeq.container import ModelFile
from edgeq.errors import UnsupportedError
from edgeq.records import ArrayRef
from edgeq.targets.cuda.device import Device, Memory, upload
from edgeq.targets.reference.context import as_float32
from edgeq.targets.rows import Page

MOST_BYTES = 4 << 31
"""Of an array or a buffer: kernels count its words of 4 bytes in int32."""
POOL_PAGES = 16
"""Pages that the pool of a cache grows by."""
PIECE_BYTES = 32 << 20
"""Bytes of an array that are copied to the device at once."""
POOL_UNIT = 16
"""Bytes in which kernels count the offsets of pages."""


STREAMED = "streamed"
ALIGNMENT = 256
Group = tuple[ArrayRef, ...]


class Storage:
    """Arrays of the file, each uploaded once, and memory by name; addresses do not change.

    streamed   groups of arrays that are not kept: all take turns in the same memory (`bring`)
    """

    def __init__(self, device: Device, file: ModelFile, streamed: Iterable[Group] = ()) -> None:
        self.device, self._file = device, file
        self._uploaded: dict[tuple[ArrayRef, bool], Memory] = {}
        self._named: dict[object, Memory] = {}
        self._turns: dict[ArrayRef, int] = {}
        largest = 0
        for group in streamed:
            end = 0
            for ref in group:
                self._turns[ref] = end
                end += -(-ref.nbytes // ALIGNMENT) * ALIGNMENT
            largest = max(largest, end)
        if largest:
            self.named(STREAMED, largest)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in (*self._uploaded.values(), *self._named.values()))

    def array(self, ref: ArrayRef) -> int:
        """The address of an array as it is in the file; of a streamed one after `bring`."""
        if ref in self._turns:
            return self.address(STREAMED) + self._turns[ref]
        return self._upload(ref, as_stored=True)

    def streams(self, group: Group) -> bool:
        return any(ref in self._turns for ref in group)

    def bring(self, group: Sequence[ArrayRef]) -> None:
        """Copy a group to the memory of those that are streamed, after what was launched before."""
        for ref in group:
            self._fill(self.array(ref), self._file.array(ref))
            self._file.release(ref, uncached=self.device.integrated)

    def floats(self, ref: ArrayRef) -> int:
        """The address of an array as f32."""
        return self._upload(ref, as_stored=False)

    def _upload(self, ref: ArrayRef, as_stored: bool) -> int:
        key = ref, as_stored
        if key not in self._uploaded:
            stored = self._file.array(ref)
            if stored.nbytes > MOST_BYTES:
                raise UnsupportedError(
                    f"the cuda target has no arrays of {stored.nbytes / (1 << 30):,.1f} GiB, only of up to {MOST_BYTES >> 30}; "
                    "run with --target cpu"
                )
            if as_stored:
                self._uploaded[key] = self._copied(stored)
            else:
                self._uploaded[key] = upload(self.device, as_float32(stored, ref.dtype))
            # One copy is enough where the GPU has the memory of the processor; elsewhere the system keeps what it has read.
            self._file.release(ref, uncached=self.device.integrated)
        return self._uploaded[key].address

    def _copied(self, stored: AnyArray) -> Memory:
        memory = self.device.allocate(stored.nbytes)
        self._fill(memory.address, stored)
        return memory

    def _fill(self, address: int, stored: AnyArray) -> None:
        """Copy an array in pieces: a driver that copies through memory of its own then needs little of it."""
        data = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        for start in range(0, data.nbytes, PIECE_BYTES):
            self.device.write(address + start, data[start : start + PIECE_BYTES])

    def named(self, name: object, nbytes: int) -> int:
        """The address of memory that is made, as zeros, when it is first asked for.

        UnsupportedError: a kernel would count beyond its end, and wrap around.
        """
        if nbytes > MOST_BYTES:
            raise UnsupportedError(
                f"the cuda target has no buffers of {nbytes / (1 << 30):,.1f} GiB, only of up to {MOST_BYTES >> 30}; "
                "pass a smaller `max_rows` or `max_logits`"
            )
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
        data = self.host_memory()
        self._device.read(page.address, data)
        return data

    def host_memory(self) -> NDArray[np.uint8]:
        """Memory of the host for the contents of a page."""
        return np.empty(self.page_bytes, np.uint8)

    def filled(self, data: NDArray[np.uint8]) -> CudaPage:
        """A page with these contents.  ValueError: another number of bytes."""
        if len(data) != self.page_bytes:
            raise ValueError(f"{len(data)} bytes for a page of {self.page_bytes}")
        page = self.page()
        self._device.write(page.address, data)
        return page
