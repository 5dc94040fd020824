"""A model as another one changes its tensors: the base of those changes that are made tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from edgeq.converters.checkpoint.slabs import Tensors


class Changed:
    """Tensors of `source`, some of them changed by `change`; the one last asked for stays in memory."""

    def __init__(self, source: Tensors) -> None:
        self._source = source
        self._last: tuple[str, NDArray[np.float32]] | None = None

    def changes(self, name: str) -> bool:
        """Whether the tensor is another one than in `source`."""
        raise NotImplementedError

    def change(self, name: str) -> Tensor:
        """Tensor `name` after the change, float32."""
        raise NotImplementedError

    def whole(self, name: str) -> NDArray[np.float32]:
        if not self.changes(name):
            return self._source.whole(name)
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self.change(name).float().contiguous().numpy()
        return self._last[1]

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        return self.whole(name)[start:stop] if self.changes(name) else self._source.rows(name, start, stop)

    def read(self, name: str) -> Tensor:
        """A tensor of `source`, float64."""
        return torch.from_numpy(self._source.whole(name)).double()


class Padded(Changed):
    """Tensors with zeros after their rows and columns, up to `shapes` by name.

    An inner channel of an MLP that is always act(0) = 0, and whose column is 0, changes nothing.
    """

    def __init__(self, source: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(source)
        self._shapes = shapes

    def changes(self, name: str) -> bool:
        return name in self._shapes

    def change(self, name: str) -> Tensor:
        found, shape = self.read(name), self._shapes[name]
        added = [(0, wanted - size) for wanted, size in zip(shape, found.shape, strict=True)]
        return functional.pad(found, [n for pair in reversed(added) for n in pair])
