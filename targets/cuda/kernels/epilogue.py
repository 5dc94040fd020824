"""What a fused product does with its sums, which lie in shared memory as result[token * span + output channel of the block].

The arithmetic is that of the kernels for the operations one by one.
"""

from tvm.script import tirx as T

from edgeq.targets.cuda.kernels.cache import put_f16, put_int4, put_int8
from edgeq.targets.cuda.kernels.heads import rotate_head, rotate_pair
from edgeq.targets.cuda.kernels.norms import norm_head
from edgeq.targets.rows import PAGE


@T.inline
def rotary(result, at, angles, place, pairs, lane):
    for i in T.serial(T.ceildiv(pairs, 32)):
        if i * 32 + lane < pairs:
            angle: T.let = place * (2 * pairs) + i * 32 + lane
            rotate_pair(result, at + i * 32 + lane, pairs, angles[angle], angles[angle + pairs])


def writing(kv):
    """Inline: a head of keys or values into its half of a page, by one warp."""

    @T.inline
    def write(pool, numbers, page, place, slot, result, at, head_dim, high, top, with_zero, lane):
        if kv == "f16":
            for i in T.serial(T.ceildiv(head_dim, 32)):
                if i * 32 + lane < head_dim:
                    put_f16(pool, page, place, slot, i * 32 + lane, head_dim, result[at + i * 32 + lane])
        elif kv == "int8":
            put_int8(pool, numbers, page, place, slot, result, at, head_dim, lane)
        else:
            put_int4(pool, numbers, page, place, slot, result, at, head_dim, high, top, with_zero, lane)

    return write


def finishing_heads(kv, rotated):
    """Inline: norm, rotary positions and rotation of a head of a token row, by one warp; and keys and values into the cache."""
    write = writing(kv)

    @T.inline
    def finish(result, at, whole, room, row, head, heads, kv_heads, head_dim, normed, eps, q_gain, k_gain, angles, places,
               pairs, matrix, rotation, pool, numbers, pages, tables, slots, layer, high, top, lane):  # fmt: skip
        if head < heads + kv_heads:
            if normed != 0:
                if head < heads:
                    norm_head(result, at, q_gain, head_dim, eps, lane)
                else:
                    norm_head(result, at, k_gain, head_dim, eps, lane)
            T.cuda.warp_sync()
            rotary(result, at, angles, places[row], pairs, lane)
            T.cuda.warp_sync()
            if rotated:
                rotate_head(result, at, whole, room, matrix, rotation, head_dim, lane)
                T.cuda.warp_sync()
        if head >= heads:
            slot: T.let = slots[row]
            page: T.let = pages[tables[row] + slot // PAGE]
            place: T.let = layer * 2 * kv_heads + head - heads
            if kv == "int4":
                if head < heads + kv_heads:
                    write(pool, numbers, page, place, slot, result, at, head_dim, high, top, True, lane)
                else:
                    write(pool, numbers, page, place, slot, result, at, head_dim, high, top, False, lane)
            else:
                write(pool, numbers, page, place, slot, result, at, head_dim, high, top, True, lane)

    return finish
