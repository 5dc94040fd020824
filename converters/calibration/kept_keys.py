"""Keys and values of one layer that others read, in the calibration's passes through a model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
