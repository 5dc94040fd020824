"""Machine code that the user has accepted, by its digest: files of kernels that were compiled elsewhere."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from edgeq.system import machine


def digest_of(data: bytes | memoryview) -> str:
    """The digest by which a user knows a file of machine code: BLAKE2b of all its bytes, 256 bits in hexadecimal."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def trusted(digest: str) -> bool:
    """Whether the user has accepted exactly these bytes before."""
    # A folder that cannot be looked into is none: Path.exists would raise.
    return os.path.exists(_folder() / digest)


def trust(digest: str) -> None:
    """Remember a digest.  OSError: the cache folder cannot be written."""
    _folder().mkdir(parents=True, exist_ok=True)
    (_folder() / digest).touch()


def _folder() -> Path:
    return machine.cache_folder() / "trusted"
