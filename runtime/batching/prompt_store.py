"""Cache pages of prompts on disk, so that a prompt is not read again after a restart.

A file for each page of 64 positions (page_file.py).  It has the tokens and pictures of its page and the digest of those of its
owner that led to it, and is used only where these, the model, the settings and the version of edgeq are those of the prompt,
byte for byte.  Its name is the SHA-256 of the same, so that no client can name a file, texts that begin alike share files, and
an answer that goes on writes only what is new.

Pages are numbers: one that somebody else wrote with a right digest would change what a model is thought to have read.  So the
folder and its files must be the user's, and nobody else may write to them; a digest is for what breaks by itself.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Condition, Lock, Thread
from time import monotonic
from typing import cast

import numpy as np

from edgeq.errors import EdgeqError, FormatError, InputError
from edgeq.runtime.batching.page_file import Parts, contents, head_of, name_of, read
from edgeq.runtime.batching.prefix_tree import Key, Node, digest_of
from edgeq.runtime.batching.read_ahead import Readers
from edgeq.runtime.session.cache import in_turn
from edgeq.runtime.session.session_file import Origin, state_sizes
from edgeq.system.least_recently_used import remove_least_recently_used
from edgeq.system.whole_file import write_whole
from edgeq.targets.capabilities import HoldsStates
from edgeq.targets.rows import Page
from edgeq.targets.target import Program
from edgeq.version import __version__

SUFFIX = ".kv"
MIN_PAGES = 4
"""Pages of a text that is kept: what is shorter is read in a moment."""
MAX_WAITING_TEXTS = 4
"""Texts that may wait to be written; their pages cannot be dropped before."""
READERS = 2
PAGES_AHEAD = 3
"""Pages that are read before they are needed; each takes memory for as long as a prompt is fetched."""
KEPT = 0.9
"""Share of the quota that is left after removing."""
PAUSE_SECONDS = 600
"""Without writing after the disk was full or failed, or there was no memory for a page as bytes."""
STALE_SECONDS = 60
"""After which an unfinished file is of a process that was killed."""
CLOSE_SECONDS = 5.0
GIVE_UP_SECONDS = 1.0
_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_log = logging.getLogger("edgeq.server")


@dataclass(frozen=True)
class StoredFile:
    path: Path
    size: int
    used: float  # seconds since 1970


@dataclass(frozen=True)
class PageWrite:
    """A whole page that is to be written, and the digest of those before it; the number of those."""

    before: bytes
    key: Key
    page: Page
    index: int


class PromptStore:
    """`pages`, `put` and `give_up` are for one owner; other threads read and write.

    bytes    of all files, as far as is known;  errors: files that could not be used or written
    """

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        origin: Origin,
        program: Program,
        lock: Lock,
    ) -> None:
        """origin   what keys and values depend on beside the owner and what was read
        program  that makes pages, between the runs of other threads

        InputError: the folder cannot be made or used, or is not this user's alone.
        """
        self.folder, self.errors = folder, 0
        # Instruction sets add up in other orders, and another version may compute other bits.
        self._origin = Origin(origin.identity, (*origin.details, program.facts().isa or "", f"edgeq {__version__}"))
        self._save_page, self._load_page = in_turn(lock, program.save_page), in_turn(lock, program.load_page)
        self._holds, self._lock, self._most = cast(HoldsStates, program), lock, most_bytes
        # Of whole pages, and of those whose layers with a window are dropped; with a snapshot, where there may be one.
        _, snapshot = state_sizes(program)
        kinds = [(windowed, size) for size in ([snapshot, 0] if snapshot else [0]) for windowed in (True, False)]
        self._memories = [partial(_memory, program, windowed, size) for windowed, size in kinds]
        self._sizes = [(len(program.page_memory(windowed)), size) for windowed, size in kinds]
        prepare_folder(folder)
        self._remove_unfinished()
        self.bytes = sum(each.size for each in stored(folder))
        self._waiting, self._writing, self._wake = deque[deque[PageWrite]](), deque[PageWrite](), Condition()
        self._closing, self._busy, self._saving, self._paused = False, False, False, 0.0
        self._readers = Readers[Parts | None](READERS, "edgeq-prompt-reader")
        self._thread = Thread(target=self._run, name="edgeq-prompt-store", daemon=True)
        self._thread.start()

    def pages(self, before: bytes, keys: Iterable[Key], index: int) -> Iterator[tuple[Key, Page]]:
        """The pages of a prompt and their keys, from page `index` on, after pages with the digest `before`, up to the first
        that is not there, or is not what its name says.

        The next ones are read and checked by other threads meanwhile.
        """
        left, coming = iter(keys), deque[tuple[Key, Path, Future[Parts | None]]]()
        while True:
            while len(coming) < PAGES_AHEAD and (key := next(left, None)):
                path = self._path(before, key)
                heads = [head_of(self._origin, before, key, sizes) for sizes in self._sizes]
                coming.append((key, path, self._readers.submit(partial(read, path, heads, self._memories))))
                before = digest_of(before, key)
            if not coming:
                return
            key, path, reading = coming.popleft()
            try:
                data = reading.result()
                if data is None:
                    return
                _touch(path, index)
                page = self._loaded(data)
            except (FileNotFoundError, CancelledError):
                # It was removed since it was read: the oldest go when others are written.  Or the store is closed.
                return
            except (OSError, FormatError) as error:
                return self._discard(path, error)
            index += 1
            yield key, page

    def _loaded(self, parts: Parts) -> Page:
        page = self._load_page(parts[0])
        return page if len(parts) == 1 else page.with_snapshot(in_turn(self._lock, self._holds.load_snapshot)(parts[1]))

    def _saved(self, page: Page) -> list[bytes]:
        saved = [self._save_page(page)]
        if page.snapshot is not None:
            saved.append(in_turn(self._lock, self._holds.save_snapshot)(page.snapshot))
        return saved

    def put(self, root: bytes, path: Sequence[Node]) -> None:
        """Write the pages of a text, the first of which comes after `root`, soon; but not if it is short, or too many wait."""
        if len(path) < MIN_PAGES or len(self._waiting) >= MAX_WAITING_TEXTS or monotonic() < self._paused:
            return
        kept = deque(
            PageWrite(before, node.key, node.page, index)
            for index, (before, node) in enumerate(zip([root, *(node.digest for node in path)], path, strict=False))
            if node.key and node.page
        )
        with self._wake:
            self._waiting.append(kept)
            self._wake.notify_all()

    def give_up(self) -> None:
        """Drop the pages that wait to be written: they hold memory."""
        with self._wake:
            for kept in (*self._waiting, self._writing):
                kept.clear()
            # One that is being written holds none any more: a disk that hangs is not waited for.
            self._wake.wait_for(lambda: not self._saving, GIVE_UP_SECONDS)

    def flush(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait until all is written, at most so long."""
        with self._wake:
            self._wake.wait_for(lambda: not self._waiting and not self._busy, seconds)

    def close(self) -> None:
        """Write what waits, for 5 s at most."""
        self.flush()
        with self._wake:
            self._closing = True
            self._waiting.clear()
            self._wake.notify_all()
        self._thread.join(1)
        self._readers.close()

    def _path(self, before: bytes, key: Key) -> Path:
        return self.folder / f"{name_of(self._origin, before, key)}{SUFFIX}"

    def _discard(self, path: Path, error: OSError | FormatError) -> None:
        self.errors += 1
        why = error.strerror if isinstance(error, OSError) else error
        _log.warning("%s is not used: %s", path.name, why)
        with suppress(OSError):
            path.unlink()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                self._writing, self._busy = self._waiting.popleft(), True
            try:
                self._write_all()
            except (OSError, MemoryError, EdgeqError) as error:
                self.errors += 1
                self._paused = monotonic() + PAUSE_SECONDS
                why = error.strerror if isinstance(error, OSError) else str(error) or "no memory"
                _log.warning("prompts are not kept for %d minutes: %s", PAUSE_SECONDS // 60, why)
            finally:
                with self._wake:
                    self._writing.clear()
                    self._busy = False
                    self._wake.notify_all()

    def _write_all(self) -> None:
        used = list[tuple[Path, int]]()
        while found := self._next():
            path, index, data = found
            used.append((path, index))
            if data is None:
                continue
            # Not made durable: what a power failure leaves of it does not match its digest.
            write_whole(path, data)
            os.chmod(path, 0o600)
            self.bytes += sum(map(len, data))
            if self.bytes > self._most:
                self._shrink()
        for path, index in used:
            with suppress(OSError):
                _touch(path, index)

    def _next(self) -> tuple[Path, int, list[bytes] | None] | None:
        """The file of the next page, the number of pages before it, and what is to be in it, unless it is there."""
        with self._wake:
            if self._closing or not self._writing:
                return None
            kept, self._saving = self._writing.popleft(), True
        try:
            path = self._path(kept.before, kept.key)
            if path.exists():
                return path, kept.index, None
            parts = self._saved(kept.page)
            sizes = len(parts[0]), sum(map(len, parts[1:]))
            return path, kept.index, contents(head_of(self._origin, kept.before, kept.key, sizes), *parts)
        finally:
            # Else this name would hold it.
            del kept
            with self._wake:
                self._saving = False
                self._wake.notify_all()

    def _shrink(self) -> None:
        """Remove files, the longest unused first.  Another process may keep prompts here too."""
        self.bytes = remove_least_recently_used([file.path for file in stored(self.folder)], int(KEPT * self._most))

    def _remove_unfinished(self) -> None:
        for entry in os.scandir(self.folder):
            if re.fullmatch(r"[0-9a-f]{64}\.kv\.\d+\.new", entry.name):
                with suppress(OSError):
                    if abs(entry.stat(follow_symlinks=False).st_mtime - time.time()) > STALE_SECONDS:
                        os.unlink(entry.path)


def _memory(program: Program, windowed: bool, snapshot: int) -> Parts:
    """Memory for a page, and for a snapshot of so many bytes if there is one."""
    page = program.page_memory(windowed)
    return [page, np.empty(snapshot, np.uint8)] if snapshot else [page]


def _touch(path: Path, index: int) -> None:
    """Count page `index` of a text as used now, and later than those that follow it, so that it is removed after them."""
    now = time.time() - 1e-3 * index
    os.utime(path, (now, now))


def prepare_folder(folder: Path) -> None:
    """Make the folder if it is not there.  InputError: as `check_folder`, or it cannot be made."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot keep prompts there: {error.strerror}") from None
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """InputError: it is not there, is not this user's, or others can read or write in it."""
    try:
        found = folder.lstat()
    except OSError as error:
        raise InputError(f"{folder}: cannot read it: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InputError(f"{folder}: not a folder of this user alone; run: chmod 700 {folder}")


def stored(folder: Path) -> Iterator[StoredFile]:
    """The files of pages in a folder.  OSError: it cannot be read."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield StoredFile(Path(entry.path), found.st_size, found.st_mtime)
