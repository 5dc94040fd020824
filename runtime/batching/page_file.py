"""A cache page as a file: the keys and values of 64 positions of a prompt.

    0     header, 128 bytes, little endian:
            magic 8 | version u32 | bytes of the page u32 | identity of the model 16 | BLAKE2b-128 of the origin 16
            | SHA-256 of the pages before it 32 | pictures u32 | bytes of a snapshot of the states after it u32 | zeros 40
    128   its 64 tokens, i32 each
    384   pictures among them, 36 bytes each: first token in the page u32 | tokens in earlier pages u32
            | frames, rows, columns of tokens u32 | digest 16
    ...   the page, as the target holds it, or as much of it as has no window; its snapshot, if it has one
    ...   XXH3-128 of everything before, big endian

Earlier pages are there by their digest (prefix_tree.py), so that a file at the end of a long text is as long as one at its
beginning.  A reader knows all but the page before it opens a file, and compares it byte for byte: nothing is taken for a size.

The hash at the end finds damage.  Who can write to the folder can write the right one, of any kind that has no key.

Versions 1 and 2 had all earlier tokens in each file, 3 and 4 a cryptographic hash at the end, which took as long as
all the rest; 5 had whole pages alone.  Files of other versions have other names, so that nothing looks for them; they go as the
longest unused.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from edgeq.errors import FormatError
from edgeq.runtime.batching.prefix_tree import Key, digest_of
from edgeq.runtime.session.session_file import Origin
from edgeq.system.whole_file import no_follow

MAGIC = b"edgeqp\r\n"
VERSION = 6
DIGEST_BYTES = 16
_HEADER = struct.Struct("<8sII16s16s32sII40s")
_PICTURE = struct.Struct("<5I16s")


def head_of(origin: Origin, before: bytes, key: Key, sizes: tuple[int, int]) -> bytes:
    """What comes before the page whose tokens and pictures are `key`, after pages with the digest `before`.

    sizes   bytes of the page, and of its snapshot, 0 for none
    """
    ids, pictures = key
    identity, (page_bytes, snapshot) = bytes.fromhex(origin.identity), sizes
    header = _HEADER.pack(MAGIC, VERSION, page_bytes, identity, origin.digest, before, len(pictures), snapshot, bytes(40))
    return header + ids + b"".join(_PICTURE.pack(start, earlier, *grid, digest) for start, earlier, digest, grid in pictures)


def name_of(origin: Origin, before: bytes, key: Key) -> str:
    """Name of the file, without its suffix: no client can choose it."""
    led = origin.digest + bytes.fromhex(origin.identity) + digest_of(before, key)
    return hashlib.sha256(VERSION.to_bytes(4, "little") + led).hexdigest()


def contents(head: bytes, *parts: bytes) -> list[bytes]:
    """What a file has, one after another; `parts`: the page, and its snapshot."""
    return [head, *parts, digest(head, *parts)]


def digest(head: bytes, *parts: bytes | memoryview) -> bytes:
    total = xxhash.xxh3_128(head)
    for part in parts:
        total.update(part)
    return total.digest()


Parts = list[NDArray[np.uint8]]
"""The bytes of a page, and of its snapshot if it has one."""


def read(path: Path, heads: Sequence[bytes], memories: Sequence[Callable[[], Parts]]) -> Parts | None:
    """The page of a file, in memory that one of `memories` gives, if it begins with the one of `heads` for that; None: there is
    no such file.

    FormatError: others may write to it, or it is not what was written.  OSError: it cannot be read.
    """
    try:
        with open(path, "rb", opener=no_follow) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise FormatError("it is not this user's alone")
            fitting = {
                head: memory
                for head, memory in zip(heads, memories, strict=True)
                if found.st_size == len(head) + sum(sizes_of(head)) + DIGEST_BYTES
            }
            if not fitting:
                raise FormatError("it has another size")
            memory = fitting.get(head := file.read(len(heads[0])))
            parts = memory() if memory else []
            whole = all([file.readinto(part.data) == len(part) for part in parts])
            if not parts or not whole or file.read(DIGEST_BYTES + 1) != digest(head, *(part.data for part in parts)):
                raise FormatError("it is damaged")
            return parts
    except FileNotFoundError:
        return None


def sizes_of(head: bytes) -> tuple[int, int]:
    """Bytes of the page that comes after `head`, and of its snapshot."""
    _, _, page_bytes, _, _, _, _, snapshot, _ = _HEADER.unpack_from(head)
    return page_bytes, snapshot


def identity_of(path: Path) -> str | None:
    """The identity of the model whose page a file has, in hexadecimal; None: it is no such file, or of another version."""
    try:
        with open(path, "rb", opener=no_follow) as file:
            head = file.read(_HEADER.size)
    except OSError:
        return None
    if len(head) < _HEADER.size:
        return None
    magic, version, _, identity, *_ = _HEADER.unpack(head)
    return identity.hex() if (magic, version) == (MAGIC, VERSION) else None
