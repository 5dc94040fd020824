"""A GGUF file, which llama.cpp reads: every number of the model file as it is, a tensor at a time."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.converters.exporters.contents import (
    ExportedArray,
    ExportedModel,
    ExportedWeight,
    TensorNames,
    check_network,
    exported,
)
from edgeq.converters.exporters.gguf_blocks import FLOAT_NUMBERS, HeldAs, blocks_of, fits_ternary, held_as
from edgeq.converters.exporters.gguf_network import GgufNetwork, layer_names, network_of
from edgeq.converters.exporters.gguf_tokenizer import tokenizer_keys
from edgeq.converters.importers.gguf_keys import EMBEDDING, HEAD, NORM
from edgeq.converters.importers.gguf_types import TERNARY, stored_bytes
from edgeq.errors import ResourceError, UnsupportedError
from edgeq.format.codec import AnyArray, ArrayF32, as_float32, to_bf16
from edgeq.format.container import ModelFile

SLAB = 4096
"""Rows that are read and packed at once, rounded down to whole heads."""
QUANTIZATION_VERSION = 2
"""ggml's version of its blocks."""
SHARES_A_ROTATION = ("attn_q", "attn_k")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class GgufMatrix:
    """A tensor of the file: matrices of the model one below the other.

    head_size  rows of a head whose halves are written row by row in turn; 0: rows stay in order
    """

    name: str
    parts: tuple[ExportedWeight, ...]
    stored_as: HeldAs
    head_size: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.rows for part in self.parts), self.parts[0].columns

    @property
    def row_bytes(self) -> int:
        found = stored_bytes(self.stored_as.type, 1, self.shape[1])
        assert found is not None
        return found

    def data(self) -> AnyArray:
        """Its bytes, uint8 [rows, bytes of a row]."""
        data, at = np.empty((self.shape[0], self.row_bytes), np.uint8), 0
        for part in self.parts:
            for slab in _slabs(part, self.head_size):
                data[at : at + slab.rows] = self._rows(slab)
                at += slab.rows
        return data

    def _rows(self, slab: ExportedWeight) -> AnyArray:
        order = interleaved(slab.rows, self.head_size)
        if self.stored_as.codec is None:
            values = slab.values()[order]
            kind = slab.codec.kind
            stored = to_bf16(values) if kind == "bf16" else values.astype(np.float16 if kind == "f16" else np.float32)
            return np.ascontiguousarray(stored).view(np.uint8)
        arrays = {name: array[order] for name, array in slab.integers().items()}
        try:
            return blocks_of(slab.codec, self.stored_as, arrays)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.name}: {error}") from None


@dataclass(frozen=True)
class GgufTable:
    """An embedding that the model file has as a plain array."""

    name: str
    array: ExportedArray

    @property
    def stored_as(self) -> HeldAs:
        return HeldAs(FLOAT_NUMBERS[self.array.ref.dtype], None)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.array.ref.shape
        return rows, columns

    @property
    def row_bytes(self) -> int:
        return self.array.raw()[:1].nbytes

    def data(self) -> AnyArray:
        return np.ascontiguousarray(self.array.raw()).view(np.uint8)


