"""Records of the kernels over heads and over the cache of keys and values.

x is f32 [tokens][width], of which `heads` times `head_dim` numbers of a row are heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.targets.cuda.arguments.record import Address, Arguments, Float32, Int32


@dataclass(frozen=True, kw_only=True)
class HeadNormArguments(Arguments):
    """gain   f32 [head_dim]"""

    x: Address
    gain: Address
    width: Int32
    heads: Int32
    head_dim: Int32
    eps: Float32


@dataclass(frozen=True, kw_only=True)
class ValueNormArguments(Arguments):
    """first, to   numbers of a row before the heads, and before what is made of them"""

    x: Address
    width: Int32
    first: Int32
    to: Int32
    heads: Int32
    head_dim: Int32
    eps: Float32


@dataclass(frozen=True, kw_only=True)
class RotaryArguments(Arguments, run=()):
    """angles   f32 [rows of a table][2][pairs], cosines and then sines of a position's angles
    places   i32 [tokens], the row of the table for the position of each
    pairs    0: there are no rotary positions
    """

    angles: Address = 0
    places: Address = 0
    pairs: Int32 = 0


@dataclass(frozen=True, kw_only=True)
class RopeArguments(Arguments):
    """x   in place"""

    x: Address
    rotary: RotaryArguments
    width: Int32
    heads: Int32
    head_dim: Int32


@dataclass(frozen=True, kw_only=True)
class HeadRotateArguments(Arguments):
    """matrix   i8 [head_dim][head_dim];  scale: f32 [1], that it is multiplied by"""

    x: Address
    matrix: Address
    scale: Address
    width: Int32
    heads: Int32


@dataclass(frozen=True, kw_only=True)
class CacheArguments(Arguments, run=()):
    """A layer of the cache (run/storage.py).

    pages      i64, page tables: where pages lie in the pool, in units of 16 bytes
    tables     i32 [tokens], the entry of `pages` with which the table of a row begins
    kv_heads   of a page, in each of its layers of one shape;  layer: which of these
    high       dimensions of an int4 cache that have 8 bits
    """

    pages: Address
    tables: Address
    kv_heads: Int32
    layer: Int32
    high: Int32


@dataclass(frozen=True, kw_only=True)
class CacheWriteArguments(Arguments, run=("tokens", "pool", "numbers")):
    """k, v     f32 [tokens][width], of which `kv_heads` times `head_dim` numbers are written
    slots    i32 [tokens], places in the cache of their session
    top      the largest integer of the lower dimensions of an int4 cache
    """

    k: Address
    v: Address
    width: Int32
    cache: CacheArguments
    slots: Address
    head_dim: Int32
    top: Float32


@dataclass(frozen=True, kw_only=True)
class AttendArguments(Arguments, run=("tokens", "pool", "numbers", "parts", "taken")):
    """q               f32 [tokens][width]
    firsts, lasts   i32 [tokens], slots that a row sees, without the last
    window          slots before its last that a row sees at most; 0: all
    level           parts have up to 2^level pages
    sinks           f32 [heads], scores whose shares go nowhere
    out             f32 [tokens][heads * head_dim]
    sums            f32 [tokens][heads][parts][head_dim padded to 32, and 32]
    arrived         i32 [tokens][blocks of heads], 0 before and after
    scale           of a query times a key
    cap, slopes     f32 [heads]: of kernels whose scores have a cap or grow with their slots
    """

    q: Address
    width: Int32
    cache: CacheArguments
    firsts: Address
    lasts: Address
    out: Address
    heads: Int32
    window: Int32
    level: Int32
    has_sinks: Int32
    sinks: Address
    scale: Float32
    sums: Address
    arrived: Address
    cap: Float32 = 0.0
    slopes: Address = 0


@dataclass(frozen=True, kw_only=True)
class FusedHeadsArguments(Arguments, run=()):
    """What a fused product does with the heads that it makes.

    first       of its heads among `heads` of queries, then `kv_heads` of keys and as many of values
    head_normed, head_eps, q_gain, k_gain   0: no norm of heads; else as HeadNormArguments, of queries and of keys
    matrix, rotation                        as matrix and scale of HeadRotateArguments
    slots, top                              as CacheWriteArguments
    """

    cache: CacheArguments
    slots: Address
    top: Float32
    first: Int32
    heads: Int32
    head_dim: Int32
    head_normed: Int32
    head_eps: Float32
    q_gain: Address
    k_gain: Address
    matrix: Address
    rotation: Address
    rotary: RotaryArguments
