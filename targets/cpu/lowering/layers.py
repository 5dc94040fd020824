"""Operations over whole rows as op records: embedding, norms, scales, activations, the selection of rows."""

from __future__ import annotations

from edgeq.format.codec import as_float32
from edgeq.format.records import ArrayRef
from edgeq.targets import graph as op
from edgeq.targets.cpu.kernels.args import FLOAT_KINDS, NOT_QUANTIZED, QuantizedArgs
from edgeq.targets.cpu.kernels.rows import activate, elementwise, embedding, norms
from edgeq.targets.cpu.lowering.codecs import CODECS
from edgeq.targets.cpu.lowering.context import BufferRows, Context
from edgeq.targets.cpu.lowering.fuse import Fusion
from edgeq.targets.cpu.lowering.layout import QuantizedActivation
from edgeq.targets.cpu.threads.optable import channel_parts, kernel
from edgeq.targets.family_operations import ArrayScale, Limit, RowMean, ScaleAdd, ScaleShift, SoftCap


def embed(context: Context, o: op.Embed) -> None:
    out, stride = context.place(o.out)
    tokens = context.arrays.tokens
    if isinstance(o.table, ArrayRef):
        address, width = context.memory.stored(o.table), o.table.shape[1]
        args = embedding.EmbedArgs(tokens=tokens, table=address, width=width, out=out, out_stride=stride)
        context.emit(kernel(embedding.embed_plain, FLOAT_KINDS[o.table.dtype]), args)
    else:
        weight = o.table.weights[0]
        table, (function, scales) = weight.arrays["q"], CODECS[weight.codec.kind].rows(context, weight)
        tiles = embedding.EmbedTileArgs(
            tokens=tokens, table=context.memory.stored(table), table_block=table.nbytes // table.shape[0],
            width=weight.columns, out=out, out_stride=stride, **scales,
        )  # fmt: skip
        context.emit(function, tiles)
    context.invalidate(o.out)


class Result:
    """Where a maker of quantized activations writes its result.

    place, of_thread   of the float32, and bytes from one thread's row to the next: floats that nothing reads are not kept, so
                       every thread has one row, which never leaves its cache
    quantized          arguments of the quantized activations
    """

    def __init__(self, context: Context, out: str, fusion: Fusion) -> None:
        context.invalidate(out)
        self.place, self.of_thread = context.place(out), 0
        if not fusion.keeps_floats:
            stride = self.place.stride
            self.place, self.of_thread = BufferRows(context.memory.shared(("row", stride), context.threads * stride), 0), stride
        self.quantized: QuantizedArgs = NOT_QUANTIZED
        if fusion.layout:
            made: QuantizedActivation = context.add_quantized(out, fusion.layout)
            self.quantized = made.args()


def rms_norm(context: Context, o: op.RmsNorm, fusion: Fusion) -> None:
    (x, stride), result = context.place(o.x), Result(context, o.out, fusion)
    args = elementwise.NormArgs(
        x=x, x_stride=stride, width=context.width(o.x), gain=context.memory.floats(o.gain), epsilon=o.eps,
        out=result.place.address, out_stride=result.place.stride, out_of_thread=result.of_thread, quantized=result.quantized,
    )  # fmt: skip
    context.emit(kernel(elementwise.norm, context.max_tile), args)


def layer_norm(context: Context, o: op.LayerNorm, fusion: Fusion) -> None:
    (x, stride), result = context.place(o.x), Result(context, o.out, fusion)
    args = norms.LayerNormArgs(
        x=x, x_stride=stride, width=context.width(o.x), gain=context.memory.floats(o.gain),
        bias=context.memory.floats(o.bias), epsilon=o.eps,
        out=result.place.address, out_stride=result.place.stride, out_of_thread=result.of_thread, quantized=result.quantized,
    )  # fmt: skip
    context.emit(kernel(norms.layer_norm, context.max_tile), args)


def activation(context: Context, o: op.Activate, fusion: Fusion) -> None:
    (x, stride), result = context.place(o.x), Result(context, o.out, fusion)
    alpha, limit = o.clamp or (0.0, 0.0)
    args = elementwise.ActivationArgs(
        x=x, x_stride=stride, width=o.width, out=result.place.address, out_stride=result.place.stride,
        out_of_thread=result.of_thread, quantized=result.quantized, alpha=alpha, limit=limit,
    )  # fmt: skip
    function = activate.CLAMPED if o.clamp else activate.FUNCTION_CODES[o.function]
    decode = kernel(activate.activate, context.max_tile, function, int(o.gated))
    if o.swiglu:
        decode = kernel(elementwise.swiglu, context.max_tile, 0)
    prefill = kernel(elementwise.swiglu, context.max_tile, 1) if fusion.elsewhere else decode
    context.emit(prefill, args, parts=channel_parts(o.width), decode=decode)


