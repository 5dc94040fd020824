"""What is in a model file, as records: arrays, the parts of a linear layer, the metadata of a model.

A quantization method is data: `y = W x` with optional parts.  A record says which parts a layer has; which parts a target can
run is the target's to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from edgeq.codec import Codec
from edgeq.config import ModelConfig

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "uint16", "u8": "uint8", "i8": "int8", "i32": "int32"}
Mode = Literal["a16", "a8", "a4"]
"""How a layer's input is quantized: not, but for kernels' 16-bit fixed point; to 8 or 4 bits, as its `activation` says or else
symmetrically per block of at most 128 channels."""
MODES: tuple[Mode, ...] = ("a16", "a8", "a4")
KvKind = Literal["f16", "int8", "int4"]
KV_KINDS: tuple[KvKind, ...] = ("f16", "int8", "int4")


@dataclass(frozen=True)
class KvCodec:
    """How keys and values are cached.

    f16    as they are
    int8   symmetric, a scale per position and head
    int4   asymmetric, a scale and an offset per position and head; the last `high` dimensions of each head in 8 bits, with a
           scale and an offset of their own (ResQ, arXiv 2412.14363); the others have codes of `bits` bits in four
    """

    kind: KvKind = "f16"
    high: int = 0
    bits: int = 4

    @property
    def name(self) -> str:
        low = f"int{self.bits}" if self.kind == "int4" else self.kind
        return f"{low}+{self.high}" if self.high else low

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of the keys, or the values, of one position and head, padding apart."""
        if self.kind == "f16":
            return 2 * head_dim
        if self.kind == "int8":
            return head_dim + 4
        numbers = 8 if self.high < head_dim else 0
        return (head_dim - self.high + 1) // 2 + self.high + numbers + (8 if self.high else 0)


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
        return sum(part.nbytes for _, part in self.arrays())

    def arrays(self) -> Iterator[tuple[str, ArrayRef]]:
        """The arrays that are there, by the codec's names, in the order of the file."""
        yield "q", self.q
        if self.scale:
            yield "scale", self.scale
        if self.zero:
            yield "zero", self.zero


@dataclass(frozen=True)
class Transform:
    """Online orthogonal transform of a layer's input: (H_K (x) H_2^m) v / sqrt(size) of every run v of `size` channels.

    stride   distance of a run's channels: 1, or head_dim for a transform across heads (then size is the number of heads)
    base     f32 [K, K], rows of norm sqrt(K), with K = size / 2^m; None: K = 1
    """

    size: int
    stride: int = 1
    base: ArrayRef | None = None

    @property
    def base_size(self) -> int:
        return self.base.shape[0] if self.base else 1


@dataclass(frozen=True)
class Activation:
    """How the input is quantized in the modes a8 and a4: dynamically, with one scale per token and weight block.

    bits        of the first weight block's input;  high_bits: of the second's, 0 where there is none
    symmetric   scale max|x| / (2^(bits-1) - 1); else scale (max - min) / (2^bits - 1) and a zero point, over a range that has
                0 in it
    """

    bits: int
    high_bits: int = 0
    symmetric: bool = True


@dataclass(frozen=True)
class LowRank:
    """b (a x), added to the result: a float [rank, columns], b float [rows, rank] (TTQ)."""

    b: Weight
    a: Weight

    @property
    def nbytes(self) -> int:
        return self.b.nbytes + self.a.nbytes


