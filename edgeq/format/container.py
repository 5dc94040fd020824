"""The bytes of an .edgeq file, and its reader.

    0        header, 64 bytes, little endian:
               magic 8 | version u32 | header length u32 | data offset u64 | data length u64 | metadata offset u64
               | metadata length u64 | BLAKE2b-128 of the metadata
    64       zeros
    16384    data: segments in execution order, each 64-byte aligned, contiguous, zeros between them
    ...      metadata: a FlatBuffer (model.fbs), to the end of the file

Rules, each a decision about hostile files: the header must describe the file to the byte (a truncated or extended file is
refused); segments must cover the data area in order without holes or overlap, and each belongs to exactly one array, blob or
set of compiled kernels (no hidden payload); every size is checked against the file before anything is allocated or mapped from
it.  The digest of the metadata, which holds the digests of all segments, is the identity of the file.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.errors import FormatError, InputError, UnsupportedError
from edgeq.format import manifest
from edgeq.format.codec import MAX_ENTRY, Codec
from edgeq.format.metadata import ALIGNMENT, DIGEST_BYTES, Metadata, Segment
from edgeq.format.metadata_codec import decode
from edgeq.format.quantization import check_scales
from edgeq.format.records import DTYPES, ArrayRef

MAGIC = b"edgeq\r\n\x1a"
VERSION = 1
# The largest page size of a supported board (Raspberry Pi 5): data can be mapped and protected apart from the header.
DATA_OFFSET = 16384
MAX_METADATA = 64 << 20
_HEADER = struct.Struct("<8sIIQQQQ16s")


def digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _open_at_once(path: str, flags: int) -> int:
    """Opening a pipe without a writer would wait for one; of a regular file the flag changes nothing."""
    return os.open(path, flags | os.O_NONBLOCK)


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class FileHeader:
    data_length: int
    metadata_length: int
    metadata_digest: bytes

    @property
    def metadata_offset(self) -> int:
        return DATA_OFFSET + self.data_length

    def encode(self) -> bytes:
        return _HEADER.pack(
            MAGIC,
            VERSION,
            _HEADER.size,
            DATA_OFFSET,
            self.data_length,
            self.metadata_offset,
            self.metadata_length,
            self.metadata_digest,
        )

    @classmethod
    def decode(cls, data: bytes, file_size: int) -> FileHeader:
        """The header of a file of `file_size` bytes.

        UnsupportedError: a newer version.  FormatError: it does not describe exactly that file.
        """
        if len(data) < _HEADER.size or data[:8] != MAGIC:
            raise FormatError("not an .edgeq file; make one with: edgeq convert SRC -o OUT.edgeq")
        fields = _HEADER.unpack(data[: _HEADER.size])
        _, version, length, data_offset, data_length, offset, metadata_length, metadata_digest = fields
        if version > VERSION:
            raise UnsupportedError(f"the file has format version {version}; this edgeq reads up to {VERSION}: upgrade edgeq")
        header = cls(data_length, metadata_length, metadata_digest)
        sound = (version, length, data_offset) == (VERSION, _HEADER.size, DATA_OFFSET)
        if not sound or data_length % ALIGNMENT or offset != header.metadata_offset:
            raise FormatError("the header is damaged; copy or convert the file again")
        if metadata_length > MAX_METADATA:
            raise FormatError(f"the header claims {metadata_length} bytes of metadata; at most {MAX_METADATA} are possible")
        if offset + metadata_length != file_size:
            raise FormatError(
                f"the file has {file_size} bytes, its header states {offset + metadata_length}: "
                "truncated or damaged; copy it again"
            )
        return header


class ModelFile:
    """An open, checked, memory-mapped .edgeq file.  Arrays are views of the mapping: nothing is copied."""

    def __init__(self, path: Path, header: FileHeader, metadata: Metadata, segments: list[Segment], mapped: mmap.mmap) -> None:
        self.path = path
        self.header = header
        self.metadata = metadata
        self.segments = segments
        self.mapped = mapped
        self._bytes = np.frombuffer(mapped, np.uint8)

    @property
    def is_intact(self) -> bool:
        """Whether the file that is mapped still has its length and its header, in which the digest of all it holds is.

        Writing to a file changes what every process has mapped of it; another file that takes its name does not.
        """
        return self.mapped.size() == len(self.mapped) and self.mapped[: _HEADER.size] == self.header.encode()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ModelFile:
        """Map the file and check everything but the digests of the data (see `verify`).

        InputError: no such file.  FormatError: damaged.  UnsupportedError: a newer version, codec or part.
        """
        path = Path(path)
        try:
            with open(path, "rb", opener=_open_at_once) as file:
                size = os.fstat(file.fileno()).st_size
                header = FileHeader.decode(file.read(_HEADER.size), size)
                if any(file.read(DATA_OFFSET - _HEADER.size)):
                    raise FormatError("the bytes after the header are not zero: damaged; copy or convert the file again")
                file.seek(header.metadata_offset)
                data = file.read(header.metadata_length)
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                _ask_for_large_pages(mapped)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None
        except UnsupportedError as error:
            raise UnsupportedError(f"{path}: {error}") from None
        except FileNotFoundError:
            raise InputError(f"{path}: no such file") from None
        except OSError as error:
            raise InputError(f"{path}: cannot read it: {error.strerror}") from None
        try:
            if digest(data) != header.metadata_digest:
                raise FormatError("the metadata does not match its digest: damaged; copy or convert the file again")
            metadata, segments = decode(data, header.data_length)
            _check_segments(segments, header)
            manifest.check(metadata)
            _check_arrays(metadata, segments)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None
        except UnsupportedError as error:
            raise UnsupportedError(f"{path}: {error}") from None
        opened = cls(path, header, metadata, segments, mapped)
        for name, linear in metadata.linears.items():
            if linear.input_order:
                # A gather reads where these numbers point.
                order = opened.array(linear.input_order)
                if not np.array_equal(np.sort(order), np.arange(linear.columns)):
                    raise FormatError(f"{path}: {name}: input_order is not a permutation of {linear.columns} channels")
            if linear.activation and linear.activation.scales:
                check_scales(f"{path}: {name}", opened.array(linear.activation.scales))
            for weight in (*linear.weights, *([linear.master] if linear.master else [])):
                if "table" in weight.arrays:
                    # Kernels add up products of entries in as many bits as those of such a size need.
                    _check_table(f"{path}: {name}", weight.codec, opened.array(weight.arrays["table"]))
        return opened

    @property
    def size(self) -> int:
        return self.header.metadata_offset + self.header.metadata_length

    @property
    def identity(self) -> str:
        """The digest of the metadata, hence of all contents, in hexadecimal."""
        return self.header.metadata_digest.hex()

    def segment(self, index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a segment as a read-only view of the mapping."""
        s = self.segments[index]
        return self._bytes[s.offset : s.offset + s.length]

    def array(self, ref: ArrayRef) -> np.ndarray[Any, Any]:
        """An array as a read-only view of the mapping; bf16 as uint16 bits."""
        data = self.segment(ref.segment)[ref.skipped : ref.skipped + ref.nbytes]
        return data.view(DTYPES[ref.dtype]).reshape(ref.shape)

    def pages(self, ref: ArrayRef) -> tuple[int, int]:
        """(address, bytes) of the whole pages of the mapping that hold nothing but this array."""
        s, size = self.segments[ref.segment], mmap.PAGESIZE
        begin = s.offset + ref.skipped
        first, last = -(-begin // size) * size, (begin + ref.nbytes) // size * size
        return int(self._bytes.ctypes.data) + first, max(0, last - first)

    def release(self, ref: ArrayRef, uncached: bool = False) -> None:
        """Drop the pages of an array from memory; a later read loads them again.

        uncached   the system drops them from its cache of files too: where a GPU shares the memory, they would be in its way
        """
        address, length = self.pages(ref)
        first = address - int(self._bytes.ctypes.data)
        if length and hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED, first, length)
        if length and uncached and hasattr(os, "posix_fadvise"):
            # What is mapped stays in the cache: only after it left the map.
            with suppress(OSError), self.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), first, length, os.POSIX_FADV_DONTNEED)

    def blob(self, name: str) -> bytes | None:
        index = self.metadata.blobs.get(name)
        return None if index is None else self.segment(index).tobytes()

    def verify(self) -> Iterator[tuple[int, int]]:
        """Check the digest of every segment and the padding between segments; yields (bytes done, total bytes).

        FormatError names the layer whose bytes are damaged.
        """
        done = 0
        for index, s in enumerate(self.segments):
            if digest(self.segment(index)) != s.digest:
                damaged = f"{self.owner(index)} is damaged (segment {index})"
                raise FormatError(f"{self.path}: {damaged}; copy or convert the file again")
            if self._bytes[s.offset + s.length : aligned(s.offset + s.length)].any():
                damaged = f"the padding after segment {index} is not zero"
                raise FormatError(f"{self.path}: {damaged}; copy or convert the file again")
            done += s.length
            yield done, self.header.data_length

    def owner(self, index: int) -> str:
        """A description of what segment `index` holds."""
        return next(name for name, segment in _uses(self.metadata) if segment == index)


