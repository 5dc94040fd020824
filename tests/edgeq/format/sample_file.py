"""A small sound file, and the means to make it unsound and seal it again with a right digest."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from edgeq.errors import EdgeqError
from edgeq.format.codec import Codec, pack_beside, pack_floats, pack_integers
from edgeq.format.container import DATA_OFFSET, FileHeader, ModelFile, digest
from edgeq.format.manifest import array_shapes, fused_shapes
from edgeq.format.metadata import Metadata
from edgeq.format.records import LinearSpec, Weight
from edgeq.format.writer import Writer
from edgeq.network.config import ModelConfig
from edgeq.network.rope import Rope

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=20,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=Rope(10000.0),
    max_position_embeddings=128,
    tie_word_embeddings=True,
)


def write_weight(writer: Writer, name: str, codec: Codec, rows: int, columns: int) -> LinearSpec:
    """One layer of random numbers."""
    rng = np.random.default_rng(len(writer.segments))
    if not codec.integer:
        floats = pack_floats(rng.standard_normal((rows, columns)).astype(np.float32), codec.kind)
        return LinearSpec(name, (Weight(codec, rows, columns, {"q": writer.array(floats, codec.kind)}),))
    q = pack_integers(rng.integers(0, 1 << codec.bits, (rows, columns)).astype(np.uint8), codec.bits)
    arrays = {"q": writer.array(q, "u8")}
    for part, spec in codec.parts(rows, columns).items():
        if part != "q":
            values = rng.uniform(*ranges(codec)[part], (rows, spec.shape[1])).astype(spec.dtype)
            values = np.repeat(values[::16], 16, axis=0)[:rows] if part == "table" else values
            arrays[part] = writer.array(pack_beside(codec, part, values), spec.stored)
    return LinearSpec(name, (Weight(codec, rows, columns, arrays),))


def ranges(codec: Codec) -> dict[str, tuple[float, float]]:
    """Ranges of what lies beside the integers, by the names of arrays."""
    if codec.kind == "two-level":
        return {"scale": (1, 64), "offset": (0, 64), "super_scale": (0.001, 0.002), "super_offset": (-0.02, 0)}
    if codec.coded:
        return {"scale": (0, 16), "super_scale": (0.01, 0.1), "table": (-31, 32)}
    return {"scale": (0.01, 0.1), "zero": (0, 1 << codec.bits), "offset": (-1, 0), "table": (-31, 32)}


def write_body(writer: Writer) -> Metadata:
    """All segments of the sample; the same bytes every time."""
    linears, codecs = {}, [Codec("int", 4, 16, False), Codec("table", 3, 16), Codec("f16"), Codec("s4", 3, 16)]
    others = [Codec("offset", 4, 16), Codec("two-level", 4, 32, False), Codec("half", 2, 16), Codec("two-level", 6, 16)]
    for layer, of_layer in enumerate((codecs, others)):
        for (name, parts), codec in zip(fused_shapes(CONFIG, layer), of_layer, strict=True):
            rows = sum(rows for rows, _ in parts.values())
            linears[name] = write_weight(writer, name, codec, rows, next(iter(parts.values()))[1])
    linears["head"] = write_weight(writer, "head", Codec("trellis", 2, 16), CONFIG.vocab_size, CONFIG.hidden_size)
    arrays = {name: writer.array(np.ones(shape, np.float32), "f32") for name, shape in array_shapes(CONFIG).items()}
    blobs = {"tokenizer.json": writer.append([b'{"version":"1.0"}'])}
    return Metadata(CONFIG, {"eos_token_ids": [1]}, {"method": "rtn"}, "a16", linears, arrays, blobs)


def seal(data: bytes, metadata: bytes) -> bytes:
    """A file of this data area and this metadata whose header and digest are right."""
    return FileHeader(len(data), len(metadata), digest(metadata)).encode().ljust(DATA_OFFSET, b"\0") + data + metadata


def split(file: bytes) -> tuple[bytes, bytes]:
    """(data area, metadata) of a file."""
    header = FileHeader.decode(file[:64], len(file))
    return file[DATA_OFFSET : header.metadata_offset], file[header.metadata_offset :]


def refused(path: Path, kind: type[EdgeqError], match: str) -> None:
    """Opening is refused with one line that names the file, before anything larger than the metadata is allocated."""
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=match) as caught:
            ModelFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert path.name in str(caught.value) and "\n" not in str(caught.value)
