"""Operations of layers with a state, and their gates, as op records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edgeq.format.codec import as_float32
from edgeq.targets.cpu.isa.isa import Isa
from edgeq.targets.cpu.jit.buffers import padded
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.simd import LANES
from edgeq.targets.cpu.kernels.rows import delta_rule as rule
from edgeq.targets.cpu.kernels.rows import norms
from edgeq.targets.cpu.kernels.rows import row_before as before
from edgeq.targets.cpu.kernels.rows import short_conv as kernels
from edgeq.targets.cpu.kernels.rows import ssd_scan as ssd
from edgeq.targets.cpu.kernels.rows.states import Scan
from edgeq.targets.cpu.lowering.context import Context
from edgeq.targets.cpu.threads.optable import channel_parts, kernel
from edgeq.targets.family_operations import DeltaRule, Gate, GatedNorm, RowBefore, ShortConv, SiluConv, SsdScan, padded_head
from edgeq.targets.state_layout import padded_width


def short_conv(context: Context, o: ShortConv | SiluConv) -> None:
    (x, x_stride), (out, out_stride) = context.place(o.x), context.place(o.out)
    weight = as_float32(context.file.array(o.weight), o.weight.dtype)
    by_taps = np.zeros((weight.shape[1], padded(o.width)), np.float32)
    by_taps[:, : o.width] = weight.T
    bias = np.zeros(padded(o.width), np.float32)
    biased = o.bias if isinstance(o, SiluConv) else None
    if biased is not None:
        bias[: o.width] = as_float32(context.file.array(biased), biased.dtype)
    args = kernels.ShortConvArgs(
        **context.state_args(o.state), x=x, x_stride=x_stride, out=out, out_stride=out_stride,
        width=o.width, row_bytes=4 * padded(o.width), weights=context.memory.copied(by_taps),
        bias=context.memory.copied(bias) if biased is not None else 0,
    )  # fmt: skip
    gated = int(isinstance(o, ShortConv))
    variant = kernel(kernels.short_conv, weight.shape[1], gated, int(biased is not None))
    context.emit(variant, args, parts=channel_parts(o.width))
    context.invalidate(o.out)


def row_before(context: Context, o: RowBefore) -> None:
    (out, out_stride), (x, x_stride) = context.place(o.out), context.place(o.x) if o.keeps else (0, 0)
    args = before.RowBeforeArgs(
        **context.state_args(o.state), x=x, x_stride=x_stride, out=out, out_stride=out_stride, width=o.width,
        row_bytes=4 * padded(o.width),
    )  # fmt: skip
    context.emit(kernel(before.row_before, int(o.keeps)), args, parts=channel_parts(o.width))
    context.invalidate(o.out)


def delta_rule(context: Context, o: DeltaRule) -> None:
    shape = {"key_heads": o.key_heads, "heads": o.value_heads, "key_dim": o.key_dim, "value_dim": o.value_dim}
    _scan(context, o, rule.SCAN, rule.delta_rule, o.rates, shape, beta_scale=o.beta_scale)


def ssd_scan(context: Context, o: SsdScan) -> None:
    shape = {"key_heads": o.heads // o.shared, "heads": o.heads, "key_dim": o.state_dim, "value_dim": o.head_dim}
    least, most = o.limits
    skip = context.memory.floats(o.skip)
    _scan(context, o, ssd.SCAN, ssd.ssd_scan, o.dt, shape, groups=o.groups, skip=skip, least=least, most=most)


def _scan(
    context: Context, o: DeltaRule | SsdScan, scan: Scan, make: Callable[[int], Kernel], rates: str,
    shape: Mapping[str, int], **own: Any,
) -> None:  # fmt: skip
    (x, x_stride), (rates_place, rates_stride), (out, out_stride) = map(context.place, (o.x, rates, o.out))
    scratch = scan.scratch_bytes(padded_head(shape["key_dim"]), padded_head(shape["value_dim"]))
    with np.errstate(over="ignore"):
        decay = -np.exp(as_float32(context.file.array(o.decay_log), o.decay_log.dtype))
    args = scan.args(
        **context.state_args(o.state), **shape, **own, x=x, x_stride=x_stride, rates=rates_place, rates_stride=rates_stride,
        out=out, out_stride=out_stride, log=4 * context.state_places[o.state].log,
        log_bytes=4 * padded_width(context.graph.states[o.state].log), log_values=4 * o.log_places[0],
        decay=context.memory.copied(decay), dt_bias=context.memory.floats(o.dt_bias),
        scratch=context.memory.shared("scan over a log", context.threads * scratch), scratch_bytes=scratch,
    )  # fmt: skip
    context.emit(kernel(make, int(is_wide(context.isa))), args, parts=shape["key_heads"])
    context.invalidate(o.out)


def is_wide(isa: Isa) -> bool:
    """Whether a vector of sixteen floats is one register."""
    return isa.lanes == LANES


def gated_norm(context: Context, o: GatedNorm) -> None:
    (x, x_stride), (gate, gate_stride), (out, out_stride) = map(context.place, (o.x, o.gate, o.out))
    args = norms.GatedNormArgs(
        x=x, x_stride=x_stride, gate=gate + 4 * o.offset, gate_stride=gate_stride, heads=o.heads, head_dim=o.head_dim,
        gain=context.memory.floats(o.gain), gain_bytes=0 if o.gain.shape[0] == o.head_dim else 4 * o.head_dim,
        epsilon=o.eps, out=out, out_stride=out_stride,
    )  # fmt: skip
    context.emit(kernel(norms.gated_norm, int(o.gate_first)), args, parts=channel_parts(o.heads * o.head_dim))
    context.invalidate(o.out)


def gate(context: Context, o: Gate) -> None:
    (x, x_stride), (gates, gate_stride) = context.place(o.x), context.place(o.gate)
    args = norms.GateArgs(x=x, x_stride=x_stride, gate=gates + 4 * o.offset, gate_stride=gate_stride, width=o.width)
    context.emit(kernel(norms.gate, norms.GATES.index(o.function)), args)
    context.invalidate(o.x)