@dataclass(frozen=True)
class LinearSpec:
    """y = W x + bias, with optional parts in the order in which they act.

    input_order   i32 [columns]: x' = x[input_order]
    transform     x' = transform(x')
    input_scale   f32 [columns]: x' = input_scale * x'
    activation    how x' is quantized in the modes a8 and a4
    weights       one or two blocks of consecutive channels of x'; the second is the one of higher precision
    low_rank      added; reads x as it came
    bias          added
    master        the weight (less the low-rank part) at higher precision, from which the device makes copies of `weights` for
                  other input scales
    """

    name: str
    weights: tuple[Weight, ...]
    bias: ArrayRef | None = None
    input_order: ArrayRef | None = None
    transform: Transform | None = None
    input_scale: ArrayRef | None = None
    activation: Activation | None = None
    low_rank: LowRank | None = None
    master: Weight | None = None

    def arrays(self) -> Iterator[tuple[str, ArrayRef]]:
        """(what it is, array) of everything stored for this layer, in the order of the file."""
        for i, weight in enumerate(self.weights):
            yield from ((f"{part} of the second block" if i else part, ref) for part, ref in weight.arrays())
        if self.bias:
            yield "bias", self.bias
        if self.input_order:
            yield "input_order", self.input_order
        if self.transform and self.transform.base:
            yield "base of the transform", self.transform.base
        if self.input_scale:
            yield "input_scale", self.input_scale
        if self.low_rank:
            yield from ((f"low_rank b {part}", ref) for part, ref in self.low_rank.b.arrays())
            yield from ((f"low_rank a {part}", ref) for part, ref in self.low_rank.a.arrays())
        if self.master:
            yield from ((f"master {part}", ref) for part, ref in self.master.arrays())

    @property
    def rows(self) -> int:
        return self.weights[0].rows

    @property
    def columns(self) -> int:
        return sum(w.columns for w in self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes that a token reads; the master is not among them."""
        return sum(ref.nbytes for part, ref in self.arrays() if not part.startswith("master"))

    @property
    def bits_per_weight(self) -> float:
        """Effective bits, from the parts that a token reads: scales, zero points, padding, low rank and bias count."""
        return 8 * self.nbytes / (self.rows * self.columns)


@dataclass(frozen=True)
class Metadata:
    """All of a model file but its bytes.  `linears` is in execution order and maps names to layers; `kv` is the cache that the
    file was made for.

    Names: `layers.3.qkv`, `layers.3.o`, `layers.3.gate_up`, `layers.3.down`, `head`; where the parts of q, k, v (or gate, up)
    do not agree they are stored apart as `layers.3.q` ...; an MLP without a gate has `layers.3.up`; with experts there are
    `layers.3.router`, `layers.3.experts.7.gate_up`, `layers.3.experts.7.down`, and for a shared one `layers.3.shared_gate`,
    `layers.3.shared.gate_up`, `layers.3.shared.down`.  Arrays: `embedding` (absent when tied to the head), `positions` where
    they are learned, `layers.3.attention_norm`, `layers.3.mlp_norm`, `layers.3.q_norm`, `layers.3.k_norm`, `norm`, of a
    LayerNorm also `layers.3.mlp_norm_bias` ..., where blocks end in a norm `layers.3.post_attention_norm` and
    `layers.3.post_mlp_norm`; where queries and keys are rotated behind RoPE `layers.3.key_rotation` i8 [head_dim, head_dim] and
    `layers.3.key_rotation_scale` f32 [1].
    Blobs: `tokenizer.json`, `chat_template`, `preprocessor.json`.
    """

    config: ModelConfig
    generation: dict[str, object]
    provenance: dict[str, object]
    default_mode: Mode
    linears: dict[str, LinearSpec]
    arrays: dict[str, ArrayRef]
    blobs: dict[str, int] = field(default_factory=dict)
    kv: KvCodec = KvCodec()

    def idle_bytes(self) -> int:
        """Bytes of the experts that a token does not go through."""
        experts = sum(x.nbytes for name, x in self.linears.items() if ".experts." in name)
        return experts - experts * self.config.num_experts_per_tok // max(self.config.num_experts, 1)

    def bytes_per_token(self) -> dict[str, int]:
        """Bytes read to decode one token: `weights`, `head`, and `kv_per_position` of the cache that the file was made for."""
        head = self.linears["head"].nbytes
        norms = sum(a.nbytes for name, a in self.arrays.items() if name not in ("embedding", "positions"))
        kv = self.kv.head_bytes(self.config.head_dim)
        return {
            "weights": sum(x.nbytes for x in self.linears.values()) - self.idle_bytes() - head + norms,
            "head": head,
            "kv_per_position": self.config.num_hidden_layers * 2 * self.config.num_key_value_heads * kv,
        }
