"""The inner products of attention with a page of the cache: queries with its keys, weights with its values.

Both widen what the cache holds to float32, sixteen numbers at a time, once for several queries.  What is summed for one query
depends neither on how many are taken together nor on the instruction set.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from edgeq.targets.cpu.jit.deferred import cgutils, intrinsic, types
from edgeq.targets.cpu.jit.simd import F32, I8, I64, LANES, VF16, VF32, VI32, call, constant, load, prefetch, splat, store
from edgeq.targets.cpu.kernels.attention.kv_layout import F16_KV, INT4_KV, INT8_KV, POSITIONS

NIBBLES, BYTES = INT4_KV, 3
"""What a line of keys or values holds, beside F16_KV and INT8_KV: codes of 4 bits in pairs, or of 8, of an int4 cache."""


def widened(b: Any, address: Any, kind: int) -> list[Any]:
    """The numbers at `address` as vectors of sixteen float32: one, or of NIBBLES the even ones and the odd ones."""
    if kind == F16_KV:
        return [b.fpext(load(b, address, VF16, 2), VF32)]
    octets = load(b, address, ir.VectorType(I8, LANES))
    if kind == INT8_KV:
        return [b.sitofp(octets, VF32)]
    codes = b.zext(octets, VI32)
    if kind == BYTES:
        return [b.sitofp(codes, VF32)]
    return [b.sitofp(half, VF32) for half in (b.and_(codes, constant(VI32, 15)), b.lshr(codes, constant(VI32, 4)))]


def line_bytes(kind: int) -> int:
    """Bytes of sixteen positions of a line of keys, and of what `widened` reads."""
    return 32 if kind == F16_KV else 16


def score_tile(kind: int, queries: int, vectors: int) -> Any:
    """A function (keys, ahead, query, step, lines, scores): scores[q][16 p + lane] = query q . key of that position, for
    `queries` queries and `vectors` x 16 positions.

    The keys are `lines` of one dimension of all positions of the page, or of NIBBLES of two.  `ahead` bytes after each lies one
    that is needed soon: a page is too short for the processor to see.  Queries, and their scores, lie `step` bytes apart.
    """
    what, count, width = kind, queries, vectors
    size = line_bytes(what)
    dims = 2 if what == NIBBLES else 1

    @intrinsic
    def score(typing: Any, keys: Any, ahead: Any, query: Any, step: Any, lines: Any, scores: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
            keys, ahead, query, step, lines, scores = values
            sums = [[cgutils.alloca_once(b, VF32) for _ in range(width)] for _ in range(count)]
            for slot in (slot for row in sums for slot in row):
                b.store(constant(VF32, 0.0), slot)
            offsets = [b.mul(step, ir.Constant(I64, q)) for q in range(count)]
            with cgutils.for_range(b, lines) as loop:
                line = b.add(keys, b.mul(loop.index, ir.Constant(I64, size * POSITIONS // 16)))
                prefetch(b, b.add(line, ahead), size * width)
                key = [widened(b, b.add(line, ir.Constant(I64, size * p)), what) for p in range(width)]
                for k in range(dims):
                    for q in range(count):
                        at = b.add(b.add(query, offsets[q]), b.mul(loop.index, ir.Constant(I64, 4 * dims)))
                        value = splat(b, load(b, b.add(at, ir.Constant(I64, 4 * k)), F32, 4), VF32)
                        for p in range(width):
                            b.store(call(b, "llvm.fmuladd.v16f32", VF32, key[p][k], value, b.load(sums[q][p])), sums[q][p])
            for q in range(count):
                for p in range(width):
                    store(b, b.load(sums[q][p]), b.add(b.add(scores, offsets[q]), ir.Constant(I64, 64 * p)), 4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), codegen

    return score


def value_tile(kind: int, queries: int, vectors: int) -> Any:
    """A function (values, ahead, (count, row), weights, (result, decay), step): result[q][lane] = result[q][lane] *
    decay[q][lane] + sum over `count` positions of weights[q] times values[lane], for `queries` queries and `vectors` x 16
    columns of the values: an even number of vectors of NIBBLES.

    Values lie `row` bytes apart; `ahead` as for `score_tile`.  weights, result and decay (a vector of equal numbers) of a query
    lie `step` bytes after those of the one before.
    """
    what, many, width = kind, queries, vectors
    size = line_bytes(what)
    loads = width // 2 if what == NIBBLES else width

    @intrinsic
    def accumulate(typing: Any, values: Any, ahead: Any, positions: Any, weights: Any, into: Any, step: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            values, ahead, positions, weights, into, step = args
            count, row = cgutils.unpack_tuple(b, positions, 2)
            result, decay = cgutils.unpack_tuple(b, into, 2)
            offsets = [b.mul(step, ir.Constant(I64, q)) for q in range(many)]
            results = [b.add(result, offset) for offset in offsets]
            sums = [[cgutils.alloca_once(b, VF32) for _ in range(width)] for _ in range(many)]
            for q in range(many):
                factor = load(b, b.add(decay, offsets[q]), VF32, 4)
                for p in range(width):
                    b.store(b.fmul(load(b, b.add(results[q], ir.Constant(I64, 64 * p)), VF32, 4), factor), sums[q][p])
            with cgutils.for_range(b, count) as loop:
                line = b.add(values, b.mul(loop.index, row))
                prefetch(b, b.add(line, ahead), size * loads)
                parts = [widened(b, b.add(line, ir.Constant(I64, size * p)), what) for p in range(loads)]
                value = [vector for part in parts for vector in part]
                for q in range(many):
                    at = b.add(b.add(weights, offsets[q]), b.mul(loop.index, ir.Constant(I64, 4)))
                    weight = splat(b, load(b, at, F32, 4), VF32)
                    for p in range(width):
                        b.store(call(b, "llvm.fmuladd.v16f32", VF32, value[p], weight, b.load(sums[q][p])), sums[q][p])
            for q in range(many):
                for p in range(width):
                    store(b, b.load(sums[q][p]), b.add(results[q], ir.Constant(I64, 64 * p)), 4)
            return context.get_dummy_value()

        pair = types.UniTuple(types.intp, 2)
        return types.void(types.intp, types.intp, pair, types.intp, pair, types.intp), codegen

    return accumulate
