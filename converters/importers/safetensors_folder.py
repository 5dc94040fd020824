"""A folder of a Hugging Face checkpoint, or one of the hub: JSON files beside weights in safetensors.

Only the slab of weights asked for is in memory, and one shard is open at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeq.converters.checkpoint.download import HubAccess, download, silent
from edgeq.converters.checkpoint.sentence_transformers import dense_folders
from edgeq.errors import CheckpointError
from edgeq.format.codec import AnyArray, Codec
from edgeq.format.safetensors import MAX_TENSORS, SIZES, floats, read_header, read_json, values

MAX_FILE_NAME = 255
"""Bytes that Linux and macOS take; with a longer name the system refuses to look for the file."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEXT_FILES = ("*.json", "*.jinja")
WEIGHT_FILES = ("model*.safetensors", "gptq_model*.safetensors", "*_Dense/model.safetensors")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ShardTensor:
    """Where a tensor lies: `offset` bytes from the start of the file `path`; `dtype` as safetensors spells it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    codec: ClassVar[Codec | None] = None

    def read(self, first: int, count: int, name: str) -> NDArray[np.float32]:
        """`count` values after the `first` ones.  CheckpointError: the shard is no longer what its header said."""
        return floats(self.path, self.dtype, self.offset + first * SIZES[self.dtype], count, name)

    def raw(self, first_row: int, rows: int, name: str) -> AnyArray:
        """`rows` rows [rows, ...] as the file has them, bf16 as uint16.  CheckpointError: as `read`."""
        width = math.prod(self.shape[1:])
        offset = self.offset + first_row * width * SIZES[self.dtype]
        return values(self.path, self.dtype, offset, rows * width, name).reshape(rows, *self.shape[1:])


@dataclass
class SafetensorsFolder:
    """A folder.  `hub`: where it came from; `shards`: its files of weights, when their headers are read."""

    folder: Path
    name: str
    config: dict[str, Any]
    hub: HubAccess | None = None
    shards: tuple[Path, ...] = ()
    texts_complete: ClassVar[bool] = False
    quantized: ClassVar[bool] = False
    notes: ClassVar[tuple[str, ...]] = ()
    origin: ClassVar[Mapping[str, object]] = MappingProxyType({})

    @classmethod
    def open(cls, source: str, access: HubAccess) -> SafetensorsFolder:
        """A folder, or a hub id of which only the small text files are fetched.

        CheckpointError: no such folder or repository, no config.json, not JSON.
        """
        folder = Path(source)
        if folder.is_dir():
            _check_files(folder)
            return cls(folder, folder.resolve().name, read_json(folder / "config.json"))
        if folder.exists():
            raise CheckpointError(f"{source}: a file; give the folder of a Hugging Face checkpoint or a hub id")
        if not _HUB_ID.fullmatch(source):
            raise CheckpointError(
                f"{source}: no such folder; give the folder of a Hugging Face checkpoint or a hub id (owner/name)"
            )
        folder = download(source, replace(access, on_download=silent), TEXT_FILES)
        return cls(folder, source, read_json(folder / "config.json"), access)

    @property
    def place(self) -> str:
        return str(self.folder)

    @property
    def texts(self) -> Path:
        return self.folder

    def tensors(self) -> dict[str, ShardTensor]:
        """Fetch the shards if this is a hub id, then read and check all their headers.

        CheckpointError: no safetensors, a shard missing, truncated or with a header that does not describe it.
        """
        if self.hub is not None:
            self.folder = download(self.name, self.hub, (*TEXT_FILES, *WEIGHT_FILES), self._weight_bytes())
        tensors: dict[str, ShardTensor] = {}
        shards = {self.folder / shard: names for shard, names in self._shards().items()}
        for path, names in shards.items():
            found = read_header(path)
            missing = sorted(set(names or found) - set(found))
            if missing:
                raise CheckpointError(f"{path}: lacks {missing[0]}, which {INDEX} promises; download it again")
            for name in names or found:
                header = found[name]
                tensors[name] = ShardTensor(path, header.dtype, header.shape, header.offset)
        dense = [place / SINGLE for place in dense_folders(self.folder)]
        for index, path in enumerate(dense):
            if not path.exists():
                raise CheckpointError(
                    f"{path} is missing; give the folder of a complete checkpoint, its Dense modules in safetensors"
                )
            for name, header in read_header(path).items():
                # Named as in `dense_shapes`.
                ours = f"dense.{index}.{name.removeprefix('linear.')}"
                tensors[ours] = ShardTensor(path, header.dtype, header.shape, header.offset)
        self.shards = (*shards, *dense)
        return tensors

    def files(self) -> list[Path]:
        """Shards and JSON files."""
        return sorted([*self.shards, *(path for pattern in TEXT_FILES for path in self.folder.glob(pattern))])

    def _weight_bytes(self) -> int:
        """What the index says of all shards together; 0: there is no index, or it does not say."""
        index = self.folder / INDEX
        metadata = read_json(index).get("metadata") if index.exists() else None
        size = metadata.get("total_size") if isinstance(metadata, dict) else None
        return size if type(size) is int and 0 < size < 1 << 50 else 0

    def _shards(self) -> dict[str, list[str] | None]:
        """Shard file -> the tensors it must have; None: whatever it has."""
        if (self.folder / SINGLE).exists():
            return {SINGLE: None}
        if not (self.folder / INDEX).exists():
            weights = sorted(path.name for path in self.folder.iterdir() if path.suffix == ".safetensors")
            if len(weights) == 1:
                # Older programs named the one file after the bits and groups of its weights.
                return {weights[0]: None}
            pickled = sorted(path.name for path in self.folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
            if pickled:
                raise CheckpointError(
                    f"{self.folder}: the weights are pickled ({pickled[0]}), which can run code when read; load the model with "
                    "transformers, save it again with model.save_pretrained(folder) and convert that folder"
                )
            raise CheckpointError(f"{self.folder}: neither {SINGLE} nor {INDEX}; give the folder of a complete checkpoint")
        weight_map = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or len(weight_map) > MAX_TENSORS:
            raise CheckpointError(f"{self.folder / INDEX}: no weight_map of at most {MAX_TENSORS} tensors; download it again")
        shards: dict[str, list[str] | None] = {}
        for name, shard in weight_map.items():
            # A path here could name any file of this machine.
            beside = isinstance(shard, str) and Path(shard).name == shard and shard.endswith(".safetensors")
            if not beside or len(shard.encode("utf-8", "replace")) > MAX_FILE_NAME:
                raise CheckpointError(
                    f"{self.folder / INDEX}: {name} lies in {shard!r}, which is not a .safetensors file beside it"
                )
            names = shards.setdefault(shard, [])
            assert names is not None
            names.append(name)
        for shard in shards:
            if not (self.folder / shard).exists():
                raise CheckpointError(f"{self.folder}: shard {shard} is missing ({INDEX} names it); download it again")
        return shards


def _check_files(folder: Path) -> None:
    """CheckpointError unless all that is there are files and folders: transformers opens more of them than edgeq does."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError(f"{path}: not a regular file; give the folder of a Hugging Face checkpoint")
