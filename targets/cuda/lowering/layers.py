"""Operations over whole rows: embeddings, norms, activations, the choice of rows."""

from __future__ import annotations

from collections.abc import Sequence

from edgeq.format.records import ArrayRef
from edgeq.targets.cuda.lowering.context import Gather, Launch, Lowered, Lowering, Value, refuse
from edgeq.targets.cuda.lowering.linear import launches_of, stored
from edgeq.targets.cuda.supply.pack import Variant
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
    if isinstance(op.table, ArrayRef):
        return [Gather(op, op.table, lowering.buffer(op.out))]
    weight = op.table.weights[0]
    if len(op.table.weights) > 1:
        refuse(f"an embedding of two weight blocks ({op.table.name})")
    values = {
        **stored(lowering, weight),
        "which": lowering.sent("tokens"),
        "out": lowering.buffer(op.out),
        "columns": weight.columns,
        "groups": weight.codec.groups(weight.columns),
        "group": weight.codec.group_size,
    }
    return [Launch(op, lowering.stage, launches_of(weight.codec).rows(weight.codec), values)]


def rms_norm(lowering: Lowering, op: RmsNorm | NormAdd) -> Sequence[Lowered]:
    values: dict[str, Value] = {
        "x": lowering.buffer(op.x),
        "gain": lowering.storage.floats(op.gain),
        "out": lowering.buffer(op.out),
        "width": lowering.graph.buffers[op.x],
        "add": int(isinstance(op, NormAdd)),
        "eps": op.eps,
    }
    return [Launch(op, lowering.stage, Variant("rms_norm"), values)]


def layer_norm(lowering: Lowering, op: LayerNorm) -> Sequence[Lowered]:
    values: dict[str, Value] = {
        "x": lowering.buffer(op.x),
        "gain": lowering.storage.floats(op.gain),
        "bias": lowering.storage.floats(op.bias),
        "out": lowering.buffer(op.out),
        "width": lowering.graph.buffers[op.x],
        "eps": op.eps,
    }
    return [Launch(op, lowering.stage, Variant("layer_norm"), values)]


def scale(lowering: Lowering, op: Scale) -> Sequence[Lowered]:
    values: dict[str, Value] = {
        "x": lowering.buffer(op.x),
        "out": lowering.buffer(op.out),
        "width": lowering.graph.buffers[op.x],
        "factor": op.factor,
    }
    return [Launch(op, lowering.stage, Variant("scale"), values)]


def position_add(lowering: Lowering, op: PositionAdd) -> Sequence[Lowered]:
    values: dict[str, Value] = {
        "table": lowering.storage.floats(op.table),
        "which": lowering.sent("positions"),
        "out": lowering.buffer(op.x),
        "width": lowering.graph.buffers[op.x],
        "stride": op.table.shape[1],
        "offset": 0,
        "add": 1,
    }
    return [Launch(op, lowering.stage, Variant("inject"), values)]


def inject_vectors(lowering: Lowering, op: InjectVectors) -> Sequence[Lowered]:
    width = lowering.graph.buffers[op.out]
    widest = lowering.vector_width
    values: dict[str, Value] = {
        "table": lowering.storage.named("vectors", lowering.rows(0) * widest * 4),
        "which": lowering.sent("vectors"),
        "out": lowering.buffer(op.out),
        "width": width,
        "stride": widest,
        "offset": op.offset,
        "add": int(op.add),
    }
    return [Launch(op, lowering.stage, Variant("inject"), values)]


def activate(lowering: Lowering, op: Activate) -> Sequence[Lowered]:
    values: dict[str, Value] = {
        "x": lowering.buffer(op.x),
        "out": lowering.buffer(op.out),
        "stride": lowering.graph.buffers[op.x],
        "width": op.width,
    }
    return [Launch(op, lowering.stage, Variant("activate", (op.function, op.gated)), values)]


def select(lowering: Lowering, op: Select) -> Sequence[Lowered]:
    """Rows that are joined lie side by side, as they do where each is a row."""
    if lowering.stage:
        refuse("a second choice of rows")
    buffers = [*zip(op.reads(), op.writes(), strict=True)]
    wanted = lowering.storage.named("wanted", lowering.rows(1) * op.together * 4)
    launches = []
    for start in range(0, len(buffers), 2):
        values: dict[str, Value] = {"wanted": wanted, "x2": 0, "out2": 0, "width2": 0}
        for suffix, (name, out) in zip(("", "2"), buffers[start : start + 2], strict=False):
            values |= {
                f"x{suffix}": lowering.buffer(name), f"out{suffix}": lowering.buffer(out, 1),
                f"width{suffix}": lowering.graph.buffers[name],
            }  # fmt: skip
        launches.append(Launch(op, 1, Variant("select"), values, rows_per_token=op.together))
    return launches
