"""The unfinished file beside the one that is written, held by one process; and what a finished file may replace."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from edgeq.errors import InputError
from edgeq.format.container import MAGIC
from edgeq.system.whole_file import no_follow

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What flock answers on file systems without locks."""


HEAD_BYTES = 32
"""Bytes at the beginning of an unfinished file, by which it is known."""


def partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def check_replaceable(path: Path) -> None:
    """InputError: there is something at `path` that is not an .edgeq file; a symbolic link is not followed, nor replaced."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode):
            with open(path, "rb", opener=no_follow) as file:
                if file.read(len(MAGIC)) == MAGIC:
                    return
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        raise InputError(f"{path}: a folder; give the name of the file to write")
    if stat.S_ISLNK(mode):
        raise InputError(f"{path}: a symbolic link; give the path of the file itself, or remove the link")
    what = "exists and is no .edgeq file" if stat.S_ISREG(mode) else "is not a regular file"
    raise InputError(f"{path}: {what}; it is not replaced: choose another name")


def is_rest_of_model(head: bytes) -> bool:
    """An unfinished file begins with zeros, or with a header if the run ended just before it got its name."""
    return head[: len(MAGIC)].rstrip(b"\0") in (b"", MAGIC)


class Partial:
    """`OUT.partial`, open and locked until `close`, so that two processes never write one file.

    The lock is of the file, not of its name: a crash leaves none.
    """

    def __init__(self, output: Path, what: str = "conversion", is_rest: Callable[[bytes], bool] = is_rest_of_model) -> None:
        """what      writes such files, for messages
        is_rest   whether an interrupted run leaves a file that begins with these bytes, 32 if it has as many

        InputError: another process writes it, it cannot be written, or it is not what an interrupted run leaves.
        """
        self.path = partial_path(output)
        self._what, self._is_rest = what, is_rest
        self.file = self._open()
        # One that its writer finished between the calls has its final name by now, or was removed.
        while not self._is_named():
            self.file.close()
            self.file = self._open()

    def _open(self) -> BinaryIO:
        try:
            descriptor = no_follow(os.fspath(self.path), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            link = "a symbolic link, " if error.errno == errno.ELOOP else ""
            raise InputError(f"{self.path}: {link}cannot write it: {error.strerror}") from None
        try:
            self._lock(descriptor)
            self._check(descriptor)
        except InputError:
            os.close(descriptor)
            raise
        return os.fdopen(descriptor, "r+b")

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{self.path}: another {self._what} is writing this file; wait for its end or choose another name"
            ) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise InputError(f"{self.path}: cannot lock it: {error.strerror}") from None

    def _check(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        # A second name would be another file's, whose contents were lost.
        own = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1
        if not own or not self._is_rest(os.pread(descriptor, HEAD_BYTES, 0)):
            raise InputError(f"{self.path}: not the rest of a {self._what}; remove it, or choose another name for the output")

    def _is_named(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), os.lstat(self.path))
        except FileNotFoundError:
            return False

    @property
    def empty(self) -> bool:
        """Whether nothing was written yet."""
        return os.fstat(self.file.fileno()).st_size == 0

    def close(self) -> None:
        """Give up the lock; a file into which nothing was written is removed."""
        if not self.file.closed:
            if self.empty and self._is_named():
                self.path.unlink()
            self.file.close()
