"""Kernels that look rows up in an embedding: a plain array, or a tied head as packed for products."""

from __future__ import annotations

import numpy as np

from edgeq.format.codec import SUPER_SIZE
from edgeq.targets.cpu.jit.args import Args, nbytes, number, pointer
from edgeq.targets.cpu.jit.compile import Kernel
from edgeq.targets.cpu.jit.deferred import inline
from edgeq.targets.cpu.jit.simd import get_bf16, get_f16, get_f32, get_i32, get_i64, get_u8, put_f32
from edgeq.targets.cpu.kernels.args import F16_KIND, F32_KIND
from edgeq.targets.cpu.kernels.products.groups import (
    CODED,
    HALF,
    HALF_S4,
    OFFSET,
    TABLES,
    TRELLIS,
    TWO_LEVELS,
    TWO_LEVELS_OFFSET,
    ZERO,
    entries,
)


@inline
def get_float(kind, address, index):
    """Element `index` of an array of f32, f16 or bf16."""
    if kind == F32_KIND:
        return get_f32(address + 4 * index)
    if kind == F16_KIND:
        return get_f16(address + 2 * index)
    return get_bf16(address + 2 * index)


class EmbedArgs(Args):
    """tokens i32; table [vocab, width]."""

    tokens = pointer()
    table = pointer()
    width = number()
    out = pointer()
    out_stride = nbytes()


class EmbedTileArgs(EmbedArgs):
    """The table is a tied head or an embedding in file order; scales, zero points and channels of a group are of integers."""

    table_block = nbytes()
    scales = pointer(0)
    scales_block = nbytes(0)
    zeros = pointer(0)
    super_scales = pointer(0)
    super_offsets = pointer(0)
    super_block = nbytes(0)
    group = number(0)


def embed_plain(kind: int) -> Kernel:
    """A token's row of a plain table."""

    def kernel(record, part, parts, thread):
        args = EmbedArgs(record)
        width = args.width
        for r in range(part, get_i64(args.rows), parts):
            token = get_i32(args.tokens + 4 * r)
            out = args.out + r * args.out_stride
            for c in range(width):
                put_f32(out + 4 * c, get_float(kind, args.table, token * width + c))

    return kernel


def embed_float_tile(kind: int) -> Kernel:
    """As `embed_plain`, from a tied head of floats in file order."""

    def kernel(record, part, parts, thread):
        args = EmbedTileArgs(record)
        per_lane = 1 if kind == F32_KIND else 2
        for r in range(part, get_i64(args.rows), parts):
            token = get_i32(args.tokens + 4 * r)
            out, block = args.out + r * args.out_stride, args.table + token // 16 * args.table_block
            for c in range(args.width):
                put_f32(out + 4 * c, get_float(kind, block, (c // per_lane * 16 + token % 16) * per_lane + c % per_lane))

    return kernel


@inline
def beside(chunk, lane, channel, bits):
    """The bit that the rows above and below row `lane` of a block give an index of a trellis (edgeq/format/trellis.py)."""
    place = chunk + channel % 4
    shift = channel // 4
    if bits == 2:
        place, shift = place + channel // 16 * 64, channel // 4 % 4 * 2
    elif bits == 3:
        place += 128
    return ((get_u8(place + 4 * ((lane + 1) % 16)) ^ get_u8(place + 4 * ((lane + 15) % 16))) >> shift) & 1


def embed_integer_tile(bits: int, group_kind: int) -> Kernel:
    """As `embed_float_tile`, of packed integers; group_kind: of groups.py."""
    wide, middle, low = (bits & 8) // 8, (bits & 4) // 4, bits % 4
    two, one = low // 2, low % 2
    two_levels, offsets = group_kind in (TWO_LEVELS, TWO_LEVELS_OFFSET), group_kind in (OFFSET, TWO_LEVELS_OFFSET)
    halves, looked_up, coded = group_kind in (HALF, HALF_S4), group_kind in TABLES, group_kind in CODED
    ring, count = group_kind == TRELLIS, entries(bits, group_kind)

    def kernel(record, part, parts, thread):
        args = EmbedTileArgs(record)
        group = args.group
        for r in range(part, get_i64(args.rows), parts):
            token = get_i32(args.tokens + 4 * r)
            lane = token % 16
            out, block = args.out + r * args.out_stride, args.table + token // 16 * args.table_block
            scales = args.scales + token // 16 * args.scales_block
            zeros = args.zeros + token // 16 * (args.scales_block // 2 if group_kind == ZERO else args.scales_block)
            supers = token // 16 * args.super_block
            for c in range(args.width):
                line = block + c // 32 * bits * 64 + 4 * lane + c % 4
                quad = c % 32 // 4
                if wide:
                    q = get_u8(line + 64 * quad)
                else:
                    q, shift = 0, 0
                    if middle:
                        q = (get_u8(line + quad // 2 * 64) >> (quad % 2 * 4)) & 15
                        line, shift = line + 256, 4
                    if two:
                        q |= ((get_u8(line + quad // 4 * 64) >> (quad % 4 * 2)) & 3) << shift
                        line, shift = line + 128, shift + 2
                    if one:
                        q |= ((get_u8(line) >> quad) & 1) << shift
                place = c // group * 16 + lane
                if two_levels:
                    above = supers + (c // SUPER_SIZE * 16 + lane) * 2
                    scale = get_f16(args.super_scales + above) * np.float32((get_u8(scales + place) ^ 128) - 128)
                    offset = np.float32(0)
                    if group_kind == TWO_LEVELS_OFFSET:
                        offset = get_f16(args.super_offsets + above) * np.float32(get_u8(zeros + place))
                elif coded:
                    code = get_u8(scales + c // group * 8 + lane % 8) >> (lane // 8 * 4) & 15
                    scale = (
                        get_f16(args.super_scales + supers + 2 * lane) * np.float32(8 - code % 4) / np.float32(8 << code // 4)
                    )
                    offset = np.float32(0)
                else:
                    scale = get_f16(scales + 2 * place)
                    offset = get_f16(zeros + 2 * place) if group_kind == OFFSET else np.float32(0)
                if looked_up:
                    if ring:
                        q |= beside(block + c // 32 * bits * 64, lane, c % 32, bits) << bits
                    entry = get_u8(args.zeros + token // 16 * count + q)
                    put_f32(out + 4 * c, scale * np.float32((entry ^ 128) - 128))
                elif offsets:
                    put_f32(out + 4 * c, scale * np.float32(q) + offset)
                else:
                    center = get_u8(zeros + place) if group_kind == ZERO else 1 << (bits - 1)
                    put_f32(out + 4 * c, scale * (np.float32(q - center) + np.float32(0.5) if halves else q - center))

    return kernel
