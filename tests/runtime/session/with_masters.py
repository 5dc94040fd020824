"""A file whose linear layers have masters, made from one without quantization."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.format.codec import Codec, dequantize, pack_floats
from edgeq.format.container import ModelFile
from edgeq.format.metadata import Metadata
from edgeq.format.quantization import rounded
from edgeq.format.records import DTYPES, ArrayRef, LinearSpec, LowRank, Weight
from edgeq.format.writer import Writer


def append(writer: Writer, codec: Codec, w: np.ndarray) -> tuple[Weight, np.ndarray]:
    """Store w; the record, and the matrix as it is read back."""
    parts = rounded(w, codec) if codec.kind == "int" else {"q": pack_floats(w, codec.kind)}
    dtypes = {"q": codec.kind if codec.kind != "int" else "u8", "scale": "f16", "zero": "u8"}
    refs = {name: writer.array(a.view(DTYPES[dtypes[name]]), dtypes[name]) for name, a in parts.items()}
    back = dequantize(codec, *w.shape, parts)
    return Weight(codec, *w.shape, refs), back


def matrix(file: ModelFile, weight: Weight) -> np.ndarray:
    arrays = {name: file.array(ref) for name, ref in weight.arrays.items()}
    return dequantize(weight.codec, weight.rows, weight.columns, arrays)


def with_masters(
    source: Path, path: Path, codec: Codec, master: Codec, rank: int = 0, apart: dict[str, dict[str, int]] | None = None
) -> Path:
    """`source` with the layers in front of the head rounded to `codec` from a master, less a low-rank part of `rank`.

    apart   layers stored as several: their name, then the names and the rows of the pieces
    """
    file, writer = ModelFile.open(source), Writer(path)

    def copied(ref: ArrayRef) -> ArrayRef:
        return writer.array(np.array(file.array(ref)), ref.dtype)

    def layer(name: str, w: np.ndarray, bias: ArrayRef | None) -> LinearSpec:
        low_rank, product = None, np.zeros_like(w)
        if rank:
            u, s, v = np.linalg.svd(w, full_matrices=False)
            b, a = u[:, :rank] * np.sqrt(s[:rank]), np.sqrt(s[:rank])[:, None] * v[:rank]
            (b_weight, b), (a_weight, a) = (append(writer, Codec("f16"), each.astype(np.float32)) for each in (b, a))
            low_rank, product = LowRank(b_weight, a_weight), b @ a
        kept, rest = append(writer, master, w - product)
        weight, _ = append(writer, codec, rest)
        return LinearSpec(name, (weight,), bias and copied(bias), low_rank=low_rank, master=kept)

    linears: dict[str, Any] = {}
    for name, spec in file.metadata.linears.items():
        w, row = matrix(file, spec.weights[0]), 0
        if name == "head":
            linears[name] = LinearSpec(name, (append(writer, spec.weights[0].codec, w)[0],), spec.bias and copied(spec.bias))
            continue
        for piece, rows in (apart or {}).get(name, {name: len(w)}).items():
            linears[piece] = layer(piece, w[row : row + rows], spec.bias)
            row += rows
    arrays = {name: copied(ref) for name, ref in file.metadata.arrays.items()}
    blobs = {name: writer.append([file.segment(index).tobytes()]) for name, index in file.metadata.blobs.items()}
    metadata: Metadata = replace(file.metadata, linears=linears, arrays=arrays, blobs=blobs)
    writer.finish(metadata)
    return path
