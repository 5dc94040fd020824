"""What is in a model file, as records: arrays, the parts of a linear layer, the metadata of a model.

A quantization method is data: `y = W x` with optional parts.  A record says which parts a layer has; which parts a target can
run is the target's to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from edgeq.codec import Codec
from edgeq.config import ModelConfig

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "uint16", "u8": "uint8", "i8": "int8", "i32": "int32"}
Mode = Literal["a16", "a8"]
KvCodec = Literal["f16", "int8"]


@dataclass(frozen=True)
class ArrayRef:
    """A plain C-ordered array that fills one segment of the file.  bf16 is held as its uint16 bits."""

    dtype: str
    shape: tuple[int, ...]
    segment: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (4 if self.dtype in ("f32", "i32") else 2 if self.dtype in ("f16", "bf16") else 1)


@dataclass(frozen=True)
class Weight:
    """One block of consecutive input columns: W[rows, columns] in `codec`, its arrays as `codec.parts` names them."""

    codec: Codec
    rows: int
    columns: int
    q: ArrayRef
    scale: ArrayRef | None = None
    zero: ArrayRef | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.q, self.scale, self.zero) if part)


@dataclass(frozen=True)
class LinearSpec:
    """y = W x + bias.  The schema has further parts (edgeq/model.fbs); a file that uses one is refused by the part's name."""

    name: str
    weights: tuple[Weight, ...]
    bias: ArrayRef | None = None

    @property
    def rows(self) -> int:
        return self.weights[0].rows

    @property
    def columns(self) -> int:
        return sum(w.columns for w in self.weights)

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.weights) + (self.bias.nbytes if self.bias else 0)

    @property
    def bits_per_weight(self) -> float:
        """Effective bits, from the stored parts: scales, zero points, padding and bias count."""
        return 8 * self.nbytes / (self.rows * self.columns)


@dataclass(frozen=True)
class Metadata:
    """All of a model file but its bytes.  `linears` is in execution order and maps names to layers.

    Names: `layers.3.qkv`, `layers.3.o`, `layers.3.gate_up`, `layers.3.down`, `head`; where the parts of q, k, v (or gate, up)
    do not agree they are stored apart as `layers.3.q` ...  Arrays: `embedding` (absent when tied to the head),
    `layers.3.attention_norm`, `layers.3.mlp_norm`, `layers.3.q_norm`, `layers.3.k_norm`, `norm`.
    Blobs: `tokenizer.json`, `chat_template`, `preprocessor.json`.
    """

    config: ModelConfig
    generation: dict[str, object]
    provenance: dict[str, object]
    default_mode: Mode
    linears: dict[str, LinearSpec]
    arrays: dict[str, ArrayRef]
    blobs: dict[str, int] = field(default_factory=dict)

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes read to decode one token: `weights`, `head`, and `kv_per_position` of an f16 cache."""
        head = self.linears["head"].nbytes
        norms = sum(a.nbytes for name, a in self.arrays.items() if name != "embedding")
        return {
            "weights": sum(x.nbytes for x in self.linears.values()) - head + norms,
            "head": head,
            "kv_per_position": self.config.kv_bytes_per_position(),
        }
