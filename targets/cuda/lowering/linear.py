"""Linear layers: what changes their input, the quantized input that products read, products, and what is added to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgeq.format.codec import CHUNK, ROWS, Codec, Kind
from edgeq.format.quantization import activation_block
from edgeq.format.records import ArrayRef, LinearSpec, LowRank, Mode, Transform, Weight
from edgeq.targets.cuda.arguments.products import (
    AddSquaresArguments,
    ArrangeArguments,
    ButterfliesArguments,
    FloatProductArguments,
    LowRankAddArguments,
    LowRankArguments,
    ProductArguments,
    SplitRowArguments,
)
from edgeq.targets.cuda.arguments.rows import EmbedArguments, EmbedFloatArguments
from edgeq.targets.cuda.arguments.weights import LowRankPartArguments, NormArguments, WeightArguments
from edgeq.targets.cuda.lowering.context import FACTORS, Bring, Input, Launch, Lowered, Lowering, Output, refuse
from edgeq.targets.cuda.lowering.quantize_input import input_memory, input_quantizer, widest_input
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.graph import Embed, Linear
from edgeq.targets.layers import linears
from edgeq.targets.requantization import master_arrays

MANY_TOKENS = 64
"""Token rows of a tile of `matmul`; the quantized input has a multiple of it."""
TILE = 4096
"""The largest power of two that one pass of a transform takes."""
BASE_TILE = 512
"""Numbers of a block of threads in a pass with a base, if its power of two is not more."""
LOW_RANK_TOKENS, LOW_RANK_CHANNELS, LOW_RANK_SHARES, BLOCK_ROWS = 8, 256, 16, 16
"""Token rows and input channels of a round of a block of threads of a low-rank part; how many blocks share all of them at
most; output channels."""
FLOAT_KINDS = {"f16": 1, "bf16": 2, "f32": 3}
NO_NORM = NormArguments()
PARAMETERS = {"q": "q", "scale": "s", "zero": "z", "table": "z", "super_scale": "u"}
"""Arrays of integer codecs, and the parameters of kernels that take their addresses."""


def linear(lowering: Lowering, op: Linear) -> Sequence[Lowered]:
    layer, buffers = op.linear, lowering.graph.buffers
    raw = Input(lowering.buffer(op.x), buffers[op.x], (op.x,))
    out = Output(lowering.buffer(op.out) + 4 * op.offset, buffers[op.out], op.add)
    launches = layer_launches(lowering, op, layer, raw, out, lowering.mode_of(op))
    if lowering.source == "masters" and lowering.shared_input(layer) is not None:
        master = master_arrays(layer)
        if lowering.storage.streams(master):
            return [Bring(op, master, lowering.stage), *launches]
    return launches


def layer_launches(lowering: Lowering, op: Linear, layer: LinearSpec, raw: Input, out: Output, mode: Mode) -> list[Launch]:
    """y = W x' + bias and what else the layer adds, for rows of `raw`."""
    index, launches = lowering.shared_input(layer), list[Launch]()
    if index is not None and lowering.source == "masters":
        assert layer.master
        if lowering.inputs[index].layers[0].name == layer.name:
            launches.append(add_squares(lowering, op, raw, index))
        layer, index = replace(layer, weights=(layer.master,)), None
    made, x = prepared(lowering, op, layer, raw, index)
    launches += made
    start = 0
    for place, weight in enumerate(layer.weights):
        block = Input(x.address + 4 * start, x.width, (*x.made, start, weight.columns))
        to = replace(out, add=out.add or place > 0)
        bias = layer.bias if place == 0 else None
        launches += product(lowering, op, layer, place, block, out=to, bias=bias, mode=mode, index=index)
        start += weight.columns
    if layer.split_row is not None:
        arguments = SplitRowArguments(
            x=x.address, weights=lowering.storage.floats(layer.split_row.row), y=out.address, rows=layer.rows,
            columns=x.width, width=out.width, index=layer.split_row.index,
        )  # fmt: skip
        launches.append(Launch(op, lowering.stage, Variant("split_row"), arguments))
    if layer.low_rank is not None:
        launches.append(low_rank(lowering, op, layer.low_rank, raw, NO_NORM))
        part = low_rank_part(lowering, layer.low_rank)
        added = LowRankAddArguments(part=part, y=out.address, width=out.width, rows=layer.rows)
        launches.append(Launch(op, lowering.stage, Variant("low_rank_add"), added, reads_weights=True))
    return launches


