"""The tensors of a model file under the names that another program gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeq.errors import UnsupportedError
from edgeq.format.codec import AnyArray, ArrayF32, Codec, dequantize, from_bf16, unpack_beside, unpack_integers
from edgeq.format.container import ModelFile
from edgeq.format.manifest import fused_shapes, layer_prefix
from edgeq.format.records import ArrayRef, LinearSpec
from edgeq.network.config import ModelConfig

DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
"""Types of arrays in a model file -> as safetensors spells them."""


@dataclass(frozen=True, eq=False)
class ExportedWeight:
    """Rows of a linear layer of a model file: one matrix of the checkpoint.

    linear   the layer in the file;  first, rows: which of its rows they are
    """

    file: ModelFile
    linear: LinearSpec
    first: int
    rows: int

    @property
    def codec(self) -> Codec:
        return self.linear.weights[0].codec

    @property
    def columns(self) -> int:
        return self.linear.columns

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def _arrays(self) -> tuple[dict[str, AnyArray], slice]:
        """The arrays of the blocks of 16 rows that these rows lie in, and which rows of those they are."""
        start, stop = self.first // 16, -(-(self.first + self.rows) // 16)
        weight = self.linear.weights[0]
        arrays = {name: self.file.array(ref)[start:stop] for name, ref in weight.arrays.items()}
        return arrays, slice(self.first - 16 * start, self.first - 16 * start + self.rows)

    def integers(self) -> dict[str, AnyArray]:
        """q uint8 [rows, columns], scale f16 [rows, groups], and what else the codec has for each group."""
        arrays, rows = self._arrays()
        count = 16 * len(arrays["q"])
        found = {name: unpack_beside(self.codec, name, array, count)[rows] for name, array in arrays.items() if name != "q"}
        return {"q": unpack_integers(arrays["q"], count, self.columns)[rows], **found}

    def tables(self) -> AnyArray | None:
        """Tables of the blocks that these rows lie in, int8 [tables, entries]; None: the codec has none."""
        ref = self.linear.weights[0].arrays.get("table")
        return None if ref is None else self.file.array(ref)[self.first // 16 : -(-(self.first + self.rows) // 16)]

    def values(self) -> ArrayF32:
        arrays, rows = self._arrays()
        return np.ascontiguousarray(dequantize(self.codec, 16 * len(arrays["q"]), self.columns, arrays)[rows])

    def bias(self) -> tuple[str, AnyArray] | None:
        """Its dtype, as safetensors spells it, and its values [rows]; bf16 as uint16."""
        ref = self.linear.bias
        return None if ref is None else (DTYPES[ref.dtype], self.file.array(ref)[self.first : self.first + self.rows])


@dataclass(frozen=True, eq=False)
class ExportedArray:
    """A plain array of a model file."""

    file: ModelFile
    ref: ArrayRef

    @property
    def dtype(self) -> str:
        return DTYPES[self.ref.dtype]

    def raw(self) -> AnyArray:
        """bf16 as uint16."""
        return self.file.array(self.ref)

    def values(self) -> ArrayF32:
        raw = self.raw()
        return from_bf16(raw) if self.ref.dtype == "bf16" else raw.astype(np.float32)


@dataclass(frozen=True)
class TensorNames:
    """Names of weights, with `.weight`: of the parts of a decoder layer, q ... post_mlp_norm, and of the rest."""

    layer: Callable[[int], Mapping[str, str]]
    embedding: str
    head: str
    norm: str


@dataclass(frozen=True, eq=False)
class ExportedModel:
    """The matrices and the arrays of a model by their names, matrices without `.weight`.

    fused   matrices that other programs compute as one: q, k and v, gate and up
    """

    weights: Mapping[str, ExportedWeight]
    arrays: Mapping[str, ExportedArray]
    fused: tuple[tuple[str, ...], ...]


def exported(file: ModelFile, wanted: TensorNames) -> ExportedModel:
    """UnsupportedError: a layer with parts that other formats do not have, by its name."""
    metadata, config = file.metadata, file.metadata.config
    for name, linear in metadata.linears.items():
        _check(name, linear)
    if any(name.endswith("key_rotation") for name in metadata.arrays):
        raise UnsupportedError("keys and queries are rotated when the model runs (ResQ): no other format has that")
    weights: dict[str, ExportedWeight] = {}
    arrays: dict[str, ExportedArray] = {}
    fused: list[tuple[str, ...]] = []
    for layer in range(config.num_hidden_layers):
        names = {part: name.removesuffix(".weight") for part, name in wanted.layer(layer).items()}
        prefix = layer_prefix(config, layer)
        for together, parts in fused_shapes(config, layer):
            found = [names[part.removeprefix(prefix)] for part in parts]
            fused += [(*found,)] if len(found) > 1 else []
            weights |= dict(zip(found, _rows(file, together, {part: rows for part, (rows, _) in parts.items()}), strict=True))
        arrays |= {
            f"{names[part]}.weight": ExportedArray(file, metadata.arrays[f"{prefix}{part}"])
            for part in names
            if f"{prefix}{part}" in metadata.arrays
        }
    arrays[wanted.norm] = ExportedArray(file, metadata.arrays["norm"])
    head = metadata.linears["head"]
    table = wanted.embedding if config.tie_word_embeddings else wanted.head
    weights[table.removesuffix(".weight")] = ExportedWeight(file, head, 0, head.rows)
    if "embedding" in metadata.arrays:
        arrays[wanted.embedding] = ExportedArray(file, metadata.arrays["embedding"])
    elif "embedding" in metadata.linears:
        embedding = metadata.linears["embedding"]
        weights[wanted.embedding.removesuffix(".weight")] = ExportedWeight(file, embedding, 0, embedding.rows)
    return ExportedModel(weights, arrays, tuple(fused))


def generation_settings(file: ModelFile) -> dict[str, Any]:
    """generation_config.json of a model file."""
    generation = dict(file.metadata.generation)
    ids = {"bos_token_id": generation.pop("bos_token_id", None), "eos_token_id": generation.pop("eos_token_ids", None) or None}
    kept = {key: value for key, value in generation.items() if key not in ("add_bos", "special_tokens")}
    return {key: value for key, value in (ids | kept).items() if value is not None}


def check_network(config: ModelConfig) -> None:
    """UnsupportedError: experts, whose matrices other formats lay in ways of their own, or a LayerNorm."""
    if config.num_experts:
        raise UnsupportedError("models with experts are not exported; supported: models without")
    if config.layer_norm:
        raise UnsupportedError("models with LayerNorm are not exported; supported: models with RMSNorm")


def _rows(file: ModelFile, together: str, parts: Mapping[str, int]) -> Iterator[ExportedWeight]:
    first = 0
    for part, rows in parts.items():
        if together in file.metadata.linears:
            yield ExportedWeight(file, file.metadata.linears[together], first, rows)
        else:
            yield ExportedWeight(file, file.metadata.linears[part], 0, rows)
        first += rows


def _check(name: str, linear: LinearSpec) -> None:
    parts = ("input_order", "transform", "input_scale", "split_row", "low_rank", "master")
    found = next((part for part in parts if getattr(linear, part) is not None), None)
    if len(linear.weights) > 1:
        found = "second weight block"
    if found:
        raise UnsupportedError(f"{name} has a part that no other format has ({found}); convert with rtn, awq or gptq to export")
