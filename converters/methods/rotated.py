"""Base of QuaRot and ResQ: a model in another basis, which its weights absorb, and the rotations left to be done online.

The residual stream is rotated by one Q for the whole model, the values of every KV head by one of their own; the norms' gains
move into the linear layers after them, the last one's into the head, which therefore is no longer the embedding.  What is left
to do online is an orthogonal transform before the down projection (and QuaRot's before the output projection), and a
rotation of queries and keys after RoPE where the cache has 4 bits: it changes no score, q Q (k Q)^T = q k^T, but spreads the
outliers of the keys.  A cache of 8 bits does without: the online rotation rounds queries and keys to 8 bits itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeq.converters.checkpoint.slabs import Tensors
from edgeq.converters.families import LINEARS, Family
from edgeq.converters.method import Block, Method, Study
from edgeq.converters.methods.folded_rotation import rotating_bytes, unrotatable
from edgeq.converters.methods.gptq import gptq_layer, moments_bytes
from edgeq.converters.methods.static_scales import observed
from edgeq.converters.planning.options import ConvertOptions
from edgeq.converters.rotation.fuse import LayerRotation, Rotation
from edgeq.converters.rotation.hadamard import Hadamard, hadamard
from edgeq.converters.rotation.model import RotatedModel
from edgeq.converters.rounding.linears import Delivery
from edgeq.converters.rounding.presets import ABSMAX_SEARCH, Preset
from edgeq.errors import UnsupportedError
from edgeq.format.codec import Codec
from edgeq.format.manifest import FLOAT_PARTS, rotation_shapes
from edgeq.network.config import ModelConfig


class Rotated(Method):
    """Base of the rotated methods: weights symmetric, a scale per row and block, ranges by QuaRot's search."""

    pools = False
    passes = 10
    effort = 80

    def __init__(self, options: ConvertOptions, family: Family, config: ModelConfig) -> None:
        super().__init__(options, family, config)
        if reason := unrotatable(family, config):
            raise UnsupportedError(
                f"{self.name} cannot rotate a {config.model_type}: it has {reason}; choose gptq, awq, ttq or rtn"
            )
        self.calibrates = self.propagates = self.gptq
        # A size without a transform is refused here, not after the first layer.
        for size in self.transformed_sizes():
            hadamard(size)

    @property
    def gptq(self) -> bool:
        """Whether weights are rounded by GPTQ."""
        return bool(self.options.gptq)

    # What a method defines ----------------------------------------------------------------------------------------------------

    def transformed_sizes(self) -> tuple[int, ...]:
        """Numbers of channels that go through a Hadamard transform, online or absorbed."""
        shared = self.config.shared_expert_intermediate_size
        return (self.config.intermediate_size, *([shared] if shared else []))

    def residual(self, study: Study) -> Rotation:
        """The rotation of the residual stream."""
        raise NotImplementedError

    def values(self, layer: int, study: Study) -> list[Rotation]:
        """The rotations of a layer's values, one per KV head."""
        raise NotImplementedError

    def keys(self, layer: int, study: Study) -> Tensor:
        """Q float64 [head_dim, head_dim] of queries and keys after RoPE."""
        raise NotImplementedError

    def before_o(self) -> Rotation | None:
        """The online transform of the output projection's input; None: there is none."""
        return None

    def before_down(self, x: Tensor) -> Tensor:
        """The online transform of the down projection's input [..., channels], of an expert's, too: over all its channels."""
        return hadamard(x.shape[-1])(x)

    # What follows from it -----------------------------------------------------------------------------------------------------

    def codec(self, columns: int) -> Codec:
        return replace(super().codec(columns), symmetric=True)

    @property
    def preset(self) -> Preset:
        return ABSMAX_SEARCH

    @property
    def stored_config(self) -> ModelConfig:
        return replace(self.config, tie_word_embeddings=False)

    @property
    def rotates_keys(self) -> bool:
        return self.kv.kind == "int4"

    def dtype(self, part: str, stored: str) -> str:
        # A rotated bias or router is no longer a value of its old type, and small.
        return "f32" if part.endswith(".bias") or part in FLOAT_PARTS else stored

    def extras(self, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        return rotation_shapes(self.config, layer) if self.rotates_keys else {}

    def memory_bytes(self, tokens: int) -> int:
        """What rotating and GPTQ need."""
        return rotating_bytes(self.config.hidden_size, self.widest) + (moments_bytes(self.widest) if self.gptq else 0)

    def tensors(self, source: Tensors, study: Study) -> Tensors:
        residual, before_o = self.residual(study), self.before_o()

        def layer(index: int) -> LayerRotation:
            return LayerRotation(residual, self.values(index, study), before_o, self.before_down)

        constants: dict[str, NDArray[np.float32]] = {}
        if self.rotates_keys:
            for index in range(self.config.num_hidden_layers):
                rounded, scale = to_int8(self.keys(index, study))
                constants[f"layers.{index}.key_rotation"] = rounded
                constants[f"layers.{index}.key_rotation_scale"] = scale
        return RotatedModel(source, self.family, self.config, residual, layer, constants)

    def install(self, index: int, module: nn.Module) -> None:
        before_o = self.before_o()
        for path, found in module.named_modules():
            if path == LINEARS["o"] and before_o:
                found.register_forward_pre_hook(before(before_o))
            elif path.endswith(".down_proj"):
                found.register_forward_pre_hook(before(self.before_down))

    def prepare(self, block: Block) -> dict[str, Delivery]:
        return gptq_layer(block, bool(self.options.act_order)) if self.gptq else observed(block)


def to_int8(q: Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A matrix as integers of -127 ... 127 and one scale [1] for all of them, both float32."""
    scale = (q.abs().max() / 127).float()
    return (q / scale).round().float().numpy(), scale[None].numpy()


def stored_transform(transform: Hadamard, stride: int = 1) -> tuple[int, int, NDArray[np.float32] | None]:
    """An online transform as a recipe has it."""
    return transform.size, stride, None if transform.base is None else transform.base.float().numpy()


def before(online: Rotation) -> Callable[..., tuple[Any, ...]]:
    return lambda module, args: (online(args[0]), *args[1:])
