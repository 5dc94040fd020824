"""What the CPU target can do with each way of storing weights.  A codec that is not in `CODECS` does not run here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgeq.format.codec import Codec, Kind
from edgeq.format.records import Weight
from edgeq.targets.cpu.kernels.args import FLOAT_KINDS
from edgeq.targets.cpu.kernels.products.groups import group_args, group_kind
from edgeq.targets.cpu.kernels.rows import embedding, requantize
from edgeq.targets.cpu.lowering.context import Context
from edgeq.targets.cpu.lowering.layout import QuantizedActivation
from edgeq.targets.cpu.lowering.products import LinearProduct, float_product, integer_product
from edgeq.targets.cpu.threads.optable import Variant, kernel


@dataclass(frozen=True)
class CodecKernels:
    """The kernels of a codec.

    product      emits y = W x
    rows         the kernel that looks rows up, for an embedding, and its arguments but for tokens, table, width and output
    requantize   the kernel that rounds a master to the codec; None: there is none
    swiglu       whether `product` can do the SwiGLU after it
    """

    product: Callable[[Context, LinearProduct, QuantizedActivation], None]
    rows: Callable[[Context, Weight], tuple[Variant, dict[str, int]]]
    requantize: Callable[[Weight, Codec], Variant] | None = None
    swiglu: bool = False


def float_rows(context: Context, weight: Weight) -> tuple[Variant, dict[str, int]]:
    return kernel(embedding.embed_float_tile, FLOAT_KINDS[weight.codec.kind]), {}


def integer_rows(context: Context, weight: Weight) -> tuple[Variant, dict[str, int]]:
    codec = weight.codec
    args = group_args(codec, weight.rows, weight.columns, lambda name: context.memory.stored(weight.arrays[name]))
    del args["scales_step"]
    return kernel(embedding.embed_integer_tile, codec.bits, group_kind(codec)), {
        **args, "group": codec.group_size or weight.columns
    }  # fmt: skip


def integer_requantize(master: Weight, codec: Codec) -> Variant:
    return requantize.requantize, requantize.literals(master, codec)


FLOATS = CodecKernels(float_product, float_rows)
CODECS: Mapping[Kind, CodecKernels] = {
    "f32": FLOATS,
    "f16": FLOATS,
    "bf16": FLOATS,
    "int": CodecKernels(integer_product, integer_rows, integer_requantize, swiglu=True),
    "half": CodecKernels(integer_product, integer_rows, swiglu=True),
    "s4": CodecKernels(integer_product, integer_rows, swiglu=True),
    "offset": CodecKernels(integer_product, integer_rows, swiglu=True),
    "two-level": CodecKernels(integer_product, integer_rows, swiglu=True),
    "table": CodecKernels(integer_product, integer_rows, swiglu=True),
    "trellis": CodecKernels(integer_product, integer_rows, swiglu=True),
}
