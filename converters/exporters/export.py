"""`edgeq export`: a model file in another format, written beside its place and moved there when it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from edgeq.converters.exporters.compressed_tensors import write_compressed_tensors
from edgeq.converters.exporters.gguf_export import write_gguf
from edgeq.converters.importers.gguf_file import is_gguf
from edgeq.errors import EdgeqError, InputError
from edgeq.format.container import ModelFile

FORMATS = ("compressed-tensors", "gguf")
Progress = Callable[[int, int], None]
"""(bytes written, all bytes)"""


def export(model: Path, to: str, output: Path, force: bool, on_progress: Progress) -> list[str]:
    """Write the model file `model` as `to`, one of FORMATS, to `output`; returns lines for the user.

    InputError: no such file, or `output` is there and not `force`.  UnsupportedError: what the format does not hold, by the
    name of the layer.  ResourceError: the disk has no room.  ModuleNotFoundError: the package that writes it is not installed.
    """
    file, single = ModelFile.open(model), to == "gguf"
    if output.exists() and not force:
        raise InputError(f"{output}: is there already; choose another name, or --force to replace it")
    if output.exists() and not (is_gguf(output) if single and output.is_file() else not single and _is_export(output)):
        made = "GGUF file" if single else "folder that an export made"
        raise InputError(f"{output}: is no {made}, and is not replaced; choose another name")
    if not output.parent.is_dir():
        raise InputError(f"{output.parent}: no such folder")
    partial = output.with_name(f"{output.name}.partial")
    _remove(partial)
    try:
        if single:
            notes = write_gguf(file, partial, on_progress)
        else:
            partial.mkdir()
            notes = write_compressed_tensors(file, partial, on_progress)
    except EdgeqError as error:
        _remove(partial)
        raise type(error)(f"{model} as {to}: {error}") from None
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
