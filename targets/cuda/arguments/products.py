"""Records of products, of what changes their input before, and of what is added after them.

x and y are f32 [tokens][a width], of which `columns` or `rows` numbers of a row are read or written.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.targets.cuda.arguments.heads import FusedHeadsArguments
from edgeq.targets.cuda.arguments.record import Address, Arguments, Float32, Int32, suffixed
from edgeq.targets.cuda.arguments.weights import LowRankPartArguments, NormArguments, QuantizedInputArguments, WeightArguments


@dataclass(frozen=True, kw_only=True)
class QuantizedRowsArguments(Arguments, run=()):
    """x      f32 [tokens][width], of which `columns` numbers are quantized
    data   [chunk][padded][32 channels], f16 or i8
    """

    x: Address
    data: Address
    quantized: QuantizedInputArguments
    columns: Int32
    width: Int32


@dataclass(frozen=True, kw_only=True)
class QuantizeInputArguments(Arguments):
    """By a scale for every group.  `limit`: the largest integer; not read where the result is f16"""

    rows: QuantizedRowsArguments
    limit: Float32


@dataclass(frozen=True, kw_only=True)
class QuantizeInputTokenArguments(Arguments):
    """By a scale for every token row.

    symmetric   0: and a zero point
    levels      of the integers: 2^bits - 1, or where symmetric 2^(bits - 1) - 1
    """

    rows: QuantizedRowsArguments
    symmetric: Int32
    levels: Float32


@dataclass(frozen=True, kw_only=True)
class QuantizeInputStaticArguments(Arguments):
    """By scales that are given.

    scales     f32 [kinds], one for each modality
    modality   i32 [tokens]
    limit      the largest integer
    """

    rows: QuantizedRowsArguments
    scales: Address
    modality: Address
    kinds: Int32
    limit: Float32


@dataclass(frozen=True, kw_only=True)
class ProductArguments(Arguments):
    """Arguments of `matvec` and `matmul`: y = W x + bias.

    x         quantized input
    stride    blocks of 16 scales from a group to the next: 1; 0: one group is the whole row
    width     of y;  add: 1: the product is added to it
    bias      f32 [rows], read where `has_bias`
    """

    x: Address
    quantized: QuantizedInputArguments
    weight: WeightArguments
    stride: Int32
    rows: Int32
    width: Int32
    y: Address
    bias: Address
    has_bias: Int32
    add: Int32


@dataclass(frozen=True, kw_only=True)
class FloatProductArguments(Arguments):
    """x         f32 [tokens][stride], of which `columns` numbers are read
    q         weights in file order
    width     of y;  add: 1: the product is added to it
    bias      f32 [rows], read where `has_bias`
    """

    x: Address
    q: Address
    bias: Address
    y: Address
    columns: Int32
    stride: Int32
    rows: Int32
    width: Int32
    has_bias: Int32
    add: Int32


@dataclass(frozen=True, kw_only=True)
class FusedBlockArguments(Arguments, run=()):
    """A block of weights of a fused product, and its input channels.

    limit     of the integers of the input; 0: it is f16
    groups    of `columns`;  stride: as ProductArguments
    """

    weight: WeightArguments
    limit: Float32
    columns: Int32
    groups: Int32
    stride: Int32


@dataclass(frozen=True, kw_only=True)
class FusedInputArguments(Arguments, run=()):
    """What a fused product does to its input after the norm, and by which rule it quantizes it.

    order, scale            i32 and f32 [columns of all blocks], read where `ordered`, `scaled`
    scales, modality, kinds, symmetric   as QuantizeInputStaticArguments and QuantizeInputTokenArguments
    """

    ordered: Int32 = 0
    order: Address = 0
    scaled: Int32 = 0
    scale: Address = 0
    scales: Address = 0
    modality: Address = 0
    kinds: Int32 = 0
    symmetric: Int32 = 0


@dataclass(frozen=True, kw_only=True)
class SpreadArguments(Arguments, run=()):
    """How a fused product is spread: 0 is left open until its kernel is loaded.

    ctas     blocks of threads;  each: blocks of 16 output channels of one
    most     blocks of 16 output channels, where gated of either factor
    ahead    rounds of input channels of these blocks, one block after another, that are asked for before they are multiplied
    shares   of the rounds of input channels: so many times `ctas` blocks of threads
    sums     f32 [tiles of 8 tokens][ctas][blocks of 16 of one][groups][8][16], written where there are several shares
    arrived  i32 [tiles of 8 tokens][ctas], 0 before and after
    """

    most: Int32
    ctas: Int32 = 0
    each: Int32 = 0
    ahead: Int32 = 0
    shares: Int32 = 1
    sums: Address = 0
    arrived: Address = 0


@dataclass(frozen=True, kw_only=True)
class FusedArguments(Arguments, run=("tokens", "pool", "numbers")):
    """Arguments of `fused_rows`, `fused_activate` and `fused_heads`: a product with what comes before and after it.

    x                f32 [tokens][width_in]
    second           of weights in two blocks of input channels; their names end in 2
    rows             output channels;  bias: f32 [rows], read where `has_bias`
    y                f32 [tokens][width];  add: 1: the product is added to it
    heads            of fused_heads
    """

    x: Address
    width_in: Int32
    norm: NormArguments
    input: FusedInputArguments
    block: FusedBlockArguments
    second: FusedBlockArguments | None = suffixed("2", default=None)
    rows: Int32
    bias: Address
    has_bias: Int32
    low_rank: LowRankPartArguments
    y: Address
    width: Int32
    add: Int32
    spread: SpreadArguments
    heads: FusedHeadsArguments | None = None


@dataclass(frozen=True, kw_only=True)
class LowRankArguments(Arguments):
    """out = a x, of the input x after its norm.

    x          f32 [tokens][width_in];  a: in file order
    out        f32 [tokens][rank]
    sums       f32 [tiles of 8 tokens][blocks of 16 of `rank`][shares][8][16]
    arrived    i32 [tiles of 8 tokens][blocks of 16 of `rank`], 0 before and after
    shares     blocks of threads that share the input channels, `each` rounds of 256 of one
    """

    x: Address
    width_in: Int32
    norm: NormArguments
    a: Address
    out: Address
    sums: Address
    arrived: Address
    columns: Int32
    rank: Int32
    shares: Int32
    each: Int32


@dataclass(frozen=True, kw_only=True)
class LowRankAddArguments(Arguments):
    """y   f32 [tokens][width], to the first `rows` numbers of which the low-rank part is added"""

    part: LowRankPartArguments
    y: Address
    rows: Int32
    width: Int32


@dataclass(frozen=True, kw_only=True)
class ArrangeArguments(Arguments):
    """out = x, its channels in another order, times scales.

    x        f32 [tokens][width];  out: f32 [tokens][columns]
    order    i32 [columns], read where `ordered`;  scale: f32 [columns], read where `scaled`
    """

    x: Address
    order: Address
    scale: Address
    out: Address
    columns: Int32
    width: Int32
    ordered: Int32
    scaled: Int32


@dataclass(frozen=True, kw_only=True)
class ButterfliesArguments(Arguments):
    """A pass of a transform, of vectors of `power` numbers that lie `stride` channels apart.

    x         f32 [tokens][width];  out: f32 [tokens][columns]
    vectors   of a block of threads
    base      f32 [order][order]; order 1: none;  piece: channels of what it multiplies
    factor    that the result is multiplied by
    """

    x: Address
    base: Address
    out: Address
    columns: Int32
    width: Int32
    power: Int32
    stride: Int32
    vectors: Int32
    order: Int32
    piece: Int32
    factor: Float32


@dataclass(frozen=True, kw_only=True)
class SplitRowArguments(Arguments):
    """x         f32 [tokens][columns], of which the number of input channel `index` is read
    weights   f32 [rows], of that channel
    y         f32 [tokens][width], to the first `rows` numbers of which the product is added
    """

    x: Address
    weights: Address
    y: Address
    rows: Int32
    columns: Int32
    width: Int32
    index: Int32


@dataclass(frozen=True, kw_only=True)
class AddSquaresArguments(Arguments):
    """x         f32 [tokens][width]
    counted   i32 [tokens], 0: the row is left out
    sums      f32 [columns]
    """

    x: Address
    counted: Address
    sums: Address
    columns: Int32
    width: Int32


@dataclass(frozen=True, kw_only=True)
class RequantizeArguments(Arguments, run=()):
    """A master [rows][columns] times factors, rounded to other weights; arrays in file order.

    master, scales, zeros   of the master;  master_group: channels of a group of it, all of a row where it has one
    factors                 f32 [columns]
    q, qs, qz               integers, scales f16 and zero points u8 of the result;  group: channels of a group
    span                    channels of a thread: a multiple of 32 and of `group`
    """

    master: Address
    scales: Address
    zeros: Address
    factors: Address
    q: Address
    qs: Address
    qz: Address
    rows: Int32
    columns: Int32
    master_group: Int32
    group: Int32
    span: Int32
