"""Files of the safetensors format and the JSON beside them, from their headers: no tensor is read before it is asked for.

They come from strangers: cap, check, then loop; no length is used before it has been compared with the size of the file.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import CheckpointError
from edgeq.format.codec import from_bf16

MAX_HEADER = 100 << 20
MAX_VALUES = 1 << 21
"""Values in one JSON text, counted by its commas and brackets: each takes up to a hundred bytes of memory once it is read, for
two bytes of text.  The headers and indices of the largest models have less than a million."""
MAX_RANK = 8
MAX_TENSORS = 1 << 20
FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
SIZES |= {"I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8}
NUMPY = {"U8": "u1", "I8": "i1", "I16": "<i2", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4", "F32": "<f4"}
NUMPY |= {"I64": "<i8", "U64": "<u8"}
"""Types whose values are read, and how numpy spells them."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: `offset` bytes from the start of its file; `dtype` as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def values(path: Path, dtype: str, offset: int, count: int, name: str) -> NDArray[Any]:
    """`count` values of `dtype`, one of NUMPY, from `offset` on, bf16 as uint16; `name`: of the tensor, for messages.

    CheckpointError: the file ends before them.
    """
    raw: NDArray[Any] = np.fromfile(path, NUMPY[dtype], count, offset=offset)
    if len(raw) != count:
        raise CheckpointError(f"{path}: ends inside {name}; it changed while it was read")
    return raw


def floats(path: Path, dtype: str, offset: int, count: int, name: str) -> NDArray[np.float32]:
    """The same of one of FLOATS, as float32."""
    raw = values(path, dtype, offset, count, name)
    return from_bf16(raw) if dtype == "BF16" else raw.astype(np.float32, copy=False)


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


def read_header(path: Path) -> dict[str, TensorEntry]:
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
    return {name: TensorEntry(dtype, shape, 8 + length + begin) for name, (begin, _, (dtype, shape)) in tensors.items()}


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
