"""Patterns of operations that one launch computes, in runs of few rows.

A launch is a product with the norm, order, scale and quantization of its input before it, and after it the residual, an
activation, or the operations on heads and the cache.  A norm is left out where all that read its result are such products.
What no pattern takes stays as it is, and both give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from edgeq.format.quantization import activation_block
from edgeq.format.records import ArrayRef, LinearSpec
from edgeq.targets.cuda.device import occupancy
from edgeq.targets.cuda.lowering.attention import cache_values, rotary_values
from edgeq.targets.cuda.lowering.context import FACTORS, Launch, Lowered, Lowering, Value
from edgeq.targets.cuda.lowering.linear import (
    NO_NORM,
    Input,
    input_quantizer,
    launches_of,
    low_rank,
    low_rank_values,
    prepared,
    stored,
)
from edgeq.targets.cuda.supply.pack import Variant
from edgeq.targets.graph import (
    Activate,
    CacheWrite,
    Graph,
    HeadNorm,
    HeadRotate,
    LayerNorm,
    Linear,
    Operation,
    RmsNorm,
    RopeRotate,
)

WARPS = 4
"""Warps of a block of threads."""
ROWS, MAX_HEAD = 16, 256
"""Output channels of a block of the file; dimensions of a head."""
RULES = {"quantize_input": "group", "quantize_input_token": "token", "quantize_input_static": "static"}

Op = TypeVar("Op", bound=Operation)


def matched(lowering: Lowering, at: int) -> tuple[Sequence[Lowered], int]:
    """The launches of a pattern that begins with operation `at`, and how many operations it has; 0: there is none."""
    op = lowering.graph.operations[at]
    if isinstance(op, (RmsNorm, LayerNorm)):
        lowering.norms.pop(op.out, None)
        if deferred(lowering.graph, at, op):
            lowering.norms[op.out] = op
            return [], 1
    if isinstance(op, Linear) and taken(op):
        for pattern in (heads, activated):
            launches, count = pattern(lowering, at)
            if count:
                return launches, count
        return plain(lowering, op), 1
    return [], 0


def deferred(graph: Graph, at: int, norm: RmsNorm | LayerNorm) -> bool:
    """Whether everything that reads the result of a norm can compute it, from an input that is still as it was.

    After a norm that is left out, whatever reads its buffer computes it, until the next norm writes there: so that must be the
    next to write.
    """
    operations = graph.operations
    readers = graph.readers(at + 1, norm.out)
    if any(index == len(operations) or not computes_norm(operations[index]) for index in readers):
        return False
    after = readers[-1] + 1 if readers else at + 1
    if graph.changes(at + 1, after, norm.x) or graph.changes(at + 1, after, norm.out):
        return False
    following = next((op for op in operations[after:] if norm.out in op.writes()), None)
    return following is None or isinstance(following, (RmsNorm, LayerNorm))


def computes_norm(op: Operation) -> bool:
    """Whether the launch of an operation can do the norm of its input."""
    return isinstance(op, Linear) and taken(op) and op.linear.transform is None


def taken(op: Linear) -> bool:
    """Whether a fused launch computes a layer, after one for the first factor of its low-rank part.

    Blocks of two groupings would need more shared memory than a block of threads has without asking for it.
    """
    layer = op.linear
    return (
        op.x != op.out
        and all(launches_of(weight.codec).fused for weight in layer.weights)
        and len(layer.weights) <= 2
        and len({activation_block(weight.codec) for weight in layer.weights}) == 1
        and layer.split_row is None
    )


def plain(lowering: Lowering, op: Linear) -> list[Launch]:
    rest: dict[str, Value] = {
        "y": lowering.buffer(op.out) + 4 * op.offset, "width": lowering.graph.buffers[op.out], "add": int(op.add),
        **spread(lowering, op.linear, -(-op.linear.rows // ROWS), lowering.tuning.per_block),
    }  # fmt: skip
    return launched(lowering, op, "fused_rows", (), rest)


def spread(lowering: Lowering, layer: LinearSpec, blocks: int, most: int, factors: int = 1) -> dict[str, Value]:
    """So many blocks of the file for a block of threads that all of these run at once, if that is not more than `most`.

    factors   2: as many blocks again for the gate's other factor
    """
    each = max(1, min(most, -(-blocks // (lowering.storage.device.multiprocessors * lowering.tuning.resident))))
    ctas = -(-blocks // each)
    return {"ctas": ctas, "each": each, "most": blocks, "ahead": ahead(lowering, layer, ctas, each * factors)}


def ahead(lowering: Lowering, layer: LinearSpec, ctas: int, blocks: int) -> int:
    """For how many of the `blocks` of a block of threads weights are asked before they are multiplied, so that a multiprocessor
    has `in_flight`; where there are too few blocks of threads for that, for all."""
    weight = layer.weights[0]
    codec, group = weight.codec, activation_block(weight.codec)
    wanted, held = lowering.tuning.in_flight, min(lowering.tuning.resident, ctas / lowering.storage.device.multiprocessors)
    enough = (n for n in range(1, blocks) if held * occupancy.asked(codec.bits, group, WARPS, n, weight.columns) >= wanted)
    return next(enough, blocks)


def activated(lowering: Lowering, at: int) -> tuple[list[Launch], int]:
    """A product and the function of its result, which nothing else reads."""
    operations = lowering.graph.operations
    op, act = operations[at], operations[at + 1] if at + 1 < len(operations) else None
    assert isinstance(op, Linear)
    norm = lowering.norms.get(op.x)
    if not isinstance(act, Activate) or act.x != op.out or op.add or act.out in (op.x, norm.x if norm else ""):
        return [], 0
    if op.offset or op.linear.rows != act.width * (2 if act.gated else 1) or (act.gated and act.width % ROWS):
        return [], 0
    if lowering.graph.readers(at + 2, op.out):
        return [], 0
    most, factors = lowering.tuning.per_block, 2 if act.gated else 1
    rest: dict[str, Value] = {
        "y": lowering.buffer(act.out), "width": act.width, "add": 0,
        **spread(lowering, op.linear, -(-act.width // ROWS), max(1, most // factors), factors),
    }  # fmt: skip
    launches = launched(lowering, op, "fused_activate", (act.function, act.gated), rest)
    return launches, 2


def heads(lowering: Lowering, at: int) -> tuple[list[Launch], int]:
    """Queries, keys and values by one product or several, what is done to their heads, and their way into the cache."""
    operations = lowering.graph.operations
    first = operations[at]
    assert isinstance(first, Linear)
    parts = list(of_kind(operations, at, Linear, len(operations)))
    after = at + len(parts)
    norms = list(of_kind(operations, after, HeadNorm, 2))
    ropes = list(of_kind(operations, after + len(norms), RopeRotate, 2))
    turns = list(of_kind(operations, after + len(norms) + len(ropes), HeadRotate, 2))
    end = after + len(norms) + len(ropes) + len(turns)
    write = operations[end] if end < len(operations) else None
    if not isinstance(write, CacheWrite) or not all(taken(op) and op.out == write.x and not op.add for op in parts):
        return [], 0
    size, queries = write.head_dim, write.k_offset // max(1, write.head_dim)
    keys, values = queries * size, (queries + write.kv_heads) * size
    ends = [0, *(op.offset + op.linear.rows for op in parts)]
    of_queries_and_keys = [(write.x, 0, queries, size), (write.x, keys, write.kv_heads, size)]
    if (
        size % ROWS
        or size > MAX_HEAD
        or (write.k_offset, write.v_offset) != (keys, values)
        or [op.offset for op in parts] != ends[:-1]
        or ends[-1] != lowering.graph.buffers[write.x]
        or ends[-1] != values + write.kv_heads * size
        or any(end % size for end in ends)
        or any(
            pair and [(op.x, op.offset, op.heads, op.head_dim) for op in pair] != of_queries_and_keys
            for pair in (norms, ropes, turns)
        )
        or len({op.eps for op in norms}) > 1
        or len({(op.frequencies, op.factor, op.axes) for op in ropes}) > 1
        or len({(op.matrix, op.scale) for op in turns}) > 1
    ):
        return [], 0
    floats, kv = lowering.storage.floats, lowering.options.kv
    common: dict[str, Value] = {
        **cache_values(lowering, write),
        "slots": lowering.sent("slots"),
        "top": (1 << kv.bits) - 1,
        "add": 0,
        "each": size // ROWS,
        "heads": queries,
        "head_dim": size,
        "head_normed": len(norms),
        "head_eps": norms[0].eps if norms else 0.0,
        "q_gain": floats(norms[0].gain) if norms else 0,
        "k_gain": floats(norms[1].gain) if norms else 0,
        "matrix": lowering.storage.array(turns[0].matrix) if turns else 0,
        "rotation": floats(turns[0].scale) if turns else 0,
        **(rotary_values(lowering, ropes[0]) if ropes else {"cos": 0, "sin": 0, "pairs": 0}),
    }
    launches = list[Launch]()
    for op in parts:
        rest = common | {
            "y": lowering.buffer(op.out) + 4 * op.offset, "width": lowering.graph.buffers[op.out], "first": op.offset // size,
            "ctas": op.linear.rows // size, "most": op.linear.rows // ROWS,
            "ahead": ahead(lowering, op.linear, op.linear.rows // size, size // ROWS),
        }  # fmt: skip
        launches += launched(lowering, op, "fused_heads", (kv.kind, bool(turns)), rest)
    return launches, end + 1 - at


def of_kind(operations: Sequence[Operation], at: int, kind: type[Op], most: int) -> Iterator[Op]:
    """Neighbouring operations of a kind from `at` on."""
    for op in operations[at : at + most]:
        if not isinstance(op, kind):
            return
        yield op


def launched(
    lowering: Lowering, op: Linear, kernel: str, detail: tuple[str | bool, ...], rest: dict[str, Value]
) -> list[Launch]:
    """A product with its input, after what changes that input before; `rest` are the values of what comes after it."""
    layer, mode, index = op.linear, lowering.mode_of(op), lowering.shared_input(op.linear)
    norm = lowering.norms.get(op.x)
    name = norm.x if norm else op.x
    raw = Input(lowering.buffer(name), lowering.graph.buffers[name], (name,))
    first, moved = list[Launch](), dict[str, ArrayRef | tuple[str, int]]()
    floats, array = lowering.storage.floats, lowering.storage.array
    normed = NO_NORM if norm is None else {
        "norm": 1 if isinstance(norm, RmsNorm) else 2,
        "eps": norm.eps,
        "gain": floats(norm.gain),
        "shift": floats(norm.bias) if isinstance(norm, LayerNorm) else 0,
    }  # fmt: skip
    values: dict[str, Value] = {
        **normed,
        "ordered": 0, "order": 0, "scaled": 0, "scale": 0, "scales": 0, "modality": 0, "kinds": 0, "symmetric": 0,
        "bias": floats(layer.bias) if layer.bias else 0,
        "has_bias": int(layer.bias is not None),
        "rows": layer.rows, "low_b": 0, "inner": 0, "low_kind": 0, "rank": 0,
    }  # fmt: skip
    if layer.low_rank is not None:
        first.append(low_rank(lowering, op, layer.low_rank, raw, normed))
        values |= low_rank_values(lowering, layer.low_rank)
    if layer.transform is not None:
        made, raw = prepared(lowering, op, layer, raw, index)
        first += made
    else:
        values |= {
            "ordered": int(layer.input_order is not None), "order": array(layer.input_order) if layer.input_order else 0,
            "scaled": int(layer.input_scale is not None or index is not None),
            "scale": floats(layer.input_scale) if layer.input_scale else 0,
        }  # fmt: skip
        if index is not None:
            moved["scale"] = (FACTORS, index)
    values |= {"x": raw.address, "width_in": raw.width}
    codecs = list[int | bool]()
    rule = ""
    for place, weight in enumerate(layer.weights):
        quantize, numbers, integer = input_quantizer(lowering, layer, place, mode)
        suffix, group, rule = "2" if place else "", activation_block(weight.codec), RULES[quantize.kernel]
        codecs += [weight.codec.bits, not weight.codec.symmetric, integer, group]
        numbers = {"limit": numbers.get("levels", 0), **numbers}
        values |= {name: value for name, value in numbers.items() if name not in ("limit", "levels")}
        of_block: dict[str, Value] = {
            **stored(lowering, weight), "limit": numbers["limit"], "columns": weight.columns,
            "groups": -(-weight.columns // group), "stride": 1 if weight.codec.group_size else 0,
        }  # fmt: skip
        values |= {name + suffix: value for name, value in of_block.items()}
        if index is not None:
            names = {"q": "q", "scale": "s", "zero": "z"}
            moved |= {names[part] + suffix: ref for part, ref in weight.arrays.items()}
    variant = Variant(kernel, (*detail, rule, *codecs))
    return [*first, Launch(op, lowering.stage, variant, values | rest, reads_weights=True, moved=moved)]
