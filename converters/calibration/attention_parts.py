"""What attention of the calibration's passes has beside its projections: rotations, keys and values of another layer or of what
comes before, sinks, slopes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Angles = tuple[Tensor, Tensor]
"""Cosines and sines [positions, pairs]."""


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x [..., tokens, head_dim] with its first channels, two for each angle, rotated."""
    half = cosines.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines, rest), dim=-1)


class KeysValues:
    """Keys and values [rows, kv_heads, tokens, head_dim] of a layer for those that read them, on the CPU."""

    def __init__(self, rows: int) -> None:
        self._rows, self._kept = rows, tuple[Tensor, ...]()

    def keep(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """`places`: the rows that these are of."""
        if not self._kept:
            self._kept = tuple(torch.empty(self._rows, *x.shape[1:]) for x in (keys, values))
        for mine, x in zip(self._kept, (keys, values), strict=True):
            mine[places] = x.detach().cpu()

    def taken(self, places: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        keys, values = (x[places].to(device) for x in self._kept)
        return keys, values

    def few(self, step: int) -> KeysValues:
        """Those of every `step`-th row."""
        found = KeysValues(-(-self._rows // step))
        found._kept = tuple(x[::step].clone() for x in self._kept)
        return found


class KeptRows(NamedTuple):
    """Some rows of `KeysValues`."""

    whole: KeysValues
    places: Tensor


def sloped(slopes: tuple[float, ...], queries: Tensor, keys: int) -> Tensor:
    """What slopes of heads add to the scores of `queries`, int64 [n], places among so many keys: [heads, n, keys]."""
    distances = torch.arange(keys, device=queries.device) - queries[:, None]
    return torch.tensor(slopes, device=queries.device).view(-1, 1, 1) * distances


def with_sinks(sinks: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and a mask of scores with one more of each, zeros: its score of a head is the head's sink."""
    rows, _, tokens, _ = keys.shape
    seen = keys.new_zeros(rows, 1, tokens, tokens) if mask is None else added_to_scores(mask)
    scores = sinks.view(1, -1, 1, 1).expand(len(seen), -1, tokens, 1)
    added = torch.cat((seen.expand(-1, len(sinks), -1, -1), scores), -1)
    return functional.pad(keys, (0, 0, 0, 1)), functional.pad(values, (0, 0, 0, 1)), added


def added_to_scores(mask: Tensor) -> Tensor:
    """A mask, True or a number where a key is visible, as numbers that are added to scores."""
    return torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask
