"""A Hugging Face checkpoint on disk or on the hub: its JSON files, its tensors by header, their rows one slab at a time.

safetensors only.  The headers come from strangers: cap, check, then loop; no length is used before it has been compared with
the size of the file.  Only the slab of weights asked for is in memory, and one shard is open at a time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeq.codec import from_bf16
from edgeq.converters.download import HubAccess, download, silent
from edgeq.errors import CheckpointError

MAX_HEADER = 100 << 20
MAX_VALUES = 1 << 21
"""Values in one JSON text, counted by its commas and brackets: each takes up to a hundred bytes of memory once it is read, for
two bytes of text.  The headers and indices of the largest models have less than a million."""
MAX_RANK = 8
MAX_TENSORS = 1 << 20
MAX_FILE_NAME = 255
"""Bytes that Linux and macOS take; with a longer name the system refuses to look for the file."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEXT_FILES = ("*.json", "*.jinja")
WEIGHT_FILES = ("model*.safetensors",)
FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
SIZES |= {"I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `offset` bytes from the start of the file `shard`; `dtype` as safetensors spells it.

    added   to every value when it is read;  name: for messages, where the checkpoint calls it otherwise
    first   a tensor that is added to the first row
    """

    shard: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    added: float = 0.0
    name: str = ""
    first: StoredTensor | None = None


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
            self.tensors.update({name: found[name] for name in names or found})

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
            arranged[name] = StoredTensor(
                tensor.shard, tensor.dtype, source.shape, tensor.offset + skipped, source.added, source.name, first
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
        return values + np.float32(tensor.added) if tensor.added else values

    def _read(self, tensor: StoredTensor, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows of a tensor as they are stored, float32; `name`: for messages."""
        dtype, row = FLOATS[tensor.dtype], math.prod(tensor.shape[1:])
        stored = np.dtype({"f32": "<f4", "f16": "<f2", "bf16": "<u2"}[dtype])
        path, count = self.folder / tensor.shard, (stop - start) * row
        raw = np.fromfile(path, stored, count, offset=tensor.offset + start * row * stored.itemsize)
        if len(raw) != count:
            raise CheckpointError(f"{path}: ends inside {name}; it changed while it was read")
        raw = raw.reshape(stop - start, *tensor.shape[1:])
        values: NDArray[np.float32] = from_bf16(raw) if dtype == "bf16" else raw.astype(np.float32, copy=False)
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
        return hashlib.sha256(json.dumps([self.config, headers], sort_keys=True).encode()).hexdigest()


def _check_files(folder: Path) -> None:
    """CheckpointError unless all that is there are files and folders: transformers opens more of them than edgeq does."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError(f"{path}: not a regular file; give the folder of a Hugging Face checkpoint")


def open_regular(path: Path) -> BinaryIO:
    """A regular file, opened for reading.  CheckpointError: anything else: a pipe would block, a device need not end.

    FileNotFoundError: there is none.
    """
    try:
        # Opening a pipe without a writer waits for one.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read it: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a regular file; give the folder of a Hugging Face checkpoint")
    return open(descriptor, "rb")


def read_file(path: Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most`; CheckpointError otherwise."""
    try:
        with open_regular(path) as file:
            data = file.read(most + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name}; give the folder of a Hugging Face checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read it: {error.strerror}") from None
    if len(data) > most:
        raise CheckpointError(f"{path}: more than {most} bytes")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 100 MB; CheckpointError otherwise."""
    data = read_file(path, MAX_HEADER)
    _check_values(path, data)
    try:
        value = json.loads(data, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _check_values(path: Path, data: bytes) -> None:
    """CheckpointError: a JSON text of so many values that reading it would fill the memory."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise CheckpointError(f"{path}: more than {MAX_VALUES} values; no checkpoint has as many")


def _finite(digits: str) -> float:
    """Infinity and NaN are no JSON, and what is made of them could not be written as JSON again."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]}")
    return value


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file: u64 length n, n bytes of JSON, then the data, to the byte.

    CheckpointError: the header is too long, not of the format, or does not describe a file of this size.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise CheckpointError(f"{path}: truncated or not a safetensors file ({size} bytes); download it again")
        data = file.read(length)
    _check_values(path, data)
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not JSON ({error}); download it again") from None
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise CheckpointError(f"{path}: its header is not an object of at most {MAX_TENSORS} tensors")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry) for name, entry in header.items()}
    at = 0
    for name, (begin, end, _) in sorted(tensors.items(), key=lambda item: item[1][:2]):
        if begin != at:
            raise CheckpointError(f"{path}: {name} starts at byte {begin} instead of {at}: the header is damaged or hostile")
        at = end
    if size != 8 + length + at:
        raise CheckpointError(
            f"{path}: truncated or damaged: {size} bytes, its header says {8 + length + at}; download it again"
        )
    return {
        name: StoredTensor(path.name, dtype, shape, 8 + length + begin) for name, (begin, _, (dtype, shape)) in tensors.items()
    }


def _tensor(path: Path, name: str, entry: Any) -> tuple[int, int, tuple[str, tuple[int, ...]]]:
    """(begin, end, (dtype, shape)) of one header entry, each checked."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, Mapping) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise CheckpointError(f"{where} lacks dtype, shape or data_offsets; download it again")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise CheckpointError(f"{where} is stored as {dtype!r}, which is not known; supported weights: {', '.join(FLOATS)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or any(type(n) is not int or not 0 <= n < 1 << 40 for n in shape):
        raise CheckpointError(f"{where} has the shape {str(shape)[:80]}; expected at most {MAX_RANK} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(n) is not int or not 0 <= n < 1 << 60 for n in offsets):
        raise CheckpointError(f"{where} has the data_offsets {str(offsets)[:80]}; expected two positions")
    begin, end = offsets
    if end - begin != math.prod(shape) * SIZES[dtype]:
        raise CheckpointError(f"{where} has {end - begin} bytes; {dtype} {shape} needs {math.prod(shape) * SIZES[dtype]}")
    return begin, end, (dtype, tuple(shape))
