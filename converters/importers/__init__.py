"""Where checkpoints come from: one module for each kind of source, and which of them a name is for."""

from __future__ import annotations

from pathlib import Path

from edgeq.converters.checkpoint.download import HubAccess
from edgeq.converters.checkpoint.source import CheckpointSource
from edgeq.converters.importers.gguf_file import is_gguf
from edgeq.converters.importers.gguf_source import GgufSource
from edgeq.converters.importers.quantized.folder import QuantizedFolder
from edgeq.converters.importers.safetensors_folder import SafetensorsFolder


def open_source(source: str, access: HubAccess) -> CheckpointSource:
    """The checkpoint `source`, a GGUF file, a folder, or a hub id of which only the small text files are fetched.

    CheckpointError: there is none, or its configuration cannot be read.  UnsupportedError: its weights are quantized in a
    format that is not read, by its name, or of a GGUF file as by `GgufSource.open`.
    """
    path = Path(source)
    if path.is_file() and (path.suffix == ".gguf" or is_gguf(path)):
        return GgufSource.open(path)
    folder = SafetensorsFolder.open(source, access)
    return QuantizedFolder.of(folder) or folder
