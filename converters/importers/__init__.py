"""Where checkpoints come from: one module for each kind of source, and which of them a name is for."""

from __future__ import annotations

from pathlib import Path

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.checkpoint.source import CheckpointSource
from edgeq.converters.importers.gguf_file import is_gguf
from edgeq.converters.importers.gguf_source import GgufSource
from edgeq.converters.importers.quantized.folder import QuantizedFolder
from edgeq.converters.importers.safetensors_folder import SafetensorsFolder
from edgeq.errors import InputError


def open_source(source: str, access: HubAccess, tokenizer: Path | None = None, mmproj: Path | None = None) -> CheckpointSource:
    """The checkpoint `source`, a GGUF file, a folder, or a hub id of which only the small text files are fetched.

    tokenizer   a folder with a tokenizer.json in place of the one that a GGUF file describes
    mmproj      the file of the vision tower that goes with a GGUF file

    CheckpointError: there is none, or its configuration cannot be read.  UnsupportedError: its weights are quantized in a
    format that is not read, by its name, or of a GGUF file as by `GgufSource.open`.  InputError: `tokenizer` or `mmproj`
    where `source` is no GGUF file.
    """
    path = Path(source)
    if path.is_file() and (path.suffix == ".gguf" or is_gguf(path)):
        return GgufSource.open(path, tokenizer, mmproj)
    for option, given in (("--tokenizer", tokenizer), ("--mmproj", mmproj)):
        if given is not None:
            raise InputError(f"{option} goes with a GGUF file, and {source} is none; leave it out")
    folder = SafetensorsFolder.open(source, access)
    return QuantizedFolder.of(folder) or folder