def _ask_for_large_pages(mapped: mmap.mmap) -> None:
    """Where Linux can, a file that is not in memory yet is read in pages of 2 MiB: decode reads all of it for every token.

    1B shape, 4 bits, one thread, read from disk: 66 ms of processor time per token; with small pages 97.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without large pages refuses.
        with suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)


def _uses(metadata: Metadata) -> Iterator[tuple[str, int]]:
    """(owner, segment) of everything in the data area."""
    for name, linear in metadata.linears.items():
        yield from ((f"{name} {part}", ref.segment) for part, ref in linear.arrays())
    for name, array in metadata.arrays.items():
        yield name, array.segment
    yield from metadata.blobs.items()
    yield from ((f"kernels for {target}", segment) for target, segment in metadata.kernels.items())


def _check_table(owner: str, codec: Codec, table: np.ndarray[Any, np.dtype[np.int8]]) -> None:
    most, (least, largest) = MAX_ENTRY[codec.wide], (table.min(), table.max())
    if least < -most or largest > most:
        raise FormatError(
            f"{owner}: its table has entries from {least} to {largest}; those of {codec.name} have {most} at most"
        )


def _check_segments(segments: list[Segment], header: FileHeader) -> None:
    at = DATA_OFFSET
    for index, s in enumerate(segments):
        if s.offset != at or not 0 < s.length <= header.metadata_offset - at:
            raise FormatError(f"segment {index} does not follow the one before it, or leaves the file: damaged or hostile")
        at = aligned(s.offset + s.length)
    if at != header.metadata_offset:
        raise FormatError("segments do not cover the data area: damaged or hostile")


def _check_arrays(metadata: Metadata, segments: list[Segment]) -> None:
    owners: dict[int, str] = {}
    for owner, index in _uses(metadata):
        if index >= len(segments):
            raise FormatError(f"{owner} lies in segment {index}; the file has {len(segments)}")
        if index in owners:
            raise FormatError(f"{owner} and {owners[index]} share segment {index}")
        owners[index] = owner
    if len(owners) != len(segments):
        raise FormatError(f"{len(segments) - len(owners)} segments belong to nothing: damaged or hostile")
    refs = [ref for linear in metadata.linears.values() for _, ref in linear.arrays()]
    for ref in [*refs, *metadata.arrays.values()]:
        if ref.nbytes != segments[ref.segment].length:
            raise FormatError(f"{owners[ref.segment]} has {segments[ref.segment].length} bytes; its shape implies {ref.nbytes}")
