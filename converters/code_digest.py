"""A digest of sources, for results that are kept: what they computed before a change does not count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def code_digest(folders: Iterable[str], files: Iterable[Path] = ()) -> str:
    """Digest of the sources in `folders` of the converters ("": those beside this one), and of `files`."""
    here = Path(__file__).parent
    paths = [path for folder in folders for path in (here / folder).glob("*.py")]
    seen = hashlib.blake2b(digest_size=8)
    for path in (*sorted(paths), *files):
        seen.update(path.read_bytes())
    return seen.hexdigest()
