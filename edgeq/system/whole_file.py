"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def no_follow(path: str, flags: int) -> int:
    """An opener that fails where `path` is a symbolic link, and does not wait where it is a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def sync_folder(folder: Path) -> None:
    """Names given in it until now survive a power failure that follows."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, parts: str | bytes | Iterable[bytes], durable: bool = False, through: Path | None = None) -> None:
    """Write another file and give it the name: who reads `path` finds what was there before, or all of this.

    durable   it survives a power failure that follows
    through   the other file, for a `path` that one process at a time writes: those that are killed leave one at most.
              By default every call has a file of its own: in containers processes have the same numbers
    OSError: it cannot be written; what was there stays.
    """
    if through is None:
        through = path.with_name(f"{path.name}.{int.from_bytes(os.urandom(8), 'big')}.new")
    if isinstance(parts, str):
        parts = parts.encode()
    try:
        with open(through, "wb", opener=no_follow) as file:
            file.writelines([parts] if isinstance(parts, bytes) else parts)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(through, path)
        if durable:
            sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            through.unlink()
        raise
