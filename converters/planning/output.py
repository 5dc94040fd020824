"""Refuses a place for the output that would cost the user something, before torch is imported or anything downloaded."""

from __future__ import annotations

from pathlib import Path

from edgeq.converters.importers.safetensors_folder import INDEX, TEXT_FILES, WEIGHT_FILES
from edgeq.errors import InputError
from edgeq.format.partial import check_replaceable, partial_path

JOURNAL = ".partial.json"
"""What the name of an output's journal ends with, which lies beside it while it is unfinished."""


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
