"""TTQ (Koike-Akino et al. 2026, arXiv 2603.19296): the device quantizes the weights again, for the prompt at hand.

For every layer the file holds the static low-rank part B A in 16 bits, the master W - B A at higher precision, from which
the device makes integers under the input scales of a prompt, and W - B A rounded to nearest, for where there is no prompt yet.
B and A are the first singular vectors of W, B = U S^1/2 and A = S^1/2 V^T, found from products with W (Halko, Martinsson, Tropp
2011, arXiv 0909.4061), so that a matrix is streamed and never held.

Layers stored as one matrix (q,k,v and gate,up) share one B and one A, of the rank at which they have about as many numbers as a
pair of rank r for each would have.

The layers of a policy's expert are stored like those of its decoder; what is before and after them is rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgeq.converters.checkpoint.slabs import RowReader, slabs
from edgeq.converters.families import Family
from edgeq.converters.method import Method
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.rounding.linears import Delivery, LinearItem, Recipe
from edgeq.converters.rounding.presets import fitting_group_size
from edgeq.errors import InputError
from edgeq.format.codec import ROWS, Codec
from edgeq.format.manifest import layer_contents
from edgeq.network.stack import Stack

SPARE_COLUMNS = 16
ITERATIONS = 4


class Ttq(Method):
    name = "ttq"
    pools = False
    keeps_channels = True
    effort = 4

    def __init__(self, options: ConvertOptions, family: Family, stack: Stack) -> None:
        super().__init__(options, family, stack)
        shared = stack.shared_expert_intermediate_size or stack.hidden_size
        narrowest = min(stack.hidden_size, stack.query_size, stack.intermediate_size, shared)
        if self.rank > narrowest:
            raise InputError(f"--rank {self.rank}: this model's narrowest matrix has {narrowest} channels; choose a lower rank")

    @property
    def rank(self) -> int:
        return self.options.rank or 0

    def recipe(self, name: str, columns: int, stored: Codec) -> Recipe:
        layers = f"{self.stack.prefix}layers."
        if not name.startswith(layers):
            return Recipe(self.codec(columns), self.preset)
        matrices = layer_contents(self.stack, int(name.removeprefix(layers).split(".")[0]))[name]
        assert isinstance(matrices, dict)
        rank = shared_rank(self.rank, [rows for rows, _ in matrices.values()], columns)
        # A prompt gives most experts too few tokens to go by: theirs stay as they are rounded here (TTQ, section 1).
        master = None if ".experts." in name else self._master(columns)
        return Recipe(self.codec(columns), self.preset, rank=rank, master=master)

    def _master(self, columns: int) -> Codec:
        if self.options.master == "bf16":
            return Codec("bf16")
        return Codec("int", 8, fitting_group_size(columns), symmetric=True)

    def memory_bytes(self, tokens: int) -> int:
        c = self.config
        inner = max(c.intermediate_size, c.shared_expert_intermediate_size)
        rows = max(c.query_size + 2 * c.kv_size, 2 * inner)
        return 4 * 4 * (3 * self.rank + SPARE_COLUMNS) * (rows + self.widest)

    def deliver(self, item: LinearItem, read: RowReader) -> Delivery:
        if not item.recipe.rank:
            return Delivery(read)
        b, a = (factor.half().float() for factor in factors(item, read, item.recipe.rank))
        first = dict(zip((name for name, _ in item.tensors), np.cumsum([0, *(rows for _, rows in item.tensors)]), strict=False))

        def residual(name: str, start: int, stop: int) -> NDArray[np.float32]:
            rows = read(name, start, stop)
            if name not in first:
                return rows
            left: NDArray[np.float32] = rows - (b[first[name] + start : first[name] + stop] @ a).numpy()
            return left

        return Delivery(residual, low_rank=(b, a))


def shared_rank(rank: int, parts: list[int], columns: int) -> int:
    """The rank of one shared pair for matrices of `parts` rows each, instead of a pair of rank `rank` for each.

    The nearest multiple of 16, to which stored rows are padded anyway.
    """
    if rank == 0 or len(parts) == 1:
        return rank
    rows = sum(parts)
    same_size = rank * (rows + len(parts) * columns) / (rows + columns)
    return min(max(rank, round(same_size / ROWS) * ROWS), rows, columns)


@torch.no_grad()
def factors(item: LinearItem, read: RowReader, rank: int) -> tuple[Tensor, Tensor]:
    """b float32 [rows, rank] and a float32 [rank, columns] of the first `rank` singular triples of the matrix of `item`."""
    width = min(rank + SPARE_COLUMNS, item.rows, item.columns)
    start = torch.randn(item.columns, width, generator=torch.Generator().manual_seed(0))
    basis = _orthonormal(_times(item, read, start))
    for _ in range(ITERATIONS):
        basis = _orthonormal(_times(item, read, _orthonormal(_transposed_times(item, read, basis))))
    u, s, v = torch.linalg.svd(_transposed_times(item, read, basis).T, full_matrices=False)
    root = s[:rank].sqrt()
    return (basis @ u[:, :rank]) * root, root[:, None] * v[:rank]


def _orthonormal(x: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(x).Q
    return basis


def _slabs(item: LinearItem, read: RowReader) -> Iterator[Tensor]:
    return (torch.from_numpy(a) for a in slabs(item.tensors, item.columns, read))


def _times(item: LinearItem, read: RowReader, x: Tensor) -> Tensor:
    """W x, for x [columns, any]."""
    return torch.cat([slab @ x for slab in _slabs(item, read)])


def _transposed_times(item: LinearItem, read: RowReader, x: Tensor) -> Tensor:
    """W^T x, for x [rows, any]."""
    total, row = torch.zeros(item.columns, x.shape[1]), 0
    for slab in _slabs(item, read):
        total += slab.T @ x[row : row + len(slab)]
        row += len(slab)
    return total
