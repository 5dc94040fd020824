"""A cache page as a file: the keys and values of 64 positions of a prompt.

    0     header, 128 bytes, little endian:
            magic 8 | version u32 | bytes of the page u32 | identity of the model 16 | BLAKE2b-128 of the origin 16
            | SHA-256 of the pages before it 32 | pictures u32 | zeros 44
    128   its 64 tokens, i32 each
    384   pictures among them, 36 bytes each: first token in the page u32 | tokens in earlier pages u32
            | frames, rows, columns of tokens u32 | digest 16
    ...   the page, as the target holds it
    ...   BLAKE2b-128 of everything before

Earlier pages are there by their digest (prefix_tree.py), so that a file at the end of a long text is as long as one at its
beginning.  A reader knows all but the page before it opens a file, and compares it byte for byte: nothing is taken for a size.

Versions 1 and 2 had all earlier tokens in each file.  They have other names too, so that nothing looks for them.
"""

from __future__ import annotations

import struct
from pathlib import Path

from edgeq.runtime.prefix_tree import Key
from edgeq.runtime.session_file import DIGEST_BYTES, Origin
from edgeq.whole_file import no_follow

MAGIC = b"edgeqp\r\n"
VERSION = 3
_HEADER = struct.Struct("<8sII16s16s32sI44s")
_PICTURE = struct.Struct("<5I16s")


def head_of(origin: Origin, before: bytes, key: Key, page_bytes: int) -> bytes:
    """What comes before the page whose tokens and pictures are `key`, after pages with the digest `before`."""
    ids, pictures = key
    identity = bytes.fromhex(origin.identity)
    header = _HEADER.pack(MAGIC, VERSION, page_bytes, identity, origin.digest, before, len(pictures), bytes(44))
    return header + ids + b"".join(_PICTURE.pack(start, earlier, *grid, digest) for start, earlier, digest, grid in pictures)


def size_of(head: bytes, page_bytes: int) -> int:
    return len(head) + page_bytes + DIGEST_BYTES


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
