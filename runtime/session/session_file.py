"""A session as a file: its tokens, and the pages with their keys and values.

    0     header, 80 bytes, little endian:
            magic 8 | version u32 | bytes of a page u32 | tokens u64 | identity of the model 16 | BLAKE2b-128 of the origin 16
            | pictures u32 | bytes of a page without windows u32 | zeros 16
    80    tokens, u32 each
    ...   pictures, 36 bytes each: first token u32 | frames, rows, columns of tokens u32 | tokens kept u32 | digest 16
    ...   a byte for each page: 1, or 0 where its layers with a window are dropped
    ...   pages of 64 positions, as the target holds them
    ...   XXH3-128 of everything before, big endian

The hash at the end finds damage.  Earlier versions are not read: 1 and 2 had BLAKE2b-128 in its place, 3 had whole pages alone.

The origin is what keys and values depend on beside the model: target, mode, cache codec, rotary frequencies.  A file is read
only by the model and the origin that wrote it, only at exactly the size that its header implies, and only up to the context of
the session, so a hostile one cannot make the reader take memory; its pages are numbers, never addresses or sizes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from edgeq.errors import FormatError, InputError, ResourceError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.pictures.prompt import PicturePlace
from edgeq.system.whole_file import write_whole
from edgeq.targets.graph import Graph, RopeRotate
from edgeq.targets.rows import PAGE, Page
from edgeq.targets.target import Options

MAGIC = b"edgeqs\r\n"
VERSION = 4
DIGEST_BYTES = 16
MAX_PICTURE_TOKENS = 1 << 20
_HEADER = struct.Struct("<8sIIQ16s16sII16s")
_PICTURE = struct.Struct("<5I16s")


@dataclass(frozen=True)
class Origin:
    """What a session's keys and values depend on.

    identity   of the model, in hexadecimal
    details    target, mode, codec of the cache, rotary frequencies: in words, compared by their digest
    """

    identity: str
    details: tuple[str, ...]

    @classmethod
    def of(cls, file: ModelFile, target: str, options: Options, graph: Graph) -> Origin:
        # Which rotary frequencies a long context has is chosen when it is loaded.
        ropes = sorted({repr(o.frequencies) for o in graph.operations if isinstance(o, RopeRotate)})
        rope = f"rotary frequencies {hashlib.blake2b(''.join(ropes).encode(), digest_size=4).hexdigest()}"
        return cls(file.identity, (target, options.mode, options.kv.name, rope))

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b("\n".join(self.details).encode(), digest_size=DIGEST_BYTES).digest()


def write(
    path: Path,
    origin: Origin,
    tokens: Sequence[int],
    places: Sequence[PicturePlace],
    pages: Iterable[bytes],
    *,
    sizes: tuple[int, int],
    whole: Sequence[bool],
) -> None:
    """Write a session, whole or not at all.  ResourceError: it cannot be written.

    sizes   bytes of a page without layers that have a window, and of a whole one;  whole: which pages are
    """
    try:
        write_whole(path, with_digest(chain([head_of(origin, tokens, places, sizes, whole)], pages)), durable=True)
    except OSError as error:
        raise ResourceError(f"{path}: cannot write it: {error.strerror}") from None


def head_of(
    origin: Origin, tokens: Sequence[int], places: Sequence[PicturePlace], sizes: tuple[int, int], whole: Sequence[bool]
) -> bytes:
    """What comes before the pages."""
    identity, (least, most) = bytes.fromhex(origin.identity), sizes
    header = _HEADER.pack(MAGIC, VERSION, most, len(tokens), identity, origin.digest, len(places), least, bytes(16))
    pictures = b"".join(_PICTURE.pack(place.start, *place.grid, place.kept, place.digest) for place in places)
    return header + np.asarray(tokens, "<u4").tobytes() + pictures + bytes(whole)


def with_digest(parts: Iterable[bytes]) -> Iterator[bytes]:
    total = xxhash.xxh3_128()
    for part in parts:
        total.update(part)
        yield part
    yield total.digest()


def read(
    path: Path,
    origin: Origin,
    *,
    vocab_size: int,
    context: int,
    window: int,
    page_memory: Callable[[bool], NDArray[np.uint8]],
    load_page: Callable[[NDArray[np.uint8]], Page],
) -> tuple[list[int], tuple[PicturePlace, ...], list[Page]]:
    """Tokens, where pictures are among them, and what `load_page` makes of each page in memory that `page_memory` gives.

    InputError: no such file, more tokens than the context, or another model's or target's.  FormatError: damaged.
    UnsupportedError: another version.
    """
    sizes = len(page_memory(False)), len(page_memory(True))
    try:
        with open(path, "rb") as file:
            head, found = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
            count, pictures = _check_header(path, head, found, origin, context, sizes)
            ids, records, whole = file.read(4 * count), file.read(_PICTURE.size * pictures), file.read(-(-count // PAGE))
            before = head + ids + records + whole
            if found != len(before) + sum(sizes[flag > 0] for flag in whole) + DIGEST_BYTES:
                raise _of_another_size(path, found)
            total = xxhash.xxh3_128(before)
            tokens = np.frombuffer(ids, "<u4")
            if count and int(tokens.max()) >= vocab_size:
                raise FormatError(f"{path}: a token outside the vocabulary of {vocab_size}: damaged or hostile")
            places = _places(path, records, count)
            # The last token runs again.
            if set(whole) - {0, 1} or 0 in whole[max(0, count - window) // PAGE :]:
                raise FormatError(f"{path}: what the next token sees is dropped: damaged or hostile")
            pages = []
            for flag in whole:
                data = page_memory(flag == 1)
                if file.readinto(data.data) < len(data):
                    raise FormatError(f"{path}: it was cut while it was read; save the session again")
                total.update(data.data)
                pages.append(load_page(data))
            if file.read(DIGEST_BYTES + 1) != total.digest():
                raise FormatError(f"{path}: does not match its digest: damaged; save the session again")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from None
    return tokens.tolist(), places, pages


def _places(path: Path, records: bytes, count: int) -> tuple[PicturePlace, ...]:
    """FormatError: pictures that overlap, or whose kept tokens are not among `count`."""
    places, free = list[PicturePlace](), 0
    whole = records[: len(records) // _PICTURE.size * _PICTURE.size]
    for start, frames, rows, columns, kept, digest in _PICTURE.iter_unpack(whole):
        tokens = frames * rows * columns
        if not (free <= start < start + kept <= count and kept <= tokens <= MAX_PICTURE_TOKENS):
            raise FormatError(f"{path}: a picture of {tokens} tokens, {kept} kept, at {start} of {count}: damaged or hostile")
        free = start + kept
        places.append(PicturePlace(start, (frames, rows, columns), digest, kept))
    return tuple(places)


def _check_header(path: Path, head: bytes, found: int, origin: Origin, context: int, sizes: tuple[int, int]) -> tuple[int, int]:
    """The numbers of tokens and pictures of a file of `found` bytes, of which nothing but `head` was read."""
    if len(head) < _HEADER.size or head[:8] != MAGIC:
        raise FormatError(f"{path}: not a saved session")
    _, version, most, count, identity, digest, pictures, least, zeros = _HEADER.unpack(head)
    if version != VERSION:
        advice = "upgrade edgeq" if version > VERSION else "save the session again"
        raise UnsupportedError(f"{path}: a session of version {version}; this edgeq reads {VERSION}: {advice}")
    if identity.hex() != origin.identity:
        raise InputError(f"{path}: a session of another model: {identity.hex()}, this is {origin.identity}")
    if digest != origin.digest:
        raise InputError(f"{path}: saved with other settings of this model; here they are {', '.join(origin.details)}")
    if count > context:
        raise InputError(f"{path}: the session has {count} tokens, the context {context} positions; pass a larger `context`")
    before = _HEADER.size + 4 * count + _PICTURE.size * pictures + -(-count // PAGE)
    if (least, most) != sizes or found < before + -(-count // PAGE) * least + DIGEST_BYTES or any(zeros):
        raise _of_another_size(path, found)
    return int(count), int(pictures)


def _of_another_size(path: Path, found: int) -> FormatError:
    return FormatError(f"{path}: {found} bytes where its header implies others, or a damaged header; save the session again")
