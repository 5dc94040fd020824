"""The pass before emission: which operations of the list run as one.

quantization    the operation that makes a layer's input also writes it quantized; where nothing reads its float32,
                those never leave the cache
SwiGLU          into the product of gate and up
activation      into the transform of the layer that reads it
heads           norms of a head, rotary positions and the rotation of heads into the write of keys and values, or, of a layer
                that reads those of another, into one pass over its queries
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.errors import UnsupportedError
from edgeq.format.codec import ROWS
from edgeq.format.records import LinearSpec
from edgeq.targets import graph as op
from edgeq.targets.cpu.kernels.args import BLOCK, STATIC
from edgeq.targets.cpu.lowering.activations import layer_read, layouts
from edgeq.targets.cpu.lowering.codecs import CODECS
from edgeq.targets.cpu.lowering.context import Context
from edgeq.targets.cpu.lowering.layout import Layout
from edgeq.targets.cpu.lowering.prepare import transforms_at_once

MAKERS = (op.RmsNorm, op.LayerNorm, op.Activate)
"""Operations whose kernels write quantized activations of their result as well."""
AT_ONCE = (BLOCK, STATIC)
"""Scales that are known before the row is whole, so that whoever makes a row can write it quantized."""
HeadChange = op.HeadNorm | op.RopeRotate | op.HeadRotate


@dataclass(frozen=True)
class Fusion:
    """What runs as one with an operation.

    layout       the layout in which its result is also written
    keeps_floats whether its result is read as float32
    swiglu       Linear: in runs of several rows the product does the SwiGLU after it
    activation   Linear: in runs of several rows the transform of its input does this first
    elsewhere    activation: in runs of several rows the product before it or the transform after it does it
    heads        CacheWrite, or the Attention of a layer without one: what changes the heads before
    """

    layout: Layout | None = None
    keeps_floats: bool = True
    swiglu: bool = False
    activation: op.Activate | None = None
    elsewhere: bool = False
    heads: tuple[HeadChange, ...] = ()


def fuse(context: Context) -> list[Fusion]:
    """For every operation of the graph."""
    fusions, heads = list[Fusion](), list[HeadChange]()
    for position, o in enumerate(context.graph.operations):
        fusion = Fusion()
        if isinstance(o, MAKERS):
            joined = bool(fusions) and fusions[-1].swiglu and _is_swiglu(o)
            elsewhere = joined or _before_transform(context, position, o)
            fusion = Fusion(
                _layout_made(context, position, o.out), _keeps_floats(context, position, o.out), elsewhere=elsewhere
            )
        elif isinstance(o, op.Linear):
            fusion = Fusion(swiglu=_does_swiglu(context, position, o), activation=_activation_before(context, position))
        elif isinstance(o, (op.HeadNorm, op.RopeRotate, op.HeadRotate)):
            if not (isinstance(o, op.HeadNorm) and wider_than_a_head(context, o)):
                heads.append(o)
            elif heads:
                raise UnsupportedError(
                    f"layer {o.layer}: a norm over several heads after a change of each head; supported: before it"
                )
        elif isinstance(o, (op.CacheWrite, op.Attention)):
            fusion = Fusion(heads=tuple(heads))
            heads.clear()
        fusions.append(fusion)
    return fusions


def wider_than_a_head(context: Context, o: op.HeadNorm) -> bool:
    """Whether a norm is over several heads of the layer, or of none, so that no pass over heads can do it."""
    attention = (each for each in context.graph.operations if isinstance(each, op.Attention) and each.layer == o.layer)
    return all(each.head_dim != o.head_dim for each in attention)


def _is_swiglu(o: op.Operation) -> bool:
    return isinstance(o, op.Activate) and o.swiglu


def _changes_input(layer: LinearSpec) -> bool:
    return bool(layer.input_order or layer.transform)


def _layout_made(context: Context, position: int, buffer: str) -> Layout | None:
    """The layout of the first layer that reads the whole buffer as it is, in blocks, before it is overwritten."""
    for o in context.graph.operations[position + 1 :]:
        if isinstance(o, op.Linear) and o.x == buffer and not _changes_input(layer_read(context, o.linear)):
            for layout in layouts(context, o):
                if layout.first == 0 and layout.columns == context.width(buffer) and layout.scaling in AT_ONCE:
                    return layout
        if buffer in o.writes():
            return None
    return None


def _keeps_floats(context: Context, position: int, buffer: str) -> bool:
    """Whether what the operation at `position` writes is read in any way but in one quantized layout: else it writes to one
    row of every thread."""
    if context.source == "masters" or context.stage_of_expert:
        return True
    found = set[Layout]()
    for o in context.graph.operations[position + 1 :]:
        if isinstance(o, op.Linear) and o.x == buffer and buffer not in o.writes():
            layer = o.linear
            if len(layer.weights) > 1 or _changes_input(layer) or layer.low_rank or layer.split_row:
                return True
            found.update(layouts(context, o))
        elif isinstance(o, MAKERS) and o.writes() == (buffer,) != o.reads():
            break
        elif buffer in (*o.reads(), *o.writes()):
            return True
    whole = context.width(buffer)
    return len(found) != 1 or any(each.scaling not in AT_ONCE or each.columns != whole for each in found)


def _before_transform(context: Context, position: int, o: op.Operation) -> bool:
    """Whether the layer after an activation can do it: it alone reads the result, and begins with a transform of whole rows."""
    following = context.graph.operations[position + 1 :]
    if context.source == "masters" or context.stage_of_expert or not isinstance(o, op.Activate) or o.width % ROWS:
        return False
    if not following or not isinstance(following[0], op.Linear) or following[0].x != o.out or o.out in following[0].writes():
        return False
    layer = layer_read(context, following[0].linear)
    if layer.input_order or layer.low_rank or not transforms_at_once(context, layer):
        return False
    return context.graph.readers(position + 1, o.out) == [position + 1]


def _activation_before(context: Context, position: int) -> op.Activate | None:
    """What the layer at `position` does before its transform."""
    before = context.graph.operations[position - 1] if position else None
    return before if isinstance(before, op.Activate) and _before_transform(context, position - 1, before) else None


def _does_swiglu(context: Context, position: int, o: op.Linear) -> bool:
    """Whether a product can do the SwiGLU after it: gate and up are all that it gives, from one block of integers, and the
    result is read in one quantized layout alone."""
    layer, following = layer_read(context, o.linear), context.graph.operations[position + 1 : position + 2]
    weight, *more = layer.weights
    if more or not CODECS[weight.codec.kind].swiglu or layer.bias or layer.low_rank or layer.split_row or o.add or o.offset:
        return False
    if not following or not _is_swiglu(following[0]):
        return False
    swiglu = following[0]
    assert isinstance(swiglu, op.Activate)
    if swiglu.x != o.out or swiglu.width % ROWS or weight.rows != 2 * swiglu.width:
        return False
    return not _keeps_floats(context, position + 1, swiglu.out)
