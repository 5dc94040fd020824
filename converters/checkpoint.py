"""A Hugging Face checkpoint on disk or on the hub: its JSON files, its tensors by header, their rows one slab at a time.

safetensors only (edgeq.safetensors).  Only the slab of weights asked for is in memory, and one shard is open at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.adapter import Adapter, Factors
from edgeq.converters.download import HubAccess, download, silent
from edgeq.errors import CheckpointError
from edgeq.safetensors import FLOATS, MAX_TENSORS, SIZES, Header, floats, read_header, read_json

MAX_FILE_NAME = 255
"""Bytes that Linux and macOS take; with a longer name the system refuses to look for the file."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEXT_FILES = ("*.json", "*.jinja")
WEIGHT_FILES = ("model*.safetensors",)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `offset` bytes from the start of the file `shard`; `dtype` as safetensors spells it.

    added   to every value when it is read;  name: for messages, where the checkpoint calls it otherwise
    first   a tensor that is added to the first row
    merged  factors of an adapter whose product is added, and which of its rows is the first here
    """

    shard: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    added: float = 0.0
    name: str = ""
    first: StoredTensor | None = None
    merged: tuple[Factors, int] | None = None


def stored_tensor(shard: str, header: Header) -> StoredTensor:
    """The tensor of `header` in the file `shard`."""
    return StoredTensor(shard, header.dtype, header.shape, header.offset)


@dataclass(frozen=True)
class TensorSource:
    """Where to find a tensor that the checkpoint has under another name, as rows of a larger one, or less a constant.

    name    of the stored tensor, whose shape is `stored`
    shape   of the tensor meant: it begins at row `row` of the stored one, whose leading dimensions are taken as one
    added   a constant that is not in the stored values
    first   name of a vector that is added to the first row; "": none
    """

    name: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    row: int = 0
    added: float = 0.0
    first: str = ""


@dataclass
class Checkpoint:
    """An opened checkpoint.  `name` is the hub id, or the folder's own name: no path of this machine goes into a file.

    `tensors` is empty until `open_weights` has fetched and checked the shards.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    hub: HubAccess | None = None
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    adapter: Adapter | None = None

    @classmethod
    def open(cls, source: str, access: HubAccess) -> Checkpoint:
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

    def open_weights(self) -> None:
        """Fetch the shards if this is a hub id, then read and check all their headers.

        CheckpointError: no safetensors, a shard missing, truncated or with a header that does not describe it.
        """
        if self.hub is not None:
            self.folder = download(self.name, self.hub, (*TEXT_FILES, *WEIGHT_FILES), self._weight_bytes())
        for shard, names in self._shards().items():
            found = read_header(self.folder / shard)
            missing = sorted(set(names or found) - set(found))
            if missing:
                raise CheckpointError(f"{self.folder / shard}: lacks {missing[0]}, which {INDEX} promises; download it again")
            self.tensors.update({name: stored_tensor(shard, found[name]) for name in names or found})

    def merge(self, adapter: Adapter) -> None:
        """Add the products of an adapter's factors to the weights that it was trained for, whenever those are read.

        CheckpointError: there is no such weight, or it has another shape.
        """
        for module, factors in adapter.factors.items():
            name = f"{module}.weight"
            tensor = self.tensors.get(name)
            if tensor is None or tensor.shape != factors.shape:
                found = f"of {tensor.shape}" if tensor else "that is not in the checkpoint"
                raise CheckpointError(
                    f"adapter {adapter.name}: {module} is for a weight of {factors.shape}, and {name} is one {found}; give the "
                    "checkpoint that it was trained for"
                )
            self.tensors[name] = replace(tensor, merged=(factors, 0))
        self.adapter = adapter

    def _weight_bytes(self) -> int:
        """What the index says of all shards together; 0: there is no index, or it does not say."""
        index = self.folder / INDEX
        metadata = read_json(index).get("metadata") if index.exists() else None
        size = metadata.get("total_size") if isinstance(metadata, dict) else None
        return size if type(size) is int and 0 < size < 1 << 50 else 0

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """CheckpointError: there is none of this name, or it has another shape."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing; the checkpoint is incomplete or of another kind")
        if tensor.shape != shape:
            raise CheckpointError(f"{self.folder}: {name} has the shape {tensor.shape}; config.json says {shape}")
        return tensor

    def rename(self, beginnings: Mapping[str, str]) -> None:
        """Replace beginnings of tensor names by others.  CheckpointError: two tensors would have the same name."""
        renamed: dict[str, StoredTensor] = {}
        for name, tensor in self.tensors.items():
            theirs = next((each for each in beginnings if name.startswith(each)), "")
            ours = beginnings[theirs] + name.removeprefix(theirs) if theirs else name
            if ours in renamed:
                raise CheckpointError(f"{self.folder}: has {name} under two names; one of them is too many")
            renamed[ours] = replace(tensor, name=name) if theirs else tensor
        self.tensors = renamed

    def arrange(self, sources: Mapping[str, TensorSource]) -> None:
        """Replace in `tensors` what `sources` are made of by the tensors that they describe, under the names given.

        CheckpointError: a source is missing or has another shape.
        """
        arranged: dict[str, StoredTensor] = {}
        for name, source in sources.items():
            tensor = self.tensor(source.name, source.stored)
            skipped = source.row * math.prod(source.shape[1:]) * SIZES[tensor.dtype]
            first = replace(self.tensor(source.first, source.shape[1:]), name=source.first) if source.first else None
            merged = (tensor.merged[0], source.row) if tensor.merged else None
            arranged[name] = StoredTensor(
                tensor.shard, tensor.dtype, source.shape, tensor.offset + skipped, source.added, source.name, first, merged
            )
        used = {name for source in sources.values() for name in (source.name, source.first)}
        rest = {name: tensor for name, tensor in self.tensors.items() if name not in used}
        twice = sorted(set(rest) & set(arranged))
        if twice:
            raise CheckpointError(f"{self.folder}: has both {twice[0]} and {sources[twice[0]].name}; one of them is too many")
        self.tensors = rest | arranged

    def _shards(self) -> dict[str, list[str] | None]:
        """Shard file -> the tensors it must have; None: whatever it has."""
        if (self.folder / SINGLE).exists():
            return {SINGLE: None}
        if not (self.folder / INDEX).exists():
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

    def dtype(self, name: str) -> str:
        """How a weight is to be kept: as it is stored, "f32", "f16" or "bf16", or f32 where something is added to it."""
        tensor = self.tensors[name]
        if tensor.dtype not in FLOATS:
            raise CheckpointError(f"{tensor.name or name} is stored as {tensor.dtype}; supported: {', '.join(FLOATS)}")
        if tensor.first is not None and tensor.first.dtype not in FLOATS:
            raise CheckpointError(f"{tensor.first.name} is stored as {tensor.first.dtype}; supported: {', '.join(FLOATS)}")
        return "f32" if tensor.added or tensor.first else FLOATS[tensor.dtype]

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start...stop of a tensor as float32 [stop - start, ...]; a vector is a tensor of one-element rows.

        CheckpointError: NaN or infinity in them, or the shard is no longer what its header said.
        """
        self.dtype(name)
        tensor = self.tensors[name]
        values = self._read(tensor, tensor.name or name, start, stop)
        if tensor.first is not None and start == 0 < stop:
            values[0] += self._read(tensor.first, tensor.first.name, 0, len(values[0]))
        if tensor.merged is not None:
            factors, row = tensor.merged
            values = values + factors.b[row + start : row + stop] @ factors.a
        return values + np.float32(tensor.added) if tensor.added else values

    def _read(self, tensor: StoredTensor, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows of a tensor as they are stored, float32; `name`: for messages."""
        path, row = self.folder / tensor.shard, math.prod(tensor.shape[1:])
        values = floats(path, tensor.dtype, tensor.offset + start * row * SIZES[tensor.dtype], (stop - start) * row, name)
        values = values.reshape(stop - start, *tensor.shape[1:])
        if not np.isfinite(values).all():
            raise CheckpointError(f"{name} has NaN or infinite values; the checkpoint is damaged or its training diverged")
        return values

    def whole(self, name: str) -> NDArray[np.float32]:
        """A whole tensor as float32: norm gains, biases, one layer of a calibration."""
        return self.rows(name, 0, self.tensors[name].shape[0])

    def files(self) -> list[Path]:
        """The files whose change would change the result: shards and JSON files."""
        stored = [*self.tensors.values(), *(tensor.first for tensor in self.tensors.values() if tensor.first)]
        shards = {tensor.shard for tensor in stored}
        return sorted([*(self.folder / s for s in shards), *(p for pattern in TEXT_FILES for p in self.folder.glob(pattern))])

    def digest(self) -> str:
        """sha256 of the configuration and of every tensor's name, type and shape; no weight is read for it."""
        headers = sorted((name, t.dtype, t.shape) for name, t in self.tensors.items())
        described = [self.config, headers, *([self.adapter.digest] if self.adapter else [])]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _check_files(folder: Path) -> None:
    """CheckpointError unless all that is there are files and folders: transformers opens more of them than edgeq does."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError(f"{path}: not a regular file; give the folder of a Hugging Face checkpoint")
