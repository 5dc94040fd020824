"""The tensors of a rotated model, computed from the checkpoint's when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.families import EMBEDDING, HEAD, NORM, Family
from edgeq.converters.rotation.fuse import READERS, LayerRotation, Rotation, role, rotate_part
from edgeq.network.config import ModelConfig, VisionConfig

TO_DECODER = ("project.1.weight", "project.1.bias")
"""Ends of names of what a vision tower writes into the decoder's residual stream."""
Place = tuple[int, str]
"""(decoder layer, part)"""


class RotatedModel:
    """Tensors of `source` after their rotations, with a head of its own, for the last norm's gain is folded into it.

    residual   of the residual stream
    layers     layer -> its rotations, the same `residual` among them
    constants  further tensors by name

    In memory: one matrix, the one last asked for that cannot be made row by row, and the same in float64.
    """

    def __init__(
        self,
        source: Tensors,
        family: Family,
        config: ModelConfig,
        residual: Rotation,
        layers: Callable[[int], LayerRotation],
        constants: Mapping[str, NDArray[np.float32]],
    ) -> None:
        self._source, self._family, self._config = source, family, config
        self._residual, self._layers, self._constants = residual, layers, constants
        self._last: tuple[str, NDArray[np.float32]] | None = None
        self._places: dict[str, Place] = {
            name: (layer, part)
            for layer in range(config.num_hidden_layers)
            for part, name in family.layer_tensors(layer).items()
        }

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start...stop of a tensor, float32 [stop - start, ...]."""
        if name in self._constants:
            return self._constants[name][start:stop]
        if name.startswith(VisionConfig.prefix) and not name.endswith(TO_DECODER):
            return self._source.rows(name, start, stop)
        if name == EMBEDDING:
            return _array(self._residual(self._read(name, start, stop).double()).float())
        if name == HEAD:
            table = EMBEDDING if self._config.tie_word_embeddings else HEAD
            folded = self._read(table, start, stop).double() * self._whole(NORM).double()
            return _array(self._residual(folded).float())
        if name in self._places and role(self._places[name][1]) in READERS and self._places[name][1] != "v":
            return _array(self._part(name, self._read(name, start, stop)))
        return self.whole(name)[start:stop]

    def whole(self, name: str) -> NDArray[np.float32]:
        """A whole tensor, float32."""
        if name in self._constants:
            return self._constants[name]
        if name.startswith(VisionConfig.prefix):
            found = self._whole(name)
            # Features stand beside embeddings: what gives them is rotated as those are, by its output channels.
            if not name.endswith(TO_DECODER):
                return _array(found)
            return _array(self._residual(found.double().movedim(0, -1)).movedim(-1, 0).float())
        if name in (EMBEDDING, HEAD):
            return self.rows(name, 0, self._config.vocab_size)
        if self._last is None or self._last[0] != name:
            self._last = None
            weight = self._whole(name)
            self._last = name, _array(torch.ones_like(weight) if name == NORM else self._part(name, weight))
        return self._last[1]

    def _part(self, name: str, weight: Tensor) -> Tensor:
        layer, part = self._places[name]
        norm = READERS.get(role(part))
        gain = self._whole(self._family.layer_tensors(layer)[norm]) if norm else None
        return rotate_part(part, weight, gain, self._layers(layer), self._config.num_attention_heads)

    def _whole(self, name: str) -> Tensor:
        return torch.from_numpy(self._source.whole(name))

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        return torch.from_numpy(self._source.rows(name, start, stop))


def _array(x: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = x.contiguous().numpy()
    return found
