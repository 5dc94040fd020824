"""Hostile GGUF files: small networks with a tokenizer, written here field by field, whose fields or bytes are changed."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf_networks.decoders import METADATA, NETWORKS, SHAPES, VOCABULARY
from gguf_networks.encoders import ENCODERS
from gguf_networks.entries import WORDS, Entries
from gguf_networks.towers import TOWERS, language_model
from mutation import VALUES, changed_bytes, changed_json, refused

from edgeq.converters.checkpoint.sentence_transformers import embedding_settings
from edgeq.converters.checkpoint.tokenizer import read_text
from edgeq.converters.families.network import described, open_tensors
from edgeq.converters.importers.gguf_source import GgufSource
from edgeq.converters.importers.gguf_tensors import GgufTensor
from edgeq.converters.importers.gguf_types import BLOCK_TYPES, stored_bytes
from edgeq.errors import EdgeqError

OTHERS = [
    ({**metadata, **VOCABULARY}, {"token_embd.weight": [8, [len(WORDS), 64]], **shapes})
    for metadata, shapes in (NETWORKS | ENCODERS).values()
]
PIECES = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.seperator_token_id": 257, "tokenizer.ggml.cls_token_id": 256}
PIECES |= {"tokenizer.ggml.unknown_token_id": 259}
OTHERS += [({**metadata, **PIECES}, shapes) for metadata, shapes in OTHERS if metadata["general.architecture"] == "bert"]
NETWORK_FILES = [(METADATA, SHAPES), *OTHERS]
"""Metadata and tensors of a file of each."""
TYPES = (*BLOCK_TYPES, 0, 1, 30, 20, 99, 2**31)


def gguf(rng: random.Random, path: Path) -> str:
    """A file with metadata, tensors or bytes changed, at times with its tower; opened, and every weight read."""
    mmproj = path.with_name("mmproj.gguf") if rng.random() < 0.3 else None
    if mmproj:
        # One of the two is sound at times, so that the other is looked at.
        kind = rng.choice(list(TOWERS))
        _write(rng, mmproj, *TOWERS[kind])
        model = language_model(kind)
        path.write_bytes(encoded(random.Random(0), *model))
    if not mmproj or rng.random() < 0.2:
        _write(rng, path, *(model if mmproj else rng.choice(NETWORK_FILES)))
    try:
        source = GgufSource.open(path, mmproj=mmproj)
        embeds = embedding_settings(source, None)
        family, config = described(source, embeds.pooling if embeds else None)
        read_text(source, config.vocab_size)
        tensors = open_tensors(source, family)
        for name, shape in (family.tensor_shapes() | (family.tower.tensor_shapes() if family.tower else {})).items():
            assert np.isfinite(tensors.rows(name, 0, shape[0])).all(), name
            if isinstance(found := tensors.tensors[name].stored, GgufTensor) and found.codec and len(shape) > 1:
                arrays = tensors.quantized(name, 0, shape[0])
                assert arrays["q"].shape == shape and all(np.isfinite(array).all() for array in arrays.values()), name
    except EdgeqError as error:
        return refused(error)
    return "seen" if mmproj else "read"


def _write(rng: random.Random, path: Path, entries: Entries, shapes: Entries) -> None:
    metadata: Any = changed_json(rng, entries) if rng.random() < 0.5 else entries
    tensors: Any = changed_json(rng, shapes, (*VALUES, *TYPES, [256, 256], [1])) if rng.random() < 0.3 else shapes
    data = encoded(rng, metadata if isinstance(metadata, dict) else {}, tensors if isinstance(tensors, dict) else {})
    path.write_bytes(changed_bytes(rng, data[: len(data) if rng.random() < 0.9 else rng.randrange(len(data))]))
    if rng.random() < 0.5:
        path.write_bytes(data)


def encoded(rng: random.Random, metadata: Entries, tensors: Entries) -> bytes:
    """A file of these entries, with whatever values they have."""
    entries = [text(key) + typed(value) for key, value in metadata.items()]
    infos, data = list[bytes](), b""
    for name, entry in tensors.items():
        kind, shape = entry if isinstance(entry, list) and len(entry) == 2 else (8, [32, 32])
        shape = shape if isinstance(shape, list) else [32]
        known = kind in (*BLOCK_TYPES, 0, 1, 30) and all(type(n) is int and 0 < n < 1024 for n in shape) and 0 < len(shape) < 5
        known = known and math.prod(shape) < 1 << 20
        size = (known and stored_bytes(kind, math.prod(shape[:-1]), shape[-1])) or 64
        dimensions = b"".join(number(n, "<Q") for n in shape[::-1])
        infos.append(
            text(name) + struct.pack("<I", len(shape)) + dimensions + number(kind, "<I") + struct.pack("<Q", len(data))
        )
        # Few scales of random bytes are finite: most files have small numbers, whose bytes are all alike; decays are negative.
        alike = rng.randrange(0x30) | (0x80 if name.endswith("ssm_a") else 0)
        data += (rng.randbytes(size) if rng.random() < 0.02 else bytes([alike]) * size).ljust(-(-size // 32) * 32, b"\0")
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(entries)) + b"".join(entries) + b"".join(infos)
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + data


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def number(value: Any, form: str) -> bytes:
    """An integer that fits whatever `value` is."""
    return struct.pack(form, value % (1 << 8 * struct.calcsize(form)) if isinstance(value, int) else 0)


def typed(value: Any) -> bytes:
    """Type and value of an entry."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<I", 4) + number(value, "<I")
        case float():
            return struct.pack("<Id", 12, value)
        case str():
            return struct.pack("<I", 8) + text(value)
        case list() if value and all(isinstance(each, str) for each in value):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        case list() if value and all(isinstance(each, bool) for each in value):
            return struct.pack(f"<IIQ{len(value)}?", 9, 7, len(value), *value)
        case list() if value and all(isinstance(each, float) for each in value):
            return struct.pack(f"<IIQ{len(value)}d", 9, 12, len(value), *value)
        case list():
            return struct.pack("<IIQ", 9, 5, len(value)) + b"".join(number(each, "<I") for each in value)
        case _:
            return struct.pack("<II", 99, 0)
