"""From a graph to the op table: fuse, emit op records for each operation in turn, compile their kernels, write the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgeq.errors import UnsupportedError
from edgeq.targets import graph as op
from edgeq.targets.cpu.jit.args import FUNCTION, PARTS, RECORD_SLOTS
from edgeq.targets.cpu.jit.compile import address
from edgeq.targets.cpu.jit.parallel import compile_missing
from edgeq.targets.cpu.lowering import attention, experts, layers, linear, states
from edgeq.targets.cpu.lowering.context import Context
from edgeq.targets.cpu.lowering.fuse import Fusion, fuse
from edgeq.targets.cpu.threads.optable import PARTS_A_THREAD, Tables, Variant
from edgeq.targets.cpu.threads.threadpool import entries
from edgeq.targets.family_operations import (
    ArrayScale,
    DeltaRule,
    Gate,
    GatedAdd,
    GatedNorm,
    Limit,
    Route,
    RowBefore,
    RowMean,
    ScaleAdd,
    ScaleShift,
    ShareScale,
    ShortConv,
    SiluConv,
    SoftCap,
    SsdScan,
    ValueNorm,
)
from edgeq.targets.target import OnProgress
from edgeq.targets.times import Step


def lower(context: Context) -> None:
    """Fill the context's records from its graph."""
    for o, fusion in zip(context.graph.operations, fuse(context), strict=True):
        context.begin(o)
        if type(o) in _FUSED:
            _FUSED[type(o)](context, o, fusion)
        elif type(o) in _PLAIN:
            _PLAIN[type(o)](context, o)
        else:
            raise UnsupportedError(f"the cpu target does not run {type(o).__name__}; run with --target reference")


def kernels_of(context: Context) -> list[Variant]:
    """The kernels that the tables of a lowered graph call."""
    return list(
        dict.fromkeys(
            [
                *(each.prefill for each in context.records),
                *(each.decode for each in context.records),
                *(function for stage in context.expert_stages for function in stage.functions),
            ]
        )
    )


def tables(context: Context, on_progress: OnProgress) -> Tables:
    """The tables of a lowered graph; `on_progress` is told of kernels that were not compiled before, then of the end."""
    kernels = kernels_of(context)
    compile_missing([*kernels, *((each, ()) for each in entries(context.threads))], on_progress)
    addresses = {each: address(each[0], *each[1]) for each in kernels}
    for stage in context.expert_stages:
        stage.table[:, FUNCTION] = [addresses[function] for function in stage.functions]
    prefill = np.array([each.args.record() for each in context.records], np.int64).reshape(-1, RECORD_SLOTS)
    decode = prefill.copy()
    threads, most = context.options.threads_prefill, context.options.threads
    most = PARTS_A_THREAD * most if most > 1 else 1
    prefill[:, FUNCTION] = [addresses[each.prefill] for each in context.records]
    decode[:, FUNCTION] = [addresses[each.decode] for each in context.records]
    prefill[:, PARTS] = [each.parts_a_thread * threads for each in context.records]
    decode[:, PARTS] = [min(each.decode_parts, most) for each in context.records]
    steps = context.steps()
    return Tables(decode, prefill, steps, context.options.mode, np.array([_work(each) for each in steps]).reshape(-1, 2))


def _work(step: Step) -> tuple[float, float]:
    """See `Tables`: of what takes long."""
    o = step.operation
    if isinstance(o, op.Linear) and step.reads_weights:
        return 2.0 * o.linear.rows * o.linear.columns, 0.0
    return (0.0, 4.0 * o.heads * o.head_dim) if isinstance(o, op.Attention) else (0.0, 0.0)


def _experts(context: Context, o: op.Experts) -> None:
    experts.experts(context, o, lower)


_FUSED: dict[type[op.Operation], Callable[[Context, Any, Fusion], None]] = {
    op.RmsNorm: layers.rms_norm,
    op.LayerNorm: layers.layer_norm,
    op.Activate: layers.activation,
    op.Linear: linear.linear,
    op.CacheWrite: attention.cache_write,
    op.Attention: attention.attend,
}
_PLAIN: dict[type[op.Operation], Callable[[Context, Any], None]] = {
    op.Embed: layers.embed,
    op.NormAdd: layers.norm_add,
    op.Scale: layers.scale,
    op.PositionAdd: layers.position_add,
    op.HeadNorm: attention.head_change,
    op.HeadRotate: attention.head_change,
    op.RopeRotate: attention.rope_rotate,
    Route: experts.route,
    op.Experts: _experts,
    GatedAdd: experts.gated_add,
    op.InjectVectors: layers.inject_vectors,
    op.Select: layers.select,
    ShortConv: states.short_conv,
    SiluConv: states.short_conv,
    RowBefore: states.row_before,
    DeltaRule: states.delta_rule,
    SsdScan: states.ssd_scan,
    GatedNorm: states.gated_norm,
    Gate: states.gate,
    ValueNorm: attention.value_norm,
    ArrayScale: layers.array_scale,
    ScaleAdd: layers.scale,
    ShareScale: experts.share_scale,
    SoftCap: layers.soft_cap,
    Limit: layers.limit,
    RowMean: layers.row_mean,
    ScaleShift: layers.scale_shift,
}
