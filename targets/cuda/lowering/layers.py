"""Operations over whole rows: embeddings, norms, activations, the choice of rows."""

from __future__ import annotations

from collections.abc import Sequence

from edgeq.format.records import ArrayRef
from edgeq.targets.cuda.arguments.rows import (
    NOTHING_SELECTED,
    ActivateArguments,
    ActivateClampedArguments,
    ArrayScaleArguments,
    GateArguments,
    InjectArguments,
    LayerNormArguments,
    LimitArguments,
    RmsNormArguments,
    RowMeanArguments,
    ScaleArguments,
    ScaleShiftArguments,
    SelectArguments,
    SelectedArguments,
    SoftCapArguments,
)
from edgeq.targets.cuda.lowering.context import Gather, Launch, Lowered, Lowering, refuse
from edgeq.targets.cuda.lowering.linear import launches_of
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.family_operations import ArrayScale, Gate, Limit, RowMean, ScaleAdd, ScaleShift, SoftCap
from edgeq.targets.graph import (
    Activate,
    Embed,
    InjectVectors,
    LayerNorm,
    NormAdd,
    PositionAdd,
    RmsNorm,
    Scale,
    Select,
)


def embed(lowering: Lowering, op: Embed) -> Sequence[Lowered]:
    """A table beside that of the residual stream has rows of all layers: it is larger than the model, and stays in the file."""
    if isinstance(op.table, ArrayRef):
        return [Gather(op, op.table, lowering.buffer(op.out))]
    weight = op.table.weights[0]
    if len(op.table.weights) > 1:
        refuse(f"an embedding of two weight blocks ({op.table.name})")
    if op is not next(each for each in lowering.graph.operations if isinstance(each, Embed)):
        return [Gather(op, weight, lowering.buffer(op.out))]
    return [launches_of(weight.codec).rows(lowering, op, weight)]


def rms_norm(lowering: Lowering, op: RmsNorm | NormAdd) -> Sequence[Lowered]:
    arguments = RmsNormArguments(
        x=lowering.buffer(op.x),
        gain=lowering.storage.floats(op.gain),
        out=lowering.buffer(op.out),
        width=lowering.graph.buffers[op.x],
        add=int(isinstance(op, NormAdd)),
        eps=op.eps,
    )
    return [Launch(op, lowering.stage, Variant("rms_norm"), arguments)]


def layer_norm(lowering: Lowering, op: LayerNorm) -> Sequence[Lowered]:
    arguments = LayerNormArguments(
        x=lowering.buffer(op.x),
        gain=lowering.storage.floats(op.gain),
        bias=lowering.storage.floats(op.bias),
        out=lowering.buffer(op.out),
        width=lowering.graph.buffers[op.x],
        eps=op.eps,
    )
    return [Launch(op, lowering.stage, Variant("layer_norm"), arguments)]


def scale(lowering: Lowering, op: Scale | ScaleAdd) -> Sequence[Lowered]:
    arguments = ScaleArguments(
        x=lowering.buffer(op.x),
        out=lowering.buffer(op.out),
        width=lowering.graph.buffers[op.x],
        add=int(isinstance(op, ScaleAdd)),
        factor=op.factor,
    )
    return [Launch(op, lowering.stage, Variant("scale"), arguments)]


def array_scale(lowering: Lowering, op: ArrayScale) -> Sequence[Lowered]:
    arguments = ArrayScaleArguments(
        x=lowering.buffer(op.x), factor=lowering.storage.floats(op.factor), width=lowering.graph.buffers[op.x]
    )
    return [Launch(op, lowering.stage, Variant("array_scale"), arguments)]


def soft_cap(lowering: Lowering, op: SoftCap) -> Sequence[Lowered]:
    arguments = SoftCapArguments(x=lowering.buffer(op.x), width=lowering.graph.buffers[op.x], cap=op.cap)
    return [Launch(op, lowering.stage, Variant("soft_cap"), arguments)]


def limit(lowering: Lowering, op: Limit) -> Sequence[Lowered]:
    arguments = LimitArguments(
        x=lowering.buffer(op.x) + 4 * op.offset,
        out=lowering.buffer(op.out) + 4 * op.offset,
        stride=lowering.graph.buffers[op.x],
        out_stride=lowering.graph.buffers[op.out],
        width=op.width,
        least=op.least,
        most=op.most,
    )
    return [Launch(op, lowering.stage, Variant("limit"), arguments)]