def norm_add(context: Context, o: op.NormAdd) -> None:
    (x, x_stride), (out, out_stride) = context.place(o.x), context.place(o.out)
    args = norms.NormAddArgs(
        x=x, x_stride=x_stride, width=context.width(o.x), gain=context.memory.floats(o.gain), epsilon=o.eps,
        out=out, out_stride=out_stride,
    )  # fmt: skip
    context.emit(kernel(norms.norm_add), args)
    context.invalidate(o.out)


def scale(context: Context, o: op.Scale | ScaleAdd) -> None:
    (x, stride), (out, out_stride) = context.place(o.x), context.place(o.out)
    args = norms.ScaleArgs(x=x, x_stride=stride, width=context.width(o.x), factor=o.factor, out=out, out_stride=out_stride)
    context.emit(kernel(norms.scale_add if isinstance(o, ScaleAdd) else norms.scale), args)
    context.invalidate(o.out)


def array_scale(context: Context, o: ArrayScale) -> None:
    (factor,) = as_float32(context.file.array(o.factor), o.factor.dtype).tolist()
    x, stride = context.place(o.x)
    args = norms.ScaleArgs(x=x, x_stride=stride, width=context.width(o.x), factor=factor, out=x, out_stride=stride)
    context.emit(kernel(norms.scale), args)
    context.invalidate(o.x)


def soft_cap(context: Context, o: SoftCap) -> None:
    (x, stride), width = context.place(o.x), context.width(o.x)
    args = norms.SoftCapArgs(x=x, x_stride=stride, width=width, cap=o.cap)
    context.emit(kernel(norms.soft_cap, context.max_tile), args, parts=channel_parts(width))
    context.invalidate(o.x)


def limit(context: Context, o: Limit) -> None:
    (x, x_stride), (out, out_stride), begin = context.place(o.x), context.place(o.out), 4 * o.offset
    args = norms.LimitArgs(
        x=x + begin, x_stride=x_stride, width=o.width, least=o.least, most=o.most, out=out + begin, out_stride=out_stride
    )  # fmt: skip
    context.emit(kernel(norms.limit, context.max_tile), args, parts=channel_parts(o.width))
    context.invalidate(o.out)


def row_mean(context: Context, o: RowMean) -> None:
    (x, x_stride), (out, out_stride) = context.place(o.x), context.place(o.out)
    args = norms.RowMeanArgs(x=x, x_stride=x_stride, count=o.count, width=context.width(o.out), out=out, out_stride=out_stride)
    context.emit(kernel(norms.row_mean), args)
    context.invalidate(o.out)


def scale_shift(context: Context, o: ScaleShift) -> None:
    (x, stride), floats = context.place(o.x), context.memory.floats
    args = elementwise.ScaleShiftArgs(
        x=x, x_stride=stride, width=context.width(o.x), scale=floats(o.scale), shift=floats(o.shift)
    )  # fmt: skip
    context.emit(kernel(elementwise.scale_shift), args)
    context.invalidate(o.x)


def position_add(context: Context, o: op.PositionAdd) -> None:
    x, stride = context.place(o.x)
    args = norms.PositionAddArgs(
        x=x, x_stride=stride, width=o.table.shape[1],
        table=context.memory.stored(o.table), positions=context.arrays.positions,
    )  # fmt: skip
    context.emit(kernel(norms.position_add, FLOAT_KINDS[o.table.dtype]), args)
    context.invalidate(o.x)


def select(context: Context, o: op.Select) -> None:
    sources = [(context.place(name), context.width(name)) for name in o.reads()]
    context.select(o.writes())
    for name, ((x, stride), width) in zip(o.writes(), sources, strict=True):
        out, out_stride = context.place(name)
        args = elementwise.SelectArgs(
            x=x, x_stride=stride, width=width, out=out, out_stride=out_stride,
            indices=context.arrays.selection, together=o.together,
        )  # fmt: skip
        context.emit(kernel(elementwise.select), args)


def inject_vectors(context: Context, o: op.InjectVectors) -> None:
    out, stride = context.place(o.out)
    args = elementwise.InjectArgs(
        out=out, out_stride=stride, width=context.width(o.out), vectors=context.vectors, offset=4 * o.offset, add=int(o.add)
    )
    context.emit(kernel(elementwise.inject), args)
    context.invalidate(o.out)
