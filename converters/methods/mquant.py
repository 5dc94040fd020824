"""MQuant: static quantization of models that read pictures (Yu et al. 2025, arXiv 2502.00425).

Activations have constant scales: of a decoder one for rows of text and one for rows of pictures ("modality-specific static
quantization", section 3.2), of a tower one.  They are the largest magnitudes over calibration samples that end with their
answers, never clipped, of inputs that come through weights already rounded and transforms already done.

Weights are rounded by GPTQ, symmetric, a scale per output channel, columns with large inputs first, ranges by a search for the
least squared error; in a rotated model.  In the decoder the residual stream and the heads' values are rotated, and online the
input of the down projection; in the tower the same, its LayerNorms made RMSNorms, as far as its projectors allow
(rotation/tower.py), and online the input of each projector's last layer, whose outputs follow the decoder's basis.  Where no
transform fits a width, inner channels of zeros are added.

The transforms have a constant row: the mean of each output channel's weights gathers in one column, which is kept apart
unrounded ("rotation magnitude suppression", section 3.3).  How many output channels need that by equation 9 goes into the
provenance: sqrt(n) |mean(w)| > max|w|, of the weight before the transform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeq.converters.checkpoint.slabs import SLAB_BYTES, Tensors
from edgeq.converters.families import LINEARS, Family
from edgeq.converters.method import Block, Method, Study
from edgeq.converters.methods.folded_rotation import SIGNS_SEED
from edgeq.converters.methods.gptq import gptq_layer, moments_bytes
from edgeq.converters.methods.quarot import QuaRot
from edgeq.converters.methods.rotated import before, stored_transform
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.rotation.changed import Padded
from edgeq.converters.rotation.fuse import LayerRotation, Rotation
from edgeq.converters.rotation.hadamard import Hadamard, best_size, hadamard
from edgeq.converters.rotation.orthogonal import generator, signs
from edgeq.converters.rotation.tower import (
    LAST,
    RotatedTower,
    WithoutBiases,
    WithoutMeans,
    behind_rms_norm,
    means_go,
    stream_rotation,
)
from edgeq.converters.rounding.linears import Delivery, Recipe
from edgeq.converters.rounding.presets import ABSMAX_SEARCH, Preset
from edgeq.errors import InputError, UnsupportedError
from edgeq.format.codec import Codec
from edgeq.network.config import ModelConfig, VisionConfig
from edgeq.network.stack import Stack

TOWER_SEED = 1
StoredTransform = tuple[int, int, NDArray[np.float32] | None]
S = TypeVar("S", bound=Stack)
DIGITS = 4


def checked(options: ConvertOptions) -> ConvertOptions:
    """The options, with a split row unless nothing is rotated.  InputError: a split row of a model that is not rotated."""
    if options.rotate is False and options.split_row:
        raise InputError("--split-row goes with a rotated model, and --no-rotate leaves it as it is; leave one out")
    return replace(options, split_row=options.rotate is not False) if options.split_row is None else options


class MQuant(QuaRot):
    """A decoder: W4A8 by default."""

    name = "mquant"
    passes = 8

    def __init__(self, options: ConvertOptions, family: Family, config: ModelConfig) -> None:
        if config.num_experts:
            raise UnsupportedError("mquant: experts have no constant scales; choose quarot, awq or gptq")
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        if options.rotate is not False:
            inner = best_size(config.intermediate_size, config.hidden_size * (3 if config.gated else 2))
            family, config, self._shapes = padded(family, config, replace(config, intermediate_size=inner))
        super().__init__(checked(options), family, config)

    @property
    def gptq(self) -> bool:
        return True

    @property
    def rotated(self) -> bool:
        return bool(self.options.rotate)

    def recipe(self, name: str, columns: int, stored: Codec) -> Recipe:
        down = name.endswith(".down") and self.rotated
        split = down and bool(self.options.split_row)
        transform = stored_transform(hadamard(columns, split)) if down else None
        return static_recipe(self, columns, transform, split)

    @property
    def stored_config(self) -> ModelConfig:
        return super().stored_config if self.rotated else self.config

    @property
    def details(self) -> dict[str, object]:
        return {"seeds": {"signs": SIGNS_SEED, "tower": TOWER_SEED}} if self.rotated else {}

    def before_o(self) -> Rotation | None:
        return None

    def tensors(self, source: Tensors, study: Study) -> Tensors:
        return super().tensors(Padded(source, self._shapes), study) if self.rotated else source

    def install(self, index: int, module: nn.Module) -> None:
        if self.rotated:
            super().install(index, module)

    def prepare(self, block: Block) -> dict[str, Delivery]:
        return prepared(self, block)

    def dtype(self, part: str, stored: str) -> str:
        return super().dtype(part, stored) if self.rotated else stored


class MQuantTower(Method):
    """A vision tower and its projector."""

    name = "mquant"
    calibrates = propagates = True
    passes = 8

    def __init__(self, options: ConvertOptions, family: Family, config: VisionConfig) -> None:
        if not config.project_size:
            raise UnsupportedError(
                f"--method mquant: {family.architecture} has a projector of one layer; supported: projectors of two"
            )
        if config.project_eps and config.project_norm == "patch":
            raise UnsupportedError(f"--method mquant: {family.architecture} has two norms before its projector; supported: one")
        if config.project_eps and not config.layer_norm:
            raise UnsupportedError(
                f"--method mquant: {family.architecture} has RMS norms in its layers and a LayerNorm before the projector; "
                "supported: one kind of norms"
            )
        self._source_family, self._source = family, config
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._without_means = means_go(config)
        if options.rotate is not False:
            family, config = behind_rms_norm(family, config) if self._without_means else (family, config)
            inner = best_size(config.intermediate_size, config.hidden_size * (3 if config.gated else 2))
            middle = best_size(config.project_size, config.joined_size + config.out_hidden_size)
            wide = replace(config, intermediate_size=inner, project_size=middle)
            family, config, self._shapes = padded(family, config, wide)
        super().__init__(checked(options), family, config)
        self.tower = config

    @property
    def rotated(self) -> bool:
        return bool(self.options.rotate)

    def _online(self, columns: int) -> Hadamard:
        return hadamard(columns, bool(self.options.split_row))

    def codec(self, columns: int) -> Codec:
        return replace(super().codec(columns), symmetric=True)

    @property
    def preset(self) -> Preset:
        return ABSMAX_SEARCH

    def recipe(self, name: str, columns: int, stored: Codec) -> Recipe:
        online = self.rotated and name.endswith((".down", LAST))
        transform = stored_transform(self._online(columns)) if online else None
        return static_recipe(self, columns, transform, online and bool(self.options.split_row))

    def dtype(self, part: str, stored: str) -> str:
        return "f32" if self.rotated and part.endswith((".bias", "norm", "norm_bias", "positions")) else stored

    def memory_bytes(self, tokens: int) -> int:
        c = self.tower
        widest = max(c.patch_width, c.intermediate_size, c.joined_size, c.project_size)
        return moments_bytes(widest) + 24 * widest * max(c.hidden_size, c.project_size) + 8 * SLAB_BYTES

    def tensors(self, source: Tensors, study: Study) -> Tensors:
        if not self.rotated:
            return source
        if self._source.layer_norm:
            source = WithoutBiases(source, self._source_family, self._source)
        if self._without_means:
            source = WithoutMeans(source, self._source_family, self._source)
        residual = stream_rotation(self.tower, signs(self.tower.hidden_size, generator(TOWER_SEED)))
        values = [hadamard(self.tower.head_dim)] * self.tower.num_key_value_heads
        rotation = LayerRotation(residual, values, before_down=self._before)
        return RotatedTower(Padded(source, self._shapes), self.family, self.tower, rotation, self._before)

    def _before(self, x: Tensor) -> Tensor:
        return self._online(x.shape[-1])(x)

    def install(self, index: int, module: nn.Module) -> None:
        if self.rotated:
            for path, found in module.named_modules():
                if path.endswith((LINEARS["down"], LAST)):
                    found.register_forward_pre_hook(before(self._before))

    def prepare(self, block: Block) -> dict[str, Delivery]:
        return prepared(self, block)


def static_recipe(
    method: Method, columns: int, transform: tuple[int, int, NDArray[np.float32] | None] | None, split: bool
) -> Recipe:
    """A layer with weights of one codec and inputs quantized by the options."""
    scales = method.scales if method.activation else 0
    return Recipe(
        method.codec(columns), method.preset, transform=transform, activation=method.activation, scales=scales, split=split
    )


def padded(family: Family, config: S, wide: S) -> tuple[Family, S, Mapping[str, tuple[int, ...]]]:
    """The family with the inner sizes of `wide`, that configuration, and the shapes of the tensors that are larger for it."""
    changed = replace(family, config=wide)
    before, after = family.tensor_shapes(), changed.tensor_shapes()
    return changed, wide, {name: shape for name, shape in after.items() if shape != before[name]}


@torch.no_grad()
def prepared(method: Method, block: Block) -> dict[str, Delivery]:
    """GPTQ of a block, with what is said of columns that are kept apart."""
    found = {
        item.name: equation_9(block.modules(item)[0].weight.data, item.recipe) for item in block.linears if item.recipe.split
    }
    deliveries = gptq_layer(block, bool(method.options.act_order))
    return {name: replace(delivery, provenance=found.get(name)) for name, delivery in deliveries.items()}


def equation_9(weight: Tensor, recipe: Recipe) -> dict[str, object]:
    """What equation 9 says of a transformed weight [rows, columns]: the share of output channels that meet it before the
    transform; which column a constant input reaches most, as measured; and its energy, in that of the mean column."""
    assert recipe.transform is not None
    size, _, base = recipe.transform
    transform = Hadamard(size, None if base is None else torch.from_numpy(base).double())
    plain = transform.inverse(weight.double())
    marked = size**0.5 * plain.mean(1).abs() > plain.abs().amax(1)
    column = int(transform(torch.ones(size, dtype=torch.float64)).abs().argmax())
    energy = weight.double().square().sum(0)
    return {
        "outputs_over": round(float(marked.double().mean()), DIGITS),
        "column": column,
        "energy": round(float(energy[column] / energy.mean()), DIGITS),
    }