def row_mean(lowering: Lowering, op: RowMean) -> Sequence[Lowered]:
    arguments = RowMeanArguments(
        x=lowering.buffer(op.x), out=lowering.buffer(op.out), count=op.count, width=lowering.graph.buffers[op.out]
    )
    return [Launch(op, lowering.stage, Variant("row_mean"), arguments)]


def scale_shift(lowering: Lowering, op: ScaleShift) -> Sequence[Lowered]:
    floats = lowering.storage.floats
    arguments = ScaleShiftArguments(
        x=lowering.buffer(op.x), scale=floats(op.scale), shift=floats(op.shift), width=lowering.graph.buffers[op.x]
    )
    return [Launch(op, lowering.stage, Variant("scale_shift"), arguments)]


def gate(lowering: Lowering, op: Gate) -> Sequence[Lowered]:
    arguments = GateArguments(
        x=lowering.buffer(op.x),
        gate=lowering.buffer(op.gate) + 4 * op.offset,
        stride=lowering.graph.buffers[op.x],
        gate_stride=lowering.graph.buffers[op.gate],
        width=op.width,
    )
    return [Launch(op, lowering.stage, Variant("gate", (op.function or "none",)), arguments)]


def position_add(lowering: Lowering, op: PositionAdd) -> Sequence[Lowered]:
    arguments = InjectArguments(
        table=lowering.storage.floats(op.table),
        which=lowering.sent("positions"),
        out=lowering.buffer(op.x),
        width=lowering.graph.buffers[op.x],
        stride=op.table.shape[1],
        offset=0,
        add=1,
    )
    return [Launch(op, lowering.stage, Variant("inject"), arguments)]


def inject_vectors(lowering: Lowering, op: InjectVectors) -> Sequence[Lowered]:
    width = lowering.graph.buffers[op.out]
    widest = lowering.vector_width
    arguments = InjectArguments(
        table=lowering.storage.named("vectors", lowering.rows(0) * widest * 4),
        which=lowering.sent("vectors"),
        out=lowering.buffer(op.out),
        width=width,
        stride=widest,
        offset=op.offset,
        add=int(op.add),
    )
    return [Launch(op, lowering.stage, Variant("inject"), arguments)]


def activate(lowering: Lowering, op: Activate) -> Sequence[Lowered]:
    arguments = ActivateArguments(
        x=lowering.buffer(op.x),
        out=lowering.buffer(op.out),
        stride=lowering.graph.buffers[op.x],
        width=op.width,
    )
    return [activation(lowering, op, arguments)]


def activation(lowering: Lowering, op: Activate, arguments: ActivateArguments) -> Launch:
    """The launch of an activation, whose own buffers are not looked at."""
    if op.clamp is None:
        return Launch(op, lowering.stage, Variant("activate", (op.function, op.gated)), arguments)
    alpha, limit = op.clamp
    clamped = ActivateClampedArguments(
        x=arguments.x, out=arguments.out, stride=arguments.stride, width=arguments.width, alpha=alpha, limit=limit
    )
    return Launch(op, lowering.stage, Variant("activate_clamped"), clamped)


def select(lowering: Lowering, op: Select) -> Sequence[Lowered]:
    """Rows that are joined lie side by side, as they do where each is a row."""
    if lowering.stage:
        refuse("a second choice of rows")
    buffers = [*zip(op.reads(), op.writes(), strict=True)]
    wanted = lowering.storage.named("wanted", lowering.rows(1) * op.together * 4)
    launches = []
    for start in range(0, len(buffers), 2):
        first, second = [
            SelectedArguments(x=lowering.buffer(name), out=lowering.buffer(out, 1), width=lowering.graph.buffers[name])
            for name, out in buffers[start : start + 2]
        ] + [NOTHING_SELECTED] * (start + 1 == len(buffers))
        arguments = SelectArguments(wanted=wanted, first=first, second=second)
        launches.append(Launch(op, 1, Variant("select"), arguments, rows_per_token=op.together))
    return launches
