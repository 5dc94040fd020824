"""Mixtures of experts.  The host reads which rows chose which expert, and starts every expert over its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgeq.targets.cuda.arguments.experts import (
    GatedAddArguments,
    GatherAddArguments,
    RouteArguments,
    RouteBySigmoidsArguments,
    ScatterArguments,
    ShareScaleArguments,
)
from edgeq.targets.cuda.arguments.rows import NOTHING_SELECTED, ActivateArguments, SelectArguments, SelectedArguments
from edgeq.targets.cuda.lowering.context import Input, Launch, Lowered, Lowering, Output, Routed
from edgeq.targets.cuda.lowering.layers import activation
from edgeq.targets.cuda.lowering.linear import layer_launches
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.family_operations import GatedAdd, Route, ShareScale
from edgeq.targets.graph import Activate, Experts, Linear


def route(lowering: Lowering, op: Route) -> Sequence[Lowered]:
    sizes = {"width": lowering.graph.buffers[op.x], "experts": op.experts, "chosen": op.chosen}
    given = {"x": lowering.buffer(op.x), "out": lowering.buffer(op.out), "normalized": int(op.normalized), **sizes}
    if op.bias is None:
        return [Launch(op, lowering.stage, Variant("route"), RouteArguments(**given))]
    arguments = RouteBySigmoidsArguments(bias=lowering.storage.floats(op.bias), factor=op.factor, **given)
    return [Launch(op, lowering.stage, Variant("route_by_sigmoids"), arguments)]


def share_scale(lowering: Lowering, op: ShareScale) -> Sequence[Lowered]:
    arguments = ShareScaleArguments(
        routing=lowering.buffer(op.routing), scales=lowering.storage.floats(op.scales), chosen=op.chosen
    )
    return [Launch(op, lowering.stage, Variant("share_scale"), arguments)]


def experts(lowering: Lowering, op: Experts) -> Sequence[Lowered]:
    rows, named = lowering.rows(lowering.stage), lowering.storage.named
    width, result = lowering.graph.buffers[op.x], op.downs[0].rows
    here = ("experts", lowering.stage)

    def memory(name: str, numbers: int) -> int:
        return named((*here, name, numbers), rows * numbers * 4)

    # Of one expert: every row at most once.
    taken, gate_up, inner = memory("taken", width), memory("gate_up", 2 * op.width), memory("inner", op.width)
    out, results = memory("out", result), memory("results", op.chosen * result)
    which, places = memory("rows", 1), memory("places", 1)
    activate = Activate(op.layer, op.x, op.width, op.out, op.function, op.gated, clamp=op.clamp)
    launches = []
    for e, (projection, down) in enumerate(zip(op.projections, op.downs, strict=True)):
        rows_of_expert = SelectedArguments(x=lowering.buffer(op.x), out=taken, width=width)
        select = SelectArguments(wanted=which, first=rows_of_expert, second=NOTHING_SELECTED)
        steps = [Launch(op, lowering.stage, Variant("select"), select)]
        offset = 0
        for layer in projection:
            part = Linear(op.layer, op.x, layer, op.out)
            to = Output(gate_up + 4 * offset, 2 * op.width, False)
            source = Input(taken, width, ("taken", op, e))
            steps += layer_launches(lowering, part, layer, source, to, lowering.mode_of(op))
            offset += layer.rows
        act = ActivateArguments(x=gate_up, out=inner, stride=2 * op.width, width=op.width)
        steps.append(activation(lowering, activate, act))
        part = Linear(op.layer, op.x, down, op.out)
        source = Input(inner, op.width, ("inner", op, e))
        steps += layer_launches(lowering, part, down, source, Output(out, result, False), lowering.mode_of(op))
        put = ScatterArguments(x=out, places=places, out=results, width=result)
        steps.append(Launch(op, lowering.stage, Variant("scatter"), put))
        launches.append(tuple(replace(step, operation=op) for step in steps))
    routing = lowering.buffer(op.routing)
    combine = GatherAddArguments(x=results, routing=routing, out=lowering.buffer(op.out), width=result, chosen=op.chosen)
    last = Launch(op, lowering.stage, Variant("gather_add"), combine)
    return [Routed(op, routing, which, places, tuple(launches), last, lowering.stage)]


def gated_add(lowering: Lowering, op: GatedAdd) -> Sequence[Lowered]:
    arguments = GatedAddArguments(
        x=lowering.buffer(op.x),
        gate=lowering.buffer(op.gate),
        out=lowering.buffer(op.out),
        width=lowering.graph.buffers[op.out],
        stride=lowering.graph.buffers[op.gate],
    )
    return [Launch(op, lowering.stage, Variant("gated_add"), arguments)]
