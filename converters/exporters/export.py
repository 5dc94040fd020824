"""`edgeq export`: a model file in another format, written beside its place and moved there when it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from edgeq.converters.exporters.compressed_tensors import write_compressed_tensors
from edgeq.errors import EdgeqError, InputError, UnsupportedError
from edgeq.format.container import ModelFile

FORMATS = ("compressed-tensors",)
Progress = Callable[[int, int], None]
"""(bytes written, all bytes)"""


def export(model: Path, to: str, output: Path, force: bool, on_progress: Progress) -> list[str]:
    """Write the model file `model` as `to`, one of FORMATS, to `output`; returns lines for the user.

    InputError: no such file, or `output` is there and not `force`.  UnsupportedError: what the format does not hold, by the
    name of the layer.
    """
    file = ModelFile.open(model)
    if output.exists() and not force:
        raise InputError(f"{output}: is there already; choose another name, or --force to replace it")
    if output.exists() and not _is_export(output):
        raise InputError(f"{output}: is no folder that an export made, and is not replaced; choose another name")
    if not output.parent.is_dir():
        raise InputError(f"{output.parent}: no such folder")
    partial = output.with_name(f"{output.name}.partial")
    _remove(partial)
    try:
        partial.mkdir()
        notes = write_compressed_tensors(file, partial, on_progress)
    except EdgeqError as error:
        _remove(partial)
        raise UnsupportedError(f"{model} as {to}: {error}") from None
    except BaseException:
        _remove(partial)
        raise
    _remove(output)
    partial.rename(output)
    return notes


def _is_export(folder: Path) -> bool:
    """Whether it has a configuration as exports have it: --force removes nothing else."""
    config = folder / "config.json"
    return (
        folder.is_dir() and config.is_file() and '"quant_method": "compressed-tensors"' in config.read_text("utf-8", "replace")
    )


def _remove(path: Path) -> None:
    """A folder or a file; a link itself, and not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
