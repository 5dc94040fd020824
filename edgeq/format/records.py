"""What is in a model file, as records: arrays, the parts of a linear layer, the cache.

A quantization method is data: `y = W x` with optional parts.  A record lists the parts that a layer has; each target decides
which of them it can run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from edgeq.errors import FormatError
from edgeq.format.codec import ROWS, Codec

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "uint16", "u8": "uint8", "i8": "int8", "i32": "int32"}
Mode = Literal["a16", "a8", "a4"]
"""How the inputs of linear layers are quantized.

a16   not at all; kernels may use 16-bit fixed point
a8    to 8 bits, by the layer's `activation` or else symmetrically in blocks of at most 128 channels (quantization.py)
a4    to 4 bits, in the same way; layers outside the decoder layers run in a8
"""
MODES: tuple[Mode, ...] = ("a16", "a8", "a4")
KvKind = Literal["f16", "int8", "int4"]
KV_KINDS: tuple[KvKind, ...] = ("f16", "int8", "int4")
MAX_BASE = 4096
"""The most rows of the dense factor of a transform; the factors of published models' widths are far smaller."""


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
        """Bytes of the keys, or of the values, of one position and head, without padding."""
        if self.kind == "f16":
            return 2 * head_dim
        if self.kind == "int8":
            return head_dim + 4
        numbers = 8 if self.high < head_dim else 0
        return (head_dim - self.high + 1) // 2 + self.high + numbers + (8 if self.high else 0)


