"""The random model: integers and steps that every peer stores exactly, so that all of them compute the same network.

w = step * (q - 2**(bits-1)), q never 0: the values are symmetric.  A step is a power of two, the same for a whole matrix, so
any group size and any float type of scales can hold it; no runtime is faster because it is constant.  The seed of a matrix is
its name, the seed of a part of the head its first output channel: each can be made alone, and any Python makes the same bytes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import numpy as np

from edgeq.format.codec import AnyArray, ArrayU8
from edgeq.network.config import ModelConfig

BITS = 4
SLAB = 4096
"""Output channels of the head at a time."""
HEAD = 1


def _random(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _symmetric(q: AnyArray, bits: int) -> ArrayU8:
    q[q == 0] = 1 << (bits - 1)
    return q


def matrix(name: str, rows: int, columns: int) -> ArrayU8:
    """The 4-bit integers of a linear layer, uint8 [rows, columns] from 1 to 15."""
    pairs = np.frombuffer(_random(zlib.crc32(name.encode())).bytes(rows * columns // 2), np.uint8)
    return _symmetric(np.stack([pairs & 15, pairs >> 4], axis=-1), BITS).reshape(rows, columns)


def step(columns: int) -> float:
    """Step of a linear layer: outputs are about as large as inputs (15 uniform integers have a standard deviation of 4.3)."""
    return float(2.0 ** round(math.log2(1 / (4.3 * math.sqrt(columns)))))


def head_slabs(config: ModelConfig, bits: int) -> Iterator[ArrayU8]:
    """The head, which is also the embedding, in parts: uint8 [SLAB or fewer, hidden] from 1 to 2**bits - 1.

    The same random bytes are cut to any number of bits: one network at any width.
    """
    for start in range(0, config.vocab_size, SLAB):
        rows = min(SLAB, config.vocab_size - start)
        values = np.frombuffer(_random(HEAD, start).bytes(rows * config.hidden_size), np.uint8)
        yield _symmetric(values >> (8 - bits), bits).reshape(rows, config.hidden_size)


def head_step(bits: int) -> float:
    """Step of the head: a standard deviation of 0.018, as trained embeddings have."""
    return float(2.0 ** -(4 + bits))


def pack_nibbles(q: AnyArray) -> AnyArray:
    """uint8 [..., n] below 16 -> uint8 [..., n / 2], the even element in the low half: the order of ONNX and OpenVINO."""
    return np.asarray(q[..., 0::2] | q[..., 1::2] << 4)
