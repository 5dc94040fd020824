"""The header of a GGUF file (versions 2 and 3): metadata, and where its tensors lie.  No tensor is read.

    "GGUF", u32 version, u64 tensors, u64 entries; entries; tensors; zeros up to `general.alignment` (default 32); data
    string   u64 length, UTF-8          entry    string key, u32 type, value          array   u32 type, u64 count, values
    tensor   string name, u32 dimensions, u64 [dimensions] the fastest first, u32 type, u64 offset in the data

All of it is little endian.  Files come from strangers: cap, check, then loop; no length is used before it has been compared
with what is left of the file.  (The reader of the package gguf trusts counts, and takes seconds for a large vocabulary.)
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edgeq.errors import CheckpointError, UnsupportedError
from edgeq.format.safetensors import open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 256 << 20
"""Bytes of metadata and tensor entries; the largest vocabularies with their merges take 12 MB."""
MAX_ENTRIES = 1 << 14
MAX_TENSORS = 1 << 17
MAX_NAME = 256
MAX_STRING = 64 << 20
MAX_STRINGS = 1 << 21
"""Strings in all arrays together: each takes some sixty bytes of memory, for eight in the file."""
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
ALIGNMENT = "general.alignment"
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
FLOAT32, BOOL, STRING, ARRAY = 6, 7, 8, 9


@dataclass(frozen=True)
class TensorPlace:
    """shape   the slowest dimension first, as numpy has it
    type    ggml's number
    offset  bytes from the start of the file
    """

    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """metadata   key -> number, bool, str, numpy array of numbers, or list of str
    tensors    by name, in the order of the header;  size  of the file
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]
    size: int


def is_gguf(path: Path) -> bool:
    """Whether it is a file that begins as GGUF files do."""
    try:
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (CheckpointError, OSError):
        return False


def read_gguf(path: Path) -> GgufFile:
    """Read and check a header.

    CheckpointError: it is no GGUF file, truncated, or describes no file that could be.  UnsupportedError: big endian, or of
    another version.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            return _Header(path, file, size).read()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read it: {error.strerror}") from None


class _Header:
    """A header that is read from front to back."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._at, self._strings = 0, 0

    def read(self) -> GgufFile:
        if self._bytes(4, "magic") != MAGIC:
            raise CheckpointError(f"{self._path}: not a GGUF file")
        version = self._bytes(4, "version")
        number = int.from_bytes(version, "little")
        if number not in VERSIONS:
            if int.from_bytes(version, "big") in VERSIONS:
                raise UnsupportedError(f"{self._path}: a big-endian GGUF file; supported: little endian, as the hub has them")
            raise UnsupportedError(f"{self._path}: version {number} of GGUF; supported: 2 and 3")
        tensors, entries = self._u64("tensors"), self._u64("entries")
        self._limit("tensors", tensors, MAX_TENSORS, 24)
        self._limit("metadata entries", entries, MAX_ENTRIES, 13)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._name("metadata key")
            if key in metadata:
                raise self._damaged(f"metadata key {key!r:.80} is there twice")
            metadata[key] = self._value(key, self._u32(key))
        places: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name = self._name("tensor name")
            if name in places:
                raise self._damaged(f"tensor {name!r:.80} is there twice")
            places[name] = self._tensor(name)
        alignment = metadata.get(ALIGNMENT, 32)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment.bit_count() != 1:
            raise self._damaged(f"{ALIGNMENT} is {alignment!r:.40}; expected a power of two of at most {MAX_ALIGNMENT}")
        data = -(-self._at // alignment) * alignment
        for name, (_, _, offset) in places.items():
            if offset % alignment or offset > max(self._size - data, 0):
                raise self._damaged(f"tensor {name!r:.80} starts at byte {offset} of {max(self._size - data, 0)} of data")
        found = {name: TensorPlace(shape, kind, data + offset) for name, (shape, kind, offset) in places.items()}
        return GgufFile(self._path, metadata, found, self._size)

    def _tensor(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """Shape, type and offset in the data of the tensor whose name was read."""
        dimensions = self._u32(name)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name!r:.80} has {dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._u64(name) for _ in range(dimensions))[::-1]
        # No value takes less than a bit; so no product of dimensions is ever larger than can be computed with.
        if min(shape) < 1 or math.prod(shape) > 8 * self._size:
            raise self._damaged(f"tensor {name!r:.80} has the shape {shape}, more than a file of {self._size} bytes holds")
        return shape, self._u32(name), self._u64(name)

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._string(key)
        if kind == FLOAT32:
            # The shortest decimal of this number, which whoever wrote it had: 1e-06, not 9.999999974752427e-07.
            return float(str(self._numbers(key, kind, 1)[0]))
        if kind in NUMBERS:
            return self._numbers(key, kind, 1)[0].item()
        if kind != ARRAY:
            raise self._damaged(f"metadata key {key!r:.80} has a value of type {kind}; expected 0 to 12")
        kind, count = self._u32(key), self._u64(key)
        if kind in NUMBERS:
            return self._numbers(key, kind, count)
        if kind != STRING:
            raise self._damaged(f"metadata key {key!r:.80} is an array of type {kind}; expected numbers or strings")
        self._strings += count
        if self._strings > MAX_STRINGS:
            raise self._damaged(f"metadata key {key!r:.80} brings the strings to {self._strings}; at most {MAX_STRINGS}")
        self._limit(f"strings of {key!r:.80}", count, MAX_STRINGS, 8)
        return [self._string(key) for _ in range(count)]

    def _numbers(self, key: str, kind: int, count: int) -> np.ndarray[Any, np.dtype[Any]]:
        size = np.dtype(NUMBERS[kind]).itemsize
        self._limit(f"values of {key!r:.80}", count, MAX_HEADER // size, size)
        raw = self._bytes(count * size, key)
        if kind == BOOL and raw.strip(b"\0\1"):
            raise self._damaged(f"metadata key {key!r:.80} is neither true nor false")
        return np.frombuffer(raw, NUMBERS[kind])

    def _name(self, what: str) -> str:
        length = self._u64(what)
        if not 1 <= length <= MAX_NAME:
            raise self._damaged(f"a {what} of {length} bytes; expected 1 to {MAX_NAME}")
        return self._text(length, what)

    def _string(self, key: str) -> str:
        length = self._u64(key)
        if length > MAX_STRING:
            raise self._damaged(f"metadata key {key!r:.80} is a string of {length} bytes; at most {MAX_STRING}")
        return self._text(length, key)

    def _text(self, length: int, what: str) -> str:
        # Vocabularies hold pieces of characters: what is no UTF-8 must survive as far as a message.
        return self._bytes(length, what).decode("utf-8", "surrogateescape")

    def _u32(self, what: str) -> int:
        return int(struct.unpack("<I", self._bytes(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self._bytes(8, what))[0])

    def _bytes(self, count: int, what: str) -> bytes:
        if count > min(self._size, MAX_HEADER) - self._at:
            raise self._damaged(f"the header ends inside {what!r:.80}: truncated, or longer than {MAX_HEADER} bytes")
        found = self._file.read(count)
        if len(found) != count:
            raise self._damaged("it changed while it was read")
        self._at += count
        return found

    def _limit(self, what: str, count: int, most: int, item_bytes: int) -> None:
        """CheckpointError: more than `most`, or than fit in what is left where each takes at least `item_bytes`."""
        fitting = min(most, (self._size - self._at) // item_bytes)
        if count > fitting:
            raise self._damaged(f"{count} {what}; at most {fitting} are possible")

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {problem}; the file is damaged: download it again")
