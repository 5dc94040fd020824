"""Patterns of operations that one launch computes, in runs of few rows.

A launch is a product with the norm, order, scale and quantization of its input before it, and after it the residual, an
activation, or the operations on heads and the cache.  A norm is left out where all that read its result are such products.
What no pattern takes stays as it is, and both give the same bits.  Over how many blocks of threads a product is spread is found
out when its kernel is loaded (spread.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from edgeq.format.quantization import activation_block
from edgeq.format.records import ArrayRef
from edgeq.targets.cuda.arguments.heads import FusedHeadsArguments, RotaryArguments
from edgeq.targets.cuda.arguments.products import FusedArguments, FusedBlockArguments, FusedInputArguments, SpreadArguments
from edgeq.targets.cuda.arguments.weights import LAYER, RMS, LowRankPartArguments, NormArguments
from edgeq.targets.cuda.lowering.attention import layer_of_cache, rotary
from edgeq.targets.cuda.lowering.context import FACTORS, Input, Launch, Lowered, Lowering, Output
from edgeq.targets.cuda.lowering.linear import (
    NO_NORM,
    PARAMETERS,
    beside,
    launches_of,
    low_rank,
    low_rank_part,
    prepared,
    stored,
)
from edgeq.targets.cuda.lowering.quantize_input import input_quantizer
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

ROWS, MAX_HEAD = 16, 256
"""Output channels of a block of the file; dimensions of a head."""

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
    out = Output(lowering.buffer(op.out) + 4 * op.offset, lowering.graph.buffers[op.out], op.add)
    return launched(lowering, op, "fused_rows", (), out=out, spread=SpreadArguments(most=-(-op.linear.rows // ROWS)))


def activated(lowering: Lowering, at: int) -> tuple[list[Launch], int]:
    """A product and the function of its result, which nothing else reads."""
    operations = lowering.graph.operations
    op, act = operations[at], operations[at + 1] if at + 1 < len(operations) else None
    assert isinstance(op, Linear)
    norm = lowering.norms.get(op.x)
    if not isinstance(act, Activate) or act.clamp or act.x != op.out or op.add or act.out in (op.x, norm.x if norm else ""):
        return [], 0
    if op.offset or op.linear.rows != act.width * (2 if act.gated else 1) or (act.gated and act.width % ROWS):
        return [], 0
    if lowering.graph.readers(at + 2, op.out):
        return [], 0
    out, spread = Output(lowering.buffer(act.out), act.width, False), SpreadArguments(most=-(-act.width // ROWS))
    return launched(lowering, op, "fused_activate", (act.function, act.gated), out=out, spread=spread), 2


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
    common = FusedHeadsArguments(
        cache=layer_of_cache(lowering, write),
        slots=lowering.sent("slots"),
        top=(1 << kv.bits) - 1,
        first=0,
        heads=queries,
        head_dim=size,
        head_normed=len(norms),
        head_eps=norms[0].eps if norms else 0.0,
        q_gain=floats(norms[0].gain) if norms else 0,
        k_gain=floats(norms[1].gain) if norms else 0,
        matrix=lowering.storage.array(turns[0].matrix) if turns else 0,
        rotation=floats(turns[0].scale) if turns else 0,
        rotary=rotary(lowering, ropes[0]) if ropes else RotaryArguments(),
    )
    launches = list[Launch]()
    for op in parts:
        out = Output(lowering.buffer(op.out) + 4 * op.offset, lowering.graph.buffers[op.out], False)
        spread = SpreadArguments(ctas=op.linear.rows // size, each=size // ROWS, most=op.linear.rows // ROWS)
        made = replace(common, first=op.offset // size)
        launches += launched(lowering, op, "fused_heads", (kv.kind, bool(turns)), out=out, spread=spread, made=made)
    return launches, end + 1 - at


def of_kind(operations: Sequence[Operation], at: int, kind: type[Op], most: int) -> Iterator[Op]:
    """Neighbouring operations of a kind from `at` on."""
    for op in operations[at : at + most]:
        if not isinstance(op, kind):
            return
        yield op


def launched(
    lowering: Lowering, op: Linear, kernel: str, detail: tuple[str | bool, ...], *, out: Output, spread: SpreadArguments,
    made: FusedHeadsArguments | None = None,
) -> list[Launch]:  # fmt: skip
    """A product with its input, after what changes that input before; `made`: what is done with the heads of its result."""
    layer, index = op.linear, lowering.shared_input(op.linear)
    norm = lowering.norms.get(op.x)
    name = norm.x if norm else op.x
    raw = Input(lowering.buffer(name), lowering.graph.buffers[name], (name,))
    before, moved = list[Launch](), dict[str, ArrayRef | tuple[str, int]]()
    normed = norm_arguments(lowering, norm)
    bias = lowering.storage.floats(layer.bias) if layer.bias else 0
    part = LowRankPartArguments()
    if layer.low_rank is not None:
        before.append(low_rank(lowering, op, layer.low_rank, raw, normed))
        part = low_rank_part(lowering, layer.low_rank)
    reads = FusedInputArguments()
    if layer.transform is not None:
        changed, raw = prepared(lowering, op, layer, raw, index)
        before += changed
    else:
        reads = FusedInputArguments(
            ordered=int(layer.input_order is not None),
            order=lowering.storage.array(layer.input_order) if layer.input_order else 0,
            scaled=int(layer.input_scale is not None or index is not None),
            scale=lowering.storage.floats(layer.input_scale) if layer.input_scale else 0,
        )
        if index is not None:
            moved["scale"] = (FACTORS, index)
    blocks, codecs = list[FusedBlockArguments](), list[int | bool | str]()
    quantizers = [input_quantizer(lowering, layer, place, lowering.mode_of(op)) for place in range(len(layer.weights))]
    for weight, quantizer, suffix in zip(layer.weights, quantizers, ("", "2"), strict=False):
        codec, group = weight.codec, quantizer.group
        codecs += [codec.bits, beside(codec), quantizer.integer, group]
        blocks.append(FusedBlockArguments(
            weight=stored(lowering, weight), limit=quantizer.limit, columns=weight.columns,
            groups=-(-weight.columns // group), stride=1 if codec.group_size else 0,
        ))  # fmt: skip
        if index is not None:
            moved |= {PARAMETERS[name] + suffix: ref for name, ref in weight.arrays.items()}
    rule = quantizers[-1]
    reads = replace(reads, scales=rule.scales, modality=rule.modality, kinds=rule.kinds, symmetric=int(rule.symmetric))
    arguments = FusedArguments(
        x=raw.address, width_in=raw.width, norm=normed, input=reads,
        block=blocks[0], second=blocks[1] if len(blocks) > 1 else None,
        rows=layer.rows, bias=bias, has_bias=int(layer.bias is not None), low_rank=part,
        y=out.address, width=out.width, add=int(out.add), spread=spread, heads=made,
    )  # fmt: skip
    variant = Variant(kernel, (*detail, rule.rule, *codecs))
    return [*before, Launch(op, lowering.stage, variant, arguments, reads_weights=True, moved=moved)]


def norm_arguments(lowering: Lowering, norm: RmsNorm | LayerNorm | None) -> NormArguments:
    """The norm of an input that its readers compute."""
    if norm is None:
        return NO_NORM
    gain = lowering.storage.floats(norm.gain)
    if isinstance(norm, LayerNorm):
        return NormArguments(norm=LAYER, eps=norm.eps, gain=gain, shift=lowering.storage.floats(norm.bias))
    return NormArguments(norm=RMS, eps=norm.eps, gain=gain)
