"""Writes an .edgeq file: segments are appended as they are made, then the metadata; only a finished file gets its name.

Until then the file is `OUT.edgeq.partial`.  A killed conversion continues after the segments that `sync` returned last; bytes
after them are cut off.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.errors import ResourceError
from edgeq.format.container import DATA_OFFSET, FileHeader, ModelFile, aligned, digest
from edgeq.format.metadata import DIGEST_BYTES, Metadata, Segment
from edgeq.format.metadata_codec import encode
from edgeq.format.partial import Partial, check_replaceable
from edgeq.format.records import DTYPES, ArrayRef
from edgeq.system.whole_file import sync_folder

BLOCK_BYTES = 2 << 20
"""Linux (from 6.16 on, ext4) maps a file in huge pages where it was written in whole blocks at multiples of their size, else
only after it was read from the disk again.  A block that had to be on the disk before it was full is written again later."""


class Writer:
    """Appends segments to `path`.partial; `finish` writes metadata and header, syncs and renames."""

    def __init__(self, path: Path, segments: list[Segment] | None = None, partial: Partial | None = None) -> None:
        """Begin a new partial file, or continue with `segments` that of a killed run, cut after the last of them.

        partial: that of `path`, if it is locked already.  InputError: `path` is something that is not replaced, the file cannot
        be written, or another process writes it.
        """
        check_replaceable(path)
        self.path = path
        self._lock = partial or Partial(path)
        self.partial = self._lock.path
        self.segments = list(segments or ())
        last = self.segments[-1] if self.segments else None
        self._at = aligned(last.offset + last.length) if last else DATA_OFFSET
        # Where the block begins that is not full, and what is in it.
        self._block, self._pending = self._at // BLOCK_BYTES * BLOCK_BYTES, bytearray()
        self._file = self._lock.file
        try:
            self._file.truncate(self._at if segments else 0)
            self._file.truncate(self._at)
            self._file.seek(self._block)
            self._pending += self._file.read(self._at - self._block)
            self._forget_block()
        except OSError as error:
            raise self._failed(error) from None

    def append(self, chunks: Iterable[Any]) -> int:
        """Write the bytes of `chunks` (arrays or bytes) as one segment; returns its index.

        ResourceError: the disk is full; nothing is written under the final name, and a later run can continue.
        """
        hasher, length = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
        try:
            for chunk in chunks:
                data = chunk if isinstance(chunk, bytes) else np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
                hasher.update(data)
                self._put(data)
                length += len(data)
            end = self._at + length
            self._put(bytes(aligned(end) - end))
        except OSError as error:
            raise self._failed(error) from None
        self.segments.append(Segment(self._at, length, hasher.digest()))
        self._at = aligned(end)
        return len(self.segments) - 1

    def array(self, a: np.ndarray[Any, Any], dtype: str) -> ArrayRef:
        """Append a plain array stored as `dtype` ("bf16": its uint16 bits)."""
        return self.stream([np.ascontiguousarray(a, DTYPES[dtype])], dtype, a.shape)

    def stream(self, chunks: Iterable[Any], dtype: str, shape: tuple[int, ...]) -> ArrayRef:
        """Append a plain array whose consecutive pieces are `chunks`."""
        ref = ArrayRef(dtype, tuple(int(n) for n in shape), self.append(chunks))
        if ref.nbytes != self.segments[-1].length:
            raise ValueError(f"{self.segments[-1].length} bytes written for {dtype} {shape}")
        return ref

    def _put(self, data: bytes | memoryview) -> None:
        """Write as much of `data` as completes blocks; the rest waits for the next call."""
        left = memoryview(data)
        while len(left):
            room = BLOCK_BYTES - len(self._pending)
            if self._pending or len(left) < room:
                count = min(room, len(left))
                self._pending += left[:count]
                if count == room:
                    self._file.write(self._pending)
                    self._block += BLOCK_BYTES
                    self._pending.clear()
            else:
                count = len(left) // BLOCK_BYTES * BLOCK_BYTES
                self._file.write(left[:count])
                self._block += count
            left = left[count:]

    def _forget_block(self) -> None:
        """The next write is of the block again, and finds nothing of it in the system's cache of files."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._file.fileno(), self._block, 0, os.POSIX_FADV_DONTNEED)
        self._file.seek(self._block)

    def sync(self) -> list[Segment]:
        """Flush everything to the disk; returns the segments that a resumed run may rely on."""
        try:
            self._file.write(self._pending)
            self._flush()
            self._forget_block()
        except OSError as error:
            raise self._failed(error) from None
        return list(self.segments)

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, metadata: Metadata) -> ModelFile:
        """Write metadata and header, sync and rename; the finished file is opened, and so checked, before it gets its name."""
        data = encode(metadata, self.segments)
        header = FileHeader(self._at - DATA_OFFSET, len(data), digest(data))
        try:
            self._put(data)
            self._file.write(self._pending)
            self._flush()
            self._file.seek(0)
            self._file.write(header.encode())
            self._flush()
            ModelFile.open(self.partial)
            check_replaceable(self.path)
            os.replace(self.partial, self.path)
            # Only now: another conversion that got the lock before would have cut the file.
            self._lock.close()
            sync_folder(self.path.parent)
        except OSError as error:
            raise self._failed(error) from None
        return ModelFile.open(self.path)

    def close(self) -> None:
        """Close the partial file and leave it as it is."""
        self._lock.close()

    def _failed(self, error: OSError) -> ResourceError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return ResourceError(
                f"{self.path}: the disk is full after {self._at} bytes; "
                "free some space and run the same command again: it continues"
            )
        return ResourceError(f"{self.path}: writing failed: {error.strerror}")
