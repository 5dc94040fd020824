"""From operations to launches: one operation after the other, and for runs of few rows by patterns of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgeq.targets.cuda.lowering import attention, experts, fused, layers, linear, states
from edgeq.targets.cuda.lowering.context import Lowered, Lowering, refuse
from edgeq.targets.cuda.run.storage import Storage
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
from edgeq.targets.graph import (
    Activate,
    Attention,
    CacheWrite,
    Embed,
    Experts,
    Graph,
    HeadNorm,
    HeadRotate,
    InjectVectors,
    LayerNorm,
    Linear,
    NormAdd,
    Operation,
    PositionAdd,
    RmsNorm,
    RopeRotate,
    Scale,
    Select,
)
from edgeq.targets.requantization import SharedInput, WeightSource
from edgeq.targets.target import Options


def lower(
    graph: Graph,
    storage: Storage,
    options: Options,
    source: WeightSource = "file",
    inputs: tuple[SharedInput, ...] = (),
) -> Lowering:
    """The launches of a run in the mode of the options, in `found`, and what such runs have to send.

    inputs   of the layers with a master, where `source` is not the file

    UnsupportedError: the graph has something that this target does not.
    """
    lowering = Lowering(graph, storage, options, source, inputs)
    at = 0
    while at < len(graph.operations):
        at += _lower_next(lowering, at)
    # Masters are read with a prompt, and rows without tokens are those of a picture: neither are few.
    if source != "masters" and any(isinstance(op, Embed) for op in graph.operations):
        patterns = Lowering(graph, storage, options, source, inputs)
        at = 0
        while at < len(graph.operations):
            at += _lower_next(patterns, at, patterns=True)
        lowering.fused = patterns.by_operation
    return lowering


def _lower_next(lowering: Lowering, at: int, patterns: bool = False) -> int:
    """Lower operation `at`, or the pattern that begins with it; returns how many operations that were."""
    operations = lowering.graph.operations
    launches, count = fused.matched(lowering, at) if patterns else ([], 0)
    if not count:
        operation = operations[at]
        if type(operation) not in _LOWER:
            refuse(f"the operation {type(operation).__name__}")
        launches, count = _LOWER[type(operation)](lowering, operation), 1
    lowering.by_operation += launches
    for operation in operations[at : at + count]:
        lowering.changed(operation.writes())
        if isinstance(operation, Select):
            lowering.stage += 1
            lowering.changed(lowering.graph.buffers)
    return count


_LOWER: dict[type[Operation], Callable[[Lowering, Any], Sequence[Lowered]]] = {
    Embed: layers.embed,
    RmsNorm: layers.rms_norm,
    NormAdd: layers.rms_norm,
    LayerNorm: layers.layer_norm,
    Scale: layers.scale,
    PositionAdd: layers.position_add,
    InjectVectors: layers.inject_vectors,
    Activate: layers.activate,
    Select: layers.select,
    Linear: linear.linear,
    HeadNorm: attention.head_norm,
    RopeRotate: attention.rope_rotate,
    HeadRotate: attention.head_rotate,
    CacheWrite: attention.cache_write,
    Attention: attention.attention,
    Route: experts.route,
    Experts: experts.experts,
    GatedAdd: experts.gated_add,
    ShortConv: states.short_conv,
    SiluConv: states.short_conv,
    RowBefore: states.row_before,
    DeltaRule: states.delta_rule,
    SsdScan: states.ssd_scan,
    GatedNorm: states.gated_norm,
    ShareScale: experts.share_scale,
    ValueNorm: attention.value_norm,
    ScaleAdd: layers.scale,
    ArrayScale: layers.array_scale,
    SoftCap: layers.soft_cap,
    Gate: layers.gate,
    Limit: layers.limit,
    RowMean: layers.row_mean,
    ScaleShift: layers.scale_shift,
}
