"""Second moments X^T X of the inputs of a linear layer: what GPTQ, AWQ's search and clipping need of the calibration text.

The error that a change D of a weight [rows, columns] makes in the layer's output, summed over all tokens, is tr(D M D^T).  That
is exact however many tokens there were, so nothing but M is kept of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOMENT_BYTES = 512 << 20
"""Moments of several layers that are collected in one pass; those of one may be larger."""
MASSIVE = 100
"""Squared norm of the input of a massive token, at least, in medians of all tokens'."""
TILE = 1024
"""Columns of a product at a time: M is symmetric, so that only the tiles on and above its diagonal are multiplied."""


class Moments:
    """M float32 [columns, columns], and sum |x| of every channel, over the tokens added; on the device of the first."""

    def __init__(self, columns: int, device: torch.device | None = None) -> None:
        self.tokens = 0
        self._sums = torch.zeros(columns, columns, device=device)
        self._magnitude = torch.zeros(columns, device=device)
        self._mirrored = True

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Inputs [tokens, columns], and what each token counts in M, [tokens]; None: 1."""
        self.tokens += len(x)
        self._magnitude += x.abs().sum(0)
        if weights is not None:
            x = x * weights.sqrt()[:, None]
        with fast_products(x.device):
            for left in range(0, x.shape[1], TILE):
                self._sums[left : left + TILE, left:].addmm_(x[:, left : left + TILE].T, x[:, left:])
        self._mirrored = False

    @property
    def matrix(self) -> Tensor:
        """M, all of it."""
        if not self._mirrored:
            for left in range(0, len(self._sums), TILE):
                tile = slice(left, left + TILE)
                corner = self._sums[tile, tile]
                # Its two halves were multiplied in another order: the lower one is taken from the upper one.
                corner.copy_(corner.triu() + corner.triu(1).T)
                self._sums[left + TILE :, tile] = self._sums[tile, left + TILE :].T
            self._mirrored = True
        return self._sums

    @property
    def magnitude(self) -> Tensor:
        """Mean |x| of every channel; 0 without tokens."""
        return self._magnitude / max(self.tokens, 1)

    def divide(self, scale: Tensor) -> None:
        """Make these the moments of x / scale."""
        self.matrix.div_(scale).div_(scale[:, None])
        self._magnitude /= scale


def massive(x: Tensor) -> Tensor:
    """Which inputs [tokens, columns] are of massive tokens (Sun et al. 2024, arXiv 2402.17762): bool [tokens].

    Where most inputs are 0 there is nothing to compare with, and none is.
    """
    squares = x.square().sum(-1)
    median = squares.median()
    return (squares > MASSIVE * median) & (median > 0)


def counted(x: Tensor, weights: Tensor | None, share: float) -> Tensor | None:
    """What each token of inputs [tokens, columns] counts in their moments: its weight, of [tokens], times `share` if it is a
    massive one; None: all the same."""
    if share == 1:
        return weights
    of_massive = torch.where(massive(x), share, 1.0)
    return of_massive if weights is None else weights * of_massive


def has_bf16() -> bool:
    """Whether this processor multiplies bf16, adding up in float32."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Products of float32 matrices in bf16 where `device` is a processor that has them, added up in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if device.type == "cpu" and has_bf16() else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
