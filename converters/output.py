"""Refuses a place for the output that would cost the user something, before torch is imported or anything downloaded."""

from __future__ import annotations

from pathlib import Path

from edgeq.converters.checkpoint import INDEX, TEXT_FILES, WEIGHT_FILES
from edgeq.errors import InputError
from edgeq.partial import check_replaceable, partial_path


def check_output(source: str, output: Path) -> None:
    """Look at what is at `output` and where it lies.

    InputError: there is no such folder; it is a file of the checkpoint or would be read as one; it is there and no .edgeq file.
    """
    if not output.parent.is_dir():
        raise InputError(f"{output.parent}: no such folder; make it first")
    for path in (output, partial_path(output)):
        if path.resolve().parent == Path(source).resolve() and any(path.match(p) for p in (*TEXT_FILES, *WEIGHT_FILES, INDEX)):
            raise InputError(f"{output}: is a file of the checkpoint {source}, or would be read as one; choose another name")
    check_replaceable(output)
