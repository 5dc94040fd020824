"""From operations to launches, one operation after the other.

An operation that this target does not have, or a part of a layer, is refused here by name, before anything is uploaded for it.
Two stages: rows of the run, and after a Select the selected ones; their buffers lie apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgeq.codec import CHUNK
from edgeq.errors import UnsupportedError
from edgeq.quantization import activation_block, activation_limit
from edgeq.records import ArrayRef, LinearSpec, Mode, Weight
from edgeq.targets.cuda.pack import Variant
from edgeq.targets.cuda.storage import Storage
from edgeq.targets.graph import (
    Activate,
    Attention,
    CacheWrite,
    Embed,
    Graph,
    Linear,
    Operation,
    RmsNorm,
    RopeRotate,
    Select,
    mode_of,
)
from edgeq.targets.target import Options

LARGEST_HEAD = 256
FORM_BLOCK = 128
"""Channels that a warp brings into the form that products read, and of which the form holds a multiple."""
MANY_TOKENS = 64
"""Token rows of a tile of `many`; the form has a multiple of it."""
Value = int | float


@dataclass(frozen=True)
class Angles:
    """A table of cosines and sines that a run needs: [rows][pairs] of each."""

    frequencies: tuple[float, ...]
    factor: float
    axes: tuple[int, ...]
    stage: int

    def of(self, positions: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines for positions [axes, rows].  Angles are float64: a float32 one is wrong at large positions."""
        axes = np.array(self.axes or (0,) * len(self.frequencies))
        which = positions[axes if len(positions) > 1 else np.zeros_like(axes)]
        angle = which.T.astype(np.float64) * np.array(self.frequencies, np.float64)
        cos, sin = ((f(angle) * self.factor).astype(np.float32) for f in (np.cos, np.sin))
        return cos, sin


@dataclass(frozen=True)
class Launch:
    """One kernel over the rows of its stage.

    many     the kernel for many rows, where it is another one
    values   its scalars and addresses by name, without `tokens`, the number of rows
    """

    operation: Operation
    stage: int
    variant: Variant
    values: dict[str, Value]
    many: Variant | None = None
    reads_weights: bool = False


@dataclass(frozen=True)
class Gather:
    """Rows of a table that stays in the file, by token, written to a buffer by the host."""

    operation: Embed
    table: ArrayRef
    address: int


Lowered = Launch | Gather


@dataclass
class Lowering:
    """The state while a graph is lowered.  `angles` gathers the tables that runs have to send."""

    graph: Graph
    storage: Storage
    options: Options
    mode: Mode
    stage: int = 0
    angles: set[Angles] = field(default_factory=set)
    formed: tuple[str, Variant, Value] | None = None  # buffer, kernel and limit of what the form holds

    def rows(self, stage: int) -> int:
        return self.options.max_logits if stage else self.options.max_rows

    def buffer(self, name: str, stage: int | None = None) -> int:
        stage = self.stage if stage is None else stage
        return self.storage.named((name, stage), self.rows(stage) * self.graph.buffers[name] * 4)

    def sent(self, name: str, each: int = 4) -> int:
        """The address of what a run sends for the rows of this stage."""
        return self.storage.named((name, "sent", self.stage), self.rows(self.stage) * each)

    def table(self, angles: Angles, kind: str) -> int:
        return self.storage.named((angles, kind), self.rows(angles.stage) * len(angles.frequencies) * 4)


def lower(graph: Graph, storage: Storage, options: Options, mode: Mode) -> tuple[list[Lowered], set[Angles]]:
    """UnsupportedError: the graph has something that this target does not."""
    lowering = Lowering(graph, storage, options, mode)
    found: list[Lowered] = []
    for operation in graph.operations:
        if type(operation) not in _LOWER:
            refuse(f"the operation {type(operation).__name__}")
        found += _LOWER[type(operation)](lowering, operation)
        if lowering.formed and lowering.formed[0] in operation.writes():
            lowering.formed = None
        if isinstance(operation, Select):
            lowering.stage += 1
            lowering.formed = None
    return found, lowering.angles


