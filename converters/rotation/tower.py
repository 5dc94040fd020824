"""A vision tower in another basis: LayerNorm becomes RMSNorm, then its stream and its heads are rotated (MQuant,
arXiv 2502.00425, section 3.3 and appendix A; Ashkboos et al. 2024, SliceGPT, arXiv 2401.15024).

LayerNorm takes the mean of its input away.  Where nothing but such norms reads the stream, what writes to it can do so before:
W - mean over outputs and b - mean(b).  Then the stream has no mean, its variance is its mean square, and RMSNorm computes the
same.  The norms' biases move into the linear layers after them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from edgeq.config import VisionConfig
from edgeq.converters.families import Family
from edgeq.converters.rotation.changed import Changed
from edgeq.converters.rotation.fuse import READERS, WRITERS, LayerRotation, Rotation, rotate_part
from edgeq.converters.slabs import Tensors
from edgeq.manifest import projector_contents

PATCH, NORM, FIRST, LAST = "vision.patch", "vision.norm", "vision.project.0", "vision.project.1"


def behind_rms_norm(family: Family, config: VisionConfig) -> tuple[Family, VisionConfig]:
    """Family and configuration of the tower that `WithoutMeans` makes."""
    changed = replace(config, layer_norm=False)
    return replace(family, config=changed), changed


class WithoutMeans(Changed):
    """A tower with LayerNorm as one with RMSNorm.  `family`, `config`: of the tower with LayerNorm."""

    def __init__(self, source: Tensors, family: Family, config: VisionConfig) -> None:
        super().__init__(source)
        self._places, self._config = _places(family, config), config
        self._names = [family.layer_tensors(layer) for layer in range(config.num_hidden_layers)]

    def changes(self, name: str) -> bool:
        part = self._places.get(name, (0, ""))[1]
        return self._centred(name, part) or self._takes_bias(name, part)

    def _centred(self, name: str, part: str) -> bool:
        return name.startswith(PATCH) or part.removesuffix(".bias") in WRITERS

    def _takes_bias(self, name: str, part: str) -> bool:
        return part.endswith(".bias") and part.removesuffix(".bias") in READERS or name == f"{FIRST}.bias"

    def change(self, name: str) -> Tensor:
        found = self.read(name)
        layer, part = self._places.get(name, (0, ""))
        if self._centred(name, part):
            return found - found.mean(0)
        norm = NORM if name.startswith(FIRST) else None
        if norm is None:
            gain = self._names[layer][READERS[part.removesuffix(".bias")]]
            norm = gain.removesuffix(".weight")
        bias = self.read(f"{norm}.bias")
        weight = self.read(f"{name.removesuffix('.bias')}.weight")
        # The projector reads several patches side by side.
        return found + weight @ bias.repeat(weight.shape[1] // len(bias))


class RotatedTower(Changed):
    """A tower with RMSNorm, its gains folded, rotated.

    residual        of the stream; None: it stays as it is, with its norms
    rotation        of a layer, the same `residual` within
    before_project  the online transform of the input of the projector's last layer
    """

    def __init__(
        self,
        source: Tensors,
        family: Family,
        config: VisionConfig,
        rotation: LayerRotation,
        before_project: Rotation,
    ) -> None:
        super().__init__(source)
        self._places, self._config = _places(family, config), config
        self._names = [family.layer_tensors(layer) for layer in range(config.num_hidden_layers)]
        self._rotation, self._before_project = rotation, before_project
        self._ends = {name for name, _ in family.end_parts(projector_contents(config)).values()}

    def changes(self, name: str) -> bool:
        return name in self._places or name.startswith(PATCH) or name in (f"{NORM}.weight", f"{FIRST}.weight", f"{LAST}.weight")

    def change(self, name: str) -> Tensor:
        found, rotate = self.read(name), self._rotation.residual
        if name in self._places:
            layer, part = self._places[name]
            norm = READERS.get(part)
            gain = self.read(self._names[layer][norm]) if norm else None
            return rotate_part(part, found, gain, self._rotation, self._config.num_attention_heads)
        if name.startswith(PATCH):
            return rotate(found.movedim(0, -1)).movedim(-1, 0)
        if name == f"{NORM}.weight":
            return torch.ones_like(found)
        if name == f"{LAST}.weight":
            return self._before_project(found)
        gain = self.read(f"{NORM}.weight")
        return rotate(found.unflatten(1, (-1, len(gain))) * gain).flatten(1)


def _places(family: Family, config: VisionConfig) -> dict[str, tuple[int, str]]:
    """Name of a tensor of a layer -> the layer, and which part of it."""
    return {
        name: (layer, part) for layer in range(config.num_hidden_layers) for part, name in family.layer_tensors(layer).items()
    }
