"""A digest of sources, for results that are kept: what they computed before a change does not count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from edgeq.format import codec, quantization

CONVERTERS = Path(__file__).parents[1]


def code_digest(folders: Iterable[Path], files: Iterable[Path] = ()) -> str:
    """Digest of the Python sources in `folders` and in every folder below them, and of `files`."""
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    seen = hashlib.blake2b(digest_size=8)
    for path in (*sorted(paths), *files):
        seen.update(path.read_bytes())
    return seen.hexdigest()


@cache
def quantizing_code() -> str:
    """Digest of all sources that a converted file depends on: those of the converters, and of codecs and integer ranges."""
    return code_digest((CONVERTERS,), (Path(codec.__file__), Path(quantization.__file__)))
