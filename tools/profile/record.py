"""The document that a profile is saved as: written whole, read with care."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgeq.errors import FormatError, InputError
from edgeq.system.whole_file import write_whole

SCHEMA = "edgeq profile 1"
OTHER = "a profile of another version"
MAX_PROFILE_BYTES = 256 << 20
"""Bytes of a saved profile that is read."""


def write(path: Path, document: dict[str, Any]) -> None:
    """Replace `path`: who kills the process finds the last whole document there.  OSError: it cannot be written."""
    write_whole(path, json.dumps(document) + "\n")


def is_profile(path: Path) -> bool:
    """Whether the file can be read as a profile, of this version or another: what may be replaced by one."""
    try:
        read(path)
    except FormatError as error:
        return OTHER in str(error)
    except InputError:
        return False
    return True


def read(path: Path) -> dict[str, Any]:
    """A document that `write` wrote.  InputError: no such file.  FormatError: not a profile, or of another version."""
    try:
        # A device or a pipe does not tell its size.
        with open(path, "rb") as file:
            stored = file.read(MAX_PROFILE_BYTES + 1)
        if len(stored) > MAX_PROFILE_BYTES:
            raise FormatError(f"{path}: larger than {MAX_PROFILE_BYTES >> 20} MB; not a profile")
        document = json.loads(stored.decode("utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give a file that `edgeq profile --save` wrote") from None
    except (ValueError, RecursionError):
        raise FormatError(f"{path}: not JSON; give a file that `edgeq profile --save` wrote") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else None
        if isinstance(found, str) and found.startswith(SCHEMA.rpartition(" ")[0]):
            raise FormatError(f"{path}: {OTHER}, {found[:80]!r}, and this one reads {SCHEMA!r}; make the profile again")
        raise FormatError(f"{path}: JSON, but no profile; give a file that `edgeq profile --save` wrote")
    records = document.get("measurements")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise FormatError(f"{path}: has no list of measurements; make the profile again")
    return document
