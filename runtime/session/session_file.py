"""A session as a file: its tokens, the pages with their keys and values, and the states of layers that have one.

    0     header, 80 bytes, little endian:
            magic 8 | version u32 | bytes of a page u32 | tokens u64 | identity of the model 16 | BLAKE2b-128 of the origin 16
            | pictures u32 | bytes of a page without windows u32 | bytes of the states u32 | bytes of a snapshot u32
            | rows that the states took after the last token, forgotten since u32 | zeros 4
    80    tokens, u32 each
    ...   pictures, 36 bytes each: first token u32 | frames, rows, columns of tokens u32 | tokens kept u32 | digest 16
    ...   a byte for each page: 1, or 0 where its layers with a window are dropped; and 2 more where a snapshot follows it
    ...   pages of 64 positions, as the target holds them, each with its snapshot
    ...   the states, as the target holds them; none where they begin with the snapshot of the last page
    ...   XXH3-128 of everything before, big endian

The hash at the end finds damage.  Earlier versions are not read: 1 and 2 had BLAKE2b-128 in its place, 3 had whole pages alone.

The origin is what keys and values depend on beside the model: target, mode, cache codec, rotary frequencies, states.  A file is
read only by the model and the origin that wrote it, only at exactly the size that its header implies, and only up to the
context of the session, so a hostile one cannot make the reader take memory; its pages are numbers, never addresses or sizes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from edgeq.errors import FormatError, InputError, ResourceError, UnsupportedError
from edgeq.format.container import ModelFile
from edgeq.pictures.prompt import PicturePlace
from edgeq.runtime.session.cache import in_turn
from edgeq.system.whole_file import write_whole
from edgeq.targets.capabilities import HoldsStates
from edgeq.targets.graph import Graph, RopeRotate
from edgeq.targets.rows import PAGE, Page
from edgeq.targets.states import LOG, SessionState
from edgeq.targets.target import Options, Program

MAGIC = b"edgeqs\r\n"
VERSION = 4
DIGEST_BYTES = 16
MAX_PICTURE_TOKENS = 1 << 20
_HEADER = struct.Struct("<8sIIQ16s16sIIIII4s")
_PICTURE = struct.Struct("<5I16s")
_FLAGS = ({0, 1}, {0, 1, 2, 3})
"""Flags of pages, where the graph has no states, and where it has some."""


@dataclass(frozen=True)
class Origin:
    """What a session's keys and values depend on.

    identity   of the model, in hexadecimal
    details    target, mode, codec of the cache, rotary frequencies, states: in words, compared by their digest
    """

    identity: str
    details: tuple[str, ...]

    @classmethod
    def of(cls, file: ModelFile, target: str, options: Options, graph: Graph) -> Origin:
        # Which rotary frequencies a long context has is chosen when it is loaded.
        ropes = sorted({repr(o.frequencies) for o in graph.operations if isinstance(o, RopeRotate)})
        rope = f"rotary frequencies {hashlib.blake2b(''.join(ropes).encode(), digest_size=4).hexdigest()}"
        # How many rows a log has is a part of the bits.
        held = hashlib.blake2b(repr((LOG, graph.states)).encode(), digest_size=4).hexdigest()
        states = (f"states {held}",) if graph.states else ()
        return cls(file.identity, (target, options.mode, options.kv.name, rope, *states))

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b("\n".join(self.details).encode(), digest_size=DIGEST_BYTES).digest()


class Saved(NamedTuple):
    """What a session is: its tokens, where pictures are among them, the pages that hold them, and the states after the last.

    state   None: there are none, or they begin with the snapshot of the last page
    """

    tokens: Sequence[int]
    places: Sequence[PicturePlace]
    pages: Sequence[Page]
    state: SessionState | None


def write(path: Path, origin: Origin, saved: Saved, program: Program, lock: Lock) -> None:
    """Write a session, whole or not at all, between the runs of other threads.  ResourceError: it cannot be written."""
    try:
        write_whole(path, with_digest(_contents(origin, saved, program, lock)), durable=True)
    except OSError as error:
        raise ResourceError(f"{path}: cannot write it: {error.strerror}") from None


def _contents(origin: Origin, saved: Saved, program: Program, lock: Lock) -> Iterator[bytes]:
    identity, (least, most) = bytes.fromhex(origin.identity), page_sizes(program)
    tokens, places, pages, state = saved
    states, snapshot = state_sizes(program)
    counts = (states if state else 0, snapshot, state.written - state.slot if state else 0)
    yield _HEADER.pack(MAGIC, VERSION, most, len(tokens), identity, origin.digest, len(places), least, *counts, bytes(4))
    yield np.asarray(tokens, "<u4").tobytes()
    yield b"".join(_PICTURE.pack(place.start, *place.grid, place.kept, place.digest) for place in places)
    yield bytes((page.windowed is not None) + 2 * (page.snapshot is not None) for page in pages)
    for page in pages:
        yield in_turn(lock, program.save_page)(page)
        if page.snapshot is not None:
            yield in_turn(lock, cast(HoldsStates, program).save_snapshot)(page.snapshot)
    if state is not None:
        yield in_turn(lock, cast(HoldsStates, program).save_state)(state)


def page_sizes(program: Program) -> tuple[int, int]:
    """Bytes of a page without layers that have a window, and of a whole one."""
    return len(program.page_memory(False)), len(program.page_memory())


def state_sizes(program: Program) -> tuple[int, int]:
    """Bytes of the states of a session, and of a snapshot of them; 0 where the graph has none."""
    return cast(HoldsStates, program).saved_bytes if program.snapshot_pages else (0, 0)


def with_digest(parts: Iterable[bytes]) -> Iterator[bytes]:
    total = xxhash.xxh3_128()
    for part in parts:
        total.update(part)
        yield part
    yield total.digest()


def read(path: Path, origin: Origin, program: Program, lock: Lock, vocab_size: int, context: int) -> Saved:
    """What `write` wrote, as `program` makes it.

    InputError: no such file, more tokens than the context, or another model's or target's.  FormatError: damaged.
    UnsupportedError: another version.
    """
    sizes, window, (_, snapshot_size) = page_sizes(program), program.window, state_sizes(program)
    try:
        with open(path, "rb") as file:
            head, found = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
            _check_header(path, head, found, origin, context, program)
            _, _, _, count, _, _, pictures, _, state_size, _, ahead, _ = _HEADER.unpack(head)
            ids, records, flags = file.read(4 * count), file.read(_PICTURE.size * pictures), file.read(-(-count // PAGE))
            before = head + ids + records + flags
            of_pages = sum(sizes[flag & 1] + (snapshot_size if flag & 2 else 0) for flag in flags)
            if found != len(before) + of_pages + state_size + DIGEST_BYTES:
                raise _of_another_size(path, found)
            total = xxhash.xxh3_128(before)
            tokens = np.frombuffer(ids, "<u4")
            if count and int(tokens.max()) >= vocab_size:
                raise FormatError(f"{path}: a token outside the vocabulary of {vocab_size}: damaged or hostile")
            places = _places(path, records, count)
            # The last token runs again.
            if set(flags) - _FLAGS[snapshot_size > 0] or any(not flag & 1 for flag in flags[max(0, count - window) // PAGE :]):
                raise FormatError(f"{path}: what the next token sees is dropped: damaged or hostile")
            if count and snapshot_size and not state_size and (count % PAGE or not flags[-1] & 2):
                raise FormatError(f"{path}: no states that the next token needs: damaged or hostile")

            def filled(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
                if file.readinto(data.data) < len(data):
                    raise FormatError(f"{path}: it was cut while it was read; save the session again")
                total.update(data.data)
                return data

            pages, state, holds = list[Page](), None, cast(HoldsStates, program)
            for flag in flags:
                pages.append(in_turn(lock, program.load_page)(filled(program.page_memory(flag & 1 == 1))))
                if flag & 2:
                    numbers = filled(np.empty(snapshot_size, np.uint8))
                    pages[-1] = pages[-1].with_snapshot(in_turn(lock, holds.load_snapshot)(numbers))
            if state_size:
                state = in_turn(lock, holds.load_state)(filled(np.empty(state_size, np.uint8)), count, count + ahead)
            if file.read(DIGEST_BYTES + 1) != total.digest():
                raise FormatError(f"{path}: does not match its digest: damaged; save the session again")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from None
    return Saved(tokens.tolist(), places, pages, state)


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


def _check_header(path: Path, head: bytes, file_bytes: int, origin: Origin, context: int, program: Program) -> None:
    """Check what was read of a file of `file_bytes` bytes: nothing but `head`."""
    if len(head) < _HEADER.size or head[:8] != MAGIC:
        raise FormatError(f"{path}: not a saved session")
    _, version, most, count, identity, digest, pictures, least, states, snapshot, ahead, zeros = _HEADER.unpack(head)
    if version != VERSION:
        advice = "upgrade edgeq" if version > VERSION else "save the session again"
        raise UnsupportedError(f"{path}: a session of version {version}; this edgeq reads {VERSION}: {advice}")
    if identity.hex() != origin.identity:
        raise InputError(f"{path}: a session of another model: {identity.hex()}, this is {origin.identity}")
    if digest != origin.digest:
        raise InputError(f"{path}: saved with other settings of this model; here they are {', '.join(origin.details)}")
    if count > context:
        raise InputError(f"{path}: the session has {count} tokens, the context {context} positions; pass a larger `context`")
    whole, of_snapshot = state_sizes(program)
    sizes_match = (least, most) == page_sizes(program) and snapshot == of_snapshot and states in (0, whole)
    before = _HEADER.size + 4 * count + _PICTURE.size * pictures + -(-count // PAGE)
    too_short = file_bytes < before + -(-count // PAGE) * least + states + DIGEST_BYTES
    if not sizes_match or too_short or ahead > (LOG if states else 0) or any(zeros):
        raise _of_another_size(path, file_bytes)


def _of_another_size(path: Path, file_bytes: int) -> FormatError:
    what = f"{file_bytes} bytes where its header implies others, or a damaged header"
    return FormatError(f"{path}: {what}; save the session again")