@dataclass(frozen=True)
class ArrayRef:
    """A plain C-ordered array that fills one segment of the file; numpy sees bf16 as its uint16 bits.

    first, whole   of a part of such an array, which no file holds: its first entry, and how many the array has, along the
                   first dimension; `whole` of 0: it is the array
    """

    dtype: str
    shape: tuple[int, ...]
    segment: int
    first: int = 0
    whole: int = 0

    def part(self, first: int, count: int) -> ArrayRef:
        """`count` entries of the array along its first dimension, which stay where they are."""
        return ArrayRef(self.dtype, (count, *self.shape[1:]), self.segment, first, self.shape[0])

    @property
    def array(self) -> ArrayRef:
        """The array of which this is a part, or itself."""
        return ArrayRef(self.dtype, (self.whole, *self.shape[1:]), self.segment) if self.whole else self

    @property
    def skipped(self) -> int:
        """Bytes of the segment before it."""
        return self.first * (self.nbytes // self.shape[0]) if self.first else 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (4 if self.dtype in ("f32", "i32") else 2 if self.dtype in ("f16", "bf16") else 1)


@dataclass(frozen=True)
class Weight:
    """One block of consecutive input columns: W[rows, columns] in `codec`.

    arrays   by their names in `codec.parts`, in that order, which is the order of the file
    """

    codec: Codec
    rows: int
    columns: int
    arrays: Mapping[str, ArrayRef]

    def __hash__(self) -> int:
        return hash((self.codec, self.rows, self.columns, *self.arrays.values()))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def part(self, first: int, end: int) -> Weight:
        """Rows from `first`, where a block begins, to `end`: blocks lie one after another in every array of every codec."""
        begin, count = first // ROWS, -(-(end - first) // ROWS)
        arrays = {name: ref.part(begin, count) for name, ref in self.arrays.items()}
        return Weight(self.codec, end - first, self.columns, arrays)


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

    def check(self, name: str, columns: int) -> None:
        """FormatError unless it fits a layer, `name`, of so many columns."""
        size, stride, dense = self.size, self.stride, self.base
        if size < 1 or stride < 1 or columns % (size * stride):
            raise FormatError(f"{name}: a transform of {size} channels {stride} apart does not fit {columns} channels")
        # Checked first: `base_size` assumes the shape of a matrix, and the checks below divide by it.
        if dense and (dense.dtype != "f32" or len(set(dense.shape)) != 1 or len(dense.shape) != 2):
            raise FormatError(f"{name}: the base of its transform is {dense.dtype} {dense.shape}, not a square of f32")
        base = self.base_size
        if not 1 <= base <= MAX_BASE:
            raise FormatError(f"{name}: the base of its transform has {base} rows; supported: 1 to {MAX_BASE}")
        if size % base or (size // base).bit_count() != 1:
            raise FormatError(f"{name}: a transform of {size} channels is not {base} times a power of two")


@dataclass(frozen=True)
class Activation:
    """How the input is quantized in the modes a8 and a4: dynamically, with one scale per token and weight block, or `scales`.

    bits        of the input of the first weight block;  high_bits: of that of the second, 0 where there is none
    symmetric   scale max|x| / (2^(bits-1) - 1); else scale (max - min) / (2^bits - 1) and a zero point, over a range that
                includes 0
    scales      f32 [n]: constant scales, one for every modality of a row (text, vision) or one for all; symmetric, one block
                (MQuant, arXiv 2502.00425)
    """

    bits: int
    high_bits: int = 0
    symmetric: bool = True
    scales: ArrayRef | None = None


@dataclass(frozen=True)
class SplitRow:
    """x'[index] row, added to the result: an input channel whose weights, row, a float [rows], are kept apart and zero in
    the weight itself (MQuant, arXiv 2502.00425, section 3.3)."""

    index: int
    row: ArrayRef


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
    split_row     added; reads x' unrounded
    low_rank      added; reads x as it came
    bias          added
    master        the weight (less the low-rank part) at higher precision, from which a device requantizes `weights` for other
                  input scales
    """

    name: str
    weights: tuple[Weight, ...]
    bias: ArrayRef | None = None
    input_order: ArrayRef | None = None
    transform: Transform | None = None
    input_scale: ArrayRef | None = None
    activation: Activation | None = None
    split_row: SplitRow | None = None
    low_rank: LowRank | None = None
    master: Weight | None = None

    def arrays(self) -> Iterator[tuple[str, ArrayRef]]:
        """(description, array) of everything stored for this layer, in the order of the file."""
        for i, weight in enumerate(self.weights):
            yield from ((f"{part} of the second block" if i else part, ref) for part, ref in weight.arrays.items())
        if self.bias:
            yield "bias", self.bias
        if self.input_order:
            yield "input_order", self.input_order
        if self.transform and self.transform.base:
            yield "base of the transform", self.transform.base
        if self.input_scale:
            yield "input_scale", self.input_scale
        if self.activation and self.activation.scales:
            yield "activation scales", self.activation.scales
        if self.split_row:
            yield "split row", self.split_row.row
        if self.low_rank:
            yield from ((f"low_rank b {part}", ref) for part, ref in self.low_rank.b.arrays.items())
            yield from ((f"low_rank a {part}", ref) for part, ref in self.low_rank.a.arrays.items())
        if self.master:
            yield from ((f"master {part}", ref) for part, ref in self.master.arrays.items())

    @property
    def rows(self) -> int:
        return self.weights[0].rows

    def part(self, first: int, end: int) -> LinearSpec:
        """Rows from `first`, where a block of 16 begins, to `end`, without a copy; of a layer without a master."""
        assert self.master is None
        beside, low_rank = self.split_row, self.low_rank
        return replace(
            self,
            weights=tuple(weight.part(first, end) for weight in self.weights),
            bias=self.bias and self.bias.part(first, end - first),
            split_row=beside and replace(beside, row=beside.row.part(first, end - first)),
            low_rank=low_rank and replace(low_rank, b=low_rank.b.part(first, end)),
        )

    @property
    def columns(self) -> int:
        return sum(w.columns for w in self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes that a token reads; the master is not counted."""
        return sum(ref.nbytes for part, ref in self.arrays() if not part.startswith("master"))

    @property
    def bits_per_weight(self) -> float:
        """Effective bits per weight of what a token reads: scales, zero points, padding, low rank and bias are counted."""
        return 8 * self.nbytes / (self.rows * self.columns)