def refuse(what: str) -> NoReturn:
    raise UnsupportedError(f"the cuda target does not have {what} yet; run with --target cpu")


def embed(lowering: Lowering, op: Embed) -> Sequence[Lowered]:
    if isinstance(op.table, ArrayRef):
        return [Gather(op, op.table, lowering.buffer(op.out))]
    weight = integer_weight(op.table)
    values = {
        **stored(lowering, weight),
        "which": lowering.sent("tokens"),
        "out": lowering.buffer(op.out),
        "columns": weight.columns,
        "groups": weight.codec.groups(weight.columns),
        "group": weight.codec.group_size,
    }
    return [Launch(op, lowering.stage, Variant("embed", (weight.codec.bits, not weight.codec.symmetric)), values)]


def rms_norm(lowering: Lowering, op: RmsNorm) -> Sequence[Lowered]:
    values: dict[str, Value] = {
        "x": lowering.buffer(op.x),
        "gain": lowering.storage.floats(op.gain),
        "out": lowering.buffer(op.out),
        "width": lowering.graph.buffers[op.x],
        "eps": op.eps,
    }
    return [Launch(op, lowering.stage, Variant("rms_norm"), values)]


def linear(lowering: Lowering, op: Linear) -> Sequence[Lowered]:
    layer = op.linear
    weight = integer_weight(layer)
    for part in ("input_order", "transform", "input_scale", "activation", "split_row", "low_rank"):
        if getattr(layer, part) is not None:
            refuse(f"layers with a part `{part}` ({layer.name})")
    if layer.master is not None and lowering.options.requantize:
        refuse(f"requantization ({layer.name} has a master)")
    codec, mode = weight.codec, mode_of(op, lowering.mode)
    integer = mode != "a16"
    block = activation_block(codec)
    groups, padded = -(-weight.columns // block), -(-lowering.rows(0) // MANY_TOKENS) * MANY_TOKENS
    form: dict[str, Value] = {
        "x": lowering.buffer(op.x),
        **form_memory(lowering, padded),
        "columns": weight.columns,
        "width": lowering.graph.buffers[op.x],
        "padded": padded,
        "groups": groups,
        "limit": activation_limit(codec, mode) if mode != "a16" else 0,
    }
    forming = Variant("form", (integer, block))
    width = lowering.graph.buffers[op.out]
    values = {
        **stored(lowering, weight),
        "x": form["data"],
        **{name: form[name] for name in ("xs", "xn", "groups", "padded")},
        "stride": 1 if codec.group_size else 0,
        "rows": weight.rows,
        "width": width,
        "y": lowering.buffer(op.out) + 4 * op.offset,
        "bias": lowering.storage.floats(layer.bias) if layer.bias else 0,
        "has_bias": int(layer.bias is not None),
        "add": int(op.add),
    }
    literals = (codec.bits, not codec.symmetric, integer, block)
    product = Launch(op, lowering.stage, Variant("few", literals), values, Variant("many", literals), reads_weights=True)
    held = op.x, forming, form["limit"]
    if lowering.formed == held:
        return [product]
    lowering.formed = held
    return [Launch(op, lowering.stage, forming, form), product]


def form_memory(lowering: Lowering, padded: int) -> dict[str, Value]:
    """Room for the form of the widest input in any kind: f16 is the larger one, and a group has at least 16 channels."""
    widest = max(op.linear.columns for op in lowering.graph.operations if isinstance(op, Linear))
    channels = -(-widest // FORM_BLOCK) * FORM_BLOCK * padded
    sizes = {"data": channels * 2, "xs": channels // 16 * 4, "xn": channels // 16 * 4}
    return {name: lowering.storage.named(("form", name), nbytes) for name, nbytes in sizes.items()}


def integer_weight(layer: LinearSpec) -> Weight:
    if len(layer.weights) > 1:
        refuse(f"layers of two weight blocks ({layer.name})")
    if layer.weights[0].codec.kind != "int":
        refuse(f"weights in {layer.weights[0].codec.name} ({layer.name})")
    return layer.weights[0]


def stored(lowering: Lowering, weight: Weight) -> dict[str, Value]:
    assert weight.scale is not None
    return {
        "q": lowering.storage.array(weight.q),
        "s": lowering.storage.array(weight.scale),
        "z": lowering.storage.array(weight.zero) if weight.zero else 0,
        "chunks": -(-weight.columns // CHUNK),
    }


def rope_rotate(lowering: Lowering, op: RopeRotate) -> Sequence[Lowered]:
    angles = Angles(op.frequencies, op.factor, op.axes, lowering.stage)
    lowering.angles.add(angles)
    values: dict[str, Value] = {
        "x": lowering.buffer(op.x) + 4 * op.offset,
        "cos": lowering.table(angles, "cos"),
        "sin": lowering.table(angles, "sin"),
        "width": lowering.graph.buffers[op.x],
        "heads": op.heads,
        "head_dim": op.head_dim,
        "pairs": len(op.frequencies),
    }
    return [Launch(op, lowering.stage, Variant("rope"), values)]


def cache_values(lowering: Lowering, op: CacheWrite | Attention) -> dict[str, Value]:
    return {
        "pages": lowering.storage.address("pages"),
        "tables": lowering.sent("tables"),
        "slots": lowering.sent("slots"),
        "width": lowering.graph.buffers[op.x],
        "kv_heads": op.kv_heads,
        "layer": op.cache,
    }


def cache_write(lowering: Lowering, op: CacheWrite) -> Sequence[Lowered]:
    if lowering.options.kv.kind != "f16":
        refuse(f"a cache in {lowering.options.kv.name}")
    x = lowering.buffer(op.x)
    values = {**cache_values(lowering, op), "k": x + 4 * op.k_offset, "v": x + 4 * op.v_offset, "head_dim": op.head_dim}
    return [Launch(op, lowering.stage, Variant("cache_write"), values)]


def attention(lowering: Lowering, op: Attention) -> Sequence[Lowered]:
    if op.span >= 0:
        refuse("attention over spans of slots")
    if op.head_dim % 8 or op.head_dim > LARGEST_HEAD:
        refuse(f"heads of {op.head_dim} dimensions, only multiples of 8 up to {LARGEST_HEAD}")
    values = {
        **cache_values(lowering, op),
        "q": lowering.buffer(op.x) + 4 * op.q_offset,
        "out": lowering.buffer(op.out),
        "heads": op.heads,
        "window": op.window,
        "scale": op.scale,
    }
    return [Launch(op, lowering.stage, Variant("attend", (op.head_dim,)), values)]


def activate(lowering: Lowering, op: Activate) -> Sequence[Lowered]:
    if not op.swiglu:
        refuse(f"the activation {op.function}{' with a gate' if op.gated else ''}")
    values: dict[str, Value] = {"x": lowering.buffer(op.x), "out": lowering.buffer(op.out), "width": op.width}
    return [Launch(op, lowering.stage, Variant("swiglu"), values)]


def select(lowering: Lowering, op: Select) -> Sequence[Lowered]:
    if op.together != 1 or lowering.stage:
        refuse("a second choice of rows, or one that joins them")
    return [
        Launch(
            op,
            1,
            Variant("select"),
            {
                "x": lowering.buffer(name),
                "wanted": lowering.storage.named("wanted", lowering.rows(1) * 4),
                "out": lowering.buffer(out, 1),
                "width": lowering.graph.buffers[name],
            },
        )
        for name, out in zip(op.reads(), op.writes(), strict=True)
    ]


_LOWER: dict[type[Operation], Callable[[Lowering, Any], Sequence[Lowered]]] = {
    Embed: embed,
    RmsNorm: rms_norm,
    Linear: linear,
    RopeRotate: rope_rotate,
    CacheWrite: cache_write,
    Attention: attention,
    Activate: activate,
    Select: select,
}
