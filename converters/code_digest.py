"""A digest of sources, for results that are kept: what they computed before a change does not count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from edgeq import codec, quantization

QUANTIZING = ("", "allocation", "calibration", "families", "methods", "rotation")


def code_digest(folders: Iterable[str], files: Iterable[Path] = ()) -> str:
    """Digest of the sources in `folders` of the converters ("": those beside this one), and of `files`."""
    here = Path(__file__).parent
    paths = [path for folder in folders for path in (here / folder).glob("*.py")]
    seen = hashlib.blake2b(digest_size=8)
    for path in (*sorted(paths), *files):
        seen.update(path.read_bytes())
    return seen.hexdigest()


@cache
def quantizing_code() -> str:
    """Digest of all sources that a converted file depends on: those of the converters, and of codecs and integer ranges."""
    return code_digest(QUANTIZING, (Path(codec.__file__), Path(quantization.__file__)))