def write_gguf(file: ModelFile, path: Path, on_progress: Progress) -> list[str]:
    """Write `file` to `path`; returns lines for the user.

    UnsupportedError: what GGUF does not hold, by the name of the layer.  ResourceError: the disk has no room for it.
    ModuleNotFoundError: the package gguf is not installed.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    config = file.metadata.config
    check_network(config)
    network = network_of(config)
    model = exported(file, TensorNames(layer_names, EMBEDDING, HEAD, NORM))
    tables = [GgufTable(name, array) for name, array in model.arrays.items() if len(array.ref.shape) > 1]
    matrices: list[GgufMatrix | GgufTable] = [*tables, *_matrices(model, network, config.head_dim)]
    vectors = _vectors(model, network, config.head_dim)
    total = sum(matrix.shape[0] * matrix.row_bytes for matrix in matrices)
    if (free := shutil.disk_usage(path.parent).free) < total:
        raise ResourceError(
            f"{total / 1e6:,.1f} MB are to be written, and {path.parent} has {free / 1e6:,.1f} MB free; make room"
        )
    keys: dict[str, Any] = {"general.type": "model", "general.name": path.name.removesuffix(".partial").removesuffix(".gguf")}
    keys |= {"general.quantization_version": QUANTIZATION_VERSION, **network.keys, **tokenizer_keys(file, network.architecture)}
    writer = GGUFWriter(path, network.architecture)
    try:
        for key, value in keys.items():
            _add(writer, key, value)
        for name, values in vectors.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        for matrix in matrices:
            shape = matrix.shape[0], matrix.row_bytes
            kind = GGMLQuantizationType(matrix.stored_as.type)
            writer.add_tensor_info(matrix.name, shape, np.dtype(np.uint8), shape[0] * shape[1], kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for values in vectors.values():
            writer.write_tensor_data(values)
        for matrix in matrices:
            writer.write_tensor_data(matrix.data())
            done += matrix.shape[0] * matrix.row_bytes
            on_progress(done, total)
    finally:
        writer.close()
    return _notes(matrices)


def interleaved(rows: int, head_size: int) -> slice | AnyArray:
    """The order in which rows are written: row i of half s of a head becomes row 2i + s; all of them in order where it is 0."""
    if not head_size:
        return slice(None)
    return np.arange(rows).reshape(-1, 2, head_size // 2).transpose(0, 2, 1).reshape(-1)


def _matrices(model: ExportedModel, network: GgufNetwork, head_dim: int) -> Iterator[GgufMatrix]:
    """UnsupportedError: one that GGUF does not hold, by name."""
    together: dict[str, list[ExportedWeight]] = {}
    for name, weight in model.weights.items():
        together.setdefault(network.tensor(name), []).append(weight)
    for name, parts in together.items():
        codecs = list(dict.fromkeys(part.codec.name for part in parts))
        if len(codecs) > 1:
            raise UnsupportedError(f"{name}: llama.cpp has one tensor for what has several codecs here: {', '.join(codecs)}")
        try:
            found = [table for part in parts if (table := part.tables()) is not None]
            held = held_as(parts[0].codec, parts[0].columns, np.concatenate(found) if found else None, _ternary(parts))
        except UnsupportedError as error:
            raise UnsupportedError(f"{name}: {error}") from None
        yield GgufMatrix(f"{name}.weight", (*parts,), held, _head_size(name, network, head_dim))


def _ternary(parts: list[ExportedWeight]) -> bool:
    """Whether matrices are -1, 0 and 1 times scales that TQ2_0 has: no codec says so, their integers do."""
    if parts[0].codec != TERNARY:
        return False
    return all(fits_ternary(slab.codec, slab.integers()) for part in parts for slab in _slabs(part, 0))


def _vectors(model: ExportedModel, network: GgufNetwork, head_dim: int) -> dict[str, ArrayF32]:
    """Gains, biases and factors, in float32 as llama.cpp wants them."""
    found: dict[str, ArrayF32] = dict(network.factors)
    found |= {name: array.values() for name, array in model.arrays.items() if len(array.ref.shape) == 1}
    for name, weight in model.weights.items():
        if (bias := weight.bias()) is not None:
            values = as_float32(bias[1], bias[0].lower())
            found[f"{name}.bias"] = values[interleaved(len(values), _head_size(name, network, head_dim))]
    return {name: np.ascontiguousarray(values, np.float32) for name, values in found.items()}


def _head_size(name: str, network: GgufNetwork, head_dim: int) -> int:
    return head_dim if network.interleaved and name.rpartition(".")[2] in SHARES_A_ROTATION else 0


def _slabs(weight: ExportedWeight, head_size: int) -> Iterator[ExportedWeight]:
    step = SLAB - SLAB % (head_size or 1)
    for first in range(0, weight.rows, step):
        yield replace(weight, first=weight.first + first, rows=min(step, weight.rows - first))


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[list] = writer.add_array
    kinds[type(value)](key, value)


def _notes(matrices: Iterable[GgufMatrix | GgufTable]) -> list[str]:
    """What is stored wider than here, though as the same numbers."""
    wider = Counter[str]()
    for matrix in matrices:
        if not isinstance(matrix, GgufMatrix):
            continue
        codec = matrix.parts[0].codec
        if matrix.stored_as.codec not in (None, codec):
            rows, columns = matrix.shape
            bits = 8 * codec.nbytes(rows, columns) / (rows * columns)
            wider[
                f"{codec.name} as {matrix.stored_as.name}, {8 * matrix.row_bytes / columns:.2f} bits per weight for {bits:.2f}"
            ] += 1
    return [f"{count} matrices of {how}: the same numbers" for how, count in wider.items()]
