"""A vision tower in another basis: LayerNorm becomes RMSNorm, then its stream and its heads are rotated (MQuant,
arXiv 2502.00425, section 3.3 and appendix A; Ashkboos et al. 2024, SliceGPT, arXiv 2401.15024).

LayerNorm takes the mean of its input away.  Where nothing but such norms reads the stream, what writes to it can do so before:
W - mean over outputs, b - mean(b) and positions - their mean.  Then the stream has no mean, its variance is its mean square,
and RMSNorm computes the same.  The norms' gains and biases move into the linear layers after them.

A projector that reads the stream as it is (LLaVA), or by a norm over several patches, which only takes away the mean of all of
them (the taps of Qwen3-VL), needs the means.  There LayerNorm stays, and the stream is rotated by a Q that leaves the vector of
ones where it is: a row's mean and variance are then what they were, and LayerNorm(x Q) = LayerNorm(x) Q.  A norm that makes the
stream (CLIP's) has a gain in its own basis, and that stream is not rotated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.families import Family
from edgeq.converters.rotation.changed import Changed
from edgeq.converters.rotation.fuse import READERS, WRITERS, LayerRotation, Rotation, rotate_part
from edgeq.converters.rotation.hadamard import hadamard
from edgeq.format.manifest import projectors
from edgeq.network.config import VisionConfig

PATCH, POSITIONS, LAST = "vision.patch", "vision.positions.weight", "project.1"


def means_go(config: VisionConfig) -> bool:
    """Whether every reader of the stream of a tower takes away the mean of each patch, and no norm makes it."""
    return config.layer_norm and not config.pre_norm and all(norm == "patch" for _, norm in projectors(config))


def behind_rms_norm(family: Family, config: VisionConfig) -> tuple[Family, VisionConfig]:
    """Family and configuration of the tower that `WithoutMeans` makes."""
    changed = replace(config, layer_norm=False)
    return replace(family, config=changed), changed


def stream_rotation(config: VisionConfig, sign: Tensor) -> Rotation:
    """The rotation of the stream of a tower as it is stored; `sign`: float64 [hidden] of +1 and -1."""
    size = config.hidden_size
    if config.pre_norm:
        return lambda x: x
    if not config.layer_norm:
        full = hadamard(size)
        return lambda x: full(x * sign)
    # Ones become the first of these coordinates, and come back.
    full, kept = hadamard(size, constant_row=True), sign.clone()
    kept[0] = 1
    return lambda x: full.inverse(full(x) * kept)


class WithoutBiases(Changed):
    """A tower whose norms have no biases, or biases of zeros: they are in those of the layers that read them."""

    def __init__(self, source: Tensors, family: Family, config: VisionConfig) -> None:
        super().__init__(source)
        self._norms = dict(_norms_read(family, config))
        self._zeros = {f"{norm}.bias" for norm in self._norms.values()}

    def changes(self, name: str) -> bool:
        return name in self._zeros or name.endswith(".bias") and name.removesuffix(".bias") in self._norms

    def change(self, name: str) -> Tensor:
        found = self.read(name)
        if name in self._zeros:
            return torch.zeros_like(found)
        module = name.removesuffix(".bias")
        weight, bias = self.read(f"{module}.weight"), self.read(f"{self._norms[module]}.bias")
        # A projector reads several patches side by side.
        return found + weight @ bias.repeat(weight.shape[1] // len(bias))


class WithoutMeans(Changed):
    """A tower with a stream without means.  `family`, `config`: of the tower with LayerNorm."""

    def __init__(self, source: Tensors, family: Family, config: VisionConfig) -> None:
        super().__init__(source)
        self._places = _places(family, config)

    def changes(self, name: str) -> bool:
        part = self._places.get(name, (0, ""))[1]
        return name.startswith(PATCH) or name == POSITIONS or part.removesuffix(".bias") in WRITERS

    def change(self, name: str) -> Tensor:
        found = self.read(name)
        return found - (found.mean(1, keepdim=True) if name == POSITIONS else found.mean(0))


class RotatedTower(Changed):
    """A tower, its norms' gains folded and their biases nowhere, rotated.

    rotation        of a layer, with the one of the stream; RMSNorm, or LayerNorm with a rotation that leaves means as they are
    before_project  the online transform of the input of each projector's last layer
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
        # Weight of the layer that reads the stream -> gain of the norm before it.
        self._first = {
            f"{prefix}project.0.weight": None if norm == "none" else f"{prefix}norm.weight"
            for prefix, norm in projectors(config)
        }

    def changes(self, name: str) -> bool:
        ends = (*self._first, *self._first.values())
        of_last = name.endswith(f"{LAST}.weight")
        return name in self._places or name.startswith(PATCH) or name == POSITIONS or name in ends or of_last

    def change(self, name: str) -> Tensor:
        found, rotate = self.read(name), self._rotation.residual
        if name in self._places:
            return self._of_layer(name, found)
        if name.startswith(PATCH):
            return rotate(found.movedim(0, -1)).movedim(-1, 0)
        if name == POSITIONS:
            return rotate(found)
        if name in self._first.values():
            return torch.ones_like(found)
        if name not in self._first:
            return self._before_project(found)
        if norm := self._first[name]:
            gain = self.read(norm)
            found = (found.unflatten(1, (-1, len(gain))) * gain).flatten(1)
        return rotate(found.unflatten(1, (-1, self._config.hidden_size))).flatten(1)

    def _of_layer(self, name: str, tensor: Tensor) -> Tensor:
        layer, part = self._places[name]
        if part.endswith("_bias"):
            return tensor
        norm = READERS.get(part)
        gain = self.read(self._names[layer][norm]) if norm else None
        return rotate_part(part, tensor, gain, self._rotation, self._config.num_attention_heads)


def _norms_read(family: Family, config: VisionConfig) -> Iterator[tuple[str, str]]:
    """Modules that read a norm, and that norm."""
    for layer in range(config.num_hidden_layers):
        names = family.layer_tensors(layer)
        for part, norm in READERS.items():
            if part in names:
                yield names[part].removesuffix(".weight"), names[norm].removesuffix(".weight")
    for prefix, norm in projectors(config):
        if norm != "none":
            yield f"{prefix}project.0", f"{prefix}norm"


def _places(family: Family, config: VisionConfig) -> dict[str, tuple[int, str]]:
    """Name of a tensor of a layer -> the layer, and which part of it."""
    return {
        name: (layer, part) for layer in range(config.num_hidden_layers) for part, name in family.layer_tensors(layer).items()
    }
