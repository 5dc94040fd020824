"""Plans: which codec every part of a model gets, as a JSON file that people can read, change and pass on.

    {"layers.0.qkv": "i3 g64 zero", "layers.0.o": "i2 g32 zero", ..., "head": "i6 g128 zero"}

Every part is there; codecs are called as `edgeq inspect` shows them.  The provenance of a file has the same object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from edgeq.errors import InputError
from edgeq.system.whole_file import write_whole

MAX_BYTES = 1 << 22
"""A plan of a model with a hundred thousand parts is smaller."""


def read_plan(path: Path) -> dict[str, str]:
    """The plan in a file.  InputError: it cannot be read, or is not an object of names."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
        found = json.loads(text) if len(text) <= MAX_BYTES else None
    except OSError as error:
        raise InputError(f"{path}: cannot read this plan: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a plan in JSON ({error}); --save-plan writes one") from None
    if not isinstance(found, dict) or not all(isinstance(codec, str) for codec in found.values()):
        raise InputError(f'{path}: not a plan; expected an object such as {{"layers.0.qkv": "i4 g128 zero", ...}}')
    return found


def write_plan(path: Path, plan: Mapping[str, str]) -> None:
    """Write a plan, replacing what is there.  InputError: it cannot be written."""
    write_text(path, json.dumps(plan, indent=1) + "\n")


def check_place(path: Path) -> None:
    """InputError: no file can be written there.  Asked before the measurement whose result goes there, which takes long."""
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: no such folder; make it first")
    if path.is_dir():
        raise InputError(f"{path}: cannot write it: Is a directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"{path}: cannot write it: Permission denied")


def write_text(path: Path, text: str) -> None:
    """Write a text file, replacing what is there.  InputError: it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"{path}: cannot write it: {error.strerror}") from None
