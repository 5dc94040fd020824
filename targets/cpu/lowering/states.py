"""Operations of layers with a state as op records."""

from __future__ import annotations

import numpy as np

from edgeq.format.codec import as_float32
from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.kernels.rows import short_conv as kernels
from edgeq.targets.cpu.lowering.context import Context
from edgeq.targets.cpu.threads.optable import channel_parts, kernel
from edgeq.targets.state_operations import ShortConv


def short_conv(context: Context, o: ShortConv) -> None:
    (x, x_stride), (out, out_stride) = context.place(o.x), context.place(o.out)
    weight = as_float32(context.file.array(o.weight), o.weight.dtype)
    by_taps = np.zeros((weight.shape[1], padded(o.width)), np.float32)
    by_taps[:, : o.width] = weight.T
    args = kernels.ShortConvArgs(
        **context.state_args(o.state), x=x, x_stride=x_stride, out=out, out_stride=out_stride,
        width=o.width, row_bytes=4 * padded(o.width), weights=context.memory.copied(by_taps),
    )  # fmt: skip
    context.emit(kernel(kernels.short_conv, weight.shape[1]), args, parts=channel_parts(o.width))
    context.invalidate(o.out)
