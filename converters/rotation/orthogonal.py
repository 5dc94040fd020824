"""Random orthogonal matrices and principal axes, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 0.01
"""Added to a moment matrix before its eigenvectors are taken, as a share of the mean of its diagonal (ResQ)."""


def generator(seed: int) -> torch.Generator:
    """Fixed random numbers, the same in every conversion."""
    return torch.Generator().manual_seed(seed)


def haar(size: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal float64 [size, size], uniform over the group: Q of a Gaussian matrix with R's diagonal made positive
    (Mezzadri 2007)."""
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    flipped: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    return flipped


def signs(size: int, generator: torch.Generator) -> Tensor:
    """float64 [size] of random +1 and -1."""
    return torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1


def principal_axes(moment: Tensor) -> Tensor:
    """Eigenvectors float64 [n, n] of a second moment sum x^T x, in columns: the last has the most energy."""
    ridge = RIDGE * moment.diagonal().mean()
    axes: Tensor = torch.linalg.eigh(moment + ridge * torch.eye(len(moment), dtype=torch.float64))[1]
    return axes


def split_rotation(size: int, high: int, generator: torch.Generator) -> Tensor:
    """blockdiag of a random rotation of the first size - high coordinates and one of the last `high`."""
    return torch.block_diag(haar(size - high, generator), haar(high, generator)) if high else haar(size, generator)
