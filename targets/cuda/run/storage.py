"""What a program holds on its device: weights, buffers, what a run sends, and the pages of the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import UnsupportedError
from edgeq.format.codec import AnyArray, as_float32
from edgeq.format.container import ModelFile
from edgeq.format.records import ArrayRef
from edgeq.targets.cuda.device.device import Device, Memory, upload
from edgeq.targets.rows import Page, PagePart, parts_of

MAX_BYTES = 4 << 31
"""Bytes of an array or a buffer: kernels count its words of 4 bytes in int32."""
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
    beside     what another program holds, and what that has beside it, whose arrays of the file are used before any is uploaded
    """

    def __init__(self, device: Device, file: ModelFile, streamed: Iterable[Group] = (), beside: Storage | None = None) -> None:
        self.device, self._file, self._beside = device, file, beside
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

    def minus_exp(self, ref: ArrayRef) -> int:
        """The address of -exp of an array, as f32."""
        if not self.has(("-exp", ref)):
            with np.errstate(over="ignore"):
                values = -np.exp(as_float32(self._file.array(ref), ref.dtype))
            self.named(("-exp", ref), values.nbytes)
            self.send(("-exp", ref), values)
        return self.address(("-exp", ref))

    def constants(self, values: tuple[float, ...]) -> int:
        """The address of numbers that are not in the file, as f32."""
        name = "constants", values
        if not self.has(name):
            self.named(name, 4 * len(values))
            self.send(name, np.array(values, np.float32))
        return self.address(name)

    def _known(self, key: tuple[ArrayRef, bool]) -> Memory | None:
        """An array that is on the device already."""
        return self._uploaded.get(key) or (self._beside._known(key) if self._beside else None)

    def _upload(self, ref: ArrayRef, as_stored: bool) -> int:
        if ref.whole:
            entry = ref.nbytes // ref.shape[0] if as_stored else 4 * prod(ref.shape[1:])
            return self._upload(ref.array, as_stored) + ref.first * entry
        key = ref, as_stored
        if (known := self._known(key)) is not None:
            return known.address
        stored = self._file.array(ref)
        if stored.nbytes > MAX_BYTES:
            raise UnsupportedError(
                f"the cuda target has no arrays of {stored.nbytes / (1 << 30):,.1f} GiB, only of up to {MAX_BYTES >> 30}; "
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
        if nbytes > MAX_BYTES:
            raise UnsupportedError(
                f"the cuda target has no buffers of {nbytes / (1 << 30):,.1f} GiB, only of up to {MAX_BYTES >> 30}; "
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


class CudaPart(PagePart):
    """A part of a page, in a pool to which its place returns when it is dropped."""

    __slots__ = ("_free", "address")

    def __init__(self, pool: Pool, address: int) -> None:
        self.address, self._free = address, pool.free

    def __del__(self) -> None:
        # No call of the device: this can run in any thread, at any time.
        self._free.append(self.address)


class Pool:
    """Parts of cache pages of one program, or its states, of one size, in memory that grows by so many `together`; what it has
    it keeps."""

    def __init__(self, device: Device, part_bytes: int, together: int = POOL_PAGES) -> None:
        self.part_bytes, self._together = part_bytes, together
        self.free: deque[int] = deque()
        self._device = device
        self._stride = -(-part_bytes // 256) * 256
        self._memories: list[Memory] = []
        self._grow()

    def _grow(self) -> None:
        memory = self._device.allocate(self._stride * self._together)
        self._memories.append(memory)
        self.free.extend(memory.address + i * self._stride for i in range(self._together))

    @property
    def base(self) -> int:
        return self._memories[0].address

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memories)

    def part(self) -> CudaPart:
        """Zeros: what was never written is multiplied by zero, and a NaN would stay."""
        if not self.free:
            self._grow()
        part = CudaPart(self, self.free.popleft())
        self._device.zero(part.address, self.part_bytes)
        return part


class Pages:
    """The cache pages of one program.

    base   the address from which kernels count, in units of POOL_UNIT bytes
    """

    def __init__(self, device: Device, part_bytes: tuple[int, int]) -> None:
        """part_bytes   of layers without a window, and of those with one"""
        self._device, self._part_bytes = device, part_bytes
        self._pools = [Pool(device, nbytes) if nbytes else None for nbytes in part_bytes]
        self.base = next((pool.base for pool in self._pools if pool), 0)

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools if pool)

    def page(self, windowed: bool = True) -> Page:
        """A page of zeros, with or without layers that have a window."""
        parts = [pool.part() if pool else PagePart() for pool in self._pools[: 1 + windowed]]
        return Page(parts[0], parts[1] if windowed else None)

    def offset(self, page: Page, windowed: bool) -> int:
        """Where a part of the page begins, in units of POOL_UNIT bytes; 0 for one that was dropped, which no row sees."""
        part = page.windowed if windowed else page.full
        return (part.address - self.base) // POOL_UNIT if isinstance(part, CudaPart) else 0

    def contents(self, page: Page) -> NDArray[np.uint8]:
        data = self.host_memory(page.windowed is not None)
        for part, its in self._with_bytes(page, data):
            self._device.read(part.address, its)
        return data

    def host_memory(self, windowed: bool = True) -> NDArray[np.uint8]:
        """Memory of the host for the contents of a page."""
        return np.empty(sum(self._part_bytes[: 1 + windowed]), np.uint8)

    def filled(self, data: NDArray[np.uint8]) -> Page:
        """A page with these contents.  ValueError: another number of bytes."""
        page = self.page(parts_of(data, self._part_bytes)[1] is not None)
        for part, its in self._with_bytes(page, data):
            self._device.write(part.address, its)
        return page

    def _with_bytes(self, page: Page, data: NDArray[np.uint8]) -> Iterator[tuple[CudaPart, NDArray[np.uint8]]]:
        """The parts that have memory on the device, and what `data` has of each."""
        for part, its in zip((page.full, page.windowed), parts_of(data, self._part_bytes), strict=True):
            if isinstance(part, CudaPart) and its is not None:
                yield part, its