def low_rank(lowering: Lowering, op: Linear, part: LowRank, raw: Input, norm: NormArguments) -> Launch:
    """The product with a of the low-rank part of a layer, of rows of `raw` through a norm."""
    tiles, blocks = -(-lowering.most_rows // LOW_RANK_TOKENS), -(-widest_rank(lowering) // BLOCK_ROWS)
    rounds = -(-part.a.columns // LOW_RANK_CHANNELS)
    each = -(-rounds // LOW_RANK_SHARES)
    room = tiles * blocks * LOW_RANK_TOKENS * BLOCK_ROWS * LOW_RANK_SHARES * 4
    arguments = LowRankArguments(
        norm=norm, x=raw.address, width_in=raw.width, columns=part.a.columns, rank=part.a.rows,
        a=lowering.storage.array(part.a.arrays["q"]), out=low_rank_part(lowering, part).inner,
        sums=lowering.storage.named("low rank sums", room),
        arrived=lowering.storage.named("low rank arrived", tiles * blocks * 4),
        shares=-(-rounds // each), each=each,
    )  # fmt: skip
    return Launch(op, lowering.stage, Variant("low_rank", (part.a.codec.kind,)), arguments, reads_weights=True)


def low_rank_part(lowering: Lowering, part: LowRank) -> LowRankPartArguments:
    """What a kernel has to know to add the low-rank part of a layer."""
    return LowRankPartArguments(
        inner=lowering.storage.named("low rank", lowering.most_rows * widest_rank(lowering) * 4),
        low_b=lowering.storage.array(part.b.arrays["q"]), low_kind=FLOAT_KINDS[part.b.codec.kind], rank=part.b.columns,
    )  # fmt: skip


def widest_rank(lowering: Lowering) -> int:
    layers = (layer for op in lowering.graph.operations for layer in linears(op))
    return max(layer.low_rank.a.rows for layer in layers if layer.low_rank)


def add_squares(lowering: Lowering, op: Linear, raw: Input, index: int) -> Launch:
    shared = lowering.inputs[index]
    arguments = AddSquaresArguments(
        x=raw.address,
        counted=lowering.sent("counted"),
        sums=lowering.storage.address("sums") + 4 * shared.offset,
        columns=shared.columns,
        width=raw.width,
    )
    return Launch(op, lowering.stage, Variant("add_squares"), arguments)


def prepared(lowering: Lowering, op: Linear, layer: LinearSpec, raw: Input, index: int | None) -> tuple[list[Launch], Input]:
    """The launches that order, transform and scale an input, and where it is then; layers of the same parts share it.

    index   of a shared input, whose requantized weights want it divided by their scales
    """
    if not (layer.input_order or layer.transform or layer.input_scale or index is not None):
        return [], raw
    columns = layer.columns
    nbytes = lowering.most_rows * widest_input(lowering) * 4
    result = Input(
        lowering.storage.named("prepared", nbytes), columns,
        (*raw.made, raw.address, layer.input_order, layer.transform, layer.input_scale, index),
    )  # fmt: skip
    if lowering.holds("prepared", result.made):
        return [], result
    launches, at = list[Launch](), raw
    scale = lowering.storage.floats(layer.input_scale) if layer.input_scale else 0
    if layer.input_order or layer.transform is None:
        # The scale comes after a transform.  One that has a base cannot work in place.
        order = lowering.storage.array(layer.input_order) if layer.input_order else 0
        early = scale if layer.transform is None else 0
        based = layer.transform is not None and layer.transform.base is not None
        place = Input(lowering.storage.named("ordered", nbytes), columns, ()) if based else result
        launches.append(arrange(lowering, op, at, place, order=order, scale=early, index=index))
        at = place
    if layer.transform is not None:
        launches += transform(lowering, op, layer.transform, at, result)
        if scale:
            launches.append(arrange(lowering, op, result, result, order=0, scale=scale, index=None))
    return launches, result


def arrange(lowering: Lowering, op: Linear, source: Input, to: Input, *, order: int, scale: int, index: int | None) -> Launch:
    arguments = ArrangeArguments(
        x=source.address, order=order, scale=scale, out=to.address, columns=to.width, width=source.width,
        ordered=int(order != 0), scaled=int(scale != 0 or index is not None),
    )  # fmt: skip
    moved: dict[str, ArrayRef | tuple[str, int]] = {} if index is None else {"scale": (FACTORS, index)}
    return Launch(op, lowering.stage, Variant("arrange"), arguments, moved=moved)


def transform(lowering: Lowering, op: Linear, part: Transform, source: Input, to: Input) -> list[Launch]:
    """(base (x) H_2^m) v / sqrt(size): a pass for every TILE of the power of two, the first with the base."""
    power, stride, at, launches = part.size // part.base_size, part.stride, source, list[Launch]()
    if part.size == 1:
        return [arrange(lowering, op, at, to, order=0, scale=0, index=None)]
    left, order = power, part.base_size
    while left > 1 or order > 1:
        now = min(left, TILE)
        left //= now
        # Every channel of a base is a sum of many: more blocks of threads share them.
        numbers = max(now, BASE_TILE) if order > 1 else TILE
        arguments = ButterfliesArguments(
            x=at.address, base=lowering.storage.floats(part.base) if part.base else 0, out=to.address,
            columns=to.width, width=at.width, power=now, stride=stride, order=order,
            piece=power * part.stride, vectors=min(numbers // now, to.width // now),
            factor=part.size**-0.5 if left == 1 else 1.0,
        )  # fmt: skip
        launches.append(Launch(op, lowering.stage, Variant("butterflies"), arguments))
        at, stride, order = to, stride * now, 1
    return launches


def product(
    lowering: Lowering, op: Linear, layer: LinearSpec, place: int, x: Input, *, out: Output, bias: ArrayRef | None, mode: Mode,
    index: int | None,
) -> list[Launch]:  # fmt: skip
    """The product of weight block `place` with x, in the quantized input that the layer's activation or the mode asks for."""
    make = launches_of(layer.weights[place].codec).product
    return make(lowering, op, layer, place, x, out, bias=bias, mode=mode, index=index)


def integer_product(
    lowering: Lowering, op: Linear, layer: LinearSpec, place: int, x: Input, out: Output, *, bias: ArrayRef | None, mode: Mode,
    index: int | None,
) -> list[Launch]:  # fmt: skip
    weight = layer.weights[place]
    codec = weight.codec
    group, padded = activation_block(codec), -(-lowering.most_rows // MANY_TOKENS) * MANY_TOKENS
    data, quantized = input_memory(lowering, padded, -(-weight.columns // group))
    quantizer = input_quantizer(lowering, layer, place, mode)
    arguments = ProductArguments(
        weight=stored(lowering, weight),
        x=data,
        quantized=quantized,
        stride=1 if codec.group_size else 0,
        rows=weight.rows,
        width=out.width,
        y=out.address,
        bias=lowering.storage.floats(bias) if bias else 0,
        has_bias=int(bias is not None),
        add=int(out.add),
    )
    literals = (codec.bits, beside(codec), quantizer.integer, group)
    moved = {} if index is None else {PARAMETERS[name]: ref for name, ref in weight.arrays.items()}
    matvec, matmul = Variant("matvec", literals), Variant("matmul", literals)
    launch = Launch(op, lowering.stage, matvec, arguments, matmul, reads_weights=True, moved=moved)
    if x.made and lowering.holds("quantize_input", (*x.made, x.address, quantizer)):
        return [launch]
    made = quantizer.arguments(x, weight.columns, data, quantized)
    return [Launch(op, lowering.stage, quantizer.variant, made), launch]


def float_product(
    lowering: Lowering, op: Linear, layer: LinearSpec, place: int, x: Input, out: Output, *, bias: ArrayRef | None, mode: Mode,
    index: int | None,
) -> list[Launch]:  # fmt: skip
    weight = layer.weights[place]
    arguments = FloatProductArguments(
        x=x.address, q=lowering.storage.array(weight.arrays["q"]), bias=lowering.storage.floats(bias) if bias else 0,
        y=out.address, columns=weight.columns, stride=x.width, rows=weight.rows, width=out.width,
        has_bias=int(bias is not None), add=int(out.add),
    )  # fmt: skip
    return [Launch(op, lowering.stage, Variant("float_product", (weight.codec.kind,)), arguments, reads_weights=True)]


def stored(lowering: Lowering, weight: Weight) -> WeightArguments:
    addresses = dict.fromkeys(PARAMETERS.values(), 0)
    addresses |= {PARAMETERS[name]: lowering.storage.array(ref) for name, ref in weight.arrays.items()}
    return WeightArguments(**addresses, chunks=-(-weight.columns // CHUNK))


def beside(codec: Codec) -> bool | str:
    """The literal of kernels that says what lies beside the integers of a codec (kernels/weights.py)."""
    return launches_of(codec).beside or not codec.symmetric


def integer_rows(lowering: Lowering, op: Embed, weight: Weight) -> Launch:
    codec = weight.codec
    arguments = EmbedArguments(
        weight=stored(lowering, weight), which=lowering.sent("tokens"), out=lowering.buffer(op.out), columns=weight.columns,
        groups=codec.groups(weight.columns), group=codec.group_size,
    )  # fmt: skip
    return Launch(op, lowering.stage, Variant("embed", (codec.bits, beside(codec))), arguments)


def float_rows(lowering: Lowering, op: Embed, weight: Weight) -> Launch:
    q, which = lowering.storage.array(weight.arrays["q"]), lowering.sent("tokens")
    arguments = EmbedFloatArguments(q=q, which=which, out=lowering.buffer(op.out), columns=weight.columns)
    return Launch(op, lowering.stage, Variant("embed_float", (weight.codec.kind,)), arguments)


@dataclass(frozen=True)
class CodecLaunches:
    """The kernels of a codec.

    product      the launches of y = W x, as `integer_product` takes them
    arrays       those of a weight that the kernels read
    rows         the launch that looks rows up, for an embedding
    beside       what kernels are told lies beside its integers (kernels/weights.py); none: nothing, or zero points
    fused        whether launches of patterns (fused.py) read such weights
    requantize   the kernel that rounds a master of one codec to another; None: there is none
    """

    product: Callable[..., list[Launch]]
    arrays: frozenset[str]
    rows: Callable[[Lowering, Embed, Weight], Launch]
    beside: str = ""
    fused: bool = False
    requantize: Callable[[Codec, Codec], Variant] | None = None


def integer_requantize(master: Codec, codec: Codec) -> Variant:
    return Variant("requantize", (master.kind, master.bits, not master.symmetric, codec.bits, not codec.symmetric))


FLOATS = CodecLaunches(float_product, frozenset({"q"}), float_rows)
CODECS: Mapping[Kind, CodecLaunches] = {
    "f32": FLOATS,
    "f16": FLOATS,
    "bf16": FLOATS,
    "int": CodecLaunches(
        integer_product,
        frozenset({"q", "scale", "zero"}),
        integer_rows,
        fused=True,
        requantize=integer_requantize,
    ),
    "half": CodecLaunches(integer_product, frozenset({"q", "scale"}), integer_rows, "half", fused=True),
    "s4": CodecLaunches(integer_product, frozenset({"q", "scale", "super_scale"}), integer_rows, "s4", fused=True),
    "table": CodecLaunches(integer_product, frozenset({"q", "scale", "table"}), integer_rows, "table", fused=True),
    "trellis": CodecLaunches(
        integer_product, frozenset({"q", "scale", "super_scale", "table"}), integer_rows, "trellis", fused=True
    ),
}


def launches_of(codec: Codec) -> CodecLaunches:
    """UnsupportedError, with the name of the codec: there are no kernels for it, or none that read all of its arrays."""
    found = CODECS.get(codec.kind)
    if found is None or not found.arrays.issuperset(codec.parts(ROWS, CHUNK)):
        refuse(f"weights in the codec {codec.name}")
    return found
