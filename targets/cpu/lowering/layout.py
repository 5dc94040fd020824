"""What a product reads instead of float32: the layout of quantized activations, and where they lie."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from edgeq.format.codec import CHUNK
from edgeq.targets.cpu.jit.buffers import Buffers, padded
from edgeq.targets.cpu.kernels.args import A8, A16, A16_PAIRS, BLOCK, FLOAT, QuantizedArgs

CHUNK_BYTES = {FLOAT: 4 * CHUNK, A8: CHUNK, A16: 2 * CHUNK, A16_PAIRS: 2 * CHUNK}
MAX_BYTE = 127
SMALL_TILE = 4
"""Tokens of a tile that the last rows of a run may have to themselves."""


@dataclass(frozen=True)
class Layout:
    """Columns [first, first + columns) of a buffer's rows, quantized.

    kind       FLOAT, A8, A16 or A16_PAIRS: how the numbers are stored
    block      channels that have a scale of their own in store, a multiple of 16
    limit      the largest integer; with TOKEN_ZERO the difference of the largest and the smallest
    scaling    BLOCK, TOKEN, TOKEN_ZERO or STATIC
    factors    address of one f32 per channel that x is multiplied by first, or 0
    constants  of STATIC: address of inverse and scale of each modality
    flat_from  in runs of so many rows or more every row lies by itself, of A16 all low bytes before all high ones; 0: in none
    winograd   8-bit integers go to products by Winograd's method, which need a number more of every block (winograd.py)
    """

    kind: int
    columns: int
    block: int
    limit: int = 0
    scaling: int = BLOCK
    factors: int = 0
    first: int = 0
    winograd: bool = False
    constants: int = 0
    flat_from: int = 0

    @property
    def holds_bytes(self) -> bool:
        """Whether the integers have 8 bits, however they are stored."""
        return self.kind == A8 or self.kind == A16_PAIRS and self.limit <= MAX_BYTE

    @property
    def blocks(self) -> int:
        return -(-self.columns // self.block)

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return padded(self.columns, 2 * CHUNK if self.flat_from else CHUNK) // CHUNK * CHUNK_BYTES[self.kind]


@dataclass(frozen=True)
class QuantizedActivation:
    """Where quantized activations lie: addresses of the tiles, `layout.stride` bytes for each row; of scales, of sums and, for
    Winograd's method, of the sums A, one per row and block."""

    layout: Layout
    data: int
    scales: int
    sums: int
    winograd_sums: int = 0
    modality: int = 0

    @classmethod
    def allocated(
        cls, layout: Layout, rows: int, modality: int, name: tuple[Hashable, ...], memory: Buffers
    ) -> QuantizedActivation:
        """Room for so many rows, shared by all who ask by this name; `modality`: address of theirs."""
        rows = padded(rows, SMALL_TILE)
        sizes = [layout.stride, 4 * layout.blocks, 4 * layout.blocks] + [4 * layout.blocks] * layout.winograd
        places = (memory.shared((*name, array), rows * size) for array, size in enumerate(sizes))
        return replace(cls(layout, *places), modality=modality)

    def args(self) -> QuantizedArgs:
        layout = self.layout
        return QuantizedArgs(
            kind=layout.kind, columns=layout.columns, block=layout.block, stride=layout.stride, limit=layout.limit,
            factors=layout.factors, data=self.data, scales=self.scales, sums=self.sums, winograd_sums=self.winograd_sums,
            constants=layout.constants, modality=self.modality, flat_from=layout.flat_from,
        )  # fmt: skip
