"""Writes an .edgeq file: segments are appended as they are made, then the metadata; only a finished file gets its name.

Until then the file is `OUT.edgeq.partial`.  A killed conversion continues after the segments that `sync` returned last; bytes
after them are cut off.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.container import DATA_OFFSET, Header, ModelFile, aligned, digest
from edgeq.errors import ResourceError
from edgeq.metadata import DIGEST_BYTES, Metadata, Segment
from edgeq.metadata_codec import encode
from edgeq.partial import Partial, check_replaceable
from edgeq.records import DTYPES, ArrayRef

BLOCK_BYTES = 2 << 20
"""Linux (from 6.16 on, ext4) maps a file in huge pages if it was written in whole blocks at multiples of their size; otherwise
only after the file was read from the disk again.  Decode is a few percent faster with huge pages."""


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
        self._pending, self._written = bytearray(), self._at
        self._file = self._lock.file
        try:
            self._file.truncate(self._at if segments else 0)
            self._file.truncate(self._at)
            self._file.seek(self._at)
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
            room = BLOCK_BYTES - (self._written + len(self._pending)) % BLOCK_BYTES
            if self._pending or len(left) < room:
                count = min(room, len(left))
                self._pending += left[:count]
                if count == room:
                    self._write_pending()
            else:
                count = room + (len(left) - room) // BLOCK_BYTES * BLOCK_BYTES
                self._file.write(left[:count])
                self._written += count
            left = left[count:]

    def _write_pending(self) -> None:
        self._file.write(self._pending)
        self._written += len(self._pending)
        self._pending.clear()

    def sync(self) -> list[Segment]:
        """Flush everything to the disk; returns the segments that a resumed run may rely on."""
        try:
            self._write_pending()
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from None
        return list(self.segments)

    def finish(self, metadata: Metadata) -> ModelFile:
        """Write metadata and header, sync and rename; the finished file is opened, and so checked, before it gets its name."""
        data = encode(metadata, self.segments)
        header = Header(self._at - DATA_OFFSET, len(data), digest(data))
        try:
            self._put(data)
            self.sync()
            self._file.seek(0)
            self._file.write(header.encode())
            self.sync()
            ModelFile.open(self.partial)
            check_replaceable(self.path)
            os.replace(self.partial, self.path)
            # Only now: another conversion that got the lock before would have cut the file.
            self._lock.close()
            directory = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
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
